//! Concatenation and slicing of heads: the parts of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024,
//! section 2.1) that are not GEMMs of whole rows.
//!
//! Its queries and keys have a part with rotary position embedding and one without; the rotary part of the keys is
//! shared by all heads. Its values are narrower than its queries and keys.

use super::{
    CpuQueue, attention,
    operands::{Operand, check_disjoint, expect},
    simd::{BLOCK, Block, Float, add_to, inlined, with_float},
};
use crate::{HeadKernels, HeadProduct, View};

/// Returns the number of tokens, of heads, and the width of a head.
fn heads_of(name: &str, view: View<'_>) -> [usize; 3] {
    match *view.shape().dims() {
        [tokens, heads, width] => [tokens, heads, width],
        _ => panic!("{name}: {view:?} must be [tokens, heads, width]"),
    }
}

impl HeadKernels for CpuQueue {
    fn join_heads(&self, own: View<'_>, tail: View<'_>, y: View<'_>) {
        let ([tokens, heads], [width, behind], tails) = parts("join_heads", own, tail, y);
        check_disjoint(&[y], &[own, tail]);
        with_float!(y.dtype(), T => {
            let [own, tail, y] = [own, tail, y].map(Operand::<T>::new);
            let (rows, all) = (tokens * heads, width + behind);
            self.for_each_row(rows, all, inlined!(|row, _| {
                let from = if tails == 1 { row / heads } else { row };
                // SAFETY: both parts are only read, and each row of `y` belongs to one task.
                unsafe {
                    let (first, second) = y.write(row * all..(row + 1) * all).split_at_mut(width);
                    first.copy_from_slice(own.read(row * width..(row + 1) * width));
                    second.copy_from_slice(tail.read(from * behind..(from + 1) * behind));
                }
            }));
        });
    }

    fn join_heads_backward(&self, dy: View<'_>, down: View<'_>, dtail: View<'_>) {
        let ([tokens, heads], [width, behind], tails) = parts("join_heads_backward", down, dtail, dy);
        check_disjoint(&[down, dtail], &[dy]);
        with_float!(dy.dtype(), T => {
            let [dy, down, dtail] = [dy, down, dtail].map(Operand::<T>::new);
            let all = width + behind;
            self.for_each_row(tokens, heads * all, inlined!(|token, isa| {
                for head in 0..heads {
                    let row = token * heads + head;
                    // SAFETY: the gradient is only read, and a token's elements belong to one task.
                    unsafe {
                        let dy = dy.read(row * all..row * all + width);
                        down.write(row * width..(row + 1) * width).copy_from_slice(dy);
                    }
                }
                for tail in 0..tails {
                    let sharing = if tails == 1 { 0..heads } else { tail..tail + 1 };
                    for start in (0..behind).step_by(BLOCK) {
                        let n = BLOCK.min(behind - start);
                        let (mut total, mut part) = (Block::ZERO, Block::ZERO);
                        for head in sharing.clone() {
                            let first = (token * heads + head) * all + width + start;
                            // SAFETY: as above.
                            let dy = unsafe { dy.read(first..first + n) };
                            part.0.iter_mut().zip(dy).for_each(|(part, dy)| *part = dy.load());
                            add_to(&mut total.0[..n], &part.0[..n]);
                        }
                        let first = (token * tails + tail) * behind + start;
                        // SAFETY: as above.
                        T::store_all(isa, &total.0[..n], unsafe { dtail.write(first..first + n) });
                    }
                }
            }));
        });
    }

    fn resize_heads(&self, x: View<'_>, y: View<'_>) {
        let ([tokens, heads, width], [_, _, wanted]) =
            (heads_of("resize_heads", x), heads_of("resize_heads", y));
        expect("resize_heads: y", y, x.dtype(), tokens * heads * wanted);
        check_disjoint(&[y], &[x]);
        let kept = width.min(wanted);
        with_float!(x.dtype(), T => {
            let [x, y] = [x, y].map(Operand::<T>::new);
            let rows = tokens * heads;
            self.for_each_row(rows, wanted, inlined!(|row, _| {
                // SAFETY: `x` is only read, and each row of `y` belongs to one task.
                let (x, y) = unsafe { (x.read(row * width..row * width + kept), y.write(row * wanted..(row + 1) * wanted)) };
                let (same, beyond) = y.split_at_mut(kept);
                same.copy_from_slice(x);
                beyond.fill(T::store(0.0));
            }));
        });
    }

    fn multiply_heads(&self, product: HeadProduct<'_>) {
        attention::multiply_heads(self, product);
    }
}

/// Checks the shapes of the two parts and of their concatenation. Returns ([tokens, heads], [width of the first part,
/// width of the tail], heads of the tail).
fn parts(kernel: &str, own: View<'_>, tail: View<'_>, y: View<'_>) -> ([usize; 2], [usize; 2], usize) {
    let ([tokens, heads, width], [_, tails, behind]) = (heads_of(kernel, own), heads_of(kernel, tail));
    assert!(tails == heads || tails == 1, "{kernel}: {tails} tails for {heads} heads");
    expect(format_args!("{kernel}: tail"), tail, own.dtype(), tokens * tails * behind);
    expect(format_args!("{kernel}: y"), y, own.dtype(), tokens * heads * (width + behind));
    ([tokens, heads], [width, behind], tails)
}

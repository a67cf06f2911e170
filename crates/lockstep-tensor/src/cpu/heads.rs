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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::testing::{
        ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tolerance, values,
    };

    fn joined(own: &[f64], tail: &[f64], [heads, width, tails]: [usize; 3]) -> Vec<f64> {
        let behind = tail.len() * heads / tails / (own.len() / width);
        let rows = own.chunks(width).enumerate();
        let tail_of = |row: usize| if tails == 1 { row / heads } else { row };
        rows.flat_map(|(row, own)| [own, &tail[tail_of(row) * behind..][..behind]].concat()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn heads_are_joined_cut_and_padded(
            (tokens, heads) in prop_oneof![(1usize..7, 1usize..5), (60usize..70, 8usize..12)],
            [width, behind] in [1usize..40, 1usize..300],
            is_shared in proptest::bool::ANY,
        ) {
            let tails = if is_shared { 1 } else { heads };
            for dtype in ACTIVATIONS {
                let own = random_of(dtype, 1, tokens * heads * width);
                let tail = random_of(dtype, 2, tokens * tails * behind);
                let run = |queue: &CpuQueue| {
                    let own = floats(dtype, [tokens, heads, width], &own);
                    let tail = floats(dtype, [tokens, tails, behind], &tail);
                    let make = |width: usize| floats(dtype, [tokens, heads, width], &vec![9.0; tokens * heads * width]);
                    let (y, down, wide, narrow) = (make(width + behind), make(width), make(width + 3), make(1));
                    let dtail = floats(dtype, [tokens, tails, behind], &vec![9.0; tail.view().elements()]);
                    queue.join_heads(own.view(), tail.view(), y.view());
                    queue.join_heads_backward(y.view(), down.view(), dtail.view());
                    queue.resize_heads(own.view(), wide.view());
                    queue.resize_heads(own.view(), narrow.view());
                    [y, down, dtail, wide, narrow].map(|tensor| values(tensor.view())).to_vec()
                };
                let times = if is_shared { heads as f64 } else { 1.0 };
                let dtail: Vec<f64> = tail.iter().map(|x| times * x).collect();
                let padded: Vec<f64> = own.chunks(width).flat_map(|head| [head, &[0.0; 3]].concat()).collect();
                let cut: Vec<f64> = own.iter().copied().step_by(width).collect();
                on_every_queue(run, |results| {
                    assert_eq!(results[0], joined(&own, &tail, [heads, width, tails]));
                    assert_eq!(results[1], own);
                    assert_close("dtail", &results[2], &dtail, tolerance(dtype), 1e-6);
                    assert_eq!((&results[3], &results[4]), (&padded, &cut));
                });
            }
        }
    }
}

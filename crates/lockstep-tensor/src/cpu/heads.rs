//! Concatenation and slicing of heads: the parts of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024,
//! section 2.1) that are not GEMMs.
//!
//! Its queries and keys have a part with rotary position embedding and one without; the rotary part of the keys is
//! shared by all heads. Its values are narrower than its queries and keys.

use lockstep_plan::DType;

use super::{
    CpuQueue, check_disjoint, check_elementwise,
    simd::{Float, sin_cos, with_float},
    tasks::{BLOCK, Block, Operand, add_to, expect, rows_per_task},
};
use crate::{Rotation, View};

/// Returns the number of tokens, of heads, and the width of a head.
fn heads_of(name: &str, view: View<'_>) -> [usize; 3] {
    match *view.shape().dims() {
        [tokens, heads, width] => [tokens, heads, width],
        _ => panic!("{name}: {view:?} must be [tokens, heads, width]"),
    }
}

pub(super) fn resize_heads(queue: &CpuQueue, x: View<'_>, y: View<'_>) {
    let ([tokens, heads, width], [_, _, wanted]) = (heads_of("resize_heads", x), heads_of("resize_heads", y));
    expect("resize_heads: y", y, x.dtype(), tokens * heads * wanted);
    check_disjoint(&[y], &[x]);
    let kept = width.min(wanted);
    with_float!(x.dtype(), T => {
        let [x, y] = [x, y].map(Operand::<T>::new);
        let rows = tokens * heads;
        queue.for_each_range(rows, rows_per_task(rows, wanted), #[inline(always)] |range, _| {
            for row in range {
                // SAFETY: `x` is only read, and each row of `y` belongs to one task.
                let (x, y) = unsafe { (x.read(row * width..row * width + kept), y.write(row * wanted..(row + 1) * wanted)) };
                let (same, beyond) = y.split_at_mut(kept);
                same.copy_from_slice(x);
                beyond.fill(T::store(0.0));
            }
        });
    });
}

/// Checks the shapes of the two parts and of their concatenation. Returns ([tokens, heads], [width of the first part,
/// width of the tail], heads of the tail).
fn parts(kernel: &str, own: View<'_>, tail: View<'_>, y: View<'_>) -> ([usize; 2], [usize; 2], usize) {
    let ([tokens, heads, width], [_, tails, behind]) = (heads_of(kernel, own), heads_of(kernel, tail));
    assert!(tails == heads || tails == 1, "{kernel}: {tails} tails for {heads} heads");
    expect(&format!("{kernel}: tail"), tail, own.dtype(), tokens * tails * behind);
    expect(&format!("{kernel}: y"), y, own.dtype(), tokens * heads * (width + behind));
    ([tokens, heads], [width, behind], tails)
}

pub(super) fn join_heads(queue: &CpuQueue, own: View<'_>, tail: View<'_>, y: View<'_>) {
    let ([tokens, heads], [width, behind], tails) = parts("join_heads", own, tail, y);
    check_disjoint(&[y], &[own, tail]);
    with_float!(y.dtype(), T => {
        let [own, tail, y] = [own, tail, y].map(Operand::<T>::new);
        let (rows, all) = (tokens * heads, width + behind);
        queue.for_each_range(rows, rows_per_task(rows, all), #[inline(always)] |range, _| {
            for row in range {
                let from = if tails == 1 { row / heads } else { row };
                // SAFETY: both parts are only read, and each row of `y` belongs to one task.
                unsafe {
                    let (first, second) = y.write(row * all..(row + 1) * all).split_at_mut(width);
                    first.copy_from_slice(own.read(row * width..(row + 1) * width));
                    second.copy_from_slice(tail.read(from * behind..(from + 1) * behind));
                }
            }
        });
    });
}

pub(super) fn join_heads_backward(queue: &CpuQueue, dy: View<'_>, [down, dtail]: [View<'_>; 2]) {
    let ([tokens, heads], [width, behind], tails) = parts("join_heads_backward", down, dtail, dy);
    check_disjoint(&[down, dtail], &[dy]);
    with_float!(dy.dtype(), T => {
        let [dy, down, dtail] = [dy, down, dtail].map(Operand::<T>::new);
        let all = width + behind;
        queue.for_each_range(tokens, rows_per_task(tokens, heads * all), #[inline(always)] |range, isa| {
            for token in range {
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
            }
        });
    });
}

pub(super) fn rope_interleaved(
    queue: &CpuQueue,
    x: View<'_>,
    positions: View<'_>,
    inverse_frequencies: View<'_>,
    rotation: Rotation,
    y: View<'_>,
) {
    let (pairs, tokens) = (inverse_frequencies.elements(), positions.elements());
    expect("rope_interleaved: positions", positions, DType::U32, tokens);
    expect("rope_interleaved: inverse frequencies", inverse_frequencies, DType::F32, pairs);
    expect("rope_interleaved: y", y, x.dtype(), x.elements());
    let width = x.elements() / tokens.max(1);
    assert!(
        pairs > 0 && width * tokens == x.elements() && width.is_multiple_of(2 * pairs),
        "rope_interleaved: {x:?} is not [{tokens} tokens, heads, {} elements]",
        2 * pairs
    );
    check_elementwise(y, &[x]);
    check_disjoint(&[y], &[positions, inverse_frequencies]);
    let sign = match rotation {
        Rotation::Forward => 1.0,
        Rotation::Backward => -1.0,
    };
    with_float!(x.dtype(), T => {
        let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
        let positions = Operand::<u32>::new(positions);
        let frequencies = Operand::<f32>::new(inverse_frequencies);
        queue.for_each_range(tokens, rows_per_task(tokens, width), #[inline(always)] |range, _| {
            for token in range {
                // SAFETY: positions and frequencies are only read.
                let (position, frequencies) =
                    unsafe { (positions.read(token..token + 1)[0] as f32, frequencies.read(0..pairs)) };
                for (pair, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = sin_cos(position * frequency);
                    let sin = sign * sin;
                    for head in (token * width..(token + 1) * width).step_by(2 * pairs) {
                        let at = head + 2 * pair..head + 2 * pair + 2;
                        // SAFETY: only this task accesses this token, and no slice of it is live at the write.
                        unsafe {
                            let [a, b] = [0, 1].map(|i| x.read(at.clone())[i].load());
                            let rotated = [T::store(a * cos - b * sin), T::store(b * cos + a * sin)];
                            y.write(at).copy_from_slice(&rotated);
                        }
                    }
                }
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Kernels;
    use crate::cpu::reference;
    use crate::cpu::testing::{
        ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
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

        #[test]
        fn neighbours_are_rotated_as_halves_are(tokens in 1usize..9, heads in 1usize..4, half in 1usize..40) {
            let width = 2 * half * heads;
            let x = random_of(DType::F32, 1, tokens * width);
            let positions: Vec<u32> = (0..tokens as u32).map(|t| 3 * t).collect();
            let frequencies: Vec<f32> = (0..half).map(|i| 100.0_f32.powf(-(i as f32) / half as f32)).collect();
            // The reference has the pairs of a head split in halves.
            let apart = |x: &[f64]| -> Vec<f64> {
                let one = |head: &[f64], first: usize| head.iter().skip(first).step_by(2).copied().collect::<Vec<_>>();
                x.chunks(2 * half).flat_map(|head| [one(head, 0), one(head, 1)].concat()).collect()
            };
            for (rotation, sign) in [(Rotation::Forward, 1.0), (Rotation::Backward, -1.0)] {
                let expected = reference::rope(&apart(&x), &positions, &frequencies, sign);
                let run = |queue: &CpuQueue| {
                    let x = floats(DType::F32, [tokens, heads, 2 * half], &x);
                    let (positions, frequencies) = (tensor(&positions), tensor(&frequencies));
                    queue.rope_interleaved(x.view(), positions.view(), frequencies.view(), rotation, x.view());
                    vec![values(x.view())]
                };
                on_every_queue(run, |results| {
                    assert_close("rotated", &apart(&results[0]), &expected, 1e-6, 2e-6);
                });
            }
        }
    }
}

//! Loops over slices, a block at a time: maps and reductions.

use super::{Float, Isa, inlined};
use crate::Write;

/// Number of elements that kernels convert to f32 and process at a time: a buffer on the stack that stays in the L1
/// cache.
pub(crate) const BLOCK: usize = 256;

/// A stack buffer of [`BLOCK`] f32 elements.
#[repr(align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Block(pub(crate) [f32; BLOCK]);

impl Block {
    pub(crate) const ZERO: Self = Self([0.0; BLOCK]);
}

/// Computes `outputs[m][i] = f([inputs[0][i], inputs[1][i], ...])[m]` for the first `n` elements of each.
#[inline(always)]
pub(crate) fn map_block<T: Float, const N: usize, const M: usize>(
    inputs: [&[T]; N],
    outputs: &mut [Block; M],
    n: usize,
    f: impl Fn([f32; N]) -> [f32; M],
) {
    combine_block(inputs, outputs, n, f, |_, result| result);
}

/// Computes [`map_block`], and combines each result with the old output by `combine`.
#[inline(always)]
fn combine_block<T: Float, const N: usize, const M: usize>(
    inputs: [&[T]; N],
    outputs: &mut [Block; M],
    n: usize,
    f: impl Fn([f32; N]) -> [f32; M],
    combine: impl Fn(f32, f32) -> f32,
) {
    assert!(n <= BLOCK && inputs.iter().all(|input| input.len() >= n));
    for i in 0..n {
        // SAFETY: every slice has `n` elements, as just checked. Bounds checks in the loop would prevent the
        // vectorization of the last elements of each block.
        let arguments = inputs.map(inlined!(|input| unsafe { input.get_unchecked(i) }.load()));
        for (output, result) in outputs.iter_mut().zip(f(arguments)) {
            // SAFETY: as above.
            let output = unsafe { output.0.get_unchecked_mut(i) };
            *output = combine(*output, result);
        }
    }
}

/// Computes `to[i] = f([inputs[0][i], inputs[1][i], ...])`, or adds it to `to[i]`.
#[inline(always)]
pub(crate) fn map_slices<T: Float, const N: usize>(
    isa: Isa,
    inputs: [&[T]; N],
    to: &mut [T],
    write: Write,
    f: impl Fn([f32; N]) -> f32,
) {
    let mut results = [Block::ZERO];
    for (index, to) in to.chunks_mut(BLOCK).enumerate() {
        map_block(inputs.map(|input| &input[index * BLOCK..]), &mut results, to.len(), inlined!(|x| [f(x)]));
        let results = &mut results[0].0[..to.len()];
        if write == Write::Accumulate {
            for (result, earlier) in results.iter_mut().zip(&*to) {
                *result += earlier.load();
            }
        }
        T::store_all(isa, results, to);
    }
}

/// Number of partial results at the end of a reduction: a few vectors.
const LANES: usize = 32;

/// Returns the sums of `M` functions of `N` equally long slices: `Σ f([a[i], b[i], ...])`.
#[inline(always)]
pub(crate) fn sum<T: Float, const N: usize, const M: usize>(
    inputs: [&[T]; N],
    f: impl Fn([f32; N]) -> [f32; M],
) -> [f32; M] {
    reduce(inputs, 0.0, f, |a, b| a + b)
}

/// Returns the largest element, NaN excepted; negative infinity if there is none.
#[inline(always)]
pub(crate) fn max<T: Float>(x: &[T]) -> f32 {
    let [largest] = reduce([x], f32::NEG_INFINITY, |[x]| [x], |a, b| if b > a { b } else { a });
    largest
}

/// Reduces `M` functions of `N` equally long slices. Blocks of results are combined with each other, then the halves
/// of the last block.
#[inline(always)]
fn reduce<T: Float, const N: usize, const M: usize>(
    inputs: [&[T]; N],
    neutral: f32,
    f: impl Fn([f32; N]) -> [f32; M],
    combine: impl Fn(f32, f32) -> f32,
) -> [f32; M] {
    let len = inputs[0].len();
    let mut blocks = [Block([neutral; BLOCK]); M];
    for start in (0..len).step_by(BLOCK) {
        let inputs = inputs.map(|input| &input[start..]);
        combine_block(inputs, &mut blocks, BLOCK.min(len - start), &f, &combine);
    }
    let used = len.min(BLOCK).next_power_of_two();
    let mut results = [neutral; M];
    for (result, block) in results.iter_mut().zip(&mut blocks) {
        let mut half = used / 2;
        while half >= LANES {
            let (low, high) = block.0.split_at_mut(half);
            combine_into(low, high, &combine);
            half /= 2;
        }
        let mut lanes = [neutral; LANES];
        lanes.copy_from_slice(&block.0[..LANES]);
        let mut half = LANES / 2;
        while half > 0 {
            let (low, high) = lanes.split_at_mut(half);
            combine_into(low, &high[..half], &combine);
            half /= 2;
        }
        *result = lanes[0];
    }
    results
}

/// Combines each element of `a` with the one of `b`.
#[inline(always)]
fn combine_into(a: &mut [f32], b: &[f32], combine: &impl Fn(f32, f32) -> f32) {
    for (a, b) in a.iter_mut().zip(b) {
        *a = combine(*a, *b);
    }
}

/// Computes `y += x`.
#[inline(always)]
pub(crate) fn add_to(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_cover_every_element_of_any_length() {
        for n in 0..200 {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let [linear, square] = sum([&x[..], &x[..]], |[a, b]| [a, a * b]);
            assert_eq!(linear, (0..n).sum::<i32>() as f32, "n = {n}");
            assert_eq!(square, (0..n).map(|i| i * i).sum::<i32>() as f32, "n = {n}");
            assert_eq!(max(&x), if n == 0 { f32::NEG_INFINITY } else { (n - 1) as f32 });
        }
    }
}

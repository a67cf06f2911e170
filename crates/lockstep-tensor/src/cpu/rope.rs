//! Rotary position embedding (Su et al., 2021) of heads or of their first elements, in the half-split form.
//!
//! The sines and cosines of a token are computed once, for a block of frequencies, and applied to all its heads.

use std::ops::Range;

use lockstep_plan::DType;

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, check_elementwise, expect},
    simd::{BLOCK, Block, Float, inlined, sin_cos, with_float},
    tasks::rows_per_task,
};
use crate::{Rotary, RotaryKernels, Rotation, View};

/// Number of pairs that are rotated at a time.
const LANES: usize = 16;

impl RotaryKernels for CpuQueue {
    fn rope(&self, x: View<'_>, rotary: Rotary<'_>, rotation: Rotation, y: View<'_>) {
        let Rotary { positions, inverse_frequencies, amplitude } = rotary;
        let (half, tokens) = (inverse_frequencies.elements(), positions.elements());
        let [width, head_dim] = check("rope", x, positions, inverse_frequencies, y);
        if width == 0 {
            return;
        }
        let sign = sign(rotation);
        with_float!(x.dtype(), T => {
            let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
            let positions = Operand::<u32>::new(positions);
            let frequencies = Operand::<f32>::new(inverse_frequencies);
            self.for_each_range(tokens, rows_per_task(tokens, width), inlined!(|tokens, _| {
                let mut turn = Turn { sin: Block::ZERO, cos: Block::ZERO };
                for token in tokens {
                    for start in (0..half).step_by(BLOCK) {
                        let n = BLOCK.min(half - start);
                        // SAFETY: positions and frequencies are only read.
                        let (position, frequencies) = unsafe {
                            (positions.read(token..token + 1)[0], frequencies.read(start..start + n))
                        };
                        turn.set(position, frequencies, [sign, amplitude]);
                        for head in (token * width..(token + 1) * width).step_by(head_dim) {
                            // SAFETY: this task alone accesses this token.
                            unsafe { turn.apply(&x, &y, head + start, half, n) };
                        }
                    }
                    // SAFETY: as above.
                    unsafe { copy_rest(&x, &y, token * width..(token + 1) * width, [2 * half, head_dim]) };
                }
            }));
        });
    }

    fn rope_interleaved(&self, x: View<'_>, rotary: Rotary<'_>, rotation: Rotation, y: View<'_>) {
        let Rotary { positions, inverse_frequencies, amplitude } = rotary;
        let (pairs, tokens) = (inverse_frequencies.elements(), positions.elements());
        let [width, head_dim] = check("rope_interleaved", x, positions, inverse_frequencies, y);
        let sign = sign(rotation);
        with_float!(x.dtype(), T => {
            let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
            let positions = Operand::<u32>::new(positions);
            let frequencies = Operand::<f32>::new(inverse_frequencies);
            self.for_each_row(tokens, width, inlined!(|token, _| {
                // SAFETY: positions and frequencies are only read.
                let (position, frequencies) =
                    unsafe { (positions.read(token..token + 1)[0] as f32, frequencies.read(0..pairs)) };
                for (pair, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = sin_cos(position * frequency);
                    let (sin, cos) = (sign * sin * amplitude, cos * amplitude);
                    for head in (token * width..(token + 1) * width).step_by(head_dim) {
                        let at = head + 2 * pair..head + 2 * pair + 2;
                        // SAFETY: only this task accesses this token, and no slice of it is live at the write.
                        unsafe {
                            let [a, b] = [0, 1].map(|i| x.read(at.clone())[i].load());
                            let rotated = [T::store(a * cos - b * sin), T::store(b * cos + a * sin)];
                            y.write(at).copy_from_slice(&rotated);
                        }
                    }
                }
                // SAFETY: only this task accesses this token.
                unsafe { copy_rest(&x, &y, token * width..(token + 1) * width, [2 * pairs, head_dim]) };
            }));
        });
    }
}

/// Checks the operands, and returns the number of elements of a token and of a head.
fn check(kernel: &str, x: View<'_>, positions: View<'_>, frequencies: View<'_>, y: View<'_>) -> [usize; 2] {
    let (pairs, tokens) = (frequencies.elements(), positions.elements());
    expect(format_args!("{kernel}: positions"), positions, DType::U32, tokens);
    expect(format_args!("{kernel}: inverse frequencies"), frequencies, DType::F32, pairs);
    expect(format_args!("{kernel}: y"), y, x.dtype(), x.elements());
    let width = x.elements() / tokens.max(1);
    let head_dim = x.shape().dims().last().copied().unwrap_or(0);
    let is_of_heads = width * tokens == x.elements() && head_dim > 0 && width.is_multiple_of(head_dim);
    assert!(
        x.elements() == 0 || (pairs > 0 && is_of_heads && 2 * pairs <= head_dim),
        "{kernel}: {x:?} is not [{tokens} tokens, heads, at least {} elements]",
        2 * pairs
    );
    check_elementwise(y, &[x]);
    check_disjoint(&[y], &[positions, frequencies]);
    [width, head_dim]
}

/// Copies the elements of a token's heads that are not rotated: all from `rotated` on.
///
/// # Safety
/// Nothing else may access these elements of `y`, or write these elements of `x`.
#[inline(always)]
unsafe fn copy_rest<T: Float>(
    x: &Operand<'_, T>,
    y: &Operand<'_, T>,
    token: Range<usize>,
    [rotated, head_dim]: [usize; 2],
) {
    for head in token.step_by(head_dim) {
        for i in head + rotated..head + head_dim {
            // SAFETY: promised by the caller; the element is read before the slice of it is made.
            unsafe {
                let element = x.read(i..i + 1)[0];
                y.write(i..i + 1)[0] = element;
            }
        }
    }
}

/// Returns the sign of the angles.
fn sign(rotation: Rotation) -> f32 {
    match rotation {
        Rotation::Forward => 1.0,
        Rotation::Backward => -1.0,
    }
}

/// The rotations of up to a block of pairs.
struct Turn {
    sin: Block,
    cos: Block,
}

impl Turn {
    /// Sets the angles. They are rounded to f32 before the sine is taken, as in the training of existing models.
    #[inline(always)]
    fn set(&mut self, position: u32, frequencies: &[f32], [sign, amplitude]: [f32; 2]) {
        let position = position as f32;
        for ((sin, cos), frequency) in self.sin.0.iter_mut().zip(&mut self.cos.0).zip(frequencies) {
            let (s, c) = sin_cos(position * frequency);
            *sin = sign * s * amplitude;
            *cos = c * amplitude;
        }
    }

    /// Rotates the `n` pairs whose first elements start at `first`, and whose second elements are `half` further.
    ///
    /// # Safety
    /// Nothing else may access these elements of `y`, or write these elements of `x`.
    #[inline(always)]
    unsafe fn apply<T: Float>(
        &self,
        x: &Operand<'_, T>,
        y: &Operand<'_, T>,
        first: usize,
        half: usize,
        n: usize,
    ) {
        let whole = n - n % LANES;
        for i in (0..whole).step_by(LANES) {
            // SAFETY: promised by the caller.
            unsafe { self.apply_to::<T, LANES>(x, y, i, first + i, half) };
        }
        for i in whole..n {
            // SAFETY: promised by the caller.
            unsafe { self.apply_to::<T, 1>(x, y, i, first + i, half) };
        }
    }

    /// Rotates `L` pairs, from pair `i` of the block on. Both halves are read before either is written, so that
    /// in-place rotation works too.
    ///
    /// # Safety
    /// As for [`Turn::apply`].
    #[inline(always)]
    unsafe fn apply_to<T: Float, const L: usize>(
        &self,
        x: &Operand<'_, T>,
        y: &Operand<'_, T>,
        i: usize,
        first: usize,
        half: usize,
    ) {
        let second = first + half;
        let (mut a, mut b) = ([T::zeroed(); L], [T::zeroed(); L]);
        // SAFETY: nothing writes these elements before the slices are gone.
        unsafe {
            a.copy_from_slice(x.read(first..first + L));
            b.copy_from_slice(x.read(second..second + L));
        }
        let (sin, cos) = (&self.sin.0[i..i + L], &self.cos.0[i..i + L]);
        for lane in 0..L {
            let (x0, x1) = (a[lane].load(), b[lane].load());
            a[lane] = T::store(x0 * cos[lane] - x1 * sin[lane]);
            b[lane] = T::store(x1 * cos[lane] + x0 * sin[lane]);
        }
        // SAFETY: nothing else accesses these elements, and no slice of them is live.
        unsafe {
            y.write(first..first + L).copy_from_slice(&a);
            y.write(second..second + L).copy_from_slice(&b);
        }
    }
}

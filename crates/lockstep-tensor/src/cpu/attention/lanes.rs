//! A vector register of f32 lanes with the operations that attention needs, and its portable implementation.
//!
//! Code generic over [`Lanes`] must be inlined into a closure passed to `V::run(..)`: there the intrinsics
//! become single instructions. Only code that promises that the CPU has the level can make a value (`splat`, `load`),
//! so the methods on values are safe.

use std::ops::Range;

use lockstep_plan::random::Philox;

use crate::{
    CpuLevel,
    cpu::simd::{self, CACHE_LINE_BYTES, ROUND, inlined},
};

/// Rows and keys of a block of scores; also the number of bits in the mask of a row.
pub(super) const BLOCK: usize = 64;

/// Returns `head_dim` rounded up to whole registers of every level.
pub(super) const fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(16)
}

/// Prefetches a vector that will be read soon: its distance is too large for the CPU's own prefetcher.
#[inline(always)]
pub(super) fn prefetch<T>(source: &[T], vector: Range<usize>) {
    for element in vector.step_by(CACHE_LINE_BYTES / size_of::<T>()) {
        simd::prefetch(source.as_ptr().wrapping_add(element));
    }
}

/// Rows whose statistics are reduced together: a multiple of the lanes of every level, and a divisor of a block.
pub(super) const ROWS: usize = 16;

/// Coefficients of `2^r - 1` on `[-1/2, 1/2]` from the first power up: minimax in relative error, 2e-9.
pub(super) const EXP2: [f32; 6] =
    [std::f32::consts::LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_5, 0.000_153_533_62];

/// A register of f32.
///
/// # Safety contract of the constructors
/// `splat`, `load` and `keep_bits` may only run on a CPU that has [`Lanes::LEVEL`].
pub(super) trait Lanes: Copy {
    /// The level whose instructions are used.
    const LEVEL: CpuLevel;
    /// Number of lanes of a register; divides 64.
    const LANES: usize;
    /// Number of registers in a row of a tile of accumulators, such that six rows fit the register file.
    const TILE_REGISTERS: usize;

    /// Runs `work`, which must be `inlined!`, compiled for the level. Only a queue of the level calls it.
    fn run<R>(work: impl FnOnce() -> R) -> R;

    /// # Safety
    /// See the trait.
    unsafe fn splat(x: f32) -> Self;
    /// # Safety
    /// See the trait; `pointer` must be readable for `LANES` elements.
    unsafe fn load(pointer: *const f32) -> Self;
    /// # Safety
    /// `pointer` must be writable for `LANES` elements.
    unsafe fn store(self, pointer: *mut f32);
    /// Computes `self · b + c`, rounded once if the level has FMA.
    fn mul_add(self, b: Self, c: Self) -> Self;
    fn add(self, b: Self) -> Self;
    fn sub(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    /// Computes `2^self` to within 2 units in the last place for numbers up to 127; 0 below the normal numbers, NaN
    /// stays NaN.
    fn exp2(self) -> Self;
    /// Returns the larger of the two; `self` if either is NaN.
    fn max(self, b: Self) -> Self;
    /// Returns `self` in the lanes whose bit is set, `other` in the rest.
    fn select(self, bits: u64, other: Self) -> Self;
    fn sum(self) -> f32;
    fn maximum(self) -> f32;

    /// Returns [`Lanes::sum`] of each register.
    #[inline(always)]
    fn sums(registers: &[Self; ROWS]) -> [f32; ROWS] {
        registers.map(Self::sum)
    }

    /// Returns [`Lanes::maximum`] of each register.
    #[inline(always)]
    fn maximums(registers: &[Self; ROWS]) -> [f32; ROWS] {
        registers.map(Self::maximum)
    }

    /// Computes the hyperbolic tangent to within a relative error of 4e-7; NaN stays NaN.
    #[inline(always)]
    fn tanh(self) -> Self {
        /// The tangent of larger numbers rounds to 1.
        const LIMIT: f32 = 9.1;
        // SAFETY: a value exists only on a CPU of the level.
        let splat = inlined!(|x| unsafe { Self::splat(x) });
        let zero = splat(0.0);
        let bounded = zero.sub(zero.sub(self).max(splat(-LIMIT))).max(splat(-LIMIT));
        // tanh(x) = (e^2x - 1) / (e^2x + 1), where e^2x - 1 = 2^n (2^r - 1) + (2^n - 1) does not cancel.
        let exponent = bounded.mul(splat(2.0 * std::f32::consts::LOG2_E));
        let n = exponent.add(splat(ROUND)).sub(splat(ROUND));
        let r = exponent.sub(n);
        let mut p = splat(EXP2[5]);
        for c in EXP2.iter().rev().skip(1) {
            p = p.mul_add(r, splat(*c));
        }
        let power = n.exp2();
        let e = p.mul(r).mul_add(power, power.sub(splat(1.0)));
        e.div(e.add(splat(2.0)))
    }

    /// Writes the transpose of a square of `LANES` rows, which are `row` elements apart, to rows `BLOCK` apart.
    ///
    /// # Safety
    /// See the trait; the squares must be readable and writable.
    #[inline(always)]
    unsafe fn transpose(source: *const f32, row: usize, target: *mut f32) {
        for i in 0..Self::LANES {
            for j in 0..Self::LANES {
                // SAFETY: both lie in the squares.
                unsafe { *target.add(j * BLOCK + i) = *source.add(i * row + j) };
            }
        }
    }

    /// Returns the dropout mask of 64 keys: bit `i` is set (kept) if word `i % 4` of the Philox block at
    /// `[counter[0], counter[1], counter[2] + i / 4, counter[3]]` is at least `threshold`.
    ///
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn keep_bits(key: [u32; 2], counter: [u32; 4], threshold: u32) -> u64 {
        let philox = Philox::new(u64::from(key[0]) | u64::from(key[1]) << 32);
        let mut bits = 0;
        for group in 0..16 {
            let words = philox.block([counter[0], counter[1], counter[2].wrapping_add(group), counter[3]]);
            for (i, word) in words.into_iter().enumerate() {
                bits |= u64::from(word >= threshold) << (4 * group as usize + i);
            }
        }
        bits
    }
}

/// Four lanes in the baseline of every architecture.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 4]);

impl Portable {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

impl Lanes for Portable {
    const LEVEL: CpuLevel = CpuLevel::Portable;
    const LANES: usize = 4;
    const TILE_REGISTERS: usize = 2;

    #[inline(always)]
    fn run<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 4])
    }

    #[inline(always)]
    unsafe fn load(pointer: *const f32) -> Self {
        // SAFETY: the caller promises readable memory.
        Self(unsafe { pointer.cast::<[f32; 4]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, pointer: *mut f32) {
        // SAFETY: the caller promises writable memory.
        unsafe { pointer.cast::<[f32; 4]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        // Not `f32::mul_add`, which is a slow library call without the instruction.
        self.mul(b).add(c)
    }

    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.zip(b, |x, y| x + y)
    }

    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        self.zip(b, |x, y| x - y)
    }

    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.zip(b, |x, y| x * y)
    }

    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.zip(b, |x, y| x / y)
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        Self(self.0.map(|x| {
            let x = x.clamp(-127.0, 128.0);
            let n = (x + ROUND) - ROUND;
            let r = x - n;
            let p = EXP2.iter().rev().fold(0.0, |p, c| p * r + c) * r + 1.0;
            p * f32::from_bits(((n as i32 + 127) << 23) as u32)
        }))
    }

    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.zip(b, |x, y| if y > x { y } else { x })
    }

    #[inline(always)]
    fn select(self, bits: u64, other: Self) -> Self {
        Self(std::array::from_fn(|i| if bits >> i & 1 == 1 { self.0[i] } else { other.0[i] }))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        (self.0[0] + self.0[1]) + (self.0[2] + self.0[3])
    }

    #[inline(always)]
    fn maximum(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a check that is generic over the lanes, on each kind of lanes that this CPU has.
    macro_rules! on_all_lanes {
        ($check:ident) => {
            for level in CpuLevel::available() {
                match level {
                    CpuLevel::Portable => $check::<Portable>(),
                    #[cfg(target_arch = "x86_64")]
                    CpuLevel::Avx2 => $check::<super::super::x86::Avx2>(),
                    #[cfg(target_arch = "x86_64")]
                    CpuLevel::Avx512 => $check::<super::super::x86::Avx512>(),
                    #[cfg(target_arch = "aarch64")]
                    CpuLevel::Neon => $check::<super::super::aarch64::Neon>(),
                    // The higher levels use the lanes of AVX-512 or NEON.
                    _ => {}
                }
            }
        };
    }

    /// Applies `f` to a register of numbers.
    fn through<V: Lanes>(x: &[f32], f: impl Fn(V) -> V) -> Vec<f32> {
        let mut out = vec![0.0; V::LANES];
        // SAFETY: `available` detected the level in the CPU, and both slices hold a register.
        V::run(|| unsafe { f(V::load(x[..V::LANES].as_ptr())).store(out.as_mut_ptr()) });
        out
    }

    fn check_exp2<V: Lanes>() {
        let exponents: Vec<f32> = (-126_000..=127_000).map(|i| i as f32 * 1e-3).collect();
        for x in exponents.chunks_exact(V::LANES) {
            for (x, actual) in x.iter().zip(through::<V>(x, V::exp2)) {
                let exact = f64::from(*x).exp2();
                let error = (f64::from(actual) - exact).abs() / exact;
                assert!(error < 2.4e-7, "{}: 2^{x} is {actual}, not {exact}", V::LEVEL);
            }
        }
        for (x, exact) in [(f32::NEG_INFINITY, 0.0), (-1e30, 0.0), (0.0, 1.0), (200.0, f32::INFINITY)] {
            assert_eq!(through::<V>(&[x; 16], V::exp2), vec![exact; V::LANES], "{}: 2^{x}", V::LEVEL);
        }
        assert!(through::<V>(&[f32::NAN; 16], V::exp2).iter().all(|x| x.is_nan()), "{}", V::LEVEL);
    }

    #[test]
    fn powers_of_two_are_close_and_keep_nan() {
        on_all_lanes!(check_exp2);
    }

    fn check_tanh<V: Lanes>() {
        let small = (-1000..=1000).map(|i| i as f32 * 1e-6);
        let numbers: Vec<f32> = (-120_000..=120_000).map(|i| i as f32 * 1e-4).chain(small).collect();
        for x in numbers.chunks_exact(V::LANES) {
            for (x, actual) in x.iter().zip(through::<V>(x, V::tanh)) {
                let exact = f64::from(*x).tanh();
                let error = (f64::from(actual) - exact).abs();
                assert!(error <= 4e-7 * exact.abs(), "{}: tanh {x} is {actual}, not {exact}", V::LEVEL);
            }
        }
        for (x, exact) in [(0.0, 0.0), (f32::INFINITY, 1.0), (f32::NEG_INFINITY, -1.0), (1e30, 1.0)] {
            assert_eq!(through::<V>(&[x; 16], V::tanh), vec![exact; V::LANES], "{}: tanh {x}", V::LEVEL);
        }
        assert!(through::<V>(&[f32::NAN; 16], V::tanh).iter().all(|x| x.is_nan()), "{}", V::LEVEL);
    }

    #[test]
    fn hyperbolic_tangents_are_close_near_zero_and_in_saturation() {
        on_all_lanes!(check_tanh);
    }

    fn check_reductions<V: Lanes>() {
        let x: [f32; 16] = std::array::from_fn(|i| ((i * 7) % 16) as f32 - 20.0);
        let part = &x[..V::LANES];
        let largest = part.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(through::<V>(&x, |x| everywhere(x.maximum())), vec![largest; V::LANES], "{}", V::LEVEL);
        let sum: f32 = part.iter().sum();
        assert_eq!(through::<V>(&x, |x| everywhere(x.sum())), vec![sum; V::LANES], "{}", V::LEVEL);
        let bits = 0b1010_0110_0101_1001;
        let expected: Vec<f32> =
            part.iter().enumerate().map(|(i, x)| if bits >> i & 1 == 1 { *x } else { 9.0 }).collect();
        assert_eq!(through::<V>(&x, |x| x.select(bits, everywhere(9.0))), expected, "{}", V::LEVEL);
    }

    /// Returns a register with one number in all lanes.
    fn everywhere<V: Lanes>(x: f32) -> V {
        // SAFETY: called with levels that `available` detected in the CPU.
        unsafe { V::splat(x) }
    }

    #[test]
    fn reductions_cover_every_lane_and_selections_follow_their_bits() {
        on_all_lanes!(check_reductions);
    }

    fn check_reductions_of_rows<V: Lanes>() {
        // Numbers whose sums round, so that another order of additions gives other bits.
        let x: Vec<f32> = (0..ROWS * V::LANES).map(|i| (i as f32 * 1.7).sin()).collect();
        let mut reduced = [[0.0; ROWS]; 4];
        // SAFETY: `available` detected the level in the CPU, and a register of each row lies in the numbers.
        V::run(|| unsafe {
            let rows: [V; ROWS] = std::array::from_fn(|i| V::load(x[i * V::LANES..][..V::LANES].as_ptr()));
            reduced = [V::sums(&rows), rows.map(V::sum), V::maximums(&rows), rows.map(V::maximum)];
        });
        assert_eq!(reduced[0].map(f32::to_bits), reduced[1].map(f32::to_bits), "{}: sums", V::LEVEL);
        assert_eq!(reduced[2], reduced[3], "{}: maximums", V::LEVEL);
    }

    #[test]
    fn rows_are_reduced_together_in_the_order_of_one_row() {
        on_all_lanes!(check_reductions_of_rows);
    }

    fn check_transpose<V: Lanes>() {
        let row = V::LANES + 3;
        let source: Vec<f32> = (0..V::LANES * row).map(|i| i as f32).collect();
        let mut target = vec![-1.0; V::LANES * BLOCK];
        // SAFETY: `available` detected the level in the CPU, and both slices hold the squares.
        V::run(|| unsafe { V::transpose(source.as_ptr(), row, target.as_mut_ptr()) });
        for (j, line) in target.chunks(BLOCK).enumerate() {
            for (i, x) in line.iter().enumerate() {
                let expected = if i < V::LANES { source[i * row + j] } else { -1.0 };
                assert_eq!(*x, expected, "{}: row {j}, column {i}", V::LEVEL);
            }
        }
    }

    #[test]
    fn a_transposition_fills_its_square_and_nothing_beside_it() {
        on_all_lanes!(check_transpose);
    }

    fn check_keep_bits<V: Lanes>() {
        // The third counter wraps around within the 64 keys.
        for (key, counter) in [([1, 2], [3, 4, 0, 5]), ([u32::MAX, 7], [u32::MAX, 1, u32::MAX - 3, u32::MAX])]
        {
            let philox = Philox::new(u64::from(key[0]) | u64::from(key[1]) << 32);
            for threshold in [0, 1, 0x3333_3333, 0x8000_0000, u32::MAX] {
                let kept = |i: u32| {
                    let [a, b, c, d] = counter;
                    philox.block([a, b, c.wrapping_add(i / 4), d])[i as usize % 4] >= threshold
                };
                let expected = (0..64).fold(0, |bits, i| bits | u64::from(kept(i)) << i);
                // SAFETY: `available` detected the level in the CPU.
                let bits = V::run(|| unsafe { V::keep_bits(key, counter, threshold) });
                assert_eq!(bits, expected, "{}: threshold {threshold:#x}", V::LEVEL);
            }
        }
    }

    #[test]
    fn dropout_bits_are_those_of_philox_at_any_threshold() {
        on_all_lanes!(check_keep_bits);
    }
}

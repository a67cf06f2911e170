//! Helpers of the elementwise kernels: storage types as f32, vectorizable functions, and loops compiled for the
//! instructions of a [`CpuLevel`].
//!
//! Kernels are plain loops over slices. [`CpuLevel::run`] calls a closure inside a function that is compiled for the
//! level's instructions, and all code inlined into it is vectorized for them. So helpers are `#[inline(always)]`.

use half::{bf16, f16};

use super::{
    CpuLevel,
    tasks::{BLOCK, Block},
};
use crate::{Element, Write};

/// A float storage type. Arithmetic is in f32.
pub(crate) trait Float: Element {
    /// Returns the value as f32.
    fn load(self) -> f32;
    /// Returns the value nearest to `x`, ties to even.
    fn store(x: f32) -> Self;

    /// Stores each number as [`Float::store`] does. Numbers below the normal range may become zero.
    #[inline(always)]
    fn store_all(isa: Isa, from: &[f32], to: &mut [Self]) {
        let _ = isa;
        store_each(from, to);
    }
}

#[inline(always)]
fn store_each<T: Float>(from: &[f32], to: &mut [T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = T::store(*from);
    }
}

impl Float for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        x
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // A NaN whose fraction lies in the lower half must not round to infinity.
        let bits = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
        Self::from_bits((bits >> 16) as u16)
    }

    #[inline(always)]
    fn store_all(isa: Isa, from: &[f32], to: &mut [Self]) {
        #[cfg(target_arch = "x86_64")]
        if isa.bf16 {
            // SAFETY: the level has the instruction.
            return unsafe { round_to_bf16(from, to) };
        }
        let _ = isa;
        store_each(from, to);
    }
}

// Uses integer arithmetic, because a call of the conversion instruction would not be vectorized.
impl Float for f16 {
    #[inline(always)]
    fn load(self) -> f32 {
        let bits = u32::from(self.to_bits());
        // Moving the exponent by a multiplication is exact and handles subnormal numbers too.
        let finite = f32::from_bits((bits & 0x7fff) << 13) * TWO_POW_112;
        let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits(finite.to_bits() | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        let sign = x.to_bits() >> 16 & 0x8000;
        let magnitude = x.to_bits() & 0x7fff_ffff;
        let rounded = magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1));
        let normal = (rounded.wrapping_sub(112 << 23) >> 13).min(0x7c00);
        // The unit in the last place of 0.5 is 2^-24, f16's smallest number: the sum rounds to it.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
        let bits = if magnitude > 0x7f80_0000 { 0x7e00 } else { finite };
        Self::from_bits((bits | sign) as u16)
    }
}

/// The difference of the exponent biases of f32 and f16, as a factor.
const TWO_POW_112: f32 = f32::from_bits((127 + 112) << 23);

/// Calls `$body` with `$T` bound to the float type of a view's dtype.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            lockstep_plan::DType::F32 => {
                type $T = f32;
                $body
            }
            lockstep_plan::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            lockstep_plan::DType::F16 => {
                type $T = half::f16;
                $body
            }
            other => panic!("this kernel works on f32, bf16 and f16, not on {other}"),
        }
    };
}
pub(crate) use with_float;

impl CpuLevel {
    /// Runs `work` compiled for the best level of this CPU. `work` must be `#[inline(always)]`.
    #[inline(always)]
    pub fn run_at_best<R>(work: impl FnOnce() -> R) -> R {
        Self::detect().run(work)
    }

    /// Runs `work` compiled for this level.
    #[inline(always)]
    pub(crate) fn run<R>(self, work: impl FnOnce() -> R) -> R {
        self.run_with_isa(
            #[inline(always)]
            |_| work(),
        )
    }

    /// Runs `work` as [`CpuLevel::run`] does, and passes the level's [`Isa`], for code that multiplies and adds, or
    /// rounds.
    #[inline(always)]
    pub(crate) fn run_with_isa<R>(self, work: impl FnOnce(Isa) -> R) -> R {
        // One call for each level, so that the fields of `Isa` are constants in each compiled loop.
        #[cfg(target_arch = "x86_64")]
        macro_rules! run {
            ($compiled:ident, $isa:expr) => {
                // SAFETY: the level says that the CPU has these instructions.
                unsafe {
                    $compiled(
                        #[inline(always)]
                        || work($isa),
                    )
                }
            };
        }
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => run!(avx2, Isa { fma: true, bf16: false }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => run!(avx512, Isa { fma: true, bf16: false }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 | Self::AmxBf16 => run!(avx512_bf16, Isa { fma: true, bf16: true }),
            _ => work(Isa::PLAIN),
        }
    }
}

/// Instructions beyond plain arithmetic of the CPU level that a loop is compiled for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Isa {
    /// True if fused multiply-add is one instruction; otherwise it would be a library call. A constant in inlined
    /// loops.
    fma: bool,
    /// True if one instruction rounds a vector to bf16.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "an instruction of x86"))]
    bf16: bool,
}

impl Isa {
    /// Plain arithmetic only.
    pub(crate) const PLAIN: Self = Self { fma: false, bf16: false };

    /// Computes `a · b + c`, rounded once with FMA, else twice.
    #[inline(always)]
    pub(crate) fn mul_add(self, a: f32, b: f32, c: f32) -> f32 {
        if self.fma { a.mul_add(b, c) } else { a * b + c }
    }

    /// Evaluates `c[0] + c[1] x + c[2] x² + ...`.
    #[inline(always)]
    fn polynomial<const N: usize>(self, x: f32, coefficients: [f32; N]) -> f32 {
        let mut sum = coefficients[N - 1];
        for i in (0..N - 1).rev() {
            sum = self.mul_add(sum, x, coefficients[i]);
        }
        sum
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")]
fn avx512_bf16<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
fn avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// Rounds as many numbers as the shorter slice has.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn round_to_bf16(from: &[f32], to: &mut [bf16]) {
    use std::arch::x86_64::*;
    const COUNT: usize = 16;
    for (from, to) in from.chunks(COUNT).zip(to.chunks_mut(COUNT)) {
        let present: __mmask16 = __mmask16::MAX >> (COUNT - from.len().min(to.len()));
        // SAFETY: only elements of the slices are read and written; the two vectors are the same 256 bits.
        unsafe {
            let rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(present, from.as_ptr()));
            _mm256_mask_storeu_epi16(
                to.as_mut_ptr().cast(),
                present,
                std::mem::transmute::<__m256bh, __m256i>(rounded),
            );
        }
    }
}

/// Size of a cache line, in bytes.
pub(crate) const CACHE_LINE_BYTES: usize = 64;

/// Prefetches a cache line into the L2 cache. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and never faults; every x86-64 CPU has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Rounds an f32 of less than 2^22 when added and subtracted: to the nearest integer, ties to even. The low bits of
/// the sum hold that integer. (`round_ties_even` is a call on portable CPUs.)
pub(crate) const ROUND: f32 = 12_582_912.0;
/// Rounds an f64 of less than 2^51 in the way of [`ROUND`].
const ROUND_F64: f64 = 6_755_399_441_055_744.0;

/// Computes `e^x` to within 2 units in the last place; 0 below the smallest normal number, infinity above the range.
#[inline(always)]
pub(crate) fn exp(isa: Isa, x: f32) -> f32 {
    // e^x = 2^n e^r with |r| <= ln(2)/2; the degree-6 polynomial is the minimax one of Cephes' expf.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = isa.mul_add(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = isa.mul_add(n, -LN2_LOW, isa.mul_add(n, -LN2_HIGH, x));
    let p =
        isa.polynomial(r, [0.5, 1.666_666_5e-1, 4.166_579_6e-2, 8.333_452e-3, 1.398_2e-3, 1.987_569_2e-4]);
    let e = isa.mul_add(p, r * r, r) + 1.0;
    // The low bits of `shifted` hold n; shifted into the exponent they multiply by 2^n.
    let scaled = f32::from_bits(e.to_bits().wrapping_add(shifted.to_bits() << 23));
    let bounded = if x < -87.33 { 0.0 } else { scaled };
    // Infinity above the range, NaN for NaN.
    if x <= 88.722_83 { bounded } else { x + f32::INFINITY }
}

/// Computes `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(isa: Isa, x: f32) -> f32 {
    1.0 / (1.0 + exp(isa, -x))
}

/// Returns the standard normal distribution at `x`: (probability of less than `x`, density).
///
/// `Φ(x) = (1 + erf(x/√2)) / 2`, without the cancellation that this formula has for negative `x`.
#[inline(always)]
pub(crate) fn normal_distribution(isa: Isa, x: f32) -> (f32, f32) {
    const ONE_OVER_SQRT_TAU: f32 = 0.398_942_3;
    /// Mills' ratio (1 - Φ(x))/φ(x) of x >= 0 is t times this polynomial in t = 1/(1 + 0.35x). The coefficients are a
    /// weighted least-squares fit with a relative error of 3.2e-8.
    const MILLS: [f32; 9] = [
        0.349_978_6,
        0.350_587_88,
        0.300_333_1,
        0.264_635_86,
        -0.058_311_27,
        0.399_534_7,
        -0.641_446_9,
        0.361_104_8,
        -0.073_102_66,
    ];
    let t = 1.0 / isa.mul_add(0.35, x.abs(), 1.0);
    let density = ONE_OVER_SQRT_TAU * exp(isa, -0.5 * x * x);
    let tail = density * isa.polynomial(t, MILLS) * t;
    (if x < 0.0 { tail } else { 1.0 - tail }, density)
}

/// Returns (sin x, cos x) to within 2e-7 for `|x| <= 2^20`.
#[inline(always)]
pub(crate) fn sin_cos(x: f32) -> (f32, f32) {
    /// π/2 in two parts. The first has 33 bits, so that its product with a quadrant number is exact.
    const HALF_PI: [f64; 2] = [1.570_796_326_734_125_6, 6.077_100_506_506_192e-11];
    let x = f64::from(x);
    let shifted = x * std::f64::consts::FRAC_2_PI + ROUND_F64;
    let n = shifted - ROUND_F64;
    let quadrant = shifted.to_bits() as u32;
    let r = (x - n * HALF_PI[0] - n * HALF_PI[1]) as f32;
    // Taylor polynomials: for |r| <= π/4 their remainder is below 1e-8.
    let z = r * r;
    let sin = r + r * z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362_880.0))));
    let cos_tail = 1.0 / 24.0 + z * (-1.0 / 720.0 + z * (1.0 / 40_320.0 - z * (1.0 / 3_628_800.0)));
    let cos = 1.0 - 0.5 * z + z * z * cos_tail;
    let (s, c) = if quadrant & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let sin_sign = (quadrant & 2) << 30;
    let cos_sign = (quadrant.wrapping_add(1) & 2) << 30;
    (f32::from_bits(s.to_bits() ^ sin_sign), f32::from_bits(c.to_bits() ^ cos_sign))
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
        let arguments = inputs.map(
            #[inline(always)]
            |input| unsafe { input.get_unchecked(i) }.load(),
        );
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
        map_block(
            inputs.map(|input| &input[index * BLOCK..]),
            &mut results,
            to.len(),
            #[inline(always)]
            |x| [f(x)],
        );
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

#[cfg(test)]
mod tests {
    use super::*;

    /// FMA gives correct results on every CPU; it is only slow without the instruction.
    const BOTH: [Isa; 2] = [Isa::PLAIN, Isa { fma: true, bf16: false }];

    #[test]
    fn exp_is_close_to_the_exact_value_over_its_whole_range() {
        for isa in BOTH {
            let mut worst = 0.0_f64;
            for i in -87_000..88_000 {
                let x = i as f32 * 1e-3;
                let exact = f64::from(x).exp();
                worst = worst.max((f64::from(exp(isa, x)) - exact).abs() / exact);
            }
            assert!(worst < 2.5e-7, "relative error {worst}");
            assert_eq!(exp(isa, -1000.0), 0.0);
            assert_eq!(exp(isa, f32::NEG_INFINITY), 0.0);
            assert_eq!(exp(isa, f32::INFINITY), f32::INFINITY);
            assert_eq!(exp(isa, 0.0), 1.0);
            assert!(exp(isa, f32::NAN).is_nan());
            // The last number whose exponential is finite, and the next one.
            let last = f32::MAX.ln().next_down();
            assert!(exp(isa, last).is_finite() && exp(isa, last.next_up().next_up()).is_infinite());
        }
    }

    #[test]
    fn the_normal_distribution_is_close_to_the_error_function() {
        for isa in BOTH {
            for i in -14_000..14_000 {
                let x = i as f32 * 1e-3;
                let (probability, density) = normal_distribution(isa, x);
                let exact = 0.5 * libm::erfc(-f64::from(x) / std::f64::consts::SQRT_2);
                let exact_density = (-0.5 * f64::from(x).powi(2)).exp() / std::f64::consts::TAU.sqrt();
                let bound = 4e-7 * exact * (1.0 + f64::from(x).powi(2)) + 1e-36;
                assert!(
                    (f64::from(probability) - exact).abs() < bound,
                    "Φ({x}) = {probability}, not {exact}"
                );
                assert!((f64::from(probability) - exact).abs() < 2e-7, "Φ({x}) = {probability}, not {exact}");
                assert!((f64::from(density) - exact_density).abs() < 1e-7, "φ({x}) = {density}");
            }
            assert_eq!(normal_distribution(isa, f32::INFINITY), (1.0, 0.0));
            assert_eq!(normal_distribution(isa, f32::NEG_INFINITY).0, 0.0);
            assert!(normal_distribution(isa, f32::NAN).0.is_nan());
        }
    }

    #[test]
    fn sine_and_cosine_are_close_far_from_zero_too() {
        let far = (0..200_000).map(|i| i as f32 * 5.243);
        for x in (-200_000..200_000).map(|i| i as f32 * 1e-4).chain(far) {
            let (sin, cos) = sin_cos(x);
            let exact = f64::from(x).sin_cos();
            let error = (f64::from(sin) - exact.0).abs().max((f64::from(cos) - exact.1).abs());
            assert!(error < 2e-7, "x = {x}: ({sin}, {cos}), not {exact:?}");
        }
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
        // The largest position at the highest frequency: less exact, but still a sine.
        let (far, exact) = (u32::MAX as f32, f64::from(u32::MAX as f32).sin_cos());
        let (sin, cos) = sin_cos(far);
        let error = (f64::from(sin) - exact.0).abs().max((f64::from(cos) - exact.1).abs());
        assert!(error < 2e-6, "x = {far}: ({sin}, {cos}), not {exact:?}");
        assert!(sin_cos(f32::INFINITY).0.is_nan() && sin_cos(f32::NAN).1.is_nan());
    }

    #[test]
    fn the_sigmoid_is_close_and_saturates() {
        for isa in BOTH {
            for i in -80_000..80_000 {
                let x = i as f32 * 1e-3;
                let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
                let error = (f64::from(sigmoid(isa, x)) - exact).abs() / exact;
                assert!(error < 4e-7, "sigmoid(isa, {x}) = {}, not {exact}", sigmoid(isa, x));
            }
            assert_eq!((sigmoid(isa, -1000.0), sigmoid(isa, 1000.0)), (0.0, 1.0));
        }
    }

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

    #[test]
    fn f16_converts_exactly_and_rounds_to_nearest_even() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            let (ours, reference) = (Float::load(x), x.to_f32());
            assert!(
                ours.to_bits() == reference.to_bits() || (ours.is_nan() && reference.is_nan()),
                "{bits:#x} gives {ours}, expected {reference}"
            );
        }
        let border = (0..=0x7bff_u16).flat_map(|bits| {
            // The value, the point halfway to the next one, and the neighbours of that point: where rounding changes
            // direction.
            let (a, b) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
            let half = if b.is_finite() { (a + b) / 2.0 } else { 65_520.0 };
            [a, half, f32::from_bits(half.to_bits() - 1), f32::from_bits(half.to_bits() + 1)]
        });
        let spread = (0..=u32::MAX).step_by(99_991).map(f32::from_bits);
        for x in border.chain(spread).flat_map(|x| [x, -x]) {
            let (ours, reference) = (<f16 as Float>::store(x), f16::from_f32(x));
            assert!(
                ours.to_bits() == reference.to_bits() || (x.is_nan() && ours.is_nan()),
                "{x:e} gives {ours}, expected {reference}"
            );
        }
    }

    #[test]
    fn bf16_converts_exactly_and_rounds_to_nearest_even() {
        let spread = (0..=u32::MAX).step_by(99_991);
        let border = (0..=u16::MAX).flat_map(|bits| {
            // The value (NaN and infinity included), its neighbour, the point halfway to the next one, and the
            // neighbours of that point.
            let value = u32::from(bits) << 16;
            [value, value + 1, value + 0x7fff, value + 0x8000, value + 0x8001, value + 0xffff]
        });
        for x in border.chain(spread).map(f32::from_bits) {
            let (ours, reference) = (<bf16 as Float>::store(x), bf16::from_f32(x));
            assert!(
                ours.to_bits() == reference.to_bits() || (x.is_nan() && ours.is_nan()),
                "{x:e} ({:#x}) gives {ours}, expected {reference}",
                x.to_bits()
            );
            assert_eq!(Float::load(ours).to_bits(), u32::from(ours.to_bits()) << 16);
        }
    }
}

//! Vectors of integer products: 16 lines of int8 codes of weights times int8 codes of activations, summed in int32.
//!
//! A *unit* holds four neighbouring codes of each of the 16 lines, so that a lane of the sums is a line.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use super::word_lanes::{Words256, Words512};
use lockstep_plan::block_format::Words;

use super::{
    transpose::SIDE,
    word_lanes::{PlainWords, WordLanes},
};

/// Codes of a line in a unit.
pub(super) const UNIT_CODES: usize = 4;
/// Units of a group of 32 codes.
pub(super) const GROUP_UNITS: usize = 8;

/// The vectors of a CPU level.
///
/// The methods are unsafe because they may be called only if the CPU has the vectors' instructions. They are fast only inside
/// [`IntegerLanes::compiled`].
pub(super) trait IntegerLanes {
    /// Number that is taken off the codes of weights as they are loaded.
    const SHIFT: i32;
    /// The words in which weights are decoded.
    type Words: WordLanes;
    /// Four codes of each line.
    type Unit: Copy;
    /// An int32 of each line.
    type Integers: Copy;
    /// An f32 of each line.
    type Floats: Copy;

    /// Runs `work`, and all code inlined into it, compiled for the vectors' instructions.
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R;
    /// Loads a unit.
    unsafe fn unit(words: &[u32; SIDE]) -> Self::Unit;
    /// Returns the unit of decoded words.
    unsafe fn unit_of(words: Self::Words) -> Self::Unit;
    /// Returns numbers that are decoded with words.
    unsafe fn decoded(numbers: <Self::Words as Words>::Floats) -> Self::Floats;
    /// Returns the same integer for all lines.
    unsafe fn splat(integer: i32) -> Self::Integers;
    /// Adds the products of a unit and four codes of a row of activations.
    unsafe fn dot(sums: Self::Integers, unit: Self::Unit, codes: i32) -> Self::Integers;

    /// Adds the products of a run to the sums of each row: `codes` are those of all rows side by side, and `units` those of the lines.
    #[inline(always)]
    unsafe fn add_run<const ROWS: usize>(
        products: &mut [Self::Integers; ROWS],
        codes: &[[i32; ROWS]],
        units: &[[u32; SIDE]],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            for (codes, unit) in codes.iter().zip(units) {
                let unit = Self::unit(unit);
                for (product, codes) in products.iter_mut().zip(codes) {
                    *product = Self::dot(*product, unit, *codes);
                }
            }
        }
    }

    /// Loads the numbers of all lines.
    unsafe fn floats(numbers: &[f32; SIDE]) -> Self::Floats;
    /// Computes `numbers · factor`.
    unsafe fn scale(numbers: Self::Floats, factor: f32) -> Self::Floats;
    /// Computes `sums + numbers · factor`.
    unsafe fn add_scaled(sums: Self::Floats, numbers: Self::Floats, factor: f32) -> Self::Floats;
    /// Computes `sums + integers · factors`.
    unsafe fn add_products(
        sums: Self::Floats,
        integers: Self::Integers,
        factors: Self::Floats,
    ) -> Self::Floats;
    /// Writes the numbers of all lines.
    unsafe fn store(numbers: Self::Floats, target: &mut [f32; SIDE]);
}

/// Plain arithmetic, which the compiler maps to the baseline of the CPU.
pub(super) struct PlainIntegers;

impl IntegerLanes for PlainIntegers {
    const SHIFT: i32 = 0;
    type Words = PlainWords;
    type Unit = [u32; SIDE];
    type Integers = [i32; SIDE];
    type Floats = [f32; SIDE];

    #[inline(always)]
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn unit(words: &[u32; SIDE]) -> Self::Unit {
        *words
    }

    #[inline(always)]
    unsafe fn unit_of(words: PlainWords) -> Self::Unit {
        words.0
    }

    #[inline(always)]
    unsafe fn decoded(numbers: [f32; SIDE]) -> Self::Floats {
        numbers
    }

    #[inline(always)]
    unsafe fn splat(integer: i32) -> Self::Integers {
        [integer; SIDE]
    }

    #[inline(always)]
    unsafe fn dot(mut sums: Self::Integers, unit: Self::Unit, codes: i32) -> Self::Integers {
        for index in 0..UNIT_CODES {
            let code = (codes << (24 - 8 * index)) >> 24;
            for (sum, word) in sums.iter_mut().zip(&unit) {
                *sum += (word >> (8 * index) & 0xff).cast_signed() * code;
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn floats(numbers: &[f32; SIDE]) -> Self::Floats {
        *numbers
    }

    #[inline(always)]
    unsafe fn scale(mut numbers: Self::Floats, factor: f32) -> Self::Floats {
        for number in &mut numbers {
            *number *= factor;
        }
        numbers
    }

    #[inline(always)]
    unsafe fn add_scaled(mut sums: Self::Floats, numbers: Self::Floats, factor: f32) -> Self::Floats {
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum += number * factor;
        }
        sums
    }

    #[inline(always)]
    unsafe fn add_products(
        mut sums: Self::Floats,
        integers: Self::Integers,
        factors: Self::Floats,
    ) -> Self::Floats {
        for (sum, (integer, factor)) in sums.iter_mut().zip(integers.into_iter().zip(factors)) {
            *sum += integer as f32 * factor;
        }
        sums
    }

    #[inline(always)]
    unsafe fn store(numbers: Self::Floats, target: &mut [f32; SIDE]) {
        *target = numbers;
    }
}

/// AVX2. Products of bytes are of an unsigned and a signed one, and two of them must fit 16 bits: the codes of weights are made signed,
/// and their magnitudes multiplied with activations that take their signs, at most 2 · 128 · 127.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2Integers;

#[cfg(target_arch = "x86_64")]
impl IntegerLanes for Avx2Integers {
    const SHIFT: i32 = 128;
    type Words = Words256;
    type Unit = [__m256i; 2];
    type Integers = [__m256i; 2];
    type Floats = [__m256; 2];

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn unit(words: &[u32; SIDE]) -> Self::Unit {
        // SAFETY: 16 words; the caller's promise, here and below.
        unsafe { Self::unit_of(Words256::load(words)) }
    }

    #[inline(always)]
    unsafe fn unit_of(words: Words256) -> Self::Unit {
        // SAFETY: as above.
        unsafe {
            let shift = _mm256_set1_epi8(i8::MIN);
            [_mm256_xor_si256(words.0[0], shift), _mm256_xor_si256(words.0[1], shift)]
        }
    }

    #[inline(always)]
    unsafe fn decoded(numbers: [__m256; 2]) -> Self::Floats {
        numbers
    }

    #[inline(always)]
    unsafe fn splat(integer: i32) -> Self::Integers {
        // SAFETY: as above.
        unsafe { [_mm256_set1_epi32(integer); 2] }
    }

    #[inline(always)]
    unsafe fn dot(mut sums: Self::Integers, unit: Self::Unit, codes: i32) -> Self::Integers {
        // SAFETY: as above.
        unsafe {
            let (codes, ones) = (_mm256_set1_epi32(codes), _mm256_set1_epi16(1));
            for (sums, unit) in sums.iter_mut().zip(unit) {
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(unit), _mm256_sign_epi8(codes, unit));
                *sums = _mm256_add_epi32(*sums, _mm256_madd_epi16(pairs, ones));
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn floats(numbers: &[f32; SIDE]) -> Self::Floats {
        // SAFETY: 16 numbers.
        unsafe { [_mm256_loadu_ps(numbers.as_ptr()), _mm256_loadu_ps(numbers.as_ptr().add(8))] }
    }

    #[inline(always)]
    unsafe fn scale(numbers: Self::Floats, factor: f32) -> Self::Floats {
        // SAFETY: as above.
        unsafe {
            let factor = _mm256_set1_ps(factor);
            [_mm256_mul_ps(numbers[0], factor), _mm256_mul_ps(numbers[1], factor)]
        }
    }

    #[inline(always)]
    unsafe fn add_scaled(sums: Self::Floats, numbers: Self::Floats, factor: f32) -> Self::Floats {
        // SAFETY: as above.
        unsafe {
            let factor = _mm256_set1_ps(factor);
            [_mm256_fmadd_ps(numbers[0], factor, sums[0]), _mm256_fmadd_ps(numbers[1], factor, sums[1])]
        }
    }

    #[inline(always)]
    unsafe fn add_products(
        sums: Self::Floats,
        integers: Self::Integers,
        factors: Self::Floats,
    ) -> Self::Floats {
        // SAFETY: as above.
        unsafe {
            [
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers[0]), factors[0], sums[0]),
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers[1]), factors[1], sums[1]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(numbers: Self::Floats, target: &mut [f32; SIDE]) {
        // SAFETY: room for 16 numbers.
        unsafe {
            _mm256_storeu_ps(target.as_mut_ptr(), numbers[0]);
            _mm256_storeu_ps(target.as_mut_ptr().add(8), numbers[1]);
        }
    }
}

/// AVX-512 with VNNI, whose products are of an unsigned and a signed byte.
#[cfg(target_arch = "x86_64")]
pub(super) struct VnniIntegers;

#[cfg(target_arch = "x86_64")]
impl VnniIntegers {
    /// Adds an integer to each line's.
    ///
    /// # Safety
    /// The CPU must have the instructions.
    #[inline(always)]
    pub(super) unsafe fn add(sums: __m512i, integers: &[i32; SIDE]) -> __m512i {
        // SAFETY: 16 integers; the caller's promise.
        unsafe { _mm512_add_epi32(sums, _mm512_loadu_si512(integers.as_ptr().cast())) }
    }
}

#[cfg(target_arch = "x86_64")]
impl IntegerLanes for VnniIntegers {
    const SHIFT: i32 = 0;
    type Words = Words512;
    type Unit = __m512i;
    type Integers = __m512i;
    type Floats = __m512;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn unit(words: &[u32; SIDE]) -> Self::Unit {
        // SAFETY: 16 words.
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }

    #[inline(always)]
    unsafe fn unit_of(words: Words512) -> Self::Unit {
        words.0[0]
    }

    #[inline(always)]
    unsafe fn decoded([numbers]: [__m512; 1]) -> Self::Floats {
        numbers
    }

    #[inline(always)]
    unsafe fn splat(integer: i32) -> Self::Integers {
        // SAFETY: as above.
        unsafe { _mm512_set1_epi32(integer) }
    }

    #[inline(always)]
    unsafe fn dot(sums: Self::Integers, unit: Self::Unit, codes: i32) -> Self::Integers {
        // SAFETY: as above.
        unsafe { _mm512_dpbusd_epi32(sums, unit, _mm512_set1_epi32(codes)) }
    }

    #[inline(always)]
    unsafe fn floats(numbers: &[f32; SIDE]) -> Self::Floats {
        // SAFETY: 16 numbers.
        unsafe { _mm512_loadu_ps(numbers.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn scale(numbers: Self::Floats, factor: f32) -> Self::Floats {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(numbers, _mm512_set1_ps(factor)) }
    }

    #[inline(always)]
    unsafe fn add_scaled(sums: Self::Floats, numbers: Self::Floats, factor: f32) -> Self::Floats {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(numbers, _mm512_set1_ps(factor), sums) }
    }

    #[inline(always)]
    unsafe fn add_products(
        sums: Self::Floats,
        integers: Self::Integers,
        factors: Self::Floats,
    ) -> Self::Floats {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), factors, sums) }
    }

    #[inline(always)]
    unsafe fn store(numbers: Self::Floats, target: &mut [f32; SIDE]) {
        // SAFETY: room for 16 numbers.
        unsafe { _mm512_storeu_ps(target.as_mut_ptr(), numbers) }
    }
}

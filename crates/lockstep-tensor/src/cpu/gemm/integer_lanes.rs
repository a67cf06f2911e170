//! Vectors of integer products: 16 lines of int8 codes of weights times int8 codes of activations, summed in int32.
//!
//! A *unit* holds four neighbouring codes of each of the 16 lines, so that a lane of the sums is a line.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::transpose::SIDE;

/// Codes of a line in a unit.
pub(super) const UNIT_CODES: usize = 4;
/// Units of a group of 32 codes.
pub(super) const GROUP_UNITS: usize = 8;
/// Bytes of a unit.
pub(super) const UNIT_BYTES: usize = UNIT_CODES * SIDE;

/// The vectors of a CPU level.
///
/// The methods are unsafe because they may be called only if the CPU has the vectors' instructions. They are fast only inside
/// [`IntegerLanes::compiled`].
pub(super) trait IntegerLanes {
    /// Number that is added to the codes of weights in units. Sums start at minus this number times the sum of the activations' codes.
    const BIAS: i32;
    /// Four codes of each line.
    type Unit: Copy;
    /// An int32 of each line.
    type Integers: Copy;
    /// An f32 of each line.
    type Floats: Copy;

    /// Runs `work`, and all code inlined into it, compiled for the vectors' instructions.
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R;
    /// Writes the units of 32 codes of each line, with the bias.
    unsafe fn transpose(codes: &[[i8; 32]; SIDE], units: &mut [[u8; UNIT_BYTES]; GROUP_UNITS]);
    /// Loads a unit.
    unsafe fn unit(bytes: &[u8; UNIT_BYTES]) -> Self::Unit;
    /// Returns the same integer for all lines.
    unsafe fn splat(integer: i32) -> Self::Integers;
    /// Adds the products of a unit and four codes of a row of activations.
    unsafe fn dot(sums: Self::Integers, unit: Self::Unit, codes: i32) -> Self::Integers;
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
    const BIAS: i32 = 0;
    type Unit = [i8; UNIT_BYTES];
    type Integers = [i32; SIDE];
    type Floats = [f32; SIDE];

    #[inline(always)]
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn transpose(codes: &[[i8; 32]; SIDE], units: &mut [[u8; UNIT_BYTES]; GROUP_UNITS]) {
        for (unit, bytes) in units.iter_mut().enumerate() {
            for (line, codes) in codes.iter().enumerate() {
                for index in 0..UNIT_CODES {
                    bytes[line * UNIT_CODES + index] = codes[unit * UNIT_CODES + index].cast_unsigned();
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unit(bytes: &[u8; UNIT_BYTES]) -> Self::Unit {
        let mut unit = [0; UNIT_BYTES];
        for (code, byte) in unit.iter_mut().zip(bytes) {
            *code = byte.cast_signed();
        }
        unit
    }

    #[inline(always)]
    unsafe fn splat(integer: i32) -> Self::Integers {
        [integer; SIDE]
    }

    #[inline(always)]
    unsafe fn dot(mut sums: Self::Integers, unit: Self::Unit, codes: i32) -> Self::Integers {
        let codes = codes.to_le_bytes();
        for (line, sum) in sums.iter_mut().enumerate() {
            for (index, code) in codes.iter().enumerate() {
                *sum += i32::from(unit[line * UNIT_CODES + index]) * i32::from(code.cast_signed());
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

/// AVX2. Products of bytes are of an unsigned and a signed one: magnitudes of weights times activations with the weights' signs.
/// Two of them are at most 2 · 128 · 127 and fit 16 bits.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2Integers;

#[cfg(target_arch = "x86_64")]
impl IntegerLanes for Avx2Integers {
    const BIAS: i32 = 0;
    type Unit = [__m256i; 2];
    type Integers = [__m256i; 2];
    type Floats = [__m256; 2];

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn transpose(codes: &[[i8; 32]; SIDE], units: &mut [[u8; UNIT_BYTES]; GROUP_UNITS]) {
        // SAFETY: 32 codes of a line are eight words, and half a unit is eight lines' words; the caller's promise.
        unsafe {
            for half in 0..2 {
                let mut rows = [_mm256_setzero_si256(); 8];
                for (line, row) in rows.iter_mut().enumerate() {
                    *row = _mm256_loadu_si256(codes[8 * half + line].as_ptr().cast());
                }
                let mut quads = [_mm256_setzero_si256(); 8];
                for first in [0, 4] {
                    let [a, b, c, d] = [rows[first], rows[first + 1], rows[first + 2], rows[first + 3]];
                    let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                    let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                    quads[first] = _mm256_unpacklo_epi64(ab_low, cd_low);
                    quads[first + 1] = _mm256_unpackhi_epi64(ab_low, cd_low);
                    quads[first + 2] = _mm256_unpacklo_epi64(ab_high, cd_high);
                    quads[first + 3] = _mm256_unpackhi_epi64(ab_high, cd_high);
                }
                for unit in 0..4 {
                    let low = _mm256_permute2x128_si256::<0x20>(quads[unit], quads[4 + unit]);
                    let high = _mm256_permute2x128_si256::<0x31>(quads[unit], quads[4 + unit]);
                    let mut write = |unit: usize, words| {
                        _mm256_storeu_si256(units[unit].as_mut_ptr().add(32 * half).cast(), words)
                    };
                    write(unit, low);
                    write(4 + unit, high);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unit(bytes: &[u8; UNIT_BYTES]) -> Self::Unit {
        // SAFETY: 64 bytes; the caller's promise, here and below.
        unsafe {
            [
                _mm256_loadu_si256(bytes.as_ptr().cast()),
                _mm256_loadu_si256(bytes.as_ptr().add(UNIT_BYTES / 2).cast()),
            ]
        }
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

/// AVX-512 with VNNI, whose products are of an unsigned and a signed byte: codes of weights have a bias of 128.
#[cfg(target_arch = "x86_64")]
pub(super) struct VnniIntegers;

#[cfg(target_arch = "x86_64")]
impl IntegerLanes for VnniIntegers {
    const BIAS: i32 = 128;
    type Unit = __m512i;
    type Integers = __m512i;
    type Floats = __m512;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn transpose(codes: &[[i8; 32]; SIDE], units: &mut [[u8; UNIT_BYTES]; GROUP_UNITS]) {
        // SAFETY: 32 codes of a line are half a vector, and a unit is a vector; the caller's promise.
        unsafe {
            let zero = _mm512_setzero_si512();
            // Lines 0 to 3 and 8 to 11, each with the line four later.
            let mut rows = [zero; 8];
            for (index, row) in rows.iter_mut().enumerate() {
                let line = index + index / 4 * 4;
                let low = _mm256_loadu_si256(codes[line].as_ptr().cast());
                let high = _mm256_loadu_si256(codes[line + 4].as_ptr().cast());
                *row = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            }
            // Quarters of `quads[4 i + j]`: unit j and unit j + 4 of lines 8 i to 8 i + 3, then of the next four lines.
            let mut quads = [zero; 8];
            for first in [0, 4] {
                let [a, b, c, d] = [rows[first], rows[first + 1], rows[first + 2], rows[first + 3]];
                let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
                quads[first] = _mm512_unpacklo_epi64(ab_low, cd_low);
                quads[first + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
                quads[first + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
                quads[first + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
            }
            let bias = _mm512_set1_epi8(i8::MIN);
            for unit in 0..4 {
                let low = _mm512_shuffle_i32x4::<0x88>(quads[unit], quads[4 + unit]);
                let high = _mm512_shuffle_i32x4::<0xdd>(quads[unit], quads[4 + unit]);
                _mm512_storeu_si512(units[unit].as_mut_ptr().cast(), _mm512_xor_si512(low, bias));
                _mm512_storeu_si512(units[4 + unit].as_mut_ptr().cast(), _mm512_xor_si512(high, bias));
            }
        }
    }

    #[inline(always)]
    unsafe fn unit(bytes: &[u8; UNIT_BYTES]) -> Self::Unit {
        // SAFETY: 64 bytes; the caller's promise, here and below.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
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

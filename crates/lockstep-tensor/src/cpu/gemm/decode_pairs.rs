//! Decoding of quantized weights to pairs of bf16 by AVX-512.
//!
//! The codes of 16 lines are transposed as pairs of bytes, which takes half the instructions that units would, so that lanes are lines;
//! then the scales of all lines are one vector for a whole run.

use std::arch::x86_64::*;

use super::transpose::Square;

/// Lines of a 512-bit vector with 32 codes of each.
const HALF: usize = 8;

/// Decodes as [`Lanes::decode_pairs`](super::lanes::Lanes::decode_pairs) does.
///
/// # Safety
/// The target must hold 16 units of 16 lines.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn decode_pairs(
    codes: &[[i8; 32]; 16],
    scales: [&[f32; 16]; 2],
    offsets: Option<[&[f32; 16]; 2]>,
    target: Square<*mut u32>,
) {
    let columns = transposed(codes);
    for half in 0..2 {
        let factors = doubled(scales[half]);
        let terms = match offsets {
            Some(offsets) => doubled(offsets[half]),
            None => [_mm512_setzero_ps(); 2],
        };
        for (pair, column) in columns.iter().enumerate() {
            // Quarters of a column: pair `pair` of lines 0 to 7, pair `pair + 8` of them, then the same of lines 8 to 15.
            let quarters = quarters_of(column);
            let mut decoded = [_mm512_setzero_ps(); 2];
            for lines in 0..2 {
                let codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(quarters[2 * lines + half]));
                decoded[lines] = match offsets {
                    Some(_) => _mm512_fmadd_ps(codes, factors[lines], terms[lines]),
                    None => _mm512_mul_ps(codes, factors[lines]),
                };
            }
            // SAFETY: the same 512 bits; the target has the unit.
            unsafe {
                let pairs: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(decoded[1], decoded[0]));
                _mm512_storeu_si512(target.first.add((half * HALF + pair) * target.stride).cast(), pairs);
            }
        }
    }
}

/// Returns the four quarters of a vector.
#[inline(always)]
fn quarters_of(column: &__m512i) -> &[__m128i; 4] {
    // SAFETY: the same 64 bytes, and the alignment of the vector is the larger one.
    unsafe { &*std::ptr::from_ref(column).cast() }
}

/// Returns each number twice: those of the first eight lines, then of the others.
#[inline]
#[target_feature(enable = "avx512f")]
fn doubled(numbers: &[f32; 16]) -> [__m512; 2] {
    let low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    let high = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    // SAFETY: 16 numbers.
    let all = unsafe { _mm512_loadu_ps(numbers.as_ptr()) };
    [_mm512_permutexvar_ps(low, all), _mm512_permutexvar_ps(high, all)]
}

/// Transposes pairs of codes: quarter `q` of vector `p` holds pair `p + 8 (q % 2)` of lines `8 (q / 2)` to `8 (q / 2) + 7`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx2")]
fn transposed(codes: &[[i8; 32]; 16]) -> [__m512i; HALF] {
    let mut rows = [_mm512_setzero_si512(); HALF];
    for (line, row) in rows.iter_mut().enumerate() {
        // SAFETY: 32 codes each.
        let (low, high) = unsafe {
            (
                _mm256_loadu_si256(codes[line].as_ptr().cast()),
                _mm256_loadu_si256(codes[line + HALF].as_ptr().cast()),
            )
        };
        *row = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    }
    let mut words = [_mm512_setzero_si512(); HALF];
    for line in (0..HALF).step_by(2) {
        words[line] = _mm512_unpacklo_epi16(rows[line], rows[line + 1]);
        words[line + 1] = _mm512_unpackhi_epi16(rows[line], rows[line + 1]);
    }
    let mut quads = [_mm512_setzero_si512(); HALF];
    for line in (0..HALF).step_by(4) {
        for high in 0..2 {
            let (first, second) = (words[line + high], words[line + 2 + high]);
            quads[line + 2 * high] = _mm512_unpacklo_epi32(first, second);
            quads[line + 2 * high + 1] = _mm512_unpackhi_epi32(first, second);
        }
    }
    let mut columns = [_mm512_setzero_si512(); HALF];
    for pairs in 0..HALF / 2 {
        columns[2 * pairs] = _mm512_unpacklo_epi64(quads[pairs], quads[4 + pairs]);
        columns[2 * pairs + 1] = _mm512_unpackhi_epi64(quads[pairs], quads[4 + pairs]);
    }
    columns
}

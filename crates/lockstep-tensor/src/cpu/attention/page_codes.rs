//! Codes of cached keys and values: the encoding of a vector, the decoding of a block, and the application of scales.
//!
//! ```text
//! scale = largest |x| / limit            limit: 127 (int8), 448 (E4M3)
//! code  = round(x / scale), ties to even
//! q · k = scale_k (q · code_k)           a row of scores is multiplied by the scales of its keys
//! Σ p v = Σ (p · scale_v) code_v         a row of weights is multiplied by the scales of their values
//! ```
//!
//! Codes are exact in bf16 and f32, so decoding does not round, and a scale is applied once for each score.

use half::bf16;
use lockstep_plan::KvCacheType;

use super::{
    lanes::{BLOCK, Lanes},
    page_format::{PageFormat, PageLayout},
};
use crate::cpu::simd::{Float, ROUND, inlined};

/// Largest magnitude of an integer code.
const INT8_LIMIT: f32 = 127.0;
/// Largest magnitude of an E4M3 number.
const FP8_LIMIT: f32 = 448.0;
/// The code of [`FP8_LIMIT`].
const FP8_LARGEST: u32 = 0x7e;
/// Smallest normal E4M3 number.
const FP8_NORMAL: f32 = 0.015_625;
/// Fraction bits that f32 has and E4M3 has not.
const FP8_SHIFT: u32 = 20;
/// Difference of the exponent biases of f32 and E4M3.
const FP8_BIAS: u32 = 120;
/// The unit in the last place of this number is 2^-9, the smallest E4M3 number.
const FP8_ROUND: f32 = 16_384.0;

/// Encodes a vector. Returns its scale: 0 for a vector of zeros or subnormal numbers, NaN if a number is not finite.
///
/// # Panics
/// If the type has no scales.
pub(super) fn encode<V: Lanes>(stored: KvCacheType, vector: &[f32], codes: &mut [u8]) -> f32 {
    let limit = match stored {
        KvCacheType::Int8 => INT8_LIMIT,
        KvCacheType::Fp8 => FP8_LIMIT,
        KvCacheType::F32 | KvCacheType::Bf16 | KvCacheType::F16 => panic!("{stored} has no codes"),
    };
    V::run(inlined!(|| {
        // The magnitudes of numbers are in the order of their bits.
        let largest = vector.iter().fold(0, |most, x| (x.to_bits() & 0x7fff_ffff).max(most));
        let scale = f32::from_bits(largest) / limit;
        if !f32::from_bits(largest).is_finite() || scale < f32::MIN_POSITIVE {
            codes.fill(0);
            return if scale < f32::MIN_POSITIVE { 0.0 } else { f32::NAN };
        }
        match stored {
            KvCacheType::Int8 => {
                for (code, x) in codes.iter_mut().zip(vector) {
                    // The low bits of the sum are those of the rounded integer.
                    *code = (x / scale + ROUND).to_bits() as u8;
                }
            }
            _ => {
                for (code, x) in codes.iter_mut().zip(vector) {
                    *code = fp8_code(x / scale);
                }
            }
        }
        scale
    }))
}

/// Returns the code of the E4M3 number nearest to `x`, ties to even; the largest one for larger numbers.
#[inline(always)]
fn fp8_code(x: f32) -> u8 {
    let sign = x.to_bits() >> 24 & 0x80;
    let magnitude = x.to_bits() & 0x7fff_ffff;
    let half = (1 << (FP8_SHIFT - 1)) - 1 + (magnitude >> FP8_SHIFT & 1);
    let normal = ((magnitude + half) >> FP8_SHIFT).wrapping_sub(FP8_BIAS << 3).min(FP8_LARGEST);
    let subnormal = (f32::from_bits(magnitude) + FP8_ROUND).to_bits().wrapping_sub(FP8_ROUND.to_bits());
    let is_subnormal = f32::from_bits(magnitude) < FP8_NORMAL;
    (sign | if is_subnormal { subnormal } else { normal }) as u8
}

/// Returns the number of an E4M3 code other than NaN.
#[inline(always)]
fn fp8_number(code: u8) -> f32 {
    /// Moves the exponent; exact for subnormal numbers too.
    const FACTOR: f32 = f32::from_bits((127 + FP8_BIAS) << 23);
    let bits = u32::from(code);
    f32::from_bits((bits & 0x80) << 24 | (bits & 0x7f) << FP8_SHIFT) * FACTOR
}

/// Decodes the elements of a block, without their scales, into scratch: numbers of bf16 for the matrix instructions, else f32.
#[inline(never)]
pub(super) fn decode<'s, V: Lanes>(format: PageFormat, codes: &[u8], scratch: &'s mut [f32]) -> &'s [f32] {
    match format.layout {
        PageLayout::Panels(_) => {
            let numbers = &mut bytemuck::cast_slice_mut::<f32, bf16>(scratch)[..codes.len()];
            // The numbers are those of bf16, so nothing is rounded.
            let narrow = inlined!(|x: f32| bf16::from_bits((x.to_bits() >> 16) as u16));
            V::run(inlined!(|| match format.stored {
                KvCacheType::Int8 => map(codes, numbers, inlined!(|code| narrow(f32::from(code as i8)))),
                KvCacheType::Fp8 => map(codes, numbers, inlined!(|code| narrow(fp8_number(code)))),
                stored => unreachable!("bf16 numbers encoded as {stored}"),
            }));
        }
        PageLayout::Transposed { .. } | PageLayout::Rows { .. } => {
            V::run(inlined!(|| match format.stored {
                KvCacheType::Int8 => map(codes, scratch, inlined!(|code| f32::from(code as i8))),
                KvCacheType::Fp8 => map(codes, scratch, fp8_number),
                KvCacheType::Bf16 => map(bytemuck::cast_slice(codes), scratch, bf16::load),
                stored => unreachable!("f32 numbers encoded as {stored}"),
            }));
        }
    }
    scratch
}

/// Decodes vectors of `head_dim` elements, without their scales, into rows of `width` elements of a type that holds the numbers
/// exactly, padded with zeros.
#[inline(never)]
pub(super) fn decode_rows<V: Lanes, T: Float>(
    stored: KvCacheType,
    (codes, head_dim): (&[u8], usize),
    (rows, width): (&mut [T], usize),
) {
    let vectors = codes.chunks_exact(head_dim * stored.element_bytes());
    V::run(inlined!(|| {
        for (row, codes) in rows.chunks_exact_mut(width).zip(vectors) {
            let (numbers, padding) = row.split_at_mut(head_dim);
            match stored {
                KvCacheType::Int8 => map(codes, numbers, inlined!(|code| T::store(f32::from(code as i8)))),
                KvCacheType::Fp8 => map(codes, numbers, inlined!(|code| T::store(fp8_number(code)))),
                KvCacheType::Bf16 => {
                    map(bytemuck::cast_slice(codes), numbers, inlined!(|x: bf16| T::store(x.load())));
                }
                stored => unreachable!("numbers encoded as {stored}"),
            }
            padding.fill(T::store(0.0));
        }
    }));
}

#[inline(always)]
fn map<C: Copy, T>(codes: &[C], numbers: &mut [T], number: impl Fn(C) -> T) {
    for (place, &code) in numbers.iter_mut().zip(codes) {
        *place = number(code);
    }
}

/// Multiplies each row of a block, `[rows, 64]`, by the scales of its keys or values.
pub(super) fn scale_columns<V: Lanes>(scales: &[f32], rows: &mut [f32]) {
    V::run(inlined!(|| {
        let scales = &scales[..BLOCK];
        for row in rows.chunks_exact_mut(BLOCK) {
            for (score, scale) in row.iter_mut().zip(scales) {
                *score *= scale;
            }
        }
    }));
}

#[cfg(test)]
mod tests {
    use lockstep_plan::{block_format::fp8_value, random::Philox};

    use super::*;
    use crate::cpu::attention::lanes::Portable;

    fn number(stored: KvCacheType, code: u8) -> f32 {
        if stored == KvCacheType::Int8 { f32::from(code as i8) } else { fp8_number(code) }
    }

    #[test]
    fn e4m3_numbers_are_those_of_the_format_and_have_their_own_codes() {
        for code in (0..=0x7e).chain(0x80..=0xfe_u8) {
            let (found, expected) = (fp8_number(code), fp8_value(code));
            assert_eq!(found.to_bits(), expected.to_bits(), "code {code:#x}: {found} instead of {expected}");
            assert_eq!(fp8_code(found), code, "the code of {found}");
        }
    }

    #[test]
    fn e4m3_codes_are_the_nearest_ones_and_even_in_the_middle() {
        for code in 0..0x7e_u8 {
            let (below, above) = (fp8_number(code), fp8_number(code + 1));
            let middle = (below + above) / 2.0;
            let even = code + code % 2;
            for (x, expected) in [(middle.next_down(), code), (middle, even), (middle.next_up(), code + 1)] {
                assert_eq!([fp8_code(x), fp8_code(-x)], [expected, expected | 0x80], "the code of {x}");
            }
        }
        assert_eq!(fp8_code(1e30), 0x7e, "the code of a large number");
    }

    /// Errors: half a unit of an integer; half of 2^-3 of an E4M3 number, or half of the smallest one.
    #[test]
    fn vectors_come_back_within_the_rounding_of_their_type() {
        let philox = Philox::new(7);
        for stored in [KvCacheType::Int8, KvCacheType::Fp8] {
            for exponent in [-100, -3, 0, 90] {
                let draw = |index| ((philox.uniform(index) - 0.5) * 2_f64.powi(exponent)) as f32;
                let vector: Vec<f32> = (0..100).map(draw).collect();
                let mut codes = vec![0; vector.len()];
                let scale = encode::<Portable>(stored, &vector, &mut codes);
                for (&x, &code) in vector.iter().zip(&codes) {
                    let (y, step) = (number(stored, code) * scale, scale * 1.0001);
                    let bound = match stored {
                        KvCacheType::Int8 => step / 2.0,
                        _ => (x.abs() / 16.0).max(step * 2_f32.powi(-10)),
                    };
                    assert!((x - y).abs() <= bound * 1.0001, "{stored}: {y} for {x}, bound {bound}");
                }
            }
        }
    }

    #[test]
    fn halves_are_rounded_to_even_integers() {
        let vector = [127.0, 0.5, 1.5, -2.5, -126.5, 126.5];
        let mut codes = [0; 6];
        assert_eq!(encode::<Portable>(KvCacheType::Int8, &vector, &mut codes), 1.0);
        assert_eq!(codes.map(|code| code as i8), [127, 0, 2, -2, -126, 126]);
    }

    #[test]
    fn zeros_have_no_scale_and_numbers_that_are_not_finite_have_none_either() {
        for stored in [KvCacheType::Int8, KvCacheType::Fp8] {
            for (vector, expected) in [
                ([0.0, -0.0], 0.0),
                ([1e-44, -1e-45], 0.0),
                ([f32::INFINITY, 1.0], f32::NAN),
                ([1.0, f32::NAN], f32::NAN),
            ] {
                let mut codes = [9; 2];
                let scale = encode::<Portable>(stored, &vector, &mut codes);
                assert_eq!(
                    scale.to_bits(),
                    expected.to_bits(),
                    "{stored}: the scale of {vector:?} is {scale}"
                );
                assert_eq!(codes, [0; 2], "{stored}: the codes of {vector:?}");
            }
        }
    }
}

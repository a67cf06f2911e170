//! Rounding of f32 to bf16: to nearest, or stochastically, up or down at random with the exact expected value.
//!
//! The random bits are a function of (key, step, element), so the result does not depend on how the work is split.

use half::bf16;
use lockstep_plan::random::{Philox, mix};

use super::super::simd::{BLOCK, Float, Isa};
use crate::Rounding;

/// Number of random 16-bit halves in one block of the generator.
const HALVES: usize = 8;

/// The rounding of one operand of a step.
pub(super) enum Rounder {
    Nearest,
    Stochastic { philox: Philox, step: u64, first_element: u64 },
}

impl Rounder {
    /// Creates the rounding of operand `number`, which has random bits of its own.
    pub(super) fn new(rounding: Rounding, number: usize) -> Self {
        match rounding {
            Rounding::Nearest => Self::Nearest,
            Rounding::Stochastic { key, step, first_element } => {
                assert!(
                    first_element.is_multiple_of(HALVES as u64),
                    "random rounding begins at a multiple of {HALVES} elements, not at {first_element}"
                );
                Self::Stochastic { philox: Philox::new(mix(key ^ mix(number as u64))), step, first_element }
            }
        }
    }

    /// Rounds up to one block of elements, from element `start` of the operand on.
    #[inline(always)]
    pub(super) fn round(&self, isa: Isa, start: usize, values: &[f32], out: &mut [bf16]) {
        match self {
            Self::Nearest => bf16::store_all(isa, values, out),
            Self::Stochastic { philox, step, first_element } => {
                let bits = random_bits(*philox, *step, (first_element + start as u64) / HALVES as u64);
                for ((out, x), bits) in out.iter_mut().zip(values).zip(bits) {
                    *out = round_by(*x, bits);
                }
            }
        }
    }
}

/// Returns 16 random bits for each element of a block.
#[inline(always)]
fn random_bits(philox: Philox, step: u64, first: u64) -> [u32; BLOCK] {
    const COUNT: usize = BLOCK / HALVES;
    // One array for each word, so that the loop over blocks vectorizes.
    let mut columns = [[0; COUNT]; 4];
    for i in 0..COUNT {
        let counter = first + i as u64;
        let words = philox.block([counter as u32, (counter >> 32) as u32, step as u32, (step >> 32) as u32]);
        for (column, word) in columns.iter_mut().zip(words) {
            column[i] = word;
        }
    }
    let mut bits = [0; BLOCK];
    for (i, eight) in bits.as_chunks_mut::<HALVES>().0.iter_mut().enumerate() {
        for (half, bits) in eight.iter_mut().enumerate() {
            *bits = columns[half / 2][i] >> (16 * (half % 2)) & 0xffff;
        }
    }
    bits
}

/// Rounds `x` up (away from zero) if its lower half plus `bits`, 16 random ones, carries, else down. The expected
/// value of the result is `x`. Numbers that bf16 represents, infinities and NaN stay unchanged.
#[inline(always)]
fn round_by(x: f32, bits: u32) -> bf16 {
    let word = x.to_bits();
    let rounded = word.wrapping_add(bits) >> 16;
    // The lower half of a NaN or an infinity must not carry, and a NaN must keep a nonzero fraction.
    let special = word >> 16 | if word & 0x007f_ffff == 0 { 0 } else { 0x40 };
    let is_special = word & 0x7f80_0000 == 0x7f80_0000;
    bf16::from_bits((if is_special { special } else { rounded }) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stochastic(step: u64, first_element: u64) -> Rounder {
        Rounder::new(Rounding::Stochastic { key: 5, step, first_element }, 1)
    }

    #[test]
    fn the_mean_of_many_roundings_is_the_number_itself() {
        for x in [1.001_f32, -3.7415927, 1e-20, 0.3, -7e10] {
            let below = f64::from(f32::from_bits(x.to_bits() & 0xffff_0000));
            let above = f64::from(f32::from_bits((x.to_bits() & 0xffff_0000) + 0x1_0000));
            let steps = 400;
            let mut sum = 0.0;
            for step in 0..steps {
                let mut out = [bf16::ZERO; BLOCK];
                stochastic(step, 0).round(Isa::PLAIN, 0, &[x; BLOCK], &mut out);
                for rounded in out {
                    assert!([below, above].contains(&rounded.to_f64()), "{x} became {rounded}");
                    sum += rounded.to_f64();
                }
            }
            let count = (steps * BLOCK as u64) as f64;
            let (mean, p) = (sum / count, (f64::from(x) - below) / (above - below));
            // Four standard deviations of the mean.
            let tolerance = 4.0 * (above - below).abs() * (p * (1.0 - p) / count).sqrt();
            assert!((mean - f64::from(x)).abs() <= tolerance, "{x}: mean {mean}, tolerance {tolerance:e}");
        }
    }

    #[test]
    fn what_bf16_has_is_kept_and_special_numbers_stay_special() {
        let kept = [0.0, -0.0, 1.0, -2.5, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE];
        for (x, bits) in kept.into_iter().flat_map(|x| [0, 1, 0x7fff, 0xffff].map(|bits| (x, bits))) {
            assert_eq!(round_by(x, bits).to_f32().to_bits(), x.to_bits(), "{x} by {bits:x}");
        }
        for nan in [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
            assert!([0, 0xffff].iter().all(|bits| round_by(nan, *bits).is_nan()), "{:x}", nan.to_bits());
        }
    }

    #[test]
    fn the_bits_of_an_element_depend_on_its_place_the_step_and_the_operand_only() {
        let values: Vec<f32> = (0..BLOCK).map(|i| 1.0 + i as f32 * 1e-5).collect();
        let round = |rounder: &Rounder, start: usize, range: std::ops::Range<usize>| {
            let mut out = vec![bf16::ZERO; range.len()];
            rounder.round(Isa::PLAIN, start, &values[range], &mut out);
            out
        };
        let whole = round(&stochastic(3, 0), 0, 0..BLOCK);
        assert_eq!(round(&stochastic(3, 0), 16, 16..48), whole[16..48], "a part of an operand");
        assert_eq!(round(&stochastic(3, 16), 0, 16..48), whole[16..48], "a shard");
        assert_ne!(round(&stochastic(4, 0), 0, 0..BLOCK), whole, "another step");
        let other = Rounder::new(Rounding::Stochastic { key: 5, step: 3, first_element: 0 }, 2);
        assert_ne!(round(&other, 0, 0..BLOCK), whole, "another operand");
    }
}

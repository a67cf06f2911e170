//! A sum that does not depend on the order of its terms.
//!
//! The global gradient norm must not depend on how blocks are sharded. So the blocks' sums of squares are added in fixed point wide
//! enough for every finite `f64` (a Kulisch accumulator), where addition is associative, and rounded once at the end.

/// Bits to the left of limb 0 that the smallest subnormal (2^-1074) needs, rounded up to whole limbs.
const FRACTION_BITS: i32 = 34 * 32;
/// 32-bit limbs: 34 for the fraction, 32 for the integer part of `f64::MAX`, 2 for carries.
const LIMBS: usize = 68;

/// An exact sum of `f64` values.
///
/// Each limb holds 32 bits of the sum in an `i64`; the upper half takes the carries of up to 2^30
/// additions before [`ExactSum::value`] or the next normalization spreads them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExactSum {
    limbs: [i64; LIMBS],
    additions: u32,
    non_finite: bool,
}

impl Default for ExactSum {
    fn default() -> Self {
        Self { limbs: [0; LIMBS], additions: 0, non_finite: false }
    }
}

impl ExactSum {
    /// Number of words of [`ExactSum::to_words`].
    pub const WORDS: usize = LIMBS + 1;

    /// Adds one value. A NaN or an infinity makes the sum NaN for good.
    pub fn add(&mut self, value: f64) {
        if !value.is_finite() {
            self.non_finite = true;
            return;
        }
        let bits = value.to_bits();
        let exponent = ((bits >> 52) & 0x7ff) as i32;
        let fraction = bits & ((1 << 52) - 1);
        let (mantissa, exponent) =
            if exponent == 0 { (fraction, -1074) } else { (fraction | 1 << 52, exponent - 1075) };
        let position = exponent + FRACTION_BITS;
        let (limb, shift) = ((position / 32) as usize, position % 32);
        let wide = u128::from(mantissa) << shift;
        let sign = if value.is_sign_negative() { -1 } else { 1 };
        for part in 0..3 {
            self.limbs[limb + part] += sign * i64::from((wide >> (32 * part)) as u32);
        }
        self.additions += 1;
        if self.additions == 1 << 30 {
            self.normalize();
        }
    }

    /// Adds another exact sum; the result is the sum of all terms of both.
    pub fn merge(&mut self, other: &Self) {
        let mut other = other.clone();
        other.normalize();
        self.normalize();
        for (limb, value) in self.limbs.iter_mut().zip(other.limbs) {
            *limb += value;
        }
        self.additions = 2;
        self.non_finite |= other.non_finite;
    }

    /// Returns words that can be all-reduced: the word-wise sums of up to 2^30 exact sums are the words of their sum.
    pub fn to_words(&self) -> [i64; ExactSum::WORDS] {
        let mut sum = self.clone();
        sum.normalize();
        let mut words = [0; Self::WORDS];
        words[..LIMBS].copy_from_slice(&sum.limbs);
        words[LIMBS] = i64::from(sum.non_finite);
        words
    }

    /// Restores a sum from the words of [`ExactSum::to_words`], or from word-wise sums of them.
    pub fn from_words(words: &[i64; ExactSum::WORDS]) -> Self {
        let mut sum = Self { non_finite: words[LIMBS] != 0, ..Self::default() };
        sum.limbs.copy_from_slice(&words[..LIMBS]);
        sum.normalize();
        sum
    }

    /// Returns the sum, rounded once to within one unit in the last place.
    pub fn value(&self) -> f64 {
        if self.non_finite {
            return f64::NAN;
        }
        let mut sum = self.clone();
        sum.normalize();
        let sign = if sum.limbs[LIMBS - 1] < 0 { -1.0 } else { 1.0 };
        if sign < 0.0 {
            sum.limbs.iter_mut().for_each(|limb| *limb = -*limb);
            sum.normalize();
        }
        // After normalization every limb but the top one is in 0..2^32, so adding from the top down
        // loses nothing until the mantissa is full; three limbs already exceed 53 bits.
        let Some(top) = sum.limbs.iter().rposition(|&limb| limb != 0) else { return 0.0 };
        let mut value = 0.0;
        for limb in (top.saturating_sub(3)..=top).rev() {
            value += libm::ldexp(sum.limbs[limb] as f64, 32 * limb as i32 - FRACTION_BITS);
        }
        sign * value
    }

    /// Moves what exceeds 32 bits of each limb into the next; the top limb keeps the sign.
    fn normalize(&mut self) {
        let mut carry = 0;
        for limb in &mut self.limbs[..LIMBS - 1] {
            let sum = *limb + carry;
            *limb = sum & 0xffff_ffff;
            carry = sum >> 32;
        }
        self.limbs[LIMBS - 1] += carry;
        self.additions = 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(values: impl IntoIterator<Item = f64>) -> f64 {
        let mut sum = ExactSum::default();
        values.into_iter().for_each(|value| sum.add(value));
        sum.value()
    }

    #[test]
    fn sums_of_words_are_words_of_the_sum() {
        let terms = [1e300, -3.5, 1e-300, 7.25, f64::MAX / 4.0, -1e300, 2.0];
        let (mut whole, mut words) = (ExactSum::default(), [0; ExactSum::WORDS]);
        for term in terms {
            whole.add(term);
            let mut part = ExactSum::default();
            part.add(term);
            words.iter_mut().zip(part.to_words()).for_each(|(word, of_part)| *word += of_part);
        }
        assert_eq!(ExactSum::from_words(&words).value().to_bits(), whole.value().to_bits());
        let mut broken = ExactSum::default();
        broken.add(f64::NAN);
        words.iter_mut().zip(broken.to_words()).for_each(|(word, of_part)| *word += of_part);
        assert!(ExactSum::from_words(&words).value().is_nan());
    }

    #[test]
    fn cancellation_is_exact() {
        assert_eq!(sum([1e300, 1.0, -1e300]), 1.0);
        assert_eq!(sum([f64::MIN_POSITIVE / 4.0, 1.0, -1.0]), f64::MIN_POSITIVE / 4.0);
        assert_eq!(sum([f64::MAX, -f64::MAX]), 0.0);
        assert_eq!(sum([-1e-3, -2e-3]), -1e-3 - 2e-3);
    }

    #[test]
    fn a_non_finite_term_is_never_lost() {
        assert!(sum([1.0, f64::NAN]).is_nan());
        assert!(sum([f64::INFINITY, f64::NEG_INFINITY]).is_nan());
    }

    proptest! {
        #[test]
        fn order_and_grouping_change_no_bit(
            mut values in prop::collection::vec(-1e30f64..1e30, 1..50), cut in 0usize..50
        ) {
            let forward = sum(values.iter().copied());
            let (a, b) = values.split_at(cut.min(values.len()));
            let mut left = ExactSum::default();
            a.iter().for_each(|&v| left.add(v));
            let mut right = ExactSum::default();
            b.iter().for_each(|&v| right.add(v));
            right.merge(&left);
            prop_assert_eq!(right.value().to_bits(), forward.to_bits());
            values.reverse();
            prop_assert_eq!(sum(values.iter().copied()).to_bits(), forward.to_bits());
        }

        #[test]
        fn one_term_comes_back_unchanged(value in prop::num::f64::NORMAL | prop::num::f64::SUBNORMAL | prop::num::f64::NEGATIVE) {
            prop_assert_eq!(sum([value]).to_bits(), value.to_bits());
        }
    }
}

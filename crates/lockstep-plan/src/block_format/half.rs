//! IEEE 754 binary16, in which blocks store their scales.

/// The difference of the exponent biases of f32 and f16, as a factor.
const TWO_POW_112: f32 = f32::from_bits((127 + 112) << 23);

/// Returns the value of an f16, by arithmetic that vectorizes.
#[inline(always)]
pub fn widen(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // Moving the exponent by a multiplication is exact and handles subnormal numbers too.
    let finite = f32::from_bits((bits & 0x7fff) << 13) * TWO_POW_112;
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(finite.to_bits() | special | (bits & 0x8000) << 16)
}

/// Returns the bits of the f16 nearest to `x`, ties to even.
pub(super) fn narrow(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = x.abs();
    let bits = if x.is_nan() {
        0x7e00
    } else if magnitude < f32::from_bits((127 - 14) << 23) {
        // Below the normal range all numbers are multiples of 2^-24: the addition rounds to one.
        (magnitude + 0.5).to_bits() - 0.5_f32.to_bits()
    } else {
        let bits = magnitude.to_bits();
        let rounded = bits.wrapping_add(0xfff + (bits >> 13 & 1));
        (rounded.wrapping_sub(112 << 23) >> 13).min(0x7c00)
    };
    bits as u16 | sign
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_survives_a_round_trip_and_numbers_between_two_go_to_the_nearest() {
        for bits in (0..=0x7bff_u16).chain(0x8000..=0xfbff) {
            let x = widen(bits);
            assert_eq!(narrow(x), bits, "{x:e}");
            if bits & 0x7fff < 0x7bff {
                let halfway = (x + widen(bits + 1)) / 2.0;
                let even = if bits.is_multiple_of(2) { bits } else { bits + 1 };
                assert_eq!(narrow(halfway), even, "{halfway:e}");
            }
        }
        assert_eq!([65_519.9, 65_520.0, f32::INFINITY].map(narrow), [0x7bff, 0x7c00, 0x7c00]);
        assert!(widen(narrow(f32::NAN)).is_nan());
        assert_eq!(widen(0xfc00), f32::NEG_INFINITY);
    }
}

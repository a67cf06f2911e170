//! Rounding to codes. `f32::round` is a call unless the compiler may use SSE4.1, which programs for every x86-64 processor may not.

/// Adding and subtracting this rounds a number below 2^22 to an integer, ties to even: the sum has no bits for a fraction.
const NO_FRACTION: f32 = (3 << 22) as f32;

/// Returns the number's nearest integer in a range whose ends are integers below 2^22, ties away from zero: `x.round().clamp(least, most)`.
#[inline(always)]
pub(super) fn nearest(x: f32, least: f32, most: f32) -> f32 {
    let x = x.clamp(least, most);
    let even = x + NO_FRACTION - NO_FRACTION;
    // A tie that went towards zero: the difference is exact.
    let missing = x - even;
    let up = if missing == 0.5 && x > 0.0 { 1.0 } else { 0.0 };
    let down = if missing == -0.5 && x < 0.0 { 1.0 } else { 0.0 };
    even + up - down
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_number_is_rounded_as_the_standard_library_does(
            x in prop_oneof![any::<f32>(), -140.0_f32..140.0],
            (least, most) in prop_oneof![Just((0.0, 15.0)), Just((0.0, 63.0)), Just((-32.0, 31.0)), Just((-128.0, 127.0))],
        ) {
            let (found, expected) = (nearest(x, least, most), x.round().clamp(least, most));
            prop_assert!(found == expected || (found.is_nan() && x.is_nan()), "{}: {} and {}", x, found, expected);
        }
    }

    #[test]
    fn halves_and_their_neighbours_are_rounded_as_the_standard_library_does() {
        for half in -300..300 {
            let half = half as f32 / 2.0;
            for x in [half.next_down(), half, half.next_up()] {
                assert_eq!(nearest(x, -128.0, 127.0), x.round().clamp(-128.0, 127.0), "{x}");
            }
        }
        assert_eq!(nearest(f32::INFINITY, 0.0, 15.0), 15.0);
    }
}

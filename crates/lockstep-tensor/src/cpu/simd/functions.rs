//! Vectorizable functions of f32: exponential, sigmoid, normal distribution, sine and cosine.

use super::Isa;

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

/// Returns `(1 + tanh u) / 2` and its derivative by `x`, for `u = √(2/π) (x + 0.044715 x³)`: the sigmoid of `2u`.
#[inline(always)]
pub(crate) fn tanh_gate(isa: Isa, x: f32) -> (f32, f32) {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
    const CUBIC: f32 = 0.044_715;
    let s = sigmoid(isa, TWO_SQRT_2_OVER_PI * (x + CUBIC * x * x * x));
    // If s(1-s) is zero the other factor may be infinite, but only for |x| > 1e19.
    (s, s * (1.0 - s) * TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x))
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
}

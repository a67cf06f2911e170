//! What the elementwise kernels share: storage types as f32, vectorizable functions, and running a loop
//! under the instructions of a [`CpuLevel`].
//!
//! Kernels are plain loops over slices. [`CpuLevel::run`] calls a closure inside a function compiled for the
//! level's instructions; what is inlined into it is vectorized for them. So helpers are `#[inline(always)]`.

use half::{bf16, f16};

use super::CpuLevel;
use crate::Element;

/// A float storage type. Arithmetic is in f32.
pub(crate) trait Float: Element {
    /// The value as f32.
    fn load(self) -> f32;
    /// The nearest value to `x`, ties to even.
    fn store(x: f32) -> Self;
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
}

impl Float for f16 {
    #[inline(always)]
    fn load(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        Self::from_f32(x)
    }
}

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
            other => panic!("this kernel works on f32 and bf16, not on {other}"),
        }
    };
}
pub(crate) use with_float;

impl CpuLevel {
    /// Runs `work` compiled for this level.
    #[inline(always)]
    pub(crate) fn run<R>(self, work: impl FnOnce() -> R) -> R {
        #[cfg(target_arch = "x86_64")]
        {
            if self >= Self::Avx512 {
                // SAFETY: the level says that the CPU has these instructions.
                return unsafe { avx512(work) };
            }
            if self >= Self::Avx2 {
                // SAFETY: as above.
                return unsafe { avx2(work) };
            }
        }
        work()
    }
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

/// `e^x` to within 2 units in the last place; 0 below the smallest normal number, infinity above the range.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // e^x = 2^n e^r with |r| <= ln(2)/2; the degree-6 polynomial is the minimax one of Cephes' expf.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.4, 88.8);
    let n = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_2e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let e = p * r * r + r + 1.0;
    // 2^n in two halves: n reaches 128, where 2^n itself is not finite.
    let half = (n * 0.5).round_ties_even();
    let power = |n: f32| f32::from_bits(((n as i32 + 127) << 23) as u32);
    let scaled = e * power(half) * power(n - half);
    if x < -87.33 {
        0.0
    } else if x.is_nan() {
        x
    } else {
        scaled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_exact_value_over_its_whole_range() {
        let mut worst = 0.0_f64;
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.5e-7, "relative error {worst}");
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_rounds_to_nearest_even_and_keeps_nan() {
        for bits in (0..=u32::MAX).step_by(99_991) {
            let x = f32::from_bits(bits);
            let ours = <bf16 as Float>::store(x);
            let reference = bf16::from_f32(x);
            assert!(
                ours == reference || (x.is_nan() && ours.is_nan()),
                "{x} gives {ours}, expected {reference}"
            );
        }
    }
}

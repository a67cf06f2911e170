//! The registers of NEON: each operation of [`Lanes`] in its intrinsics. Every AArch64 CPU has them.

use std::arch::aarch64::*;

use lockstep_plan::random::Philox;

use super::lanes::{BLOCK, EXP2, Lanes};
use crate::{CpuLevel, cpu::simd::inlined};

/// Four lanes of NEON.
#[derive(Clone, Copy)]
pub(super) struct Neon(float32x4_t);

impl Lanes for Neon {
    const LEVEL: CpuLevel = CpuLevel::Neon;
    const LANES: usize = 4;
    const TILE_REGISTERS: usize = 4;

    #[inline(always)]
    fn run<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: every CPU has NEON, here and below.
        Self(unsafe { vdupq_n_f32(x) })
    }

    #[inline(always)]
    unsafe fn load(pointer: *const f32) -> Self {
        // SAFETY: the caller promises readable memory.
        Self(unsafe { vld1q_f32(pointer) })
    }

    #[inline(always)]
    unsafe fn store(self, pointer: *mut f32) {
        // SAFETY: the caller promises writable memory.
        unsafe { vst1q_f32(pointer, self.0) }
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { vfmaq_f32(c.0, self.0, b.0) })
    }

    #[inline(always)]
    fn add(self, b: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { vaddq_f32(self.0, b.0) })
    }

    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { vsubq_f32(self.0, b.0) })
    }

    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { vmulq_f32(self.0, b.0) })
    }

    #[inline(always)]
    fn div(self, b: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { vdivq_f32(self.0, b.0) })
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        // SAFETY: as above.
        unsafe {
            // Both limits keep NaN.
            let x = vminq_f32(vmaxq_f32(self.0, vdupq_n_f32(-127.0)), vdupq_n_f32(128.0));
            let n = vrndnq_f32(x);
            let r = vsubq_f32(x, n);
            let mut p = vdupq_n_f32(EXP2[5]);
            for coefficient in EXP2.into_iter().rev().skip(1).chain([1.0]) {
                p = vfmaq_f32(vdupq_n_f32(coefficient), p, r);
            }
            let exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            Self(vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))))
        }
    }

    #[inline(always)]
    fn max(self, b: Self) -> Self {
        // SAFETY: as above. The instruction for the maximum would return NaN if `b` is NaN.
        Self(unsafe { vbslq_f32(vcgtq_f32(b.0, self.0), b.0, self.0) })
    }

    #[inline(always)]
    fn select(self, bits: u64, other: Self) -> Self {
        const LANES: [u32; 4] = [1, 2, 4, 8];
        // SAFETY: as above.
        unsafe {
            let chosen = vtstq_u32(vdupq_n_u32(bits as u32), vld1q_u32(LANES.as_ptr()));
            Self(vbslq_f32(chosen, self.0, other.0))
        }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as above.
        unsafe { vaddvq_f32(self.0) }
    }

    #[inline(always)]
    fn maximum(self) -> f32 {
        // SAFETY: as above.
        unsafe { vmaxnmvq_f32(self.0) }
    }

    #[inline(always)]
    unsafe fn transpose(source: *const f32, row: usize, target: *mut f32) {
        // SAFETY: the caller promises the squares.
        unsafe {
            let [a, b, c, d]: [float32x4_t; 4] =
                std::array::from_fn(inlined!(|i| vld1q_f32(source.add(i * row))));
            let (ac_low, ac_high) = (vzip1q_f32(a, c), vzip2q_f32(a, c));
            let (bd_low, bd_high) = (vzip1q_f32(b, d), vzip2q_f32(b, d));
            vst1q_f32(target, vzip1q_f32(ac_low, bd_low));
            vst1q_f32(target.add(BLOCK), vzip2q_f32(ac_low, bd_low));
            vst1q_f32(target.add(2 * BLOCK), vzip1q_f32(ac_high, bd_high));
            vst1q_f32(target.add(3 * BLOCK), vzip2q_f32(ac_high, bd_high));
        }
    }

    #[inline(always)]
    unsafe fn keep_bits(key: [u32; 2], counter: [u32; 4], threshold: u32) -> u64 {
        const GROUPS: [u32; 4] = [0, 1, 2, 3];
        // SAFETY: every CPU has NEON.
        unsafe {
            let threshold = vdupq_n_u32(threshold);
            let mut bits = 0;
            for first in (0..16).step_by(4) {
                let mut c = counter.map(|word| vdupq_n_u32(word));
                c[2] = vaddq_u32(c[2], vaddq_u32(vld1q_u32(GROUPS.as_ptr()), vdupq_n_u32(first)));
                let mut k = key;
                for _ in 0..10 {
                    let (high0, low0) = multiply(c[0], Philox::MULTIPLIERS[0]);
                    let (high1, low1) = multiply(c[2], Philox::MULTIPLIERS[1]);
                    let c0 = veorq_u32(veorq_u32(high1, c[1]), vdupq_n_u32(k[0]));
                    let c2 = veorq_u32(veorq_u32(high0, c[3]), vdupq_n_u32(k[1]));
                    c = [c0, low1, c2, low0];
                    k = [k[0].wrapping_add(Philox::WEYL[0]), k[1].wrapping_add(Philox::WEYL[1])];
                }
                // Word `i` of group `g` is bit `4g + i`.
                let mut places = [1_u32, 1 << 4, 1 << 8, 1 << 12];
                let mut kept = vdupq_n_u32(0);
                for word in c {
                    let place = vld1q_u32(places.as_ptr());
                    kept = vorrq_u32(kept, vandq_u32(vcgeq_u32(word, threshold), place));
                    places = places.map(|place| place << 1);
                }
                bits |= u64::from(vaddvq_u32(kept)) << (4 * first);
            }
            bits
        }
    }
}

/// Returns the high and low halves of the 64-bit products of each lane and `factor`.
#[inline(always)]
fn multiply(a: uint32x4_t, factor: u32) -> (uint32x4_t, uint32x4_t) {
    // SAFETY: every CPU has NEON.
    unsafe {
        let low = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a), factor));
        let high = vreinterpretq_u32_u64(vmull_high_n_u32(a, factor));
        (vuzp2q_u32(low, high), vuzp1q_u32(low, high))
    }
}

//! Instruction sets: loops compiled for the instructions of a [`CpuLevel`], and prefetches.

use crate::cpu::CpuLevel;

/// A closure that is inlined into its caller, and so compiled for the instructions of the caller's level.
macro_rules! inlined {
    ($closure:expr) => {{
        #[inline(always)]
        $closure
    }};
}
pub(crate) use inlined;

impl CpuLevel {
    /// Runs `work` compiled for the best level of this CPU. `work` must be `#[inline(always)]`.
    #[inline(always)]
    pub fn run_at_best<R>(work: impl FnOnce() -> R) -> R {
        Self::detect().run(work)
    }

    /// Runs `work` compiled for this level.
    #[inline(always)]
    pub(crate) fn run<R>(self, work: impl FnOnce() -> R) -> R {
        self.run_with_isa(inlined!(|_| work()))
    }

    /// Runs `work` as [`CpuLevel::run`] does, and passes the level's [`Isa`], for code that multiplies and adds, or
    /// rounds. Levels that differ by bf16 instructions share its code: rounding calls a function that has them.
    #[inline(always)]
    pub(crate) fn run_with_isa<R>(self, work: impl FnOnce(Isa) -> R) -> R {
        // A call for each set of instructions, so that `fma` is a constant in each compiled loop.
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level says that the CPU has these instructions, here and below.
            Self::Avx2 => unsafe { avx2(inlined!(|| work(Isa { fma: true, bf16: false }))) },
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx512Bf16 | Self::AmxBf16 => {
                let bf16 = self != Self::Avx512;
                // SAFETY: as above.
                unsafe { avx512(inlined!(|| work(Isa { fma: true, bf16 }))) }
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon | Self::NeonBf16 => work(Isa { fma: true, bf16: self == Self::NeonBf16 }),
            _ => work(Isa::PLAIN),
        }
    }
}

/// Instructions beyond plain arithmetic of the CPU level that a loop is compiled for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Isa {
    /// True if fused multiply-add is one instruction; otherwise it would be a library call. A constant in inlined
    /// loops.
    pub(super) fma: bool,
    /// True if one instruction rounds a vector to bf16. Not a constant.
    pub(super) bf16: bool,
}

impl Isa {
    /// Plain arithmetic only.
    pub(crate) const PLAIN: Self = Self { fma: false, bf16: false };

    /// Computes `a · b + c`, rounded once with FMA, else twice.
    #[inline(always)]
    pub(crate) fn mul_add(self, a: f32, b: f32, c: f32) -> f32 {
        if self.fma { a.mul_add(b, c) } else { a * b + c }
    }

    /// Evaluates `c[0] + c[1] x + c[2] x² + ...`.
    #[inline(always)]
    pub(crate) fn polynomial<const N: usize>(self, x: f32, coefficients: [f32; N]) -> f32 {
        let mut sum = coefficients[N - 1];
        for i in (0..N - 1).rev() {
            sum = self.mul_add(sum, x, coefficients[i]);
        }
        sum
    }
}

/// Runs `work`, which must be `#[inline(always)]`, compiled for [`CpuLevel::Avx512`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
pub(crate) fn avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// Runs `work`, which must be `#[inline(always)]`, compiled for [`CpuLevel::Avx2`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(crate) fn avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// Size of a cache line, in bytes.
pub(crate) const CACHE_LINE_BYTES: usize = 64;

/// Declares a function that prefetches a cache line.
macro_rules! prefetching {
    ($(#[$doc:meta])* $name:ident, $hint:ident, $instruction:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub(crate) fn $name<T>(address: *const T) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch reads nothing and never faults; every x86-64 CPU has it.
            unsafe {
                use std::arch::x86_64::{$hint, _mm_prefetch};
                _mm_prefetch::<$hint>(address.cast());
            }
            #[cfg(target_arch = "aarch64")]
            // SAFETY: a prefetch reads nothing and never faults.
            unsafe {
                std::arch::asm!($instruction, in(reg) address, options(nostack, readonly, preserves_flags));
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            let _ = address;
        }
    };
}

prefetching!(
    /// Prefetches a cache line into the L2 cache. Any address is allowed.
    prefetch, _MM_HINT_T1, "prfm pldl2keep, [{0}]"
);
prefetching!(
    /// Prefetches a cache line into the L1 cache. Any address is allowed.
    prefetch_to_l1, _MM_HINT_T0, "prfm pldl1keep, [{0}]"
);

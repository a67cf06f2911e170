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

    /// Runs `work` compiled for this level. Without an [`Isa`] it has no use for bf16 instructions, so the levels that differ by them
    /// share its code.
    #[inline(always)]
    pub(crate) fn run<R>(self, work: impl FnOnce() -> R) -> R {
        let level = match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 | Self::AmxBf16 => Self::Avx512,
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => Self::Neon,
            level => level,
        };
        level.run_with_isa(inlined!(|_| work()))
    }

    /// Runs `work` as [`CpuLevel::run`] does, and passes the level's [`Isa`], for code that multiplies and adds, or
    /// rounds.
    #[inline(always)]
    pub(crate) fn run_with_isa<R>(self, work: impl FnOnce(Isa) -> R) -> R {
        // One call for each level, so that the fields of `Isa` are constants in each compiled loop.
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        macro_rules! run {
            ($compiled:ident, $isa:expr) => {
                // SAFETY: the level says that the CPU has these instructions.
                unsafe { $compiled(inlined!(|| work($isa))) }
            };
        }
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => run!(avx2, Isa { fma: true, bf16: false }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => run!(avx512, Isa { fma: true, bf16: false }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 | Self::AmxBf16 => run!(avx512_bf16, Isa { fma: true, bf16: true }),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => work(Isa { fma: true, bf16: false }),
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => run!(neon_bf16, Isa { fma: true, bf16: true }),
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
    /// True if one instruction rounds a vector to bf16.
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

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")]
fn avx512_bf16<R>(work: impl FnOnce() -> R) -> R {
    work()
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

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,bf16")]
fn neon_bf16<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// Size of a cache line, in bytes.
pub(crate) const CACHE_LINE_BYTES: usize = 64;

/// Prefetches a cache line into the L2 cache. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and never faults; every x86-64 CPU has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch reads nothing and never faults.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{0}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

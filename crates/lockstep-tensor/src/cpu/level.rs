//! CPU levels: the instruction sets of this CPU, detected once.

use std::{fmt, str::FromStr, sync::OnceLock};

/// The level that [`CpuLevel::limit`] has set.
static LIMIT: OnceLock<CpuLevel> = OnceLock::new();

/// Instruction sets that kernels choose from. Each level includes the earlier ones of its architecture: of x86-64 from AVX2
/// on, of AArch64 from NEON on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CpuLevel {
    /// The baseline of the architecture.
    Portable,
    /// AVX2 with its companions FMA, F16C and BMI2.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 with bf16 dot products.
    Avx512Bf16,
    /// AMX tiles with bf16 and int8 products, and permission from the kernel to use them.
    AmxBf16,
    /// NEON, the baseline of AArch64, with fused multiply-add.
    Neon,
    /// NEON with bf16 dot and matrix products (FEAT_BF16).
    NeonBf16,
}

impl CpuLevel {
    /// All levels of this architecture, lowest first.
    #[cfg(target_arch = "x86_64")]
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::AmxBf16];
    /// All levels of this architecture, lowest first.
    #[cfg(target_arch = "aarch64")]
    pub const ALL: [Self; 3] = [Self::Portable, Self::Neon, Self::NeonBf16];
    /// All levels of this architecture, lowest first.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub const ALL: [Self; 1] = [Self::Portable];

    /// Returns the best level of this CPU, or the limit of [`CpuLevel::limit`] if that is lower.
    pub fn detect() -> Self {
        LIMIT.get().map_or_else(Self::highest, |limit| Self::highest().min(*limit))
    }

    /// Returns the best level of this CPU, whatever limit is set.
    pub fn highest() -> Self {
        static LEVEL: OnceLock<CpuLevel> = OnceLock::new();
        *LEVEL.get_or_init(detect)
    }

    /// Returns the level, or the best one of this CPU if that is lower. Of another architecture's level only portable code
    /// is left.
    pub(crate) fn on_this_cpu(self) -> Self {
        if Self::ALL.contains(&self) { self.min(Self::detect()) } else { Self::Portable }
    }

    /// Limits all queues that this process creates from now on to `level`, so that CPUs of different levels compute
    /// the same bits. Only the first call has an effect; returns true if this is it.
    pub fn limit(level: Self) -> bool {
        let known = if Self::ALL.contains(&level) { level } else { Self::Portable };
        LIMIT.set(known).is_ok()
    }

    /// Returns true if a limit is set.
    pub fn is_limited() -> bool {
        LIMIT.get().is_some()
    }

    /// Returns the name of the level in settings.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::AmxBf16 => "amx_bf16",
            Self::Neon => "neon",
            Self::NeonBf16 => "neon_bf16",
        }
    }

    /// Returns the levels that this CPU can run, lowest first, for tests and benches.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|level| *level <= Self::detect())
    }
}

/// Parses [`CpuLevel::word`].
impl FromStr for CpuLevel {
    type Err = String;

    /// # Errors
    /// If `word` is not a level of this architecture. The error lists the allowed words.
    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|level| level.word() == word);
        found.ok_or_else(|| Self::ALL.map(Self::word).join(", "))
    }
}

impl fmt::Display for CpuLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Portable => "portable",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
            Self::Avx512Bf16 => "AVX-512 BF16",
            Self::AmxBf16 => "AMX BF16",
            Self::Neon => "NEON",
            Self::NeonBf16 => "NEON BF16",
        })
    }
}

/// Method of f32 GEMMs of stored matrices on a CPU with AMX. Sums by depth and convolutions are by FMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum F32Products {
    /// Three-way bf16 split on AMX tiles: each operand becomes three bf16 parts, and six products are summed in f32.
    /// The error is no larger than that of FMA.
    SplitBf16,
    /// Vector FMA, as on CPUs without AMX.
    #[default]
    Fma,
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> CpuLevel {
    CpuLevel::Portable
}

#[cfg(target_arch = "aarch64")]
fn detect() -> CpuLevel {
    if std::arch::is_aarch64_feature_detected!("bf16") { CpuLevel::NeonBf16 } else { CpuLevel::Neon }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> CpuLevel {
    // Everything that code of this level is compiled for. A virtual machine may hide any of these features.
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi2");
    if !avx2 {
        return CpuLevel::Portable;
    }
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if !avx512 {
        return CpuLevel::Avx2;
    }
    if !is_x86_feature_detected!("avx512bf16") {
        return CpuLevel::Avx512;
    }
    if amx::available() { CpuLevel::AmxBf16 } else { CpuLevel::Avx512Bf16 }
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::{asm, x86_64::__cpuid_count};

    /// CPUID leaf 7, EDX: AMX-BF16, AMX-TILE and AMX-INT8, which no CPU with tiles lacks.
    const AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    /// The tile data component of the extended state.
    const XFEATURE_XTILEDATA: i64 = 18;

    /// Returns true if the CPU has the tiles and the operating system lets this process use them.
    pub(super) fn available() -> bool {
        if __cpuid_count(0, 0).eax < 7 {
            return false;
        }
        let leaf = __cpuid_count(7, 0);
        leaf.edx & AMX == AMX && request_permission()
    }

    /// Asks Linux to enable tile state for this process and the threads it starts from now on.
    fn request_permission() -> bool {
        if !cfg!(target_os = "linux") {
            return false;
        }
        let result: i64;
        // SAFETY: `arch_prctl(ARCH_REQ_XCOMP_PERM, 18)` touches no memory of the process.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") SYS_ARCH_PRCTL => result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack)
            );
        }
        result == 0
    }
}

//! The level that is fastest on this CPU, which is not always the highest: bf16 dot products run at half the rate of FMA on
//! Intel's cores with AVX-512, and at twice the rate on AMD's. The bf16 products of AArch64 are treated alike.
//!
//! Cores whose rates this project has measured are in a table. Others are measured, and only a clear difference decides, so that
//! equal machines choose alike.

use std::{fmt, sync::OnceLock, time::Duration};

use super::{CpuLevel, Peak, measure_peak_within};

/// Duration of the measurement of each type.
const TIME: Duration = Duration::from_millis(50);
/// Dot products below this fraction of FMA's rate are not used. Between it and 1 they still save half of the packed bytes.
const CLEARLY_SLOWER: f64 = 0.75;

/// The reason of the preference that [`Preference::apply`] has set.
static APPLIED: OnceLock<Reason> = OnceLock::new();

/// Reason for the choice of a level.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// It is the highest level of the CPU, and no lower one is faster.
    Highest,
    /// The table of known cores names it.
    Known(&'static str),
    /// The measured rates of f32 and bf16 products decided.
    Measured(Peak),
    /// An earlier measurement on a CPU of the same model and microcode decided.
    Remembered,
    /// The checkpoint from which the run resumes names it.
    Checkpoint,
    /// A limit is set: see [`CpuLevel::limit`].
    Limit,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Highest => f.write_str("the highest level of this CPU"),
            Self::Known(core) => write!(f, "known of {core}"),
            Self::Measured(Peak { f32_gflops, bf16_gflops }) => {
                write!(
                    f,
                    "measured: {f32_gflops:.0} GFLOP/s by FMA, {bf16_gflops:.0} by bf16 dot products, one thread"
                )
            }
            Self::Remembered => f.write_str("measured by an earlier run"),
            Self::Checkpoint => f.write_str("that of the checkpoint"),
            Self::Limit => f.write_str("a limit is set"),
        }
    }
}

/// A level with the reason for its choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preference {
    /// Instructions that the kernels use.
    pub level: CpuLevel,
    /// The reason for its choice.
    pub reason: Reason,
}

impl Preference {
    /// Returns the level of this process: the highest one, unless a limit or a preference is set.
    pub fn current() -> Self {
        let unnamed = if CpuLevel::is_limited() { Reason::Limit } else { Reason::Highest };
        Self { level: CpuLevel::detect(), reason: APPLIED.get().copied().unwrap_or(unnamed) }
    }

    /// Returns the fastest level of this CPU. A CPU that is not known is measured in a tenth of a second, unless `remembered`
    /// returns the outcome of an earlier measurement.
    pub fn of_this_cpu(remembered: impl FnOnce() -> Option<CpuLevel>) -> Self {
        let highest = CpuLevel::detect();
        let measure = || measure_peak_within(highest, 1, TIME);
        Self::among(highest, core().and_then(known), remembered, measure)
    }

    /// Uses the level for all queues that this process creates from now on, unless a limit or a preference is set already.
    pub fn apply(self) {
        if CpuLevel::limit(self.level) {
            // Nothing else sets the reason: this was the first limit.
            let _ = APPLIED.set(self.reason);
        }
    }

    /// Chooses between the levels up to `highest` for a core, which is measured if it is not known.
    fn among(
        highest: CpuLevel,
        known: Option<(&'static str, CpuLevel)>,
        remembered: impl FnOnce() -> Option<CpuLevel>,
        measure: impl FnOnce() -> Peak,
    ) -> Self {
        let without_bf16 = match highest {
            CpuLevel::Avx512Bf16 => CpuLevel::Avx512,
            CpuLevel::NeonBf16 => CpuLevel::Neon,
            _ => return Self { level: highest, reason: Reason::Highest },
        };
        if let Some((core, level)) = known {
            return Self { level, reason: Reason::Known(core) };
        }
        if let Some(level) = remembered().filter(|level| [without_bf16, highest].contains(level)) {
            return Self { level, reason: Reason::Remembered };
        }
        let peak = measure();
        let is_slower = peak.bf16_gflops < CLEARLY_SLOWER * peak.f32_gflops;
        let level = if is_slower { without_bf16 } else { highest };
        Self { level, reason: Reason::Measured(peak) }
    }
}

/// Vendor, family and model of a CPU, as CPUID gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Core {
    vendor: [u8; 12],
    family: u32,
    model: u32,
}

/// Returns the name of a known core and its fastest level, of those up to [`CpuLevel::Avx512Bf16`]: a virtual machine may hide AMX. No
/// core of AArch64 has been measured.
fn known(core: Core) -> Option<(&'static str, CpuLevel)> {
    let Core { vendor, family, model } = core;
    match (&vendor, family, model) {
        (b"AuthenticAMD", 0x19, _) => Some(("Zen 4", CpuLevel::Avx512Bf16)),
        (b"AuthenticAMD", 0x1a, _) => Some(("Zen 5", CpuLevel::Avx512Bf16)),
        (b"GenuineIntel", 6, 0x8f) => Some(("Sapphire Rapids", CpuLevel::Avx512)),
        (b"GenuineIntel", 6, 0xcf) => Some(("Emerald Rapids", CpuLevel::Avx512)),
        _ => None,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn core() -> Option<Core> {
    None
}

/// Returns the core of this CPU. A virtual machine may hide it.
#[cfg(target_arch = "x86_64")]
fn core() -> Option<Core> {
    use std::arch::x86_64::__cpuid;

    let leaf = __cpuid(0);
    let mut vendor = [0; 12];
    for (bytes, register) in vendor.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
        bytes.copy_from_slice(&register.to_le_bytes());
    }
    (leaf.eax >= 1).then(|| Core::new(vendor, __cpuid(1).eax))
}

impl Core {
    /// Decodes register EAX of CPUID's leaf 1.
    #[cfg(any(test, target_arch = "x86_64"))]
    fn new(vendor: [u8; 12], signature: u32) -> Self {
        let bits = |from: u32, count: u32| signature >> from & ((1 << count) - 1);
        let (family, model) = (bits(8, 4), bits(4, 4));
        let has_extended_model = family == 6 || family == 15;
        Self {
            vendor,
            family: if family == 15 { family + bits(20, 8) } else { family },
            model: if has_extended_model { bits(16, 4) << 4 | model } else { model },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(f32_gflops: f64, bf16_gflops: f64) -> Peak {
        Peak { f32_gflops, bf16_gflops }
    }

    #[test]
    fn intels_cores_multiply_bf16_by_fma_and_amds_by_dot_products() {
        let level =
            |vendor: &[u8; 12], signature| known(Core::new(*vendor, signature)).map(|(_, level)| level);
        assert_eq!(level(b"GenuineIntel", 0x806f8), Some(CpuLevel::Avx512), "Sapphire Rapids");
        assert_eq!(level(b"GenuineIntel", 0xc06f2), Some(CpuLevel::Avx512), "Emerald Rapids");
        assert_eq!(level(b"GenuineIntel", 0x5065b), None, "Cooper Lake is measured");
        assert_eq!(level(b"AuthenticAMD", 0xa10f11), Some(CpuLevel::Avx512Bf16), "Zen 4");
        assert_eq!(level(b"AuthenticAMD", 0xb00f21), Some(CpuLevel::Avx512Bf16), "Zen 5");
        assert_eq!(level(b"CentaurHauls", 0x806f8), None);
    }

    #[test]
    fn only_a_clear_difference_between_measured_rates_decides() {
        let level = |f32_gflops, bf16_gflops| {
            Preference::among(CpuLevel::Avx512Bf16, None, || None, || rates(f32_gflops, bf16_gflops)).level
        };
        assert_eq!(level(432.0, 192.0), CpuLevel::Avx512);
        assert_eq!(level(100.0, 90.0), CpuLevel::Avx512Bf16);
        assert_eq!(level(554.0, 1026.0), CpuLevel::Avx512Bf16);
        let choose = |bf16_gflops| {
            Preference::among(CpuLevel::NeonBf16, None, || None, || rates(100.0, bf16_gflops)).level
        };
        assert_eq!([choose(50.0), choose(400.0)], [CpuLevel::Neon, CpuLevel::NeonBf16]);
    }

    #[test]
    fn nothing_is_measured_where_there_is_no_choice() {
        let measure = || -> Peak { unreachable!("there is no choice") };
        let has_choice = |level| matches!(level, CpuLevel::Avx512Bf16 | CpuLevel::NeonBf16);
        for level in CpuLevel::ALL.into_iter().filter(|level| !has_choice(*level)) {
            let chosen =
                Preference::among(level, Some(("Sapphire Rapids", CpuLevel::Avx512)), || None, measure);
            assert_eq!(chosen, Preference { level, reason: Reason::Highest });
        }
        let highest = CpuLevel::Avx512Bf16;
        let chosen = Preference::among(highest, Some(("Zen 4", highest)), || Some(CpuLevel::Avx512), measure);
        assert_eq!(chosen.reason, Reason::Known("Zen 4"));
        let chosen = Preference::among(highest, None, || Some(CpuLevel::Avx512), measure);
        assert_eq!(chosen, Preference { level: CpuLevel::Avx512, reason: Reason::Remembered });
    }
}

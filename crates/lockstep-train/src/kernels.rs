//! The level of a run's CPU kernels, on which its bits depend: that of its ranks, and that of the checkpoint it resumes from.

use lockstep_checkpoint::{Checkpoint, newest_of};
use lockstep_comm::CommError;
use lockstep_config::{Resume, RunConfig, human};
use lockstep_engine::{Engine, Ranks};
use lockstep_tensor::CpuLevel;
use lockstep_tensor::cpu::Preference;

/// Returns the level that the checkpoint names from which a run will resume. `None` for a new run, and if the manifest names no
/// level or one that this version does not know.
///
/// Only the manifest is read. If other files of the newest checkpoint turn out to be damaged, the run resumes from an older one
/// and reports a different level then.
pub fn level_of_checkpoint(config: &RunConfig, resume: &Resume) -> Option<CpuLevel> {
    let checkpoint = match resume {
        Resume::Never => None,
        Resume::From(path) => Checkpoint::open(path).ok(),
        Resume::Auto => newest_of(&config.checkpoint_dirs()),
    }?;
    checkpoint.manifest().kernels.as_deref()?.parse().ok()
}

/// Describes how the kernels of this process differ from those that computed `checkpoint`. `None` if they are of the same level,
/// or if the manifest names none.
pub(crate) fn changed_kernels(checkpoint: &Checkpoint, own: CpuLevel) -> Option<String> {
    difference(checkpoint.manifest().kernels.as_deref()?, own, CpuLevel::highest())
}

fn difference(recorded: &str, own: CpuLevel, highest: CpuLevel) -> Option<String> {
    let (changed, effect) =
        ("warning: the kernels are now", "bits differ from those of an uninterrupted run");
    let now = own.word();
    match recorded.parse::<CpuLevel>() {
        Ok(level) if level == own => None,
        Ok(level) if level > highest => Some(format!(
            "{changed} {now}, and were {recorded}, which this CPU does not have (its highest level is {}): {effect}",
            highest.word()
        )),
        Ok(_) => Some(format!(
            "{changed} {now}, and were {recorded}: {effect} (LOCKSTEP_CPU_LEVEL={recorded} keeps them)"
        )),
        Err(known) => Some(format!(
            "{changed} {now}, and were {recorded:?}, which this version does not know ({known}): {effect}"
        )),
    }
}

/// Level of the kernels of all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RunKernels {
    /// All ranks have this level.
    Equal(CpuLevel),
    /// Ranks have different levels: the level of each, in the order of the ranks.
    Unequal(Vec<CpuLevel>),
}

impl RunKernels {
    /// Gathers the levels of all ranks. Collective: every rank calls it.
    ///
    /// # Errors
    /// If a rank is lost or does not answer in time.
    pub(crate) fn of(ranks: &Ranks, engine: &Engine) -> Result<Self, CommError> {
        let own = engine.queue().level();
        let index = CpuLevel::ALL.iter().position(|level| *level == own).unwrap_or_default();
        let of_all = ranks.numbers([index as u64])?;
        let level = |[index]: [u64; 1]| CpuLevel::ALL.get(index as usize).copied().unwrap_or(own);
        Ok(Self::among(of_all.into_iter().map(level).collect()))
    }

    fn among(levels: Vec<CpuLevel>) -> Self {
        match levels[..] {
            [first, ..] if levels.iter().all(|level| *level == first) => Self::Equal(first),
            _ => Self::Unequal(levels),
        }
    }

    /// Returns the word of the level in a checkpoint's manifest; `None` if ranks have different levels.
    pub(crate) fn word(&self) -> Option<String> {
        match self {
            Self::Equal(level) => Some(level.word().to_owned()),
            Self::Unequal(_) => None,
        }
    }

    /// Describes different levels and their remedy; `None` if all ranks have the same level.
    pub(crate) fn warning(&self) -> Option<String> {
        let Self::Unequal(levels) = self else { return None };
        let lowest = levels.iter().min()?;
        let example = |level: &CpuLevel| {
            let rank = levels.iter().position(|other| other == level)?;
            Some(format!("rank {rank} has {}", level.word()))
        };
        let examples: Vec<String> =
            CpuLevel::ALL.iter().filter(|level| levels.contains(level)).filter_map(example).collect();
        Some(format!(
            "warning: ranks compute with unequal kernels: {}; LOCKSTEP_CPU_LEVEL={} gives all of them the same bits",
            examples.join(", "),
            lowest.word()
        ))
    }
}

/// Returns the ranks, threads and kernels of a run, with the reason for their level: `2 ranks × 1 thread, AVX2 instructions (the
/// checkpoint's)`.
pub(crate) fn machine_line(engine: &Engine, ranks: usize) -> String {
    let ranks = if ranks == 1 { String::new() } else { format!("{ranks} ranks × ") };
    let threads = human::plural(engine.queue().threads(), "thread");
    let Preference { reason, .. } = Preference::current();
    format!("{ranks}{threads}, {} instructions ({reason})", engine.queue().level())
}

#[cfg(test)]
mod tests {
    use super::*;

    const AVX2: CpuLevel = CpuLevel::Avx2;
    const AVX512: CpuLevel = CpuLevel::Avx512;

    #[test]
    fn a_difference_is_described_with_its_remedy_if_there_is_one() {
        assert_eq!(difference("avx2", AVX2, AVX512), None);
        let table = [
            ("avx2", AVX512, "now avx512, and were avx2: ", Some("LOCKSTEP_CPU_LEVEL=avx2 keeps")),
            (
                "amx_bf16",
                AVX2,
                "were amx_bf16, which this CPU does not have (its highest level is avx512)",
                None,
            ),
            ("avx1024", AVX512, "were \"avx1024\", which this version does not know (portable, avx2,", None),
            ("", AVX512, "were \"\"", None),
        ];
        for (recorded, own, part, remedy) in table {
            let text = difference(recorded, own, AVX512).unwrap();
            assert!(text.contains(part) && text.contains("bits differ"), "{recorded}: {text}");
            assert_eq!(text.contains("LOCKSTEP_CPU_LEVEL"), remedy.is_some(), "{text}");
            assert!(remedy.is_none_or(|remedy| text.contains(remedy)), "{text}");
        }
    }

    #[test]
    fn unequal_ranks_have_a_warning_and_no_word() {
        let equal = RunKernels::among(vec![AVX2; 3]);
        assert_eq!((equal.word().as_deref(), equal.warning()), (Some("avx2"), None));
        let unequal = RunKernels::among(vec![AVX512, AVX512, AVX2]);
        assert_eq!(unequal.word(), None);
        let text = unequal.warning().unwrap();
        for part in ["rank 2 has avx2, rank 0 has avx512", "LOCKSTEP_CPU_LEVEL=avx2 gives"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

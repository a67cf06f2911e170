//! Instruction sets of a process: the limit that `LOCKSTEP_CPU_LEVEL` sets, or that of the checkpoint from which a run resumes, or
//! the fastest on this CPU.
//!
//! Equal bits are guaranteed for one instruction level. A run on unequal CPUs, or one to be repeated on another machine, is
//! limited to the level that all of them have. Ranks inherit the variable from their launcher.

use std::collections::BTreeMap;
use std::env::{self, VarError};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use lockstep_config::user_cache_dir;
use lockstep_tensor::CpuLevel;
use lockstep_tensor::cpu::{Preference, Reason};
use lockstep_tensor::host::{microcode, processor_name};

use crate::exit::Failure;

/// Variable with which users set the level.
const VARIABLE: &str = "LOCKSTEP_CPU_LEVEL";
/// Variable with which a launcher hands the level of the resumed checkpoint to its ranks.
const HANDED_VARIABLE: &str = "LOCKSTEP_CHECKPOINT_LEVEL";

/// Limits all kernels of this process to the level of the environment variable, if it is set.
///
/// # Errors
/// If the value of the variable is not a level, or this CPU does not have the level.
pub(crate) fn limit() -> Result<(), Failure> {
    let word = match env::var(VARIABLE) {
        Ok(word) if !word.is_empty() => word,
        Ok(_) | Err(VarError::NotPresent) => return Ok(()),
        Err(VarError::NotUnicode(word)) => word.to_string_lossy().into_owned(),
    };
    let level: CpuLevel = word.parse().map_err(|levels| {
        Failure::configuration(format!("{VARIABLE}={word} is no level of instructions; allowed: {levels}"))
    })?;
    let best = CpuLevel::detect();
    if level > best {
        let message =
            format!("{VARIABLE}={word}: this CPU has no {level}; its best level is {}", best.word());
        return Err(Failure { message, code: crate::exit::MISSING });
    }
    CpuLevel::limit(level);
    Ok(())
}

/// Chooses the fastest level for all kernels of this process, unless a limit is set.
pub(crate) fn choose() {
    choose_for(None);
}

/// Chooses the level of all kernels of a run, unless a limit is set: `recorded`, that of the checkpoint from which it resumes, or
/// the fastest if there is none or this CPU does not have it.
pub(crate) fn choose_for(recorded: Option<CpuLevel>) {
    if CpuLevel::is_limited() {
        return;
    }
    let fastest = fastest();
    let recorded = recorded.filter(|level| *level != fastest.level && *level <= CpuLevel::highest());
    recorded.map_or(fastest, |level| Preference { level, reason: Reason::Checkpoint }).apply();
}

/// Returns the variable that hands `recorded` to ranks.
pub(crate) fn handed_to_ranks(recorded: Option<CpuLevel>) -> Option<(OsString, OsString)> {
    recorded.map(|level| (HANDED_VARIABLE.into(), level.word().into()))
}

/// Returns the level that the launcher of this rank has handed to it.
pub(crate) fn handed() -> Option<CpuLevel> {
    env::var(HANDED_VARIABLE).ok()?.parse().ok()
}

/// Returns the fastest level. What had to be measured is kept in the user's cache directory by model and microcode, so that the
/// ranks of a machine and later runs choose alike.
fn fastest() -> Preference {
    let preference = Preference::of_this_cpu(|| remembered().get(&cpu())?.parse().ok());
    if let Reason::Measured(_) = preference.reason {
        let mut known = remembered();
        known.insert(cpu(), preference.level.word().to_owned());
        // If the outcome cannot be kept, the next process measures again.
        let _ = fs::create_dir_all(user_cache_dir()).and_then(|()| {
            fs::write(remembered_file(), serde_json::to_vec_pretty(&known).unwrap_or_default())
        });
    }
    preference
}

/// Returns the words of the levels that were measured, by CPU.
fn remembered() -> BTreeMap<String, String> {
    fs::read(remembered_file()).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

fn remembered_file() -> PathBuf {
    user_cache_dir().join("instructions.json")
}

/// Returns the model and microcode of this CPU.
fn cpu() -> String {
    format!("{}, microcode {}", processor_name(), microcode())
}

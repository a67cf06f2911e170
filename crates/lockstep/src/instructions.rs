//! Instruction sets of a process: the fastest on this CPU, or the limit that `LOCKSTEP_CPU_LEVEL` sets.
//!
//! Equal bits are guaranteed for one instruction level. A run on unequal CPUs, or one to be repeated on another machine, is
//! limited to the level that all of them have. Ranks inherit the variable from their launcher.

use std::collections::BTreeMap;
use std::env::{self, VarError};
use std::fs;
use std::path::PathBuf;

use lockstep_config::user_cache_dir;
use lockstep_tensor::CpuLevel;
use lockstep_tensor::cpu::{Preference, Reason};
use lockstep_tensor::host::{microcode, processor_name};

use crate::exit::Failure;

/// Name of the variable.
const VARIABLE: &str = "LOCKSTEP_CPU_LEVEL";

/// Chooses the level of all kernels of this process: that of the environment variable, if it is set, or else the fastest.
///
/// # Errors
/// If the value of the variable is not a level, or this CPU does not have the level.
pub(crate) fn choose() -> Result<(), Failure> {
    let word = match env::var(VARIABLE) {
        Ok(word) if !word.is_empty() => word,
        Ok(_) | Err(VarError::NotPresent) => {
            fastest().apply();
            return Ok(());
        }
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

//! The limit on the CPU's instructions that `LOCKSTEP_CPU_LEVEL` sets.
//!
//! Bits are promised for one level of instructions. A run over unlike CPUs, or one that is to be repeated on another machine, is limited to
//! the level that all of them have; its launcher hands the variable to its ranks with the rest of the environment.

use std::env::{self, VarError};

use lockstep_tensor::CpuLevel;

use crate::exit::Failure;

/// The variable that sets the limit.
const VARIABLE: &str = "LOCKSTEP_CPU_LEVEL";

/// Limits kernels to the level that the environment names, if it names one.
///
/// # Errors
/// A word that is no level, or a level that this CPU does not have.
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

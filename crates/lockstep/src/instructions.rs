//! Limit on the CPU's instruction sets, set by `LOCKSTEP_CPU_LEVEL`.
//!
//! Equal bits are guaranteed for one instruction level. A run on unequal CPUs, or one to be repeated on another machine, is
//! limited to the level that all of them have. Ranks inherit the variable from their launcher.

use std::env::{self, VarError};

use lockstep_tensor::CpuLevel;

use crate::exit::Failure;

/// Name of the variable.
const VARIABLE: &str = "LOCKSTEP_CPU_LEVEL";

/// Limits kernels to the level in the environment variable, if it is set.
///
/// # Errors
/// If the value is not a level, or this CPU does not have the level.
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

//! System limits (`ulimit`) as errors instead of fatal signals.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Resource, getrlimit};
use signal_hook::consts::{SIGABRT, SIGXFSZ};
use signal_hook::flag;

use crate::LaunchError;

/// Turns exceeded system limits into errors. A write beyond the file size limit (`ulimit -f`) fails instead of raising a fatal
/// signal. With a limited address space (`ulimit -v`), a refused allocation exits with code 1 instead of an abort.
///
/// # Errors
/// If the system refuses the signal handlers.
pub fn outlive_limits() -> Result<(), LaunchError> {
    // The write reports the error.
    flag::register(SIGXFSZ, Arc::default()).map_err(LaunchError::Signals)?;
    if getrlimit(Resource::As).current.is_some() {
        let always = Arc::new(AtomicBool::new(true));
        flag::register_conditional_shutdown(SIGABRT, 1, always).map_err(LaunchError::Signals)?;
    }
    Ok(())
}

//! Limits of the system (`ulimit`) as errors instead of signals that kill.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Resource, getrlimit};
use signal_hook::consts::{SIGABRT, SIGXFSZ};
use signal_hook::flag;

use crate::error::Error;

/// Lets this process see limits of the system as errors. A file that may not grow (`ulimit -f`) fails the write and sends no signal that kills; where
/// the address space is limited (`ulimit -v`), the abort after a refused allocation is an exit with code 1.
///
/// # Errors
/// [`Error::Signals`] if the system refuses the handlers.
pub fn outlive_limits() -> Result<(), Error> {
    // The error of the write says it.
    flag::register(SIGXFSZ, Arc::default()).map_err(Error::Signals)?;
    if getrlimit(Resource::As).current.is_some() {
        let always = Arc::new(AtomicBool::new(true));
        flag::register_conditional_shutdown(SIGABRT, 1, always).map_err(Error::Signals)?;
    }
    Ok(())
}

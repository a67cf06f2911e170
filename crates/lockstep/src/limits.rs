//! Limits of the system on this process (`ulimit`, cgroups): exceeding one yields a message and exit code 1 instead of a panic or
//! a fatal signal.

use std::panic::{PanicHookInfo, set_hook, take_hook};

use lockstep_launch::limits::outlive_limits;

use crate::exit::{FAILED, Failure};
use crate::output;

/// Installs the handlers for refused resources.
pub(crate) fn prepare() -> Result<(), Failure> {
    outlive_limits()?;
    let usual = take_hook();
    set_hook(Box::new(move |panic| match refused_thread(panic) {
        // Threads started by the standard library or rayon have no caller that could handle the error.
        true => {
            output::error("cannot start a thread: Resource temporarily unavailable (os error 11)");
            std::process::exit(i32::from(FAILED));
        }
        false => usual(panic),
    }));
    Ok(())
}

/// Returns true if the panic is about a thread that could not be started.
fn refused_thread(panic: &PanicHookInfo<'_>) -> bool {
    panic.payload_as_str().is_some_and(|text| text.contains("thread") && text.contains("code: 11,"))
}

//! Ctrl-C and SIGTERM as a flag that the training loop reads between steps.
//!
//! The first signal asks: the loop finishes its step, saves and ends with code 75. A second Ctrl-C insists:
//! the process ends at once with 130, whatever it is doing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::Error;

/// The exit code of a process that a second Ctrl-C ends, as shells give it (128 + SIGINT).
pub const SECOND_INTERRUPT_EXIT_CODE: i32 = 130;

/// Whether somebody has asked the run to stop. Clones share the answer.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
}

impl Interrupt {
    /// Watches SIGINT and SIGTERM from now on until the process ends.
    ///
    /// # Errors
    /// [`Error::Signals`] if the system refuses the handlers.
    pub fn on_signals() -> Result<Self, Error> {
        let interrupt = Self::default();
        let requested = &interrupt.requested;
        // Handlers run in the order of registration: at the first Ctrl-C the flag is not set yet when the
        // first one looks at it.
        flag::register_conditional_shutdown(SIGINT, SECOND_INTERRUPT_EXIT_CODE, requested.clone())
            .and_then(|_| flag::register(SIGINT, requested.clone()))
            .and_then(|_| flag::register(SIGTERM, requested.clone()))
            .map_err(Error::Signals)?;
        Ok(interrupt)
    }

    /// Asks the run to stop, as a signal does.
    pub fn request(&self) {
        self.requested.store(true, Ordering::SeqCst);
    }

    /// Whether the run has been asked to stop.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }
}

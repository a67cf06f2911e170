//! The observer of a run's steps.
//!
//! `verify` reads the gradients between the backward and the optimizer step by it; fault tests change them, and stop saves.

use lockstep_checkpoint::CommitObserver;
use lockstep_engine::Engine;
use lockstep_observe::metrics::StepMetrics;

use crate::Error;

/// Observer of each step between its backward and its optimizer step. It may change the gradients: fault tests inject values that
/// must not reach the weights.
pub trait StepObserver {
    /// Called when the gradients of step `step` (from 1) are complete on all ranks.
    ///
    /// # Errors
    /// If the observer ends the run; the run ends with its error.
    fn gradients_ready(&mut self, step: u64, engine: &mut Engine) -> Result<(), Error>;

    /// Called before the first step of this process.
    fn begins(&mut self, _engine: &mut Engine) {}

    /// Returns the observer of this rank's part of the save after step `step`; it may stop the save.
    fn saving(&mut self, _step: u64) -> Box<dyn CommitObserver + Send + Sync> {
        Box::new(())
    }

    /// Called at the end of a step with its metrics.
    fn step_ended(&mut self, _row: &StepMetrics) {}
}

/// Ignores every event.
impl StepObserver for () {
    fn gradients_ready(&mut self, _: u64, _: &mut Engine) -> Result<(), Error> {
        Ok(())
    }
}

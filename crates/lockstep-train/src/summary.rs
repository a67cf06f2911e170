//! The result of a training run.

use std::path::PathBuf;

use lockstep_observe::metrics::{CountUnit, Means};

/// Result of a run that has ended without an error.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps completed in all, those before a resume included.
    pub step: u64,
    /// Steps completed by this process.
    pub steps_made: u64,
    /// Tokens, or samples of a model without tokens, that all ranks trained on while this process ran.
    pub amount: u64,
    /// Unit of `amount`.
    pub unit: CountUnit,
    /// Seconds from the first step to the last save.
    pub seconds: f64,
    /// Loss of the last step of this process that was not skipped, if there was one.
    pub loss: Option<f64>,
    /// Loss of the last evaluation, if there was one.
    pub eval_loss: Option<f64>,
    /// Mean of each metric of the last evaluation; empty if there was none.
    pub eval_metrics: Means,
    /// Loss of a uniform guess: the natural logarithm of the vocabulary size.
    pub uniform_loss: f64,
    /// True if the run was trained on chats.
    pub has_chats: bool,
    /// Path of the newest checkpoint; empty except on the first rank.
    pub checkpoint: PathBuf,
    /// Path of the HTML report, if the run keeps metrics.
    pub report: Option<PathBuf>,
    /// True if the run was asked to stop before the last step.
    pub interrupted: bool,
    /// Skipped steps of the whole run, because of values that are not finite or loss spikes.
    pub skipped: u64,
    /// Number of consecutive skipped steps up to and including the last one.
    pub skipped_last: u64,
    /// Number of times that the whole run restored an earlier copy of its state.
    pub rollbacks: u64,
}

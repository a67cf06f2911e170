//! Errors of the engine.

use lockstep_comm::CommError;
use lockstep_plan::gathering::LiveLimitTooLow;
use lockstep_tensor::{DiskError, TensorError};

use crate::StateKind;

/// Reasons why the engine cannot be built or cannot go on with a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Memory could not be allocated, or threads could not be started.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A collective failed: another rank is lost, aborted, or did not answer in time.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The disk of offloaded model state or activations failed.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A snapshot in memory was requested of model state that is offloaded to disk.
    #[error("there is no copy in memory of model state that is on disk")]
    OnDisk,
    /// The step was abandoned before its update ([`Engine::abandon_if`](crate::Engine::abandon_if)).
    #[error("the step was abandoned")]
    Abandoned,
    /// The weights of a rank differ from those of other ranks.
    #[error(
        "the weights of rank {rank} differ from those of rank {reference} after step {step}: a fault of its memory or its \
         arithmetic, or another build; go on from the last checkpoint without the machine it ran on"
    )]
    WeightsDiffer {
        /// Number of completed steps.
        step: u64,
        /// The rank whose weights differ.
        rank: usize,
        /// A rank whose weights most ranks have.
        reference: usize,
    },
    /// The limit on unsharded parameters is lower than what one unit reads.
    #[error(transparent)]
    LiveLimitTooLow(#[from] LiveLimitTooLow),
    /// A micro-batch lacks an input of the model, or has another one.
    #[error("input {name} of the model: {found}; expected: {expected}")]
    Input {
        /// Name of the input.
        name: String,
        /// Description of what the micro-batch has.
        found: String,
        /// Description of what the model declares, for a micro-batch.
        expected: String,
    },
    /// A label is no class of the model.
    #[error(
        "the label {label}{} is no class; allowed: 0 to {}, or -100 for none",
        sample.map_or(String::new(), |sample| format!(" of sample {sample}")), classes - 1
    )]
    Label {
        /// Global number of the sample.
        sample: Option<u64>,
        /// The label that was given.
        label: i32,
        /// Number of classes.
        classes: usize,
    },
    /// A tensor that is loaded does not have its parameter's size.
    #[error("{} of {name}: {found} elements, the model has {expected}", kind.name())]
    WrongSize {
        /// Name of the parameter.
        name: String,
        /// Kind of the tensor: parameter, optimizer state or gradient residual.
        kind: StateKind,
        /// Number of elements in the loaded tensor.
        found: usize,
        /// Number of elements of the parameter.
        expected: usize,
    },
}

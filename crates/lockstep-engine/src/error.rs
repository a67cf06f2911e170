//! What can go wrong in the engine.

use lockstep_comm::CommError;
use lockstep_plan::gathering::LiveLimitTooLow;
use lockstep_tensor::{DiskError, TensorError};

use crate::StateKind;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Memory or threads.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The disk that model state or activations are on.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A copy in memory is asked for of what is on disk because memory has no room for it.
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
    /// Fewer parameters may be whole at once than a unit reads.
    #[error(transparent)]
    LiveLimitTooLow(#[from] LiveLimitTooLow),
    /// A tensor that is loaded does not have its parameter's size.
    #[error("{} of {name}: {found} elements, the model has {expected}", kind.name())]
    WrongSize {
        /// Name of the parameter.
        name: String,
        /// Which of its tensors.
        kind: StateKind,
        /// Elements given.
        found: usize,
        /// Elements of the parameter.
        expected: usize,
    },
}

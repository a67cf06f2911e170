//! The engine executes training steps: it owns the weights, gradients and optimizer state in flat buffers,
//! replays the model's programs on them, and updates them.
//!
//! A step is a fixed sequence of calls, each a method of [`Engine`]:
//!
//! ```text
//! forward_backward (all micro-batches) -> finish_gradients -> update
//! ```
//!
//! The loss is a (sum, count) pair and the only division is the seed of the backward, `1 / G` with `G` the
//! valid tokens of the whole global batch, which the caller counts beforehand.
#![forbid(unsafe_code)]

mod boundaries;
mod builder;
mod engine;
mod engine_state;
mod error;
mod evaluation;
#[cfg(test)]
mod faulty_disk;
mod gradients;
mod groups;
mod host_batch;
mod load;
mod model_state;
mod offloaded_frames;
mod offloaded_gradients;
mod optimizer;
mod parameter_pool;
mod partitioned_activations;
mod passes;
mod pipeline;
mod quantized_gradients;
mod ranks;
mod reducer;
mod rehearsal;
mod runner;
mod running;
mod shards;
mod slots;
mod snapshot;
mod sparse_embedding_gradient;
mod staging;
mod state;
mod state_store;
mod storage;
mod training_passes;
mod transfers;
mod unit_parameters;
mod update;
mod weights;
mod windowed_store;

pub use builder::{EngineBuilder, EngineOptions};
pub use engine::Engine;
pub use error::EngineError;
pub use gradients::Gradients;
pub use groups::Groups;
pub use host_batch::HostBatch;
pub use load::ExpertLoad;
pub use lockstep_plan::StateKind;
pub use optimizer::{Granularity, MuonScale, Optimizer, Update};
pub use passes::{PassTime, StepTimes};
pub use ranks::{Ranks, TOTALS_WORDS, TimeLimit, TimedOperation, words_of};
pub use rehearsal::Rehearsal;
pub use runner::Runner;
pub use snapshot::Snapshot;
pub use state::{Contents, OnDisk, StateTensor};
pub use state_store::{OwnedElements, StateStore};
pub use storage::{Offload, RoundingMode, Storage, WeightStorage};
pub use transfers::Traffic;
pub use unit_parameters::UnitParameters;
pub use weights::{HeldWeights, WeightSource, Weights};

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

mod arriving;
mod borders;
mod builder;
mod engine;
mod error;
mod flat;
mod gathered;
mod gradients;
mod groups;
mod held;
mod load;
mod looked_up;
mod optimizer;
mod passes;
mod pipeline;
mod quantized;
mod ranks;
mod reducer;
mod rehearsal;
mod runner;
mod secondary;
mod shards;
mod slices;
mod slots;
mod snapshot;
mod spilled;
mod spool;
mod state;
mod storage;
mod stores;
#[cfg(test)]
mod troubled;
mod update;
mod weights;
mod windows;

pub use builder::{EngineBuilder, EngineOptions};
pub use engine::Engine;
pub use error::EngineError;
pub use flat::{FlatStore, Part, UnitParameters, Weights};
pub use gradients::Gradients;
pub use groups::Groups;
pub use load::ExpertLoad;
pub use lockstep_plan::StateKind;
pub use optimizer::{Granularity, MuonScale, Optimizer};
pub use passes::{PassTime, StepTimes};
pub use ranks::{Called, Patience, Ranks};
pub use reducer::Traffic;
pub use rehearsal::Rehearsal;
pub use runner::{HostBatch, Runner};
pub use snapshot::Snapshot;
pub use state::{Contents, OnDisk, StateTensor};
pub use storage::{Offload, RoundingMode, Storage, WeightStorage};
pub use update::Update;

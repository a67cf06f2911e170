//! The vocabulary every other crate of Lockstep speaks, and the thinking that needs no machine.
//!
//! Nothing here does I/O, starts a thread or reads a clock: a plan is a value, and so is everything it
//! is made of. That is what lets the same types drive a run, a simulation and a picture of it.
//!
//! - [`DType`] and [`MemoryCategory`]: what an element is, and under which heading its bytes are booked.
//! - [`StateLayout`]: the list of a rank's model state, which the engine allocates and [`predicted`] sums before anything is allocated.
//! - [`ParameterRecord`]: everything that is known of one parameter; sharding, optimizers, clipping,
//!   checkpoints and fine-tuning read it and nothing else.
//! - [`Share`]: what a rank holds of a parameter where the ranks of an axis split it.
//! - [`ZeroStage`]: what of a model's state ranks share out that would else each hold a copy.
//! - [`QuantizedType`]: small integers in which weights and gradients go between ranks.
//! - [`gathering`]: when weights that ranks share out are whole on a rank, and where they lie.
//! - [`ContextPlace`]: which tokens of each sequence a rank holds where ranks share sequences.
//! - [`Mesh`]: which rank is where, and the groups of ranks along any axes; for experts, the same ranks once more.
//! - [`schedule`]: what each rank of a pipeline does in a step, as lists that are complete and cannot deadlock.
//! - [`split_units`]: how many layers each stage of a pipeline gets, by what they cost.
//! - [`Plan`]: how a training step is split, as a JSON file that is checked against the model, the batch and the world.
//! - [`StateBytes`]: what model state takes under ZeRO, by the published formulas.
//! - [`work`]: what a rank has to do for a micro-batch, as recording finds it.
//! - [`random`]: the counter-based generator behind initial weights, dropout and shuffling, so that no
//!   number depends on how many ranks share the work.
//! - [`exact`]: a sum of floating-point numbers that does not depend on their order.
#![forbid(unsafe_code)]

mod context;
mod dtype;
pub mod exact;
pub mod gathering;
mod memory;
mod mesh;
mod nearest;
mod parameter;
mod pattern;
mod plan;
mod quantized;
pub mod random;
mod recompute;
mod residence;
pub mod schedule;
mod share;
mod split;
mod state_bytes;
mod state_kind;
pub mod work;
mod wrap;
mod zero;

pub use context::ContextPlace;
pub use dtype::DType;
pub use memory::{
    CACHE_LINE_BYTES, Extent, FRAME_PLACES, HeldActivations, HeldOfStage, LookedUpSizes, MemoryBytes,
    MemoryCategory, MemoryItem, MemoryPrediction, ModelProfile, Passage, RecordPassage, RingSizes,
    SharedTable, StageMemory, StateFacts, StateItem, StateLayout, StatePlan, StoreKind, StoreLayout, Stretch,
    UnitProfile, booked_bytes, predicted,
};
pub use memory::{
    DISK_ALIGNMENT_BYTES, DiskPlan, OffloadBytes, OffloadTraffic, RankTraffic, WINDOW_SLOTS,
    aligned_buffer_bytes, offload_traffic_by_kind, offloaded_bytes, window_bytes, window_memory_bytes,
};
pub use mesh::{Axis, Degrees, ExpertAxis, Mesh, MeshError, MeshProblem, View};
pub use nearest::Choices;
pub use parameter::{Initializer, ParameterId, ParameterRecord};
pub use pattern::describes;
pub use plan::{
    CheckedPlan, ContextMethod, DEFAULT_BUCKET_MB, Facts, MAX_MICRO_BATCH_TOKENS, PLAN_VERSION, PassOrder,
    PipelineSchedule, Places, Plan, PlanError, PlanPrediction, PlanProblem, PlanProblems, PlannedStep,
    RankList, RankPlan, RanksMemory, StepFacts, StepLayout, TensorDimensions,
};
pub use quantized::{Feedback, QUANTIZATION_BLOCK, Quantization, QuantizedType};
pub use recompute::{LayerRule, Recompute, RecomputeError, RecomputeRules};
pub use residence::{Offload, Residence, Residences, WINDOW_ELEMENTS};
pub use share::{Among, ExpertPlace, GridPlace, Shard, Share, Summing, TensorPlace};
pub use split::{SplitError, split_quickly, split_units};
pub use state_bytes::{StateBytes, StateOnRank};
pub use state_kind::StateKind;
pub use wrap::{BufferUnit, Wrap, WrapError};
pub use zero::{ShardPlace, Sharding, ZeroStage};

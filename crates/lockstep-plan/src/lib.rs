//! The vocabulary that all other crates of Lockstep use: plans and the values that they are made of.
//!
//! Nothing in this crate does I/O, starts a thread or reads a clock. A plan is a plain value, so the same types drive a run, a simulation
//! and a picture of it.
//!
//! - [`DType`] and [`MemoryCategory`]: element types, and the categories under which memory is booked.
//! - [`StateLayout`]: the list of a rank's model state. The engine allocates it, and [`predicted`] sums it before anything is allocated.
//! - [`ParameterRecord`]: everything known of a parameter; the only input of sharding, optimizers, clipping, checkpoints and fine-tuning.
//! - [`Share`]: a rank's shard of a parameter under tensor and expert parallelism.
//! - [`ZeroStage`]: the model state that is sharded over data-parallel ranks.
//! - [`QuantizedType`]: small integers for quantized collectives of weights and gradients.
//! - [`KvCacheType`], [`CachePlace`]: storage of cached keys and values.
//! - [`BlockFormat`]: block-quantized weights of GGUF files, encoded and decoded.
//! - [`gathering`]: schedule of parameter all-gathers (ZeRO stage 3), and the memory for unsharded parameters.
//! - [`ContextPlace`]: split of each sequence over context-parallel ranks.
//! - [`Mesh`]: coordinates of ranks, and the groups along any axes, with a second view for experts.
//! - [`schedule`]: pipeline schedules as complete action lists that cannot deadlock.
//! - [`split_units`]: split of a model's units into pipeline stages of equal cost.
//! - [`Plan`]: parallelization of a training step, as a JSON file that is checked against the model, the batch and the world size.
//! - [`StateBytes`]: bytes of model state under ZeRO, by the published formulas.
//! - [`work`]: compute and communication of a micro-batch on a rank, from its recording.
//! - [`random`]: counter-based generator for initial weights, dropout and shuffling; no number depends on the number of ranks.
//! - [`exact`]: a sum of floating-point numbers that does not depend on their order.
#![forbid(unsafe_code)]

pub mod block_format;
mod context;
mod dtype;
pub mod exact;
pub mod gathering;
mod kv_cache;
mod memory;
mod mesh;
mod named_enum;
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

pub use block_format::BlockFormat;
pub use context::{ContextMethod, ContextPlace};
pub use dtype::DType;
pub use kv_cache::{CachePlace, KvCacheType};
pub use memory::{
    ActivationUse, CACHE_LINE_BYTES, Extent, FRAME_PLACES, FlatParameter, GradientStaging, MemoryBytes,
    MemoryCategory, MemoryItem, MemoryPrediction, ModelProfile, QuantizedGradientStaging, RingSizes,
    SharedTable, SparseGradientSizes, StageActivationUse, StageMemory, StateFacts, StateItem, StateLayout,
    StatePlan, StoreKind, StoreLayout, UnitProfile, booked_bytes, predicted,
};
pub use memory::{
    DISK_ALIGNMENT_BYTES, OffloadBytes, OffloadPlan, OffloadTraffic, RankTraffic, WINDOW_SLOTS,
    aligned_buffer_bytes, offload_traffic_by_kind, offloaded_bytes, window_bytes, window_memory_bytes,
};
pub use mesh::{Axis, Degrees, ExpertAxis, Mesh, MeshError, MeshProblem, View};
pub use nearest::Choices;
pub use parameter::{BufferUnit, Initializer, ParameterId, ParameterRecord};
pub use pattern::describes;
pub use plan::{
    CheckedPlan, DEFAULT_BUCKET_MB, Facts, MAX_MICRO_BATCH_TOKENS, PLAN_VERSION, PassOrder, PipelineSchedule,
    Places, Plan, PlanError, PlanPrediction, PlanProblem, PlanProblems, PlannedStep, RankList, RankPlan,
    RanksMemory, StepFacts, StepLayout,
};
pub use quantized::{Feedback, QUANTIZATION_BLOCK, Quantization, QuantizedType};
pub use recompute::{LayerRule, Recompute, RecomputeError, RecomputeRules};
pub use residence::{Offload, Residence, Residences, WINDOW_ELEMENTS};
pub use share::{Among, ExpertPlace, GridPlace, ReductionGroup, Shard, Share, TensorDimensions, TensorPlace};
pub use split::{SplitError, split_minmax, split_units};
pub use state_bytes::{StateBytes, StateOnRank};
pub use state_kind::StateKind;
pub use wrap::{Wrap, WrapError};
pub use zero::{ShardPlace, Sharding, ZeroStage};

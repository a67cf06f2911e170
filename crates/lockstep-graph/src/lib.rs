//! The tape: model code is recorded once per shape into a [`Program`], which is then replayed.
//!
//! A model is written forward-only against a [`Recorder`], whose [`Value`]s have a shape and no storage. Recording
//! yields a [`Program`]: a static list of kernel calls for the forward, the backward, and the backward split in two
//! (input gradients first, weight gradients later). Every byte is placed before anything runs. Programs hold
//! parameter *indices*, never weights; the caller of a replay supplies the weights.
//!
//! ```text
//! model code -> Recorder -> operations -> plan (what is saved, recomputed, where it lives) -> Program
//! Program + parameters + micro-batch + frame + workspace --replay--> outputs, gradients
//! ```
//!
//! - A *frame* holds what one block saves for one micro-batch: its output and the activations its backward needs.
//! - The *workspace* holds values that live only inside one call; all blocks share one.
//! - A *deferred* buffer holds what a split backward saves for the weight gradients.
//! - Under tensor parallelism each rank records its shard of a block ([`Recorder::split`]). Its program runs
//!   collectives over its [`Peers`], which can overlap with matrix products ([`CommunicationBuffer`]).
//! - Under context parallelism ([`Recorder::share_sequences`]) attention reads the other ranks' tokens over its [`ContextPeers`].
//! - [`Program::work`] lists the work and memory of a rank for the cost model.
//! - An operation implements [`Op`]: facts, kernel calls and work in one file of `ops`, or in another crate.
//! - A [`Timeline`] records the time and cost of each operation in traced steps.
#![forbid(unsafe_code)]

mod allocation;
mod backward;
mod block;
mod buffers;
mod column_scale;
mod compile;
mod context;
mod cost;
mod execute;
mod facts;
#[cfg(feature = "faults")]
pub mod faults;
mod head;
mod images;
#[cfg(feature = "faults")]
mod injection;
mod inputs;
mod instruction;
mod low_rank;
mod mixture;
mod op;
mod ops;
mod overlap;
mod peers;
mod placement;
mod planner;
mod program;
mod recorder;
mod replay;
mod reports;
mod shapes;
mod sharded_cache;
mod shared_input;
mod split;
mod storage;
mod timeline;
mod totals;
mod training;
mod transit;
mod work;
mod work_context;

pub use block::{
    BatchInput, Bias, BlockShape, Constant, DropoutSite, HeadOutput, InputDeclaration, InputLimit,
    LoraAdapters, MAX_DROPOUT_SITES, Mode, ParameterDeclaration, ParameterIndex, RunningUpdate, Statistics,
    Value,
};
pub use buffers::{CommunicationBuffer, Ring};
pub use column_scale::ColumnScale;
pub use cost::BlockProfile;
pub use facts::{ExpertRows, Facts};
pub use lockstep_plan::work::Pass;
pub use lockstep_plan::{Recompute, RecomputeRules};
pub use mixture::Mixture;
pub use op::Op;
pub use ops::{
    attention::{AttentionOptions, AttentionShape},
    batch_norm::{BatchNormOptions, Synchronization},
    convolution::Convolution,
    linear::Linear,
    rope::{RotaryEmbedding, RotaryPairs},
    route::Routing,
    sequence_token::SequenceToken,
};
pub use peers::{ContextPeers, GridGroups, Peers};
pub use placement::{Placement, Split, Transfer};
pub use program::Program;
pub use recorder::Recorder;
pub use replay::{
    Batch, ExpertSource, InputGradients, InputObserver, Parameters, Replay, Run, Seed, StreamedExperts,
};
pub use reports::{MAX_REPORTS, Report, ReportKind};
pub use shapes::Shapes;
pub use shared_input::SharedInput;
pub use timeline::{Activity, Begin, Cost, Span, Timeline, Trace};
pub use totals::Totals;
pub use training::InputGradient;
pub use work_context::{Work, WorkContext};

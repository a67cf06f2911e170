//! The tape: model code is recorded once per shape into a [`Program`], which is then replayed.
//!
//! A model is written forward-only against a [`Recorder`], whose [`Value`]s have a shape and no storage.
//! Recording yields a [`Program`]: a static list of kernel calls for the forward, for the backward, and for the
//! backward split in two (gradients of inputs first, gradients of weights later), with every byte placed
//! before anything runs. Programs hold parameter *indices*, never weights: whoever replays one says where the
//! weights are at that moment.
//!
//! ```text
//! model code -> Recorder -> operations -> plan (what is saved, recomputed, where it lives) -> Program
//! Program + parameters + micro-batch + frame + workspace --replay--> outputs, gradients
//! ```
//!
//! - A *frame* holds what one block saves for one micro-batch: its output, and what its backward needs.
//! - The *workspace* holds what lives only inside one call; all blocks share one.
//! - A *deferred* buffer holds what a split backward keeps for the gradients of the weights.
//! - Where ranks share a block, each records its part ([`Recorder::split`]), and its program exchanges values with its [`Peers`],
//!   beside its products if it is recorded so ([`Transits`]).
//! - Where they share the sequences ([`Recorder::share_sequences`]), attention reaches the others' tokens by its [`ContextPeers`].
//! - [`Program::work`] says what a rank has to do and to keep, for whoever predicts it.
//! - A [`Timeline`] learns when each operation ran and what it had to do, for the steps that somebody traces.
#![forbid(unsafe_code)]

mod attention;
mod backward;
mod context;
mod cost;
mod exchange;
#[cfg(feature = "faults")]
pub mod faults;
mod layout;
mod loss;
mod low_rank;
mod mixture;
#[doc(hidden)]
mod operation;
mod overlap;
mod peers;
mod product;
mod program;
mod recorder;
mod replay;
mod ring;
mod route;
mod storage;
mod summa;
mod timeline;
mod training;
mod transit;
mod work;

pub use context::ContextPeers;
pub use layout::Split;
pub use lockstep_plan::work::Pass;
pub use lockstep_plan::{Recompute, RecomputeRules};
pub use low_rank::LowRank;
pub use mixture::{Mixture, Routing};
pub use operation::{AttentionShape, BatchInput, DropoutSite, ParameterIndex, RotaryPairs};
pub use peers::{GridPeers, Peers};
pub use program::{BlockProfile, ParameterDeclaration, Program};
pub use recorder::{Bias, BlockShape, Linear, Mode, Recorder, Value};
pub use replay::{Batch, KeyValueCache, Parameters, Replay, Seed};
pub use ring::Ring;
pub use timeline::{Activity, Begin, Cost, Span, Timeline, Trace};
pub use training::InputGradient;
pub use transit::Transits;

//! A plan: how a training step is split over ranks, as a small JSON file that a planner writes, a person edits and an engine executes.
//!
//! A plan does not change what a step computes, except that it may ask for quantized collectives, which round.
//!
//! ```json
//! {
//!   "version": 1,
//!   "model": "9f2c…",
//!   "mesh": { "pipeline": 2, "shard": 2, "tensor": 2 },
//!   "micro_batch": 1,
//!   "schedule": { "kind": "zb_v", "chunks": 2 },
//!   "stages": [4, 3, 3, 4],
//!   "recompute": "selective",
//!   "sequence_parallel": true,
//!   "tensor_chunks": 4,
//!   "context_method": "ring",
//!   "zero_stage": 1,
//!   "quantize_gradients": "int8",
//!   "residence": { "optimizer": "disk", "fraction": 0.5 },
//!   "predicted": { "memory": [{ "ranks": "0-7", "bytes": { "parameters": 4096, "gradients": 4096 } }] }
//! }
//! ```
//!
//! [`Plan::check`] checks a plan against the model, the batch and the world size. It reports all problems at once, or returns a
//! [`CheckedPlan`] with the mesh and the schedule.

mod check;
mod facts;
mod file;
mod pipeline_schedule;
mod predicted;
mod problem;
mod rank;
mod rules;
#[cfg(test)]
mod tests;

pub use facts::{Facts, StepFacts};
pub use file::{DEFAULT_BUCKET_MB, MAX_MICRO_BATCH_TOKENS, PLAN_VERSION, Plan};
pub use pipeline_schedule::{PassOrder, PipelineSchedule};
pub use predicted::{PlanPrediction, PlannedStep, RankList, RanksMemory};
pub use problem::{PlanError, PlanProblem, PlanProblems};
pub use rank::{CheckedPlan, Places, RankPlan, StepLayout};

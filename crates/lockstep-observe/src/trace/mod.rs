//! Recording of single steps, operation by operation.
//!
//! One step is sampled for the report (`profile.json`). The steps in `metrics.trace_steps` are written as a trace for
//! chrome://tracing and Perfetto: one file, with a process for each rank. With a pipeline, the report also shows the actions of
//! all ranks in one step (`timeline.json`).

mod chrome;
pub mod pipeline;
mod profile;
mod recorded;
mod tracer;

pub use tracer::{PROFILE, Tracer};

//! A training run, from its configuration to its metrics.
//!
//! What a run *is* stands in a [`RunConfig`]: read from RUN.toml and `--set`, checked as a whole, every value
//! with the place it came from. Around the loop stand small parts that know no tensor:
//!
//! - [`config`]: the keys of RUN.toml, in one table from which parsing, errors and the manual are made.
//! - [`schedule`]: the learning rate as a pure function of the step.
//! - [`metrics`]: `metrics.jsonl`, one whole line a step, continued without a seam after a resume.
//! - [`progress`]: the line a person watches, or plain lines where nobody does.
//! - [`interrupt`]: Ctrl-C and SIGTERM as a flag that the loop reads between steps.
//! - [`human`]: numbers the way people read them.
#![forbid(unsafe_code)]

pub mod config;
mod error;
pub mod human;
pub mod interrupt;
pub mod metrics;
pub mod progress;
pub mod schedule;

pub use config::RunConfig;
pub use error::Error;

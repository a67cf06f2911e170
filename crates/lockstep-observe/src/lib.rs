//! The view of a run from outside: metrics and their files, the progress line, traces, the report, the flight recorder's analysis, and
//! what `lockstep doctor` finds on a machine.
//!
//! - [`metrics`]: `metrics.jsonl`, TensorBoard events and Prometheus, continued without a gap after a resume.
//! - [`progress`]: the line that a terminal shows, or plain lines in a log.
//! - [`trace`]: the operations of some steps, for Chrome's trace viewer and the report.
//! - [`report`]: a run on one page.
//! - [`page`]: the template, style and drawing library of such pages.
//! - [`roofline`]: the time of a step's operations against the limits of the machine.
//! - [`flight`]: the last operations of each rank, written when a run fails, and what they tell of the cause.
//! - [`doctor`]: devices, libraries and limits of a machine.
//! - [`screen`]: text on standard error, wrapped and coloured.
#![forbid(unsafe_code)]

pub mod build;
pub mod doctor;
mod error;
pub mod flight;
mod json_value;
mod lock;
pub mod metrics;
pub mod page;
pub mod progress;
pub mod rank_layout;
pub mod report;
pub mod roofline;
pub mod screen;
pub mod trace;

pub use error::Error;
pub use lock::retry_lock;

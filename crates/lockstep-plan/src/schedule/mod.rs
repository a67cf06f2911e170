//! Pipeline schedules as data: the ordered list of actions of each pipeline rank in one step.
//!
//! A model is split into *stages*, counted from its first layer; a rank has one stage or several (its *chunks*). Each stage runs a
//! forward and a backward per micro-batch. The backward may be split in two: input gradients first, weight gradients later. A
//! [`Schedule`] has one list of [`Action`]s per rank; the engine, the simulator and pictures all read the same lists.
//!
//! - [`Kind`] names the published schedules; each is a pure function to lists of [`Pass`]es (`generate`).
//! - `lower` derives sends, receives and reductions from any such lists. Users may give their own as a CSV file
//!   ([`passes_from_csv`]).
//! - A `Schedule` can only be made from lists that are complete (`validate`) and cannot deadlock (`deadlock`); otherwise
//!   the [`ScheduleError`] lists every problem.
//! - [`Schedule::simulate`] computes start times and memory from the durations of the passes.

mod action;
mod action_lists;
mod build;
mod csv;
mod deadlock;
mod generate;
mod kind;
mod lower;
mod problem;
mod simulate;
#[cfg(test)]
mod tests;
mod validate;

pub use action::{Action, Message, Pass, PassKind, PassSyntaxError};
pub use action_lists::Schedule;
pub use csv::passes_from_csv;
pub use kind::Kind;
pub use problem::{ScheduleError, ScheduleProblem, Wait};
pub use simulate::{Costs, CostsError, Simulation, Span, StageCost};

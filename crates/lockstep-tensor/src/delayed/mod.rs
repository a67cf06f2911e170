//! A device for tests of ordering: it runs the CPU's kernels as late as events permit, on memory that the host may
//! not touch.
//!
//! Each kernel call is a job in a list. Nothing runs until somebody waits for an event; then everything before that
//! event runs, and nothing after it. So a collective that does not wait finds memory that is not written yet, and a
//! kernel finds memory that was freed too early. New and freed memory is poison (all bits set: NaN, ids beyond every
//! table). Each job knows the memory it uses, so a fault is reported with a message that names both accesses.

mod device;
mod list;
mod operands;
mod queue;

pub use device::{Delayed, Fault};

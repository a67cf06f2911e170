//! Recorded blocks: gradients, operations of a user's crate, overlap and sequences.
//!
//! One program, because linking takes longer than most of these tests.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod backward;
mod output_loss;
mod outside_operation;
mod overlap;
mod sequences;

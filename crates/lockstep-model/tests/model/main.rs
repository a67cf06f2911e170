//! Model families: configurations, names in checkpoints, memory and work.
//!
//! One program, because linking takes longer than most of these tests.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod checkpoints;
mod configs;
mod encoders;
mod memory;
mod work;

/// Directories of fixtures that transformers wrote, one for each family and variant.
const FAMILIES: [&str; 29] = include!("../../../../tests/fixtures/families.rs");

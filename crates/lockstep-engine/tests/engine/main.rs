//! Engines of whole models: steps, shards, offload, recomputation and optimizers, beside one rank or PyTorch.
//!
//! One program, because linking takes longer than most of these tests.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod common;
mod documents;
mod offload;
mod optimizers;
mod quantized;
mod recompute;
mod reports;
mod resnet;
mod shards;
mod step;
mod tuning;

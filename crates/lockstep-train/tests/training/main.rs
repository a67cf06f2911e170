//! Runs in this process: checkpoints, guard, fine-tuning and ranks as threads, beside transformers and peft.
//!
//! One program, because linking takes longer than most of these tests.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod data_parallel;
mod encoders;
mod fine_tune;
mod guard;
mod heads;
mod peft;
mod pictures;
mod quantized_base;
mod reference;
mod run;
mod sharded;
mod transformers;

//! The training loop: from a run's configuration to its last checkpoint.
//!
//! [`train`] executes a [`RunConfig`](lockstep_config::RunConfig): it resolves the model, prepares the corpus, resumes from the newest intact
//! checkpoint and runs the steps. The modules around the loop do not touch tensors:
//!
//! - [`verify`]: compares a plan's numbers with those of one rank.
//! - [`benchmark`]: step times of this machine.
//! - [`rehearsal`]: pipeline schedules, measured and simulated.
//! - [`machine_file`]: this machine as a cluster file, measured.
#![forbid(unsafe_code)]

pub mod benchmark;
mod clipping;
mod comparison;
mod corpus;
mod describe;
mod engine_state;
mod error;
mod evaluation;
mod generated_samples;
mod guard;
mod kernels;
mod loss_scale;
pub mod machine_file;
mod new_head;
mod observer;
mod peak;
mod predicted;
mod ranks;
mod records;
pub mod rehearsal;
mod reported;
mod samples;
mod saving;
mod setup;
mod start;
mod state;
mod summary;
mod trainer;
mod training_data;
pub mod verify;

pub use clipping::clip_coefficient;
pub use corpus::{CorpusSource, TextCorpus, load_tokenizer};
pub use describe::answers;
pub use engine_state::{LoopState, load_engine, save_engine};
pub use error::Error;
pub use kernels::level_of_checkpoint;
pub use observer::StepObserver;
pub use ranks::{ranks_of, ranks_of_model};
pub use samples::{SampleCorpus, SampleSet, described};
pub use summary::Summary;
pub use trainer::{train, train_observed, train_on};
pub use training_data::{TrainingData, host_batch, sample_batch};

//! Lockstep as a library: your own model, data, loss and loop, under any plan.
//!
//! [`launch`] makes a program's `main` a run of many ranks, as `torchrun` and `init_process_group` do together.
#![forbid(unsafe_code)]
// They panic if the reader is gone; `output` has replacements that do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod advice;
mod bench;
#[cfg(test)]
mod book;
mod checkpoint;
mod collectives;
mod command;
mod completions;
mod data;
mod doctor;
mod engine;
mod error;
mod error_file;
mod exit;
mod generate;
mod hosts;
mod import;
mod infer;
mod instructions;
mod launch;
mod launching;
mod limits;
mod logging;
#[cfg(test)]
mod manifests;
mod measured;
mod models;
mod nodes;
mod output;
mod pipelines;
mod plan;
mod planned;
mod ranks;
mod report;
mod stdin_secret;
mod train;
mod trainer;
mod typed;
mod verify;
mod world;

use std::process::ExitCode;

pub use lockstep_checkpoint::Checkpoint;
pub use lockstep_comm::CommError;
pub use lockstep_config::Resume;
pub use lockstep_data::MicroBatch;
pub use lockstep_data::samples::{Batch, Dataset, Transforms};

/// Data sets, transforms, orders and loaders of samples.
pub mod samples {
    pub use lockstep_data::SampleOrder;
    pub use lockstep_data::samples::*;
}

pub use lockstep_engine::Optimizer;
pub use lockstep_graph::{
    BatchNormOptions, Bias, Convolution, Facts, InputGradients, LABELS, Linear, Op, ParameterIndex,
    Placement, Recorder, Run, Value,
};
pub use lockstep_model::{InputDeclaration, Model, ModelConfig, Sizes, Unit, register};
pub use lockstep_plan::{DType, Degrees, Initializer, Plan};
pub use lockstep_tensor::{NamedTensor, TensorData, View, Window2d, Write};
pub use lockstep_train::Summary;

pub use self::engine::{Engine, Inputs, Settings, Step};
pub use self::error::Error;
pub use self::launch::{arguments, launch};
pub use self::trainer::Trainer;
pub use self::world::World;

/// Runs the command line of this process and returns its exit code: the `main` of the program `lockstep`.
pub fn command_line() -> ExitCode {
    command::main()
}

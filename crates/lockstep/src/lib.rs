//! Lockstep as a library: your own model, data, loss and loop, under any plan, on any number of ranks.
//!
//! [`launch`] makes a program's `main` a run of many ranks, as `torchrun` and `init_process_group` do together. [`Trainer`]
//! trains a [`Model`] on a [`Dataset`], with the steps, checkpoints, resumption and metrics of `lockstep train`. [`Engine`]
//! serves a loop of your own:
//!
//! ```
//! use lockstep::{DType, Engine, Error, InputDeclaration, LABELS, Model, NamedTensor, Recorder, Settings};
//! use lockstep::{Batch, Optimizer, Sizes, TensorData, Unit, Value};
//!
//! /// `y = w x + b`, held to the labels by the squared error.
//! #[derive(Debug)]
//! struct Line;
//!
//! impl Model for Line {
//!     fn model_type(&self) -> &str {
//!         "line"
//!     }
//!     fn units(&self) -> Vec<Unit> {
//!         vec![Unit { prefix: String::new(), kind: 0, layer: Some(0) }]
//!     }
//!     fn inputs(&self) -> Vec<InputDeclaration> {
//!         ["x", LABELS].map(|name| InputDeclaration::new(name, DType::F32, &[1])).to_vec()
//!     }
//!     fn record(&self, _: usize, g: &mut Recorder) -> Value {
//!         let x = g.data("x");
//!         let y = g.dense(x, "line", 1);
//!         g.squared_error(y)
//!     }
//!     fn sizes(&self) -> Sizes {
//!         Sizes { layers: 1, fixed_seq_len: Some(1), ..Sizes::default() }
//!     }
//!     fn table(&self) -> serde_json::Map<String, serde_json::Value> {
//!         serde_json::Map::new()
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     lockstep::launch(|world| {
//!         let optimizer = Optimizer::Sgd { momentum: 0.9 };
//!         let settings = Settings { global_batch: 4, optimizer, ..Settings::default() };
//!         let mut engine = Engine::new(world, Line, settings)?;
//!         // The micro-batches of this rank: all four points if it is alone.
//!         let batches: Vec<Batch> = engine.shard().map(|range| points(range)).collect();
//!         let mut loss = f64::INFINITY;
//!         for _ in 0..100 {
//!             loss = engine.forward_backward(&batches)?;
//!             engine.step(0.05)?;
//!         }
//!         assert!(loss < 1e-3, "the line passes through the points: {loss}");
//!         Ok::<(), Error>(())
//!     })
//! }
//!
//! /// Points on the line `y = 2 x - 1`.
//! fn points(range: std::ops::Range<usize>) -> Batch {
//!     let x: Vec<f32> = range.clone().map(|i| i as f32 / 2.0).collect();
//!     let y = x.iter().map(|x| 2.0 * x - 1.0).collect();
//!     let column = |name: &str, values: Vec<f32>| {
//!         NamedTensor::new(name, &[values.len(), 1], TensorData::F32(values))
//!     };
//!     let sample_numbers = range.map(|i| i as u64).collect();
//!     Batch { tensors: vec![column("x", x), column(LABELS, y)], sample_numbers, skipped: 0 }
//! }
//! ```
//!
//! | to | use |
//! |---|---|
//! | write a model | [`Model`], [`Recorder`], [`Unit`], [`InputDeclaration`] |
//! | write an operation | [`Op`], [`Facts`], [`Run`] |
//! | read samples | [`Dataset`], [`Transforms`] and the readers in [`samples`] |
//! | lay the work out over ranks | [`Plan`] in [`Settings::plan`] and [`Trainer::plan`], which may also be [`Layout::Auto`] |
//! | register a family for `model_type` | [`register`] |
//! | generate text | [`generation`] |
#![forbid(unsafe_code)]
// They panic if the reader is gone; `output` has replacements that do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod advice;
mod bench;
mod bench_generate;
#[cfg(test)]
mod book;
mod calibration;
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
mod fetch;
mod generate;
mod hosts;
mod import;
mod infer;
mod inference_ranks;
mod instructions;
mod launch;
mod launching;
mod limits;
mod local_ranks;
mod logging;
#[cfg(test)]
mod manifests;
mod measured;
mod models;
mod nodes;
mod output;
mod pipelines;
mod placement;
mod plan;
mod planned;
mod quantize;
mod ranks;
mod report;
mod sample_view;
mod stdin_secret;
mod thread_count;
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

/// Models that generate text: loading, batches with a key-value cache, sampling.
pub mod generation {
    pub use lockstep_checkpoint::ModelDirectory;
    pub use lockstep_data::Tokenizer;
    pub use lockstep_infer::{
        Batch, Device, DeviceMap, Drawn, Event, FinishReason, Generator, InferError, InferencePlan,
        LoadedModel, MapChoice, MemoryLimits, PlanRequest, Request, Sampler, Sampling, Scheduler,
        SchedulerOptions, Workload,
    };
    pub use lockstep_tensor::host::proportional_bytes;
}

pub use lockstep_engine::Optimizer;
pub use lockstep_graph::{
    AttentionOptions, AttentionShape, BatchInput, BatchNormOptions, Bias, Constant, Convolution, Facts,
    InputGradients, Linear, Op, ParameterIndex, Placement, Recorder, Run, Split, Synchronization, Value,
};
pub use lockstep_model::{InputDeclaration, Model, ModelConfig, Sizes, Tie, Unit, register};
pub use lockstep_plan::{
    DType, Degrees, Initializer, MemoryBytes, MemoryCategory, Plan, Recompute, RecomputeRules,
};
pub use lockstep_tensor::{
    Activation, AttentionDirection, INPUT_IDS, LABELS, NamedTensor, TensorData, View, Window2d, Write,
};
pub use lockstep_train::Summary;

pub use self::engine::{Engine, Inputs, Memory, Settings, Step};
pub use self::error::Error;
pub use self::launch::{arguments, launch};
pub use self::trainer::{Layout, Trainer};
pub use self::world::World;

/// Runs the command line of this process and returns its exit code: the `main` of the program `lockstep`.
pub fn command_line() -> ExitCode {
    command::main()
}

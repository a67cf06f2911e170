//! Evaluation and text generation.
//!
//! Both run the same block code as training, recorded in [`Mode::Inference`](lockstep_graph::Mode); there is no
//! second forward. [`LoadedModel`] holds the weights and [`evaluate`] measures the loss on a text. A [`Batch`] reads tokens of several
//! sequences at once, with a key-value cache in pages; a [`Scheduler`] generates many requests with it, and a [`Generator`] reads one
//! sequence.
//!
//! Several ranks run one model under a plan of training ([`check_plan`]): each loads its shards, and all draw the same tokens.
//!
//! [`calibrate`] chooses the scales of a model's channels with which its quantized weights lose least on a text.
//!
//! [`InferencePlan`] places the modules of a model under memory limits: in memory or on disk, from which they are read ahead
//! of use.
#![forbid(unsafe_code)]

mod batch;
mod beam;
mod cache;
mod calibration;
mod description;
mod device_map;
mod error;
mod estimate;
mod evaluate;
mod experts;
mod extent;
mod forward;
mod generate;
mod generation;
mod held;
mod loaded;
mod parallel;
mod placement_plan;
mod run_memory;
mod sample;
mod scheduler;
mod stored_weights;
mod stream;
mod unit_layout;
mod weight_form;
mod weights;

pub use batch::{Batch, NewTokens, SequenceId};
pub use beam::{BeamOptions, Hypothesis, beam_search};
pub use calibration::{CalibratedLayer, Calibration, calibrate, calibration_window};
pub use description::ModelDescription;
pub use device_map::{Device, DeviceMap, MemoryLimits, Module};
pub use error::InferError;
pub use estimate::{Estimate, Rates};
pub use evaluate::{EVALUATED_WINDOWS, Evaluation, evaluate};
pub use generate::Generator;
pub use generation::GenerationConfig;
pub use loaded::{LoadOptions, LoadedModel};
pub use parallel::{PlannedWork, check_placed, check_plan, plan_over};
pub use placement_plan::{InferencePlan, MapChoice, PlanRequest, PredictedMemory};
pub use run_memory::Workload;
pub use sample::{Drawn, Sampler, Sampling, TokenLogprob};
pub use scheduler::{Event, FinishReason, Request, RequestId, Scheduler, SchedulerOptions};

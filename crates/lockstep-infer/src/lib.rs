//! Evaluation and text generation.
//!
//! Both run the same block code as training, recorded in [`Mode::Inference`](lockstep_graph::Mode); there is no
//! second forward. [`LoadedModel`] holds the weights, [`evaluate`] measures the loss on a text, and [`Generator`]
//! continues a prompt one token at a time with a key-value cache for each layer.
//!
//! [`InferencePlan`] places the modules of a model under memory limits: in memory or on disk, from which they are read ahead
//! of use.
#![forbid(unsafe_code)]

mod description;
mod device_map;
mod error;
mod estimate;
mod evaluate;
mod generate;
mod generation;
mod held;
mod loaded;
mod placement_plan;
mod run_memory;
mod sample;
mod stream;
mod unit_layout;
mod weights;

pub use description::ModelDescription;
pub use device_map::{Device, DeviceMap, MemoryLimits, Module};
pub use error::InferError;
pub use estimate::{Estimate, Rates};
pub use evaluate::{EVALUATED_WINDOWS, Evaluation, evaluate};
pub use generate::Generator;
pub use generation::GenerationConfig;
pub use loaded::{LoadOptions, LoadedModel};
pub use placement_plan::{InferencePlan, MapChoice, PlanRequest, PredictedMemory};
pub use run_memory::Workload;
pub use sample::{Sampler, Sampling};

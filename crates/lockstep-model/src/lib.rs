//! Model families: about a hundred lines of forward-only code each, and what Hugging Face calls their parts.
//!
//! A model is described by a typed configuration ([`ModelConfig`]), read from and written as a Hugging Face
//! `config.json`. Recording it ([`RecordedModel`]) gives its programs and the list of its parameters
//! ([`parameter_records`]), or what a rank has to do for a micro-batch
//! alone ([`model_work`]); [`HfMapping`] says how they lie in a Hugging Face checkpoint. An option that would change the numbers and is not supported
//! is an error that names it; nothing in a configuration is ever ignored in silence.
#![forbid(unsafe_code)]

mod check;
mod config;
mod error;
mod families;
mod hf_names;
mod hf_transform;
mod lora;
mod presets;
mod recorded;
mod units;
mod work;

pub use config::{
    Activation, ExpertsConfig, Gpt2Config, LatentAttention, LlamaConfig, LlamaFamily, ModelConfig, Rope,
    RopeScaling, SpecialTokens, Yarn,
};
pub use error::{CheckpointProblem, ConfigProblem, ModelError};
pub use hf_names::{HfContent, HfImport, HfMapping, HfPlace, HfTensor};
pub use hf_transform::HfTransform;
pub use lora::{ALL_LINEAR, Adapter, AdapterTensor, LoraConfig, LoraScaling, MAX_RANK};
pub use presets::{Preset, presets};
pub use recorded::{HeadOutput, RecordedModel, RecordingOptions, Tuning, parameter_records, tuned_records};
pub use units::Flops;
pub use work::model_work;

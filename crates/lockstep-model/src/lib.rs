//! Model families, each about a hundred lines of forward-only code, and their mapping to Hugging Face names and configurations.
//!
//! A model is described by a typed configuration ([`ModelConfig`]), read from and written as a Hugging Face
//! `config.json`. [`RecordedModel`] records it into programs and a list of parameters. [`parameter_records`] returns
//! the parameters alone, [`model_work`] the work of a rank for a micro-batch. [`HfMapping`] locates the parameters in
//! a Hugging Face checkpoint. An unsupported option that would change the numbers is an error that names it; no
//! option is silently ignored.
#![forbid(unsafe_code)]

mod check;
mod config;
mod error;
mod families;
mod hf_names;
mod hf_transform;
mod lora;
mod lora_targets;
mod options;
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
pub use lora::{Adapter, AdapterTensor, LoraConfig, LoraScaling};
pub use lora_targets::{ALL_LINEAR, MAX_RANK};
pub use options::{HeadOutput, RecordingOptions, Tuning};
pub use presets::{Preset, presets};
pub use recorded::{RecordedModel, parameter_records, tuned_records};
pub use units::Flops;
pub use work::model_work;

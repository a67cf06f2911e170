//! Model families: what a configuration means, which parameters a model has, and what they are called.
//!
//! A family is described by a typed configuration ([`ModelConfig`]), read from and written as a Hugging
//! Face `config.json`. Everything else follows from it by pure functions: the list of parameters
//! ([`parameter_records`]), their number ([`ModelConfig::parameter_count`]), and how they lie in a
//! Hugging Face checkpoint ([`HfMapping`]). An option that would change the numbers and is not supported
//! is an error that names it; nothing in a configuration is ever ignored in silence.
#![forbid(unsafe_code)]

mod config;
mod error;
mod families;
mod hf_names;
mod hf_transform;
mod parameters;
mod presets;
mod recorded;

pub use config::{
    Activation, Gpt2Config, LlamaConfig, LlamaFamily, ModelConfig, Rope, RopeScaling, SpecialTokens,
};
pub use error::{CheckpointProblem, ConfigProblem, ModelError};
pub use hf_names::{HfContent, HfImport, HfMapping, HfPlace, HfTensor};
pub use hf_transform::HfTransform;
pub use parameters::parameter_records;
pub use presets::PRESETS;
pub use recorded::{HeadOutput, RecordedModel};

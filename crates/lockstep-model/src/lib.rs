//! Model families, each about a hundred lines of forward-only code, and their mapping to Hugging Face names and configurations.
//!
//! A [`Model`] is a list of units that record their forward. [`ModelConfig`] is a handle of one, read from and written as a
//! Hugging Face `config.json`; [`register`] adds a family of another crate. [`RecordedModel`] records it into programs and a list of parameters. [`parameter_records`] returns
//! the parameters alone, [`model_work`] the work of a rank for a micro-batch. [`HfMapping`] locates the parameters in
//! a Hugging Face checkpoint. An unsupported option that would change the numbers is an error that names it; no
//! option is silently ignored.
#![forbid(unsafe_code)]

mod check;
mod config;
mod error;
mod families;
mod hf_names;
mod hf_tensor;
mod hf_transform;
mod lora;
mod lora_targets;
mod model;
mod options;
mod presets;
mod recorded;
mod registry;
mod units;
mod work;

pub use config::{
    Activation, BertConfig, BertHead, BloomConfig, Classes, EncoderSizes, ExpertsConfig, FalconConfig,
    FalconResidual, Gpt2Config, GptNeoxConfig, LatentAttention, LlamaConfig, LlamaFamily, LongRope,
    ModelConfig, OptConfig, ResNetConfig, ResNetLayer, ResNetStem, Rope, RopeScaling, SpecialTokens,
    VitConfig, Yarn,
};
pub use error::{CheckpointProblem, ConfigProblem, ModelError};
pub use hf_names::{HfImport, HfMapping};
pub use hf_tensor::{HfContent, HfPlace, HfTensor};
pub use hf_transform::HfTransform;
pub use lockstep_graph::{HeadOutput, InputDeclaration};
pub use lora::{Adapter, AdapterTensor, LoraConfig, LoraScaling};
pub use lora_targets::{ALL_LINEAR, MAX_RANK};
pub use model::{Model, Sizes, Tie, Unit};
pub use options::{RecordingOptions, Tuning};
pub use presets::{Preset, presets};
pub use recorded::{RecordedModel, parameter_records, tuned_records};
pub use registry::{ReadModel, register, register_given};
pub use units::Flops;
pub use work::model_work;

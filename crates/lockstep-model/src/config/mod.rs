//! Configuration of a model: one typed value per family, read from and written as `config.json`.
//!
//! Reading has two steps. The family's reader turns keys into a struct, with transformers' defaults for absent keys.
//! Then [`ModelConfig::validate`] checks ranges and relations, which also covers configurations built in code.

mod experts;
mod family;
mod family_rope;
mod gpt2;
mod keys;
mod latent;
mod limits;
mod llama;
mod model;
mod reader;
mod resnet;
mod rope;
mod tokens;
mod windows;

pub use self::experts::ExpertsConfig;
pub use self::family::LlamaFamily;
pub(crate) use self::family::{NormPlacement, NormScale, QueryKeyNorm};
pub(crate) use self::gpt2::canonical_key;
pub use self::gpt2::{Activation, Gpt2Config};
pub use self::latent::LatentAttention;
pub use self::llama::LlamaConfig;
pub use self::model::ModelConfig;
pub use self::resnet::{ResNetConfig, ResNetLayer, ResNetStem};
pub(crate) use self::rope::{INVERSE_FREQUENCIES, LOCAL_INVERSE_FREQUENCIES};
pub use self::rope::{Rope, RopeScaling, Yarn};
pub use self::tokens::SpecialTokens;

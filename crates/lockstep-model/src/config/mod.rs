//! Configuration of a model: one typed value per family, read from and written as `config.json`.
//!
//! Reading has two steps. The family's reader turns keys into a struct, with transformers' defaults for absent keys.
//! Then [`ModelConfig::validate`] checks ranges and relations, which also covers configurations built in code.

mod activation;
mod bert;
mod bloom;
mod classes;
mod encoder;
mod experts;
mod falcon;
mod family;
mod family_rope;
mod gpt2;
mod gpt_neox;
mod keys;
mod latent;
mod limits;
mod llama;
mod model;
mod opt;
mod reader;
mod resnet;
mod rope;
mod tokens;
mod vit;
mod windows;

pub use self::activation::Activation;
pub use self::bert::{BertConfig, BertHead};
pub use self::bloom::BloomConfig;
pub use self::classes::Classes;
pub use self::encoder::EncoderSizes;
pub use self::experts::ExpertsConfig;
pub use self::falcon::{FalconConfig, FalconResidual};
pub use self::family::LlamaFamily;
pub(crate) use self::family::{NormPlacement, NormScale, QueryKeyNorm};
pub use self::gpt_neox::GptNeoxConfig;
pub use self::gpt2::Gpt2Config;
pub(crate) use self::gpt2::canonical_key;
pub use self::latent::LatentAttention;
pub use self::llama::LlamaConfig;
pub use self::model::ModelConfig;
pub use self::opt::OptConfig;
pub use self::resnet::{ResNetConfig, ResNetLayer, ResNetStem};
pub(crate) use self::rope::{INVERSE_FREQUENCIES, LOCAL_INVERSE_FREQUENCIES, LONG_INVERSE_FREQUENCIES};
pub use self::rope::{LongRope, Rope, RopeScaling, Yarn};
pub use self::tokens::SpecialTokens;
pub(crate) use self::vit::VIT_ARCHITECTURE;
pub use self::vit::VitConfig;

//! Evaluation and text generation.
//!
//! Both run the same block code as training, recorded in [`Mode::Inference`](lockstep_graph::Mode); there is no
//! second forward. [`LoadedModel`] holds the weights, [`evaluate`] measures the loss on a text, and [`Generator`]
//! continues a prompt one token at a time with a key-value cache for each layer.
#![forbid(unsafe_code)]

mod error;
mod evaluate;
mod generate;
mod generation;
mod loaded;
mod sample;
mod weights;

pub use error::InferError;
pub use evaluate::{Evaluation, evaluate};
pub use generate::Generator;
pub use generation::GenerationConfig;
pub use loaded::{LoadOptions, LoadedModel};
pub use sample::{Sampler, Sampling};

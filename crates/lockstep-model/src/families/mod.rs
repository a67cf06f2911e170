//! The model families, each written forward-only as if for one micro-batch on one device.

mod experts;
mod gpt2;
mod latent;
mod llama;

use lockstep_graph::{Linear, Recorder, Split, Value};

use crate::{LlamaConfig, ModelConfig};

/// How a family reads a micro-batch: an embedding, a number of equal blocks, a head.
///
/// Each method records one unit. The names a unit declares are relative to its prefix.
pub(crate) trait Family {
    /// Prefix of the embedding's parameters.
    fn embedding_prefix(&self) -> String;
    /// Prefix of block `layer`'s parameters.
    fn block_prefix(&self, layer: usize) -> String;
    /// Token ids (and positions) to `[tokens, hidden]`.
    fn embedding(&self, g: &mut Recorder) -> Value;
    /// Which kind of block a layer is; those of one kind differ in their weights alone.
    fn block_kind(&self, _layer: usize) -> usize {
        0
    }
    /// A block of the residual stream.
    fn block(&self, kind: usize, g: &mut Recorder) -> Value;
    /// The final norm, and the output layer to `[tokens, vocabulary]` logits that follows it. Its names have no prefix.
    fn head(&self, g: &mut Recorder) -> (Value, Linear<'static>);
    /// Name of the parameter that a tied output layer (`lm_head.weight`) shares.
    fn embedding_table(&self) -> &'static str;
    /// The frequencies of rotary embeddings, `[head_dim / 2]`, if the family has them.
    fn inverse_frequencies(&self) -> Option<Vec<f32>>;
    /// How tensor-parallel ranks split the weights, by module within its unit; they share the others.
    fn tensor_splits(&self) -> Vec<(&'static str, Split)>;
}

impl ModelConfig {
    pub(crate) fn family(&self) -> &dyn Family {
        match self {
            Self::Gpt2(config) => config,
            Self::Llama(config) => config,
        }
    }
}

impl ModelConfig {
    /// Whether training drops anything.
    pub fn has_dropout(&self) -> bool {
        match self {
            Self::Gpt2(config) => {
                config.embedding_dropout + config.residual_dropout + config.attention_dropout > 0.0
            }
            Self::Llama(config) => config.attention_dropout > 0.0,
        }
    }

    /// The same model with one probability at every place where its family drops: embedding, residual and
    /// attention for GPT-2, attention for the Llama-likes (as in transformers).
    pub fn with_dropout(&self, probability: f64) -> Self {
        let mut changed = self.clone();
        match &mut changed {
            Self::Gpt2(config) => {
                config.embedding_dropout = probability;
                config.residual_dropout = probability;
                config.attention_dropout = probability;
            }
            Self::Llama(config) => config.attention_dropout = probability,
        }
        changed
    }

    /// Whether experts take a limited number of slots in training, so that some are dropped.
    pub fn has_capacity(&self) -> bool {
        self.experts().is_some_and(|experts| experts.capacity_factor.is_some())
    }

    /// The same model where experts take all slots.
    pub fn without_capacity(&self) -> Self {
        let mut changed = self.clone();
        if let Self::Llama(LlamaConfig { experts: Some(experts), .. }) = &mut changed {
            experts.capacity_factor = None;
        }
        changed
    }

    /// The same model without dropout.
    pub fn without_dropout(&self) -> Self {
        self.with_dropout(0.0)
    }
}

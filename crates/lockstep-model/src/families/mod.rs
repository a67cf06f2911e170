//! The model families, each written forward-only for one micro-batch on one device.

mod experts;
mod gpt2;
mod latent;
mod llama;

use lockstep_graph::{Linear, Recorder, Split, Value};

use crate::{LlamaConfig, ModelConfig};

/// A model family: an embedding, blocks of one or a few kinds, and a head.
///
/// The recording methods record one unit each. The names a unit declares are relative to its prefix.
pub(crate) trait Family {
    /// Returns the prefix of the embedding's parameters.
    fn embedding_prefix(&self) -> String;
    /// Returns the prefix of block `layer`'s parameters.
    fn block_prefix(&self, layer: usize) -> String;
    /// Records the embedding: token ids (and positions) to `[tokens, hidden]`.
    fn embedding(&self, g: &mut Recorder) -> Value;
    /// Returns the kind of a layer's block. Blocks of one kind differ in their weights only.
    fn block_kind(&self, _layer: usize) -> usize {
        0
    }
    /// Records a block of the residual stream.
    fn block(&self, kind: usize, g: &mut Recorder) -> Value;
    /// Records the final norm. Returns its output, and the output layer to `[tokens, vocabulary]` logits, which the
    /// caller records. Names have no prefix.
    fn head(&self, g: &mut Recorder) -> (Value, Linear<'static>);
    /// Returns the name of the parameter that a tied output layer (`lm_head.weight`) is tied to.
    fn embedding_table(&self) -> &'static str;
    /// Returns the inverse frequencies of rotary embeddings, `[head_dim / 2]`; `None` for a family without them.
    fn inverse_frequencies(&self) -> Option<Vec<f32>>;
    /// Returns the tensor-parallel sharding of weights, by module within its unit; all other modules are replicated.
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
    /// Returns true if training applies dropout.
    pub fn has_dropout(&self) -> bool {
        match self {
            Self::Gpt2(config) => {
                config.embedding_dropout + config.residual_dropout + config.attention_dropout > 0.0
            }
            Self::Llama(config) => config.attention_dropout > 0.0,
        }
    }

    /// Returns the model with all dropout probabilities of its family set: embedding, residual and attention for
    /// GPT-2, attention for the Llama-likes (as in transformers).
    pub fn with_dropout(&self, probability: f64) -> Self {
        match self.clone() {
            Self::Gpt2(config) => Self::Gpt2(config.with_dropout(probability)),
            Self::Llama(config) => Self::Llama(LlamaConfig { attention_dropout: probability, ..config }),
        }
    }

    /// Returns true if experts have a capacity in training, beyond which slots are dropped.
    pub fn has_capacity(&self) -> bool {
        self.experts().is_some_and(|experts| experts.capacity_factor.is_some())
    }

    /// Returns the model without expert capacity, so that no slots are dropped.
    pub fn without_capacity(&self) -> Self {
        let mut changed = self.clone();
        if let Self::Llama(LlamaConfig { experts: Some(experts), .. }) = &mut changed {
            experts.capacity_factor = None;
        }
        changed
    }

    /// Returns the model without dropout.
    pub fn without_dropout(&self) -> Self {
        self.with_dropout(0.0)
    }
}

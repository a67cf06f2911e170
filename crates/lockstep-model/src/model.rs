//! The interface of a model: a list of units, each written forward-only for one micro-batch on one device.
//!
//! Everything else follows from the recording of the units: parameters, memory, work, and the program that ranks run.
//! A model knows no mesh. [`Model::placements`] names the modules whose weights tensor-parallel ranks shard.

use std::any::Any;
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;

use lockstep_graph::{Constant, InputDeclaration, Recorder, Split, Value};
use lockstep_plan::ParameterRecord;
use lockstep_tensor::{CacheShape, CachedVectors};
use serde_json::{Map, Value as Json};

use crate::config::{ExpertsConfig, SpecialTokens};
use crate::error::ConfigProblem;
use crate::hf_tensor::HfTensor;

/// A unit of a model: the smallest part that a pipeline stage, a gather of sharded parameters or a recomputation
/// handles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Prefix of the unit's parameter names, e.g. `model.layers.3.`.
    pub prefix: String,
    /// Number that tells unlike units apart: units of one kind record the same operations and share a program.
    pub kind: usize,
    /// Index of the layer, for units that rules of recomputation apply to; `None` for an embedding or a head.
    pub layer: Option<usize>,
}

impl Unit {
    /// Returns the units of a decoder of `layers` blocks between an embedding and a head; `block` returns the prefix of
    /// a block's parameters and its kind. The head's parameters have no prefix.
    pub fn decoder(
        embedding_prefix: &str,
        layers: usize,
        block: impl Fn(usize) -> (String, usize),
    ) -> Vec<Self> {
        let outside = |prefix: &str, kind| Self { prefix: prefix.to_owned(), kind, layer: None };
        let blocks = (0..layers).map(|layer| {
            let (prefix, kind) = block(layer);
            Self { prefix, kind: 2 + kind, layer: Some(layer) }
        });
        [outside(embedding_prefix, 0)].into_iter().chain(blocks).chain([outside("", 1)]).collect()
    }
}

/// A parameter that repeats another one, as an output layer repeats an embedding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tie {
    /// Unit that declares the tied parameter.
    pub unit: usize,
    /// Name of the tied parameter within its unit.
    pub parameter: String,
    /// Canonical name of the parameter that owns the weights.
    pub target: String,
}

impl Tie {
    /// Returns the tie of `lm_head.weight` to an embedding's table, if `is_tied`.
    pub fn output_layer(is_tied: bool, head: usize, table: &str) -> Vec<Self> {
        Self::of(is_tied, head, "lm_head.weight", table)
    }

    /// Returns the tie of a parameter of `unit` to another one, if `is_tied`.
    pub fn of(is_tied: bool, unit: usize, parameter: &str, target: &str) -> Vec<Self> {
        let tie = || Self { unit, parameter: parameter.into(), target: target.into() };
        is_tied.then(tie).into_iter().collect()
    }
}

/// The sizes of a model that plans are checked against and that reports show; 0 where a model has no such thing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Number of layers: units that rules of recomputation apply to.
    pub layers: usize,
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
    /// Number of classes of a classifier.
    pub classes: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layers.
    pub intermediate: usize,
    /// Number of query heads of a block.
    pub heads: usize,
    /// Number of key/value heads of a block; each serves `heads / key_value_heads` query heads.
    pub key_value_heads: usize,
    /// Number of elements of one head.
    pub head_dim: usize,
    /// Length of the longest sequence, in tokens.
    pub positions: usize,
    /// Length in tokens of every sample, for a model whose samples are all of one length; 1 for images of a model without
    /// tokens.
    pub fixed_seq_len: Option<usize>,
    /// Sequence length of the pretraining before the context was extended, in tokens; `None` if it was not.
    pub original_positions: Option<usize>,
    /// Number of positions that a position sees, itself included; `None` means all before it.
    pub window: Option<usize>,
    /// Elements of the latent vector that keys and values of all heads are projected from, with the rotary part of the keys; `None` if
    /// keys and values are projected from the residual stream.
    pub latent_dim: Option<usize>,
    /// True if queries and keys have norms over all heads together.
    pub norms_span_heads: bool,
    /// True if the layers of experts have biases.
    pub experts_have_biases: bool,
}

impl Sizes {
    /// Returns the shape of a layer's key-value cache on one rank.
    pub fn cache_shape(&self) -> CacheShape {
        let (key_value_heads, head_dim, vectors) = match self.latent_dim {
            Some(latent) => (1, latent, CachedVectors::Shared),
            None => (self.key_value_heads, self.head_dim, CachedVectors::KeyAndValue),
        };
        CacheShape { key_value_heads, head_dim, vectors }
    }
}

/// A model: its units, the placement of its parameters, and its configuration.
pub trait Model: Any + Debug + Send + Sync {
    /// Returns the value of `model_type` in the model's `config.json`.
    fn model_type(&self) -> &str;

    /// Returns the units in forward order; each reads the output of the one before.
    fn units(&self) -> Vec<Unit>;

    /// Records the forward of a unit and returns its output; the last unit ends in a loss or in logits. Names of
    /// parameters are relative to the unit's prefix.
    fn record(&self, unit: usize, g: &mut Recorder) -> Value;

    /// Returns the named inputs of a micro-batch besides its tokens, such as images and class labels.
    fn inputs(&self) -> Vec<InputDeclaration> {
        Vec::new()
    }

    /// Returns the tensor-parallel sharding of weights, by module within its unit; all other modules are replicated.
    fn placements(&self) -> Vec<(&'static str, Split)> {
        Vec::new()
    }

    /// Returns the parameters that repeat others.
    fn ties(&self) -> Vec<Tie> {
        Vec::new()
    }

    /// Returns the sizes that plans are checked against.
    fn sizes(&self) -> Sizes {
        Sizes::default()
    }

    /// Returns the keys of `config.json`, without `model_type` and the keys of special tokens. A model that its
    /// family's reader reads from these keys equals this one.
    fn table(&self) -> Map<String, Json>;

    /// Changes a table into the contents of a `config.json` that transformers loads.
    fn finish_json(&self, _table: &mut Map<String, Json>) {}

    /// Returns the class that transformers builds from the configuration; `None` for a model that it does not know, or whose
    /// table names the class.
    fn architecture(&self) -> Option<&str> {
        None
    }

    /// Checks all ranges and relations of the configuration and returns every problem.
    fn problems(&self) -> Vec<ConfigProblem> {
        Vec::new()
    }

    /// Removes keys of `table`, this model's, that are to be derived again if `overrides` replace others.
    fn forget_derived(&self, _table: &mut Map<String, Json>, _overrides: &Map<String, Json>) {}

    /// Returns the key that [`Model::table`] uses for `key` or its alias.
    fn canonical_key<'k>(&self, key: &'k str) -> &'k str {
        key
    }

    /// Returns the special token ids.
    fn tokens(&self) -> &SpecialTokens {
        const NONE: &SpecialTokens = &SpecialTokens { beginning: None, end: Vec::new(), padding: None };
        NONE
    }

    /// Returns the mixture-of-experts configuration; `None` for a dense model.
    fn experts(&self) -> Option<&ExpertsConfig> {
        None
    }

    /// Returns true if training applies dropout.
    fn has_dropout(&self) -> bool {
        false
    }

    /// Returns the model with all of its dropout probabilities set; `None` if it has none.
    fn with_dropout(&self, _probability: f64) -> Option<Arc<dyn Model>> {
        None
    }

    /// Returns the model without expert capacity, so that no slots are dropped; `None` if it has none.
    fn without_capacity(&self) -> Option<Arc<dyn Model>> {
        None
    }

    /// Returns the constants that its units read, such as the inverse frequencies of rotary embeddings.
    fn constants(&self) -> Vec<Constant> {
        Vec::new()
    }

    /// Returns the longest sequence, in tokens, up to which the rows of a batch are not [long](lockstep_graph::Batch::long_rows); `None` if
    /// that makes no difference.
    fn short_context(&self) -> Option<usize> {
        None
    }

    /// Returns the prefix of the base model's tensors in a checkpoint; checkpoints of the base model alone omit it.
    fn checkpoint_prefix(&self) -> &'static str {
        ""
    }

    /// Returns the tensors of a checkpoint, given the model's parameters; by default each has its parameter's name
    /// and layout.
    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        records.iter().filter(|record| record.tie.is_none()).map(HfTensor::same).collect()
    }

    /// Returns the name in [`Model::checkpoint_tensors`] of a checkpoint's tensor that may have an older one; `None` for a
    /// tensor that this model does not read, such as one of a head for another task.
    fn checkpoint_name<'n>(&self, name: &'n str) -> Option<Cow<'n, str>> {
        Some(Cow::Borrowed(name))
    }
}

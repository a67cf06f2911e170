//! The configuration of GPT-2 (Radford et al. 2019), in transformers' keys (`n_embd`, `n_head`, ...).
//!
//! transformers' own aliases (`hidden_size` for `n_embd` and so on) are read as well.

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::keys::{FIXED_FOR_ALL, FIXED_FOR_GPT2};
use super::limits::{Checks, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH};
use super::reader::Reader;
use super::tokens::SpecialTokens;
use crate::error::ConfigProblem;

/// A GPT-2: learned positions, LayerNorm before attention and feed-forward, GELU.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt2Config {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream (`n_embd`).
    pub hidden_size: usize,
    /// Width of the feed-forward layer (`n_inner`; by default four times the hidden size).
    pub intermediate_size: usize,
    /// Number of blocks (`n_layer`).
    pub num_hidden_layers: usize,
    /// Number of heads of a block (`n_head`).
    pub num_attention_heads: usize,
    /// Number of learned positions, and so the longest sequence in tokens (`n_positions`).
    pub max_position_embeddings: usize,
    /// Nonlinearity of the feed-forward layer (`activation_function`).
    pub activation: Activation,
    /// Epsilon that LayerNorm adds to the variance.
    pub layer_norm_epsilon: f64,
    /// True if linear layers and norms have biases (`bias`, an extension: nanoGPT has models without).
    ///
    /// transformers supports GPT-2 with biases only. A model without biases is exported with zero biases, which
    /// compute the same, and with `"bias": false` in its `config.json`, which transformers ignores. When it is read
    /// back, the biases must be zero or absent.
    pub bias: bool,
    /// Dropout probability on the sum of the embeddings (`embd_pdrop`).
    pub embedding_dropout: f64,
    /// Dropout probability on each output that a block adds to the residual stream (`resid_pdrop`).
    pub residual_dropout: f64,
    /// Dropout probability on attention probabilities (`attn_pdrop`).
    pub attention_dropout: f64,
    /// Standard deviation of initial weights; that of the two projections into the residual stream is divided by √(2 × blocks).
    pub initializer_range: f64,
    /// True if the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// Ids of the special tokens.
    pub tokens: SpecialTokens,
}

/// Pairs of (transformers' alias, key it stands for).
const ALIASES: [(&str, &str); 4] = [
    ("hidden_size", "n_embd"),
    ("max_position_embeddings", "n_positions"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
];

/// Returns the key that `key` is an alias of, or `key` itself.
pub(crate) fn canonical_key(key: &str) -> &str {
    ALIASES.iter().find(|(alias, _)| *alias == key).map_or(key, |(_, canonical)| canonical)
}

impl Gpt2Config {
    /// Number of elements of one head.
    pub const fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Sets all three dropout probabilities.
    #[must_use]
    pub const fn with_dropout(mut self, probability: f64) -> Self {
        self.embedding_dropout = probability;
        self.residual_dropout = probability;
        self.attention_dropout = probability;
        self
    }

    pub(crate) fn read(table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        reader.fixed(FIXED_FOR_ALL);
        reader.fixed(FIXED_FOR_GPT2);
        let hidden_size = aliased(&mut reader, "n_embd", 768);
        let config = Self {
            vocab_size: reader.size("vocab_size", 50257),
            hidden_size,
            intermediate_size: reader.size("n_inner", hidden_size.saturating_mul(4)),
            num_hidden_layers: aliased(&mut reader, "n_layer", 12),
            num_attention_heads: aliased(&mut reader, "n_head", 12),
            max_position_embeddings: aliased(&mut reader, "n_positions", 1024),
            activation: Activation::read(&mut reader, "activation_function", Activation::GeluTanh),
            layer_norm_epsilon: reader.number("layer_norm_epsilon", 1e-5),
            bias: reader.flag("bias", true),
            embedding_dropout: reader.number("embd_pdrop", 0.1),
            residual_dropout: reader.number("resid_pdrop", 0.1),
            attention_dropout: reader.number("attn_pdrop", 0.1),
            initializer_range: reader.number("initializer_range", 0.02),
            tie_word_embeddings: reader.flag("tie_word_embeddings", true),
            tokens: SpecialTokens::read(&mut reader),
        };
        (config, reader.finish())
    }

    /// Returns the keys of `config.json`, without those that all families have.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        let four_times = self.intermediate_size == 4 * self.hidden_size;
        let mut table = Map::new();
        let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
        put("vocab_size", json!(self.vocab_size));
        put("n_embd", json!(self.hidden_size));
        put("n_inner", if four_times { Value::Null } else { json!(self.intermediate_size) });
        put("n_layer", json!(self.num_hidden_layers));
        put("n_head", json!(self.num_attention_heads));
        put("n_positions", json!(self.max_position_embeddings));
        put("activation_function", json!(self.activation.name()));
        put("layer_norm_epsilon", json!(self.layer_norm_epsilon));
        put("embd_pdrop", json!(self.embedding_dropout));
        put("resid_pdrop", json!(self.residual_dropout));
        put("attn_pdrop", json!(self.attention_dropout));
        put("initializer_range", json!(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        if !self.bias {
            put("bias", json!(false));
        }
        table
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        checks.size("vocab_size", self.vocab_size, VOCABULARY);
        checks.size("n_embd", self.hidden_size, WIDTH);
        checks.size("n_inner", self.intermediate_size, WIDTH);
        checks.size("n_layer", self.num_hidden_layers, LAYERS);
        checks.size("n_head", self.num_attention_heads, HEADS);
        checks.size("n_positions", self.max_position_embeddings, POSITIONS);
        checks.divides(("n_head", self.num_attention_heads), ("n_embd", self.hidden_size));
        checks.epsilon("layer_norm_epsilon", self.layer_norm_epsilon);
        checks.fraction("embd_pdrop", self.embedding_dropout);
        checks.fraction("resid_pdrop", self.residual_dropout);
        checks.fraction("attn_pdrop", self.attention_dropout);
        checks.deviation("initializer_range", self.initializer_range);
        checks.problems
    }
}

/// Reads a size from `key` or its alias.
fn aliased(reader: &mut Reader<'_>, key: &'static str, default: usize) -> usize {
    let alias = ALIASES.iter().find(|(_, canonical)| *canonical == key).map_or(key, |(alias, _)| alias);
    reader.aliased_size(key, alias, default)
}

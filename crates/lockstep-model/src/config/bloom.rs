//! The configuration of BLOOM (BigScience, 2022), in transformers' keys (`n_layer`, `n_head`, ...).
//!
//! The keys of the published files (`n_embed`, `num_attention_heads`, `num_hidden_layers`) are read as well.

use serde_json::{Map, Value, json};

use super::keys::{FIXED_FOR_ALL, FIXED_FOR_BLOOM, HARMLESS_FOR_BLOOM};
use super::limits::{Checks, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH};
use super::reader::Reader;
use super::tokens::SpecialTokens;
use crate::error::ConfigProblem;

/// A BLOOM: a norm of the embedding, linear biases of attention for positions, GELU.
#[derive(Debug, Clone, PartialEq)]
pub struct BloomConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream. Feed-forward layers are four times as wide.
    pub hidden_size: usize,
    /// Number of blocks (`n_layer`).
    pub num_hidden_layers: usize,
    /// Number of heads of a block (`n_head`).
    pub num_attention_heads: usize,
    /// Longest sequence in tokens (`seq_length`, which transformers does not use).
    pub max_position_embeddings: usize,
    /// Epsilon that LayerNorm adds to the variance.
    pub layer_norm_epsilon: f64,
    /// True if attention and feed-forward are added to their normalized inputs, false if to the residual stream.
    pub apply_residual_connection_post_layernorm: bool,
    /// Dropout probability on attention probabilities.
    pub attention_dropout: f64,
    /// Dropout probability on each output that a block adds to the residual stream.
    pub hidden_dropout: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// True if the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// Ids of the special tokens.
    pub tokens: SpecialTokens,
}

/// Pairs of (alias, key it stands for).
const ALIASES: [(&str, &str); 3] =
    [("n_embed", "hidden_size"), ("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer")];

impl BloomConfig {
    /// Number of elements of one head.
    pub const fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Returns the key that `key` is an alias of, or `key` itself.
    pub(crate) fn canonical(key: &str) -> &str {
        ALIASES.iter().find(|(alias, _)| *alias == key).map_or(key, |(_, canonical)| canonical)
    }

    pub(crate) fn read(table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        reader.fixed(FIXED_FOR_ALL);
        reader.fixed(FIXED_FOR_BLOOM);
        reader.harmless(HARMLESS_FOR_BLOOM);
        let [hidden_size, num_attention_heads, num_hidden_layers] =
            [(ALIASES[0], 64), (ALIASES[1], 8), (ALIASES[2], 2)]
                .map(|((alias, key), default)| reader.aliased_size(key, alias, default));
        let config = Self {
            vocab_size: reader.size("vocab_size", 250_880),
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            max_position_embeddings: reader.size("seq_length", 2048),
            layer_norm_epsilon: reader.number("layer_norm_epsilon", 1e-5),
            apply_residual_connection_post_layernorm: reader
                .flag("apply_residual_connection_post_layernorm", false),
            attention_dropout: reader.number("attention_dropout", 0.0),
            hidden_dropout: reader.number("hidden_dropout", 0.0),
            initializer_range: reader.number("initializer_range", 0.02),
            tie_word_embeddings: reader.flag("tie_word_embeddings", true),
            tokens: SpecialTokens::read(&mut reader),
        };
        (config, reader.finish())
    }

    /// Returns the keys of `config.json`, without those that all families have.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        let mut table = Map::new();
        let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
        put("vocab_size", json!(self.vocab_size));
        put("hidden_size", json!(self.hidden_size));
        put("n_layer", json!(self.num_hidden_layers));
        put("n_head", json!(self.num_attention_heads));
        put("seq_length", json!(self.max_position_embeddings));
        put("layer_norm_epsilon", json!(self.layer_norm_epsilon));
        let is_post_norm = self.apply_residual_connection_post_layernorm;
        put("apply_residual_connection_post_layernorm", json!(is_post_norm));
        put("attention_dropout", json!(self.attention_dropout));
        put("hidden_dropout", json!(self.hidden_dropout));
        put("initializer_range", json!(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        table
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        checks.size("vocab_size", self.vocab_size, VOCABULARY);
        checks.size("hidden_size", self.hidden_size, WIDTH);
        checks.size("n_layer", self.num_hidden_layers, LAYERS);
        checks.size("n_head", self.num_attention_heads, HEADS);
        checks.size("seq_length", self.max_position_embeddings, POSITIONS);
        checks.divides(("n_head", self.num_attention_heads), ("hidden_size", self.hidden_size));
        checks.epsilon("layer_norm_epsilon", self.layer_norm_epsilon);
        checks.fraction("attention_dropout", self.attention_dropout);
        checks.fraction("hidden_dropout", self.hidden_dropout);
        checks.deviation("initializer_range", self.initializer_range);
        checks.problems
    }
}

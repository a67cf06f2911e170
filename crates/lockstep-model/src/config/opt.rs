//! The configuration of OPT (Zhang et al., 2022), in transformers' keys (`ffn_dim`, `init_std`, ...).

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::keys::{FIXED_FOR_ALL, FIXED_FOR_OPT};
use super::limits::{Checks, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH};
use super::reader::Reader;
use super::tokens::SpecialTokens;
use crate::error::ConfigProblem;

/// An OPT: learned positions, LayerNorm before or after attention and feed-forward, ReLU.
#[derive(Debug, Clone, PartialEq)]
pub struct OptConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the token embedding (`word_embed_proj_dim`); if it is not the hidden size, two layers without bias
    /// project from and to it.
    pub embedding_size: usize,
    /// Width of the feed-forward layer (`ffn_dim`).
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of heads of a block.
    pub num_attention_heads: usize,
    /// Longest sequence in tokens. The table of positions has two more rows than this.
    pub max_position_embeddings: usize,
    /// Nonlinearity of the feed-forward layer (`activation_function`).
    pub activation: Activation,
    /// True if norms are before attention and feed-forward, false if they are after the residual sums.
    pub do_layer_norm_before: bool,
    /// True if no norm precedes the output layer although the blocks' norms are before (`_remove_final_layer_norm`).
    pub remove_final_layer_norm: bool,
    /// True if the linear layers of blocks have biases (`enable_bias`).
    pub bias: bool,
    /// Dropout probability on each output that a block adds to the residual stream.
    pub dropout: f64,
    /// Dropout probability on attention probabilities.
    pub attention_dropout: f64,
    /// Standard deviation of initial weights (`init_std`).
    pub initializer_range: f64,
    /// True if the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// Ids of the special tokens.
    pub tokens: SpecialTokens,
}

impl OptConfig {
    /// Number of elements of one head.
    pub const fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Returns true if a norm precedes the output layer.
    pub const fn has_final_norm(&self) -> bool {
        self.do_layer_norm_before && !self.remove_final_layer_norm
    }

    pub(crate) fn read(table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        reader.fixed(FIXED_FOR_ALL);
        reader.fixed(FIXED_FOR_OPT);
        let hidden_size = reader.size("hidden_size", 768);
        let config = Self {
            vocab_size: reader.size("vocab_size", 50272),
            hidden_size,
            embedding_size: reader.size("word_embed_proj_dim", hidden_size),
            intermediate_size: reader.size("ffn_dim", 3072),
            num_hidden_layers: reader.size("num_hidden_layers", 12),
            num_attention_heads: reader.size("num_attention_heads", 12),
            max_position_embeddings: reader.size("max_position_embeddings", 2048),
            activation: Activation::read(&mut reader, "activation_function", Activation::Relu),
            do_layer_norm_before: reader.flag("do_layer_norm_before", true),
            remove_final_layer_norm: reader.flag("_remove_final_layer_norm", false),
            bias: reader.flag("enable_bias", true),
            dropout: reader.number("dropout", 0.1),
            attention_dropout: reader.number("attention_dropout", 0.0),
            initializer_range: reader.number("init_std", 0.02),
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
        put("word_embed_proj_dim", json!(self.embedding_size));
        put("ffn_dim", json!(self.intermediate_size));
        put("num_hidden_layers", json!(self.num_hidden_layers));
        put("num_attention_heads", json!(self.num_attention_heads));
        put("max_position_embeddings", json!(self.max_position_embeddings));
        put("activation_function", json!(self.activation.name()));
        put("do_layer_norm_before", json!(self.do_layer_norm_before));
        put("_remove_final_layer_norm", json!(self.remove_final_layer_norm));
        put("enable_bias", json!(self.bias));
        put("dropout", json!(self.dropout));
        put("attention_dropout", json!(self.attention_dropout));
        put("init_std", json!(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        table
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        checks.size("vocab_size", self.vocab_size, VOCABULARY);
        checks.size("hidden_size", self.hidden_size, WIDTH);
        checks.size("word_embed_proj_dim", self.embedding_size, WIDTH);
        checks.size("ffn_dim", self.intermediate_size, WIDTH);
        checks.size("num_hidden_layers", self.num_hidden_layers, LAYERS);
        checks.size("num_attention_heads", self.num_attention_heads, HEADS);
        checks.size("max_position_embeddings", self.max_position_embeddings, POSITIONS);
        checks.divides(("num_attention_heads", self.num_attention_heads), ("hidden_size", self.hidden_size));
        checks.fraction("dropout", self.dropout);
        checks.fraction("attention_dropout", self.attention_dropout);
        checks.deviation("init_std", self.initializer_range);
        checks.problems
    }
}

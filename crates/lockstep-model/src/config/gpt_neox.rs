//! The configuration of GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023), in transformers' keys.

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::keys::{FIXED_FOR_ALL, FIXED_FOR_NEOX};
use super::limits::{Checks, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH};
use super::reader::Reader;
use super::rope::{PART_KEY, Rope};
use super::tokens::SpecialTokens;
use crate::error::ConfigProblem;

/// A GPT-NeoX: attention and feed-forward read the same residual stream, and part of each head is rotated.
#[derive(Debug, Clone, PartialEq)]
pub struct GptNeoxConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of heads of a block.
    pub num_attention_heads: usize,
    /// Longest sequence in tokens.
    pub max_position_embeddings: usize,
    /// Nonlinearity of the feed-forward layer (`hidden_act`).
    pub activation: Activation,
    /// Epsilon that LayerNorm adds to the variance.
    pub layer_norm_eps: f64,
    /// True if attention and feed-forward both read the block's input; false if the feed-forward reads attention's sum.
    pub use_parallel_residual: bool,
    /// True if queries, keys, values and attention's output have biases.
    pub attention_bias: bool,
    /// Rotary position embedding (`rotary_emb_base` and `rope_scaling`, or `rope_parameters`).
    pub rope: Rope,
    /// Fraction of each head's elements that rotate (`rotary_pct`), in (0, 1].
    pub rotary_fraction: f64,
    /// Dropout probability on attention probabilities.
    pub attention_dropout: f64,
    /// Dropout probability on the embedding and on each output that a block adds to the residual stream.
    pub hidden_dropout: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// True if the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// Ids of the special tokens.
    pub tokens: SpecialTokens,
}

impl GptNeoxConfig {
    /// Number of elements of one head.
    pub const fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Number of elements of one head that rotate: the first ones.
    pub const fn rotary_dim(&self) -> usize {
        (self.head_dim() as f64 * self.rotary_fraction) as usize
    }

    pub(crate) fn read(table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        reader.fixed(FIXED_FOR_ALL);
        reader.fixed(FIXED_FOR_NEOX);
        let max_position_embeddings = reader.size("max_position_embeddings", 2048);
        let part = Some(("rotary_pct", 0.25));
        let (rope, rotary_fraction) =
            Rope::read_with(&mut reader, max_position_embeddings, "rotary_emb_base", part);
        let config = Self {
            vocab_size: reader.size("vocab_size", 50432),
            hidden_size: reader.size("hidden_size", 6144),
            intermediate_size: reader.size("intermediate_size", 24576),
            num_hidden_layers: reader.size("num_hidden_layers", 44),
            num_attention_heads: reader.size("num_attention_heads", 64),
            max_position_embeddings,
            activation: Activation::read(&mut reader, "hidden_act", Activation::GeluExact),
            layer_norm_eps: reader.number("layer_norm_eps", 1e-5),
            use_parallel_residual: reader.flag("use_parallel_residual", true),
            attention_bias: reader.flag("attention_bias", true),
            rope,
            rotary_fraction,
            attention_dropout: reader.number("attention_dropout", 0.0),
            hidden_dropout: reader.number("hidden_dropout", 0.0),
            initializer_range: reader.number("initializer_range", 0.02),
            tie_word_embeddings: reader.flag("tie_word_embeddings", false),
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
        put("intermediate_size", json!(self.intermediate_size));
        put("num_hidden_layers", json!(self.num_hidden_layers));
        put("num_attention_heads", json!(self.num_attention_heads));
        put("max_position_embeddings", json!(self.max_position_embeddings));
        put("hidden_act", json!(self.activation.name()));
        put("layer_norm_eps", json!(self.layer_norm_eps));
        put("use_parallel_residual", json!(self.use_parallel_residual));
        put("attention_bias", json!(self.attention_bias));
        put("rotary_pct", json!(self.rotary_fraction));
        put("attention_dropout", json!(self.attention_dropout));
        put("hidden_dropout", json!(self.hidden_dropout));
        put("initializer_range", json!(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        self.rope.write_form_4("rotary_emb_base", &mut table);
        table
    }

    /// Adds form 5 of the RoPE settings.
    pub(crate) fn write_rope(&self, table: &mut Map<String, Value>) {
        self.rope.write_form_5(table);
        table["rope_parameters"][PART_KEY] = json!(self.rotary_fraction);
    }

    /// Removes RoPE's keys of the top level that `overrides` replaces by form 5.
    pub(crate) fn forget_rope(table: &mut Map<String, Value>, overrides: &Map<String, Value>) {
        let rope = overrides.get("rope_parameters");
        for (key, inner) in [("rotary_emb_base", "rope_theta"), ("rotary_pct", PART_KEY)] {
            if rope.and_then(|rope| rope.get(inner)).is_some() {
                table.remove(key);
            }
        }
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        checks.size("vocab_size", self.vocab_size, VOCABULARY);
        checks.size("hidden_size", self.hidden_size, WIDTH);
        checks.size("intermediate_size", self.intermediate_size, WIDTH);
        checks.size("num_hidden_layers", self.num_hidden_layers, LAYERS);
        checks.size("num_attention_heads", self.num_attention_heads, HEADS);
        checks.size("max_position_embeddings", self.max_position_embeddings, POSITIONS);
        checks.divides(("num_attention_heads", self.num_attention_heads), ("hidden_size", self.hidden_size));
        checks.part("rotary_pct", self.rotary_fraction);
        if self.num_attention_heads != 0 && self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let (rotated, head_dim) = (self.rotary_dim(), self.head_dim());
            if rotated == 0 || !rotated.is_multiple_of(2) {
                checks.conflict(format!(
                    "`rotary_pct` = {} rotates {rotated} of {head_dim} elements of a head; elements rotate in pairs",
                    self.rotary_fraction
                ));
            }
            if rotated != head_dim && self.rope.attention_factor() != 1.0 {
                checks.conflict(format!(
                    "YaRN scales the scores of {rotated} of {head_dim} elements of a head; it needs `rotary_pct` = 1"
                ));
            }
        }
        checks.epsilon("layer_norm_eps", self.layer_norm_eps);
        checks.fraction("attention_dropout", self.attention_dropout);
        checks.fraction("hidden_dropout", self.hidden_dropout);
        checks.deviation("initializer_range", self.initializer_range);
        checks.problems.extend(self.rope.problems());
        checks.problems
    }
}

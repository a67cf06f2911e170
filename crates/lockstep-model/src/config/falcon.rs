//! The configuration of Falcon (Almazrouei et al., 2023), in transformers' keys.
//!
//! Three architectures share the keys: that of the 7B model, the grouped one of the 40B, 180B and 11B models
//! (`new_decoder_architecture`), and that of the RW models with linear biases of attention (`alibi`).

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::keys::{FIXED_FOR_ALL, FIXED_FOR_FALCON, HARMLESS_FOR_FALCON};
use super::limits::{Checks, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH};
use super::reader::Reader;
use super::rope::Rope;
use super::tokens::SpecialTokens;
use crate::error::ConfigProblem;

/// A Falcon: multi-query or grouped attention, mostly beside the feed-forward layer.
#[derive(Debug, Clone, PartialEq)]
pub struct FalconConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer (`ffn_hidden_size`; by default four times the hidden size).
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads of a block.
    pub num_attention_heads: usize,
    /// Number of key/value heads of a block: `num_kv_heads` in the new architecture, else 1 with `multi_query` and as
    /// many as query heads without.
    pub num_key_value_heads: usize,
    /// Longest sequence in tokens.
    pub max_position_embeddings: usize,
    /// Architecture of the 40B model, which allows any number of key/value heads and two norms.
    pub new_decoder_architecture: bool,
    /// Inputs of attention and feed-forward (`parallel_attn` and `num_ln_in_parallel_attn`).
    pub residual: FalconResidual,
    /// Nonlinearity of the feed-forward layer.
    pub activation: Activation,
    /// Epsilon that LayerNorm adds to the variance.
    pub layer_norm_epsilon: f64,
    /// True if linear layers have biases; norms have them in any case.
    pub bias: bool,
    /// True if positions enter as linear biases of attention, false if by RoPE.
    pub alibi: bool,
    /// Rotary position embedding, unused with `alibi`.
    pub rope: Rope,
    /// Dropout probability on attention probabilities with `alibi`, and on attention's output before a sequential
    /// feed-forward layer; transformers applies it nowhere else.
    pub attention_dropout: f64,
    /// Dropout probability on each output that a block adds to the residual stream, beside a sequential attention's.
    pub hidden_dropout: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// True if the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// Ids of the special tokens.
    pub tokens: SpecialTokens,
}

/// Inputs of attention and feed-forward of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FalconResidual {
    /// The feed-forward layer reads the sum with attention, after a norm of its own.
    Sequential,
    /// Both read one norm of the block's input.
    ParallelOneNorm,
    /// Both read the block's input, each after a norm of its own.
    ParallelTwoNorms,
}

impl FalconConfig {
    /// Number of elements of one head.
    pub const fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    pub(crate) fn read(table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        reader.fixed(FIXED_FOR_ALL);
        reader.fixed(FIXED_FOR_FALCON);
        reader.harmless(HARMLESS_FOR_FALCON);
        let hidden_size = reader.aliased_size("hidden_size", "n_embed", 4544);
        let heads = reader.size("num_attention_heads", 71);
        let max_position_embeddings = reader.size("max_position_embeddings", 2048);
        let new_decoder_architecture = reader.flag("new_decoder_architecture", false);
        let config = Self {
            vocab_size: reader.size("vocab_size", 65024),
            hidden_size,
            intermediate_size: reader.size("ffn_hidden_size", hidden_size.saturating_mul(4)),
            num_hidden_layers: reader.size("num_hidden_layers", 32),
            num_attention_heads: heads,
            num_key_value_heads: read_key_value_heads(&mut reader, new_decoder_architecture, heads),
            max_position_embeddings,
            new_decoder_architecture,
            residual: read_residual(&mut reader, new_decoder_architecture),
            activation: Activation::read(&mut reader, "activation", Activation::GeluExact),
            layer_norm_epsilon: reader.number("layer_norm_epsilon", 1e-5),
            bias: reader.flag("bias", false),
            alibi: reader.flag("alibi", false),
            rope: Rope::read(&mut reader, max_position_embeddings),
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
        let four_times = self.intermediate_size == 4 * self.hidden_size;
        let is_new = self.new_decoder_architecture;
        let is_parallel = self.residual != FalconResidual::Sequential;
        let norms = if self.residual == FalconResidual::ParallelTwoNorms { 2 } else { 1 };
        let mut table = Map::new();
        let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
        put("vocab_size", json!(self.vocab_size));
        put("hidden_size", json!(self.hidden_size));
        put("ffn_hidden_size", if four_times { Value::Null } else { json!(self.intermediate_size) });
        put("num_hidden_layers", json!(self.num_hidden_layers));
        put("num_attention_heads", json!(self.num_attention_heads));
        put("num_kv_heads", if is_new { json!(self.num_key_value_heads) } else { Value::Null });
        put("max_position_embeddings", json!(self.max_position_embeddings));
        put("new_decoder_architecture", json!(is_new));
        put("multi_query", json!(is_new || self.num_key_value_heads == 1));
        put("parallel_attn", json!(is_parallel));
        put("num_ln_in_parallel_attn", if is_new { json!(norms) } else { Value::Null });
        put("activation", json!(self.activation.name()));
        put("layer_norm_epsilon", json!(self.layer_norm_epsilon));
        put("bias", json!(self.bias));
        put("alibi", json!(self.alibi));
        put("attention_dropout", json!(self.attention_dropout));
        put("hidden_dropout", json!(self.hidden_dropout));
        put("initializer_range", json!(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        self.rope.write_form_4("rope_theta", &mut table);
        table
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        let (heads, key_value_heads) = (self.num_attention_heads, self.num_key_value_heads);
        checks.size("vocab_size", self.vocab_size, VOCABULARY);
        checks.size("hidden_size", self.hidden_size, WIDTH);
        checks.size("ffn_hidden_size", self.intermediate_size, WIDTH);
        checks.size("num_hidden_layers", self.num_hidden_layers, LAYERS);
        checks.size("num_attention_heads", heads, HEADS);
        checks.size("num_kv_heads", key_value_heads, HEADS);
        checks.size("max_position_embeddings", self.max_position_embeddings, POSITIONS);
        checks.divides(("num_attention_heads", heads), ("hidden_size", self.hidden_size));
        checks.divides(("num_kv_heads", key_value_heads), ("num_attention_heads", heads));
        if !self.alibi && heads != 0 && self.hidden_size.is_multiple_of(heads) {
            checks.divides(("RoPE's pair of elements", 2), ("the head size", self.head_dim()));
        }
        if !self.new_decoder_architecture && key_value_heads != 1 && key_value_heads != heads {
            checks.conflict(format!(
                "{key_value_heads} key/value heads for {heads} heads need `new_decoder_architecture` = true"
            ));
        }
        if self.new_decoder_architecture && self.residual == FalconResidual::Sequential {
            checks.conflict("`new_decoder_architecture` = true needs `parallel_attn` = true".to_owned());
        }
        if !self.new_decoder_architecture && self.residual == FalconResidual::ParallelTwoNorms {
            checks
                .conflict("`num_ln_in_parallel_attn` = 2 needs `new_decoder_architecture` = true".to_owned());
        }
        checks.epsilon("layer_norm_epsilon", self.layer_norm_epsilon);
        checks.fraction("attention_dropout", self.attention_dropout);
        checks.fraction("hidden_dropout", self.hidden_dropout);
        checks.deviation("initializer_range", self.initializer_range);
        checks.problems.extend(self.rope.problems());
        checks.problems
    }
}

/// Reads the number of key/value heads. `multi_query` has no effect in the new architecture, and `num_kv_heads` none in
/// the old one, where it may only repeat the number of heads or be what `multi_query` says.
fn read_key_value_heads(reader: &mut Reader<'_>, is_new: bool, heads: usize) -> usize {
    let given = reader.optional_size("num_kv_heads").given();
    let multi_query = reader.flag("multi_query", true);
    if is_new {
        return given.unwrap_or(heads);
    }
    let derived = if multi_query { 1 } else { heads };
    if let Some(given) = given.filter(|given| ![derived, heads].contains(given)) {
        reader.conflict(format!(
            "`num_kv_heads` = {given} has no effect without `new_decoder_architecture`; `multi_query` = {multi_query} \
             means {derived}"
        ));
    }
    derived
}

/// Reads the inputs of attention and feed-forward.
fn read_residual(reader: &mut Reader<'_>, is_new: bool) -> FalconResidual {
    let is_parallel = reader.flag("parallel_attn", true);
    let norms = reader.size("num_ln_in_parallel_attn", if is_new { 2 } else { 1 });
    match (is_parallel, norms) {
        (false, _) => FalconResidual::Sequential,
        (true, 1) => FalconResidual::ParallelOneNorm,
        (true, 2) => FalconResidual::ParallelTwoNorms,
        (true, _) => {
            reader.unsupported("num_ln_in_parallel_attn", "1 or 2");
            FalconResidual::ParallelOneNorm
        }
    }
}

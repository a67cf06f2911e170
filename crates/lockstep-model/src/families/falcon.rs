//! Falcon: attention with one key/value head or groups of them, side by side with the feed-forward layer; rotary
//! positions, or linear biases of attention in the RW models (Almazrouei et al., 2023, section 4).

use std::sync::Arc;

use lockstep_graph::{AttentionOptions, BatchInput, Constant, Linear, Recorder, Split, Value};
use lockstep_plan::ParameterRecord;
use lockstep_tensor::alibi_slopes;
use serde_json::{Map, Value as Json};

use super::fused::FusedHeads;
use crate::config::{FalconConfig, FalconResidual, INVERSE_FREQUENCIES, SpecialTokens};
use crate::error::ConfigProblem;
use crate::hf_tensor::HfTensor;
use crate::model::{Model, Sizes, Tie, Unit};

impl FalconConfig {
    fn linear(&self, g: &mut Recorder, x: Value, name: &str, out_features: usize) -> Value {
        let std = self.initializer_range as f32;
        g.linear(x, Linear { name, out_features, bias: self.bias.into(), std })
    }

    fn norm(&self, g: &mut Recorder, x: Value, name: &str) -> Value {
        g.layer_norm(x, name, true.into(), self.layer_norm_epsilon as f32)
    }

    fn heads(&self) -> FusedHeads {
        let (heads, key_value_heads) = (self.num_attention_heads, self.num_key_value_heads);
        FusedHeads { heads, key_value_heads, head_dim: self.head_dim() }
    }

    fn attention(&self, g: &mut Recorder, x: Value) -> Value {
        let linear = |g: &mut Recorder, name: &str, out| self.linear(g, x, name, out);
        let [q, k, v] = self.heads().project(g, linear, "self_attention");
        let mut shape = self.heads().shape();
        let attended = if self.alibi {
            let (dropout, slopes) = (self.attention_dropout as f32, g.constant("alibi_slopes"));
            let options = AttentionOptions { dropout, alibi_slopes: Some(slopes), ..Default::default() };
            g.attention(q, k, v, shape, options)
        } else {
            let frequencies = g.constant(INVERSE_FREQUENCIES);
            let [q, k] = [q, k].map(|x| g.rope(x, self.head_dim(), frequencies));
            shape.scale *= (self.rope.attention_factor() * self.rope.attention_factor()) as f32;
            g.attention(q, k, v, shape, AttentionOptions::default())
        };
        self.linear(g, attended, "self_attention.dense", self.hidden_size)
    }

    fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let wide = self.linear(g, x, "mlp.dense_h_to_4h", self.intermediate_size);
        let active = self.activation.record(g, wide);
        self.linear(g, active, "mlp.dense_4h_to_h", self.hidden_size)
    }

    fn block(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let (residual, added) = match self.residual {
            FalconResidual::Sequential => {
                let normed = self.norm(g, x, "input_layernorm");
                let attended = self.attention(g, normed);
                let attended = g.dropout(attended, self.attention_dropout as f32);
                let x = g.add(x, attended);
                let normed = self.norm(g, x, "post_attention_layernorm");
                (x, self.feed_forward(g, normed))
            }
            FalconResidual::ParallelOneNorm => {
                let normed = self.norm(g, x, "input_layernorm");
                let attended = self.attention(g, normed);
                let fed = self.feed_forward(g, normed);
                (x, g.add(fed, attended))
            }
            FalconResidual::ParallelTwoNorms => {
                let normed = self.norm(g, x, "ln_attn");
                let attended = self.attention(g, normed);
                let normed = self.norm(g, x, "ln_mlp");
                let fed = self.feed_forward(g, normed);
                (x, g.add(fed, attended))
            }
        };
        let added = g.dropout(added, self.hidden_dropout as f32);
        g.add(residual, added)
    }

    fn head(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "transformer.ln_f");
        let (out_features, std) = (self.vocab_size, self.initializer_range as f32);
        g.language_model_head(normed, Linear { name: "lm_head", out_features, bias: false.into(), std }, None)
    }

    /// Returns the slopes of linear biases, `[heads]`. As in transformers, they have the precision of bf16, and are
    /// scaled like the scores.
    fn slopes(&self) -> Vec<f32> {
        let scale = (self.head_dim() as f32).powf(-0.5);
        let in_bf16 = |slope: f32| {
            let bits = slope.to_bits();
            f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
        };
        alibi_slopes(self.num_attention_heads).into_iter().map(|slope| in_bf16(slope) * scale).collect()
    }
}

impl Model for FalconConfig {
    fn model_type(&self) -> &str {
        "falcon"
    }

    fn units(&self) -> Vec<Unit> {
        Unit::decoder("transformer.", self.num_hidden_layers, |layer| (format!("transformer.h.{layer}."), 0))
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        let std = self.initializer_range as f32;
        match unit {
            0 => g.embedding(BatchInput::Ids, "word_embeddings", self.vocab_size, self.hidden_size, std),
            unit if unit <= self.num_hidden_layers => self.block(g),
            _ => self.head(g),
        }
    }

    fn placements(&self) -> Vec<(&'static str, Split)> {
        let heads = Split::ColumnParallel { pieces: self.num_attention_heads };
        let key_value_heads = Split::ColumnParallel { pieces: self.num_key_value_heads };
        let features = Split::ColumnParallel { pieces: self.intermediate_size };
        vec![
            ("word_embeddings", Split::VocabularyParallel),
            ("self_attention.query", heads),
            ("self_attention.key", key_value_heads),
            ("self_attention.value", key_value_heads),
            ("self_attention.dense", Split::RowParallel),
            ("mlp.dense_h_to_4h", features),
            ("mlp.dense_4h_to_h", Split::RowParallel),
            ("lm_head", Split::VocabularyParallel),
        ]
    }

    fn ties(&self) -> Vec<Tie> {
        let head = self.num_hidden_layers + 1;
        Tie::output_layer(self.tie_word_embeddings, head, "transformer.word_embeddings.weight")
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            layers: self.num_hidden_layers,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            heads: self.num_attention_heads,
            key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim(),
            positions: self.max_position_embeddings,
            original_positions: self.rope.scaling.original_context(),
            ..Sizes::default()
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn finish_json(&self, table: &mut Map<String, Json>) {
        self.rope.write_form_5(table);
    }

    fn architecture(&self) -> Option<&str> {
        Some("FalconForCausalLM")
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn forget_derived(&self, table: &mut Map<String, Json>, overrides: &Map<String, Json>) {
        let changes = |key: &str, now: Json| overrides.get(key).is_some_and(|value| *value != now);
        let is_other = changes("new_decoder_architecture", self.new_decoder_architecture.into());
        let heads_change = changes("num_attention_heads", self.num_attention_heads.into());
        if is_other || (heads_change && self.num_key_value_heads == self.num_attention_heads) {
            table.insert("num_kv_heads".into(), Json::Null);
        }
        if is_other {
            table.insert("num_ln_in_parallel_attn".into(), Json::Null);
        }
    }

    fn canonical_key<'k>(&self, key: &'k str) -> &'k str {
        if key == "n_embed" { "hidden_size" } else { key }
    }

    fn tokens(&self) -> &SpecialTokens {
        &self.tokens
    }

    fn has_dropout(&self) -> bool {
        self.attention_dropout + self.hidden_dropout > 0.0
    }

    fn with_dropout(&self, probability: f64) -> Option<Arc<dyn Model>> {
        let (attention_dropout, hidden_dropout) = (probability, probability);
        Some(Arc::new(Self { attention_dropout, hidden_dropout, ..self.clone() }))
    }

    fn constants(&self) -> Vec<Constant> {
        vec![if self.alibi {
            Constant::new("alibi_slopes", self.slopes())
        } else {
            Constant::new(INVERSE_FREQUENCIES, self.rope.inverse_frequencies(self.head_dim()))
        }]
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "transformer."
    }

    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        self.heads().tensors(records)
    }
}

//! BLOOM: linear biases of attention for positions (Press et al., 2022), a LayerNorm after the embedding and before
//! attention and feed-forward, GELU by tanh (BigScience, 2022, section 3.2).

use std::sync::Arc;

use lockstep_graph::{AttentionOptions, BatchInput, Constant, Linear, Recorder, Split, Value};
use lockstep_plan::ParameterRecord;
use lockstep_tensor::alibi_slopes;
use serde_json::{Map, Value as Json};

use super::fused::FusedHeads;
use crate::config::{Activation, BloomConfig, SpecialTokens};
use crate::error::ConfigProblem;
use crate::hf_tensor::HfTensor;
use crate::model::{Model, Sizes, Tie, Unit};

impl BloomConfig {
    fn linear(&self, g: &mut Recorder, x: Value, name: &str, out_features: usize) -> Value {
        let std = self.initializer_range as f32;
        g.linear(x, Linear { name, out_features, bias: true.into(), std })
    }

    fn norm(&self, g: &mut Recorder, x: Value, name: &str) -> Value {
        g.layer_norm(x, name, true.into(), self.layer_norm_epsilon as f32)
    }

    fn heads(&self) -> FusedHeads {
        let heads = self.num_attention_heads;
        FusedHeads { heads, key_value_heads: heads, head_dim: self.head_dim() }
    }

    fn attention(&self, g: &mut Recorder, x: Value) -> Value {
        let linear = |g: &mut Recorder, name: &str, out| self.linear(g, x, name, out);
        let [q, k, v] = self.heads().project(g, linear, "self_attention");
        let options = AttentionOptions {
            dropout: self.attention_dropout as f32,
            alibi_slopes: Some(g.constant("alibi_slopes")),
            ..Default::default()
        };
        let attended = g.attention(q, k, v, self.heads().shape(), options);
        let attended = self.linear(g, attended, "self_attention.dense", self.hidden_size);
        g.dropout(attended, self.hidden_dropout as f32)
    }

    fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let wide = self.linear(g, x, "mlp.dense_h_to_4h", 4 * self.hidden_size);
        let active = Activation::GeluTanh.record(g, wide);
        let fed = self.linear(g, active, "mlp.dense_4h_to_h", self.hidden_size);
        g.dropout(fed, self.hidden_dropout as f32)
    }

    fn embedding(&self, g: &mut Recorder) -> Value {
        let std = self.initializer_range as f32;
        let x = g.embedding(BatchInput::Ids, "word_embeddings", self.vocab_size, self.hidden_size, std);
        self.norm(g, x, "word_embeddings_layernorm")
    }

    fn block(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let residual = |x, normed| if self.apply_residual_connection_post_layernorm { normed } else { x };
        let normed = self.norm(g, x, "input_layernorm");
        let attended = self.attention(g, normed);
        let x = g.add(residual(x, normed), attended);
        let normed = self.norm(g, x, "post_attention_layernorm");
        let fed = self.feed_forward(g, normed);
        g.add(residual(x, normed), fed)
    }

    fn head(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "transformer.ln_f");
        let (out_features, std) = (self.vocab_size, self.initializer_range as f32);
        g.language_model_head(normed, Linear { name: "lm_head", out_features, bias: false.into(), std }, None)
    }
}

impl Model for BloomConfig {
    fn model_type(&self) -> &str {
        "bloom"
    }

    fn units(&self) -> Vec<Unit> {
        Unit::decoder("transformer.", self.num_hidden_layers, |layer| (format!("transformer.h.{layer}."), 0))
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        match unit {
            0 => self.embedding(g),
            unit if unit <= self.num_hidden_layers => self.block(g),
            _ => self.head(g),
        }
    }

    fn placements(&self) -> Vec<(&'static str, Split)> {
        let heads = Split::ColumnParallel { pieces: self.num_attention_heads };
        let features = Split::ColumnParallel { pieces: 4 * self.hidden_size };
        vec![
            ("word_embeddings", Split::VocabularyParallel),
            ("self_attention.query", heads),
            ("self_attention.key", heads),
            ("self_attention.value", heads),
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
            intermediate: 4 * self.hidden_size,
            heads: self.num_attention_heads,
            key_value_heads: self.num_attention_heads,
            head_dim: self.head_dim(),
            positions: self.max_position_embeddings,
            ..Sizes::default()
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn architecture(&self) -> Option<&str> {
        Some("BloomForCausalLM")
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn canonical_key<'k>(&self, key: &'k str) -> &'k str {
        Self::canonical(key)
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
        vec![Constant::new("alibi_slopes", alibi_slopes(self.num_attention_heads))]
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "transformer."
    }

    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        self.heads().tensors(records)
    }
}

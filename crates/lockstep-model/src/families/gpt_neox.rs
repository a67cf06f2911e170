//! GPT-NeoX and Pythia: attention and feed-forward side by side, each after a LayerNorm of the block's input; rotary
//! positions on a part of each head (Black et al., 2022, section 2.1).

use std::sync::Arc;

use lockstep_graph::{AttentionOptions, BatchInput, Constant, Linear, Recorder, Split, Value};
use lockstep_plan::ParameterRecord;
use serde_json::{Map, Value as Json};

use super::fused::FusedHeads;
use crate::config::{GptNeoxConfig, INVERSE_FREQUENCIES, SpecialTokens};
use crate::error::ConfigProblem;
use crate::hf_tensor::HfTensor;
use crate::model::{Model, Sizes, Tie, Unit};

impl GptNeoxConfig {
    fn linear(&self, g: &mut Recorder, x: Value, name: &str, out_features: usize, bias: bool) -> Value {
        let std = self.initializer_range as f32;
        g.linear(x, Linear { name, out_features, bias: bias.into(), std })
    }

    fn norm(&self, g: &mut Recorder, x: Value, name: &str) -> Value {
        g.layer_norm(x, name, true.into(), self.layer_norm_eps as f32)
    }

    fn heads(&self) -> FusedHeads {
        let heads = self.num_attention_heads;
        FusedHeads { heads, key_value_heads: heads, head_dim: self.head_dim() }
    }

    fn attention(&self, g: &mut Recorder, x: Value) -> Value {
        let linear = |g: &mut Recorder, name: &str, out| self.linear(g, x, name, out, self.attention_bias);
        let [q, k, v] = self.heads().project(g, linear, "attention");
        let frequencies = g.constant(INVERSE_FREQUENCIES);
        let [q, k] = [q, k].map(|x| g.rope(x, self.head_dim(), frequencies));
        let mut shape = self.heads().shape();
        shape.scale *= (self.rope.attention_factor() * self.rope.attention_factor()) as f32;
        let options = AttentionOptions { dropout: self.attention_dropout as f32, ..Default::default() };
        let attended = g.attention(q, k, v, shape, options);
        let attended = self.linear(g, attended, "attention.dense", self.hidden_size, self.attention_bias);
        g.dropout(attended, self.hidden_dropout as f32)
    }

    fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let wide = self.linear(g, x, "mlp.dense_h_to_4h", self.intermediate_size, true);
        let active = self.activation.record(g, wide);
        let fed = self.linear(g, active, "mlp.dense_4h_to_h", self.hidden_size, true);
        g.dropout(fed, self.hidden_dropout as f32)
    }

    fn embedding(&self, g: &mut Recorder) -> Value {
        let std = self.initializer_range as f32;
        let x = g.embedding(BatchInput::Ids, "embed_in", self.vocab_size, self.hidden_size, std);
        g.dropout(x, self.hidden_dropout as f32)
    }

    fn block(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "input_layernorm");
        let attended = self.attention(g, normed);
        let sum = g.add(x, attended);
        let fed = if self.use_parallel_residual { x } else { sum };
        let normed = self.norm(g, fed, "post_attention_layernorm");
        let fed = self.feed_forward(g, normed);
        g.add(sum, fed)
    }

    fn head(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "gpt_neox.final_layer_norm");
        let (out_features, std) = (self.vocab_size, self.initializer_range as f32);
        g.language_model_head(
            normed,
            Linear { name: "embed_out", out_features, bias: false.into(), std },
            None,
        )
    }
}

impl Model for GptNeoxConfig {
    fn model_type(&self) -> &str {
        "gpt_neox"
    }

    fn units(&self) -> Vec<Unit> {
        let block = |layer| (format!("gpt_neox.layers.{layer}."), 0);
        Unit::decoder("gpt_neox.", self.num_hidden_layers, block)
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
        let features = Split::ColumnParallel { pieces: self.intermediate_size };
        vec![
            ("embed_in", Split::VocabularyParallel),
            ("attention.query", heads),
            ("attention.key", heads),
            ("attention.value", heads),
            ("attention.dense", Split::RowParallel),
            ("mlp.dense_h_to_4h", features),
            ("mlp.dense_4h_to_h", Split::RowParallel),
            ("embed_out", Split::VocabularyParallel),
        ]
    }

    fn ties(&self) -> Vec<Tie> {
        let head = self.num_hidden_layers + 1;
        Tie::of(self.tie_word_embeddings, head, "embed_out.weight", "gpt_neox.embed_in.weight")
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            layers: self.num_hidden_layers,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            heads: self.num_attention_heads,
            key_value_heads: self.num_attention_heads,
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
        self.write_rope(table);
    }

    fn architecture(&self) -> Option<&str> {
        Some("GPTNeoXForCausalLM")
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn forget_derived(&self, table: &mut Map<String, Json>, overrides: &Map<String, Json>) {
        Self::forget_rope(table, overrides);
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
        vec![Constant::new(INVERSE_FREQUENCIES, self.rope.inverse_frequencies(self.rotary_dim()))]
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "gpt_neox."
    }

    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        self.heads().tensors(records)
    }
}

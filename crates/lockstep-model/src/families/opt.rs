//! OPT: learned positions, LayerNorm before attention and feed-forward (after the residual sums in the model of 350
//! million parameters), ReLU (Zhang et al., 2022, section 2.1).

use std::sync::Arc;

use lockstep_graph::{AttentionOptions, AttentionShape, BatchInput, Linear, Recorder, Split, Value};
use serde_json::{Map, Value as Json};

use crate::config::{OptConfig, SpecialTokens};
use crate::error::ConfigProblem;
use crate::model::{Model, Sizes, Tie, Unit};

/// Rows of the table of positions before that of position 0, which fairseq left for padding.
const ROWS_BEFORE_POSITIONS: usize = 2;

/// Epsilon of all norms; the configuration has no key for it.
const EPSILON: f32 = 1e-5;

impl OptConfig {
    fn linear(&self, g: &mut Recorder, x: Value, name: &str, out_features: usize, bias: bool) -> Value {
        let std = self.initializer_range as f32;
        g.linear(x, Linear { name, out_features, bias: bias.into(), std })
    }

    fn attention(&self, g: &mut Recorder, x: Value) -> Value {
        let (hidden, heads, bias) = (self.hidden_size, self.num_attention_heads, self.bias);
        let q = self.linear(g, x, "self_attn.q_proj", hidden, bias);
        let k = self.linear(g, x, "self_attn.k_proj", hidden, bias);
        let v = self.linear(g, x, "self_attn.v_proj", hidden, bias);
        let options = AttentionOptions { dropout: self.attention_dropout as f32, ..Default::default() };
        let attended = g.attention(q, k, v, AttentionShape::new(heads, heads, self.head_dim()), options);
        self.linear(g, attended, "self_attn.out_proj", hidden, bias)
    }

    fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let wide = self.linear(g, x, "fc1", self.intermediate_size, self.bias);
        let active = self.activation.record(g, wide);
        self.linear(g, active, "fc2", self.hidden_size, self.bias)
    }

    /// Adds `part` of `x` to `x`, with a norm of the input of `part` or of the sum.
    fn add(
        &self,
        g: &mut Recorder,
        x: Value,
        norm: &str,
        part: impl Fn(&Self, &mut Recorder, Value) -> Value,
    ) -> Value {
        let normed = if self.do_layer_norm_before { g.layer_norm(x, norm, true.into(), EPSILON) } else { x };
        let y = part(self, g, normed);
        let y = g.dropout(y, self.dropout as f32);
        let sum = g.add(x, y);
        if self.do_layer_norm_before { sum } else { g.layer_norm(sum, norm, true.into(), EPSILON) }
    }

    fn embedding(&self, g: &mut Recorder) -> Value {
        let (hidden, std) = (self.hidden_size, self.initializer_range as f32);
        let mut token =
            g.embedding(BatchInput::Ids, "embed_tokens", self.vocab_size, self.embedding_size, std);
        if self.embedding_size != hidden {
            token = self.linear(g, token, "project_in", hidden, false);
        }
        let rows = ROWS_BEFORE_POSITIONS + self.max_position_embeddings;
        let positions = BatchInput::PositionsFrom { row: ROWS_BEFORE_POSITIONS };
        let position = g.embedding(positions, "embed_positions", rows, hidden, std);
        g.add(token, position)
    }

    fn block(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let x = self.add(g, x, "self_attn_layer_norm", Self::attention);
        self.add(g, x, "final_layer_norm", Self::feed_forward)
    }

    fn head(&self, g: &mut Recorder) -> Value {
        let mut x = g.input(self.hidden_size);
        if self.has_final_norm() {
            x = g.layer_norm(x, "model.decoder.final_layer_norm", true.into(), EPSILON);
        }
        if self.embedding_size != self.hidden_size {
            x = self.linear(g, x, "model.decoder.project_out", self.embedding_size, false);
        }
        let (out_features, std) = (self.vocab_size, self.initializer_range as f32);
        g.language_model_head(x, Linear { name: "lm_head", out_features, bias: false.into(), std }, None)
    }
}

impl Model for OptConfig {
    fn model_type(&self) -> &str {
        "opt"
    }

    fn units(&self) -> Vec<Unit> {
        let block = |layer| (format!("model.decoder.layers.{layer}."), 0);
        Unit::decoder("model.decoder.", self.num_hidden_layers, block)
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
            ("embed_tokens", Split::VocabularyParallel),
            ("self_attn.q_proj", heads),
            ("self_attn.k_proj", heads),
            ("self_attn.v_proj", heads),
            ("self_attn.out_proj", Split::RowParallel),
            ("fc1", features),
            ("fc2", Split::RowParallel),
            ("lm_head", Split::VocabularyParallel),
        ]
    }

    fn ties(&self) -> Vec<Tie> {
        let head = self.num_hidden_layers + 1;
        Tie::output_layer(self.tie_word_embeddings, head, "model.decoder.embed_tokens.weight")
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
            ..Sizes::default()
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn architecture(&self) -> Option<&str> {
        Some("OPTForCausalLM")
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn forget_derived(&self, table: &mut Map<String, Json>, overrides: &Map<String, Json>) {
        if overrides.contains_key("hidden_size") && self.embedding_size == self.hidden_size {
            table.insert("word_embed_proj_dim".into(), Json::Null);
        }
    }

    fn tokens(&self) -> &SpecialTokens {
        &self.tokens
    }

    fn has_dropout(&self) -> bool {
        self.dropout + self.attention_dropout > 0.0
    }

    fn with_dropout(&self, probability: f64) -> Option<Arc<dyn Model>> {
        let (dropout, attention_dropout) = (probability, probability);
        Some(Arc::new(Self { dropout, attention_dropout, ..self.clone() }))
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "model."
    }
}

//! The Llama-like families: Llama, Mistral, Qwen, Gemma, OLMo 2 and Phi-3, and with experts Mixtral, Qwen-MoE, DeepSeek-V3
//! and gpt-oss (Touvron et al., 2023; Gemma Team, 2024 and 2025; OLMo Team, 2025; Abdin et al., 2024; OpenAI, 2025).
//!
//! A block is attention with rotary positions and grouped keys and values, then a gated feed-forward or experts, each on a
//! branch of the residual stream. The table of families says where its norms are and which activation gates it.

use std::sync::Arc;

use lockstep_graph::{
    AttentionOptions, AttentionShape, BatchInput, Constant, InputDeclaration, InputLimit, Linear, Recorder,
    RotaryEmbedding, SequenceToken, Split, Value,
};
use lockstep_plan::{DType, ParameterRecord};
use lockstep_tensor::LABELS;
use serde_json::{Map, Value as Json};

use super::experts::ExpertNames;
use crate::config::{
    Classes, ExpertsConfig, INVERSE_FREQUENCIES, LOCAL_INVERSE_FREQUENCIES, LONG_INVERSE_FREQUENCIES,
    LatentAttention, LlamaConfig, LlamaFamily, NormPlacement, NormScale, QueryKeyNorm, Rope, SpecialTokens,
};
use crate::error::ConfigProblem;
use crate::hf_tensor::HfTensor;
use crate::model::{Model, Sizes, Tie, Unit};

/// Name of the input of the index of each sequence's last token that is no padding, u32.
const LAST_TOKEN: &str = "last_token";

/// Names of the norms before and after a branch.
type BranchNorms = [Option<&'static str>; 2];

impl NormPlacement {
    /// Returns the names of the norms of attention and of the feed-forward.
    fn names(self) -> [BranchNorms; 2] {
        let (input, after_attention) = (Some("input_layernorm"), Some("post_attention_layernorm"));
        let (before_feed, after_feed) =
            (Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm"));
        match self {
            Self::Before => [[input, None], [after_attention, None]],
            Self::After => [[None, after_attention], [None, after_feed]],
            Self::Around => [[input, after_attention], [before_feed, after_feed]],
        }
    }
}

impl LlamaConfig {
    pub(super) fn linear(
        &self,
        g: &mut Recorder,
        x: Value,
        name: &str,
        out_features: usize,
        bias: bool,
    ) -> Value {
        let std = self.initializer_range as f32;
        g.linear(x, Linear { name, out_features, bias: bias.into(), std })
    }

    /// Records a norm over each group of `width` columns.
    fn norm(&self, g: &mut Recorder, x: Value, name: &str, width: usize) -> Value {
        let eps = self.rms_norm_eps as f32;
        match self.family.traits().block.norm_scale {
            NormScale::Weight => g.rms_norm(x, name, width, eps),
            NormScale::OnePlusWeight => g.rms_norm_around_one(x, name, width, eps),
        }
    }

    /// Applies RoPE to queries or keys of `heads` heads, after their norm if the family has one.
    fn rotated(&self, g: &mut Recorder, x: Value, norm: &str, heads: usize, layer: usize) -> Value {
        let x = match self.family.traits().qk_norm {
            QueryKeyNorm::Never => x,
            QueryKeyNorm::OfHeads => self.norm(g, x, norm, self.head_dim),
            QueryKeyNorm::OfAll => self.norm(g, x, norm, heads * self.head_dim),
        };
        let is_local = self.local_rope.is_some() && !self.is_full(layer);
        let frequencies = g.constant(if is_local { LOCAL_INVERSE_FREQUENCIES } else { INVERSE_FREQUENCIES });
        let embedding = RotaryEmbedding {
            long_frequencies: self.rope.short_context().map(|_| g.constant(LONG_INVERSE_FREQUENCIES)),
            amplitude: self.rope.amplitude() as f32,
            ..RotaryEmbedding::new(frequencies)
        };
        g.rotary(x, self.head_dim, embedding)
    }

    fn attention(&self, g: &mut Recorder, x: Value, layer: usize) -> Value {
        if let Some(latent) = &self.latent {
            return self.latent_attention(g, x, latent);
        }
        let (heads, key_value_heads, head_dim) =
            (self.num_attention_heads, self.num_key_value_heads, self.head_dim);
        let q = self.linear(g, x, "self_attn.q_proj", heads * head_dim, self.qkv_bias);
        let k = self.linear(g, x, "self_attn.k_proj", key_value_heads * head_dim, self.qkv_bias);
        let v = self.linear(g, x, "self_attn.v_proj", key_value_heads * head_dim, self.qkv_bias);
        let q = self.rotated(g, q, "self_attn.q_norm", heads, layer);
        let k = self.rotated(g, k, "self_attn.k_norm", key_value_heads, layer);
        let shape = AttentionShape {
            scale: self.score_scale(),
            window: self.sliding_window.filter(|_| !self.is_full(layer)),
            soft_cap: self.score_cap.map(|cap| cap as f32),
            ..AttentionShape::new(heads, key_value_heads, head_dim)
        };
        let attended = g.attention(q, k, v, shape, self.attention_options());
        self.linear(g, attended, "self_attn.o_proj", self.hidden_size, self.output_bias)
    }

    fn score_scale(&self) -> f32 {
        // RoPE scales all elements of queries and keys by the same factor, so its square goes into the score scale.
        let growth = self.rope.attention_factor();
        let divisor = self.query_scale.unwrap_or(self.head_dim as f64) as f32;
        divisor.powf(-0.5) * (growth * growth) as f32
    }

    pub(super) fn attention_options(&self) -> AttentionOptions<'static> {
        let sinks = self.family.traits().block.has_sinks.then_some("self_attn.sinks");
        AttentionOptions { dropout: self.attention_dropout as f32, sinks, ..AttentionOptions::default() }
    }

    fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let gate = self.linear(g, x, "mlp.gate_proj", self.intermediate_size, self.mlp_bias);
        let up = self.linear(g, x, "mlp.up_proj", self.intermediate_size, self.mlp_bias);
        let active = g.gated(self.gate, gate, up);
        self.linear(g, active, "mlp.down_proj", self.hidden_size, self.mlp_bias)
    }

    /// Returns the experts of a layer; `None` for a dense layer.
    fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_deref().filter(|experts| experts.is_in(layer))
    }

    fn expert_names(&self) -> &'static ExpertNames {
        match self.family {
            LlamaFamily::Mixtral => &ExpertNames::MIXTRAL,
            LlamaFamily::DeepseekV3 => &ExpertNames::DEEPSEEK,
            LlamaFamily::GptOss => &ExpertNames::GPT_OSS,
            _ => &ExpertNames::QWEN,
        }
    }

    /// Records `x + after(f(before(x)))`, with the norms that have names.
    fn branch(
        &self,
        g: &mut Recorder,
        x: Value,
        [before, after]: BranchNorms,
        record: impl FnOnce(&mut Recorder, Value) -> Value,
    ) -> Value {
        let normed = |g: &mut Recorder, x, name: Option<&str>| match name {
            Some(name) => self.norm(g, x, name, self.hidden_size),
            None => x,
        };
        let inside = normed(g, x, before);
        let inside = record(g, inside);
        let inside = normed(g, inside, after);
        g.add(x, inside)
    }

    fn block(&self, layer: usize, g: &mut Recorder) -> Value {
        let [of_attention, of_feed_forward] = self.family.traits().block.norms.names();
        let x = g.input(self.hidden_size);
        let x = self.branch(g, x, of_attention, |g, x| self.attention(g, x, layer));
        self.branch(g, x, of_feed_forward, |g, x| match self.experts_of(layer) {
            Some(experts) => {
                experts.record(g, x, self.expert_names(), self.gate, self.initializer_range as f32)
            }
            None => self.feed_forward(g, x),
        })
    }

    fn embedding(&self, g: &mut Recorder) -> Value {
        let std = self.initializer_range as f32;
        let x = g.embedding(BatchInput::Ids, "embed_tokens", self.vocab_size, self.hidden_size, std);
        if !self.family.traits().block.scales_embeddings {
            return x;
        }
        let factor = (self.hidden_size as f64).sqrt() as f32;
        // transformers rounds the factor to the type of the weights.
        g.scale(x, rounded(g.shape().dtype, factor))
    }
}

/// Returns a number rounded to a floating-point type.
fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::BF16 => half::bf16::from_f32(value).to_f32(),
        DType::F16 => half::f16::from_f32(value).to_f32(),
        _ => value,
    }
}

impl LlamaConfig {
    /// Records the classification of each sequence by the last token that is no padding. The norm is of each token, so that
    /// of this one suffices.
    fn classifier(&self, g: &mut Recorder) -> Value {
        let classes = self.classes.as_ref().map_or(0, Classes::count);
        let x = g.input(self.hidden_size);
        let last = g.data(LAST_TOKEN);
        let x = g.token_of_each_sequence(x, SequenceToken::At(last));
        let normed = self.norm(g, x, "model.norm", self.hidden_size);
        let logits = self.linear(g, normed, "score", classes, false);
        g.accuracy(logits);
        g.cross_entropy(logits, 0.0)
    }
}

impl Model for LlamaConfig {
    fn model_type(&self) -> &str {
        self.family.model_type()
    }

    fn units(&self) -> Vec<Unit> {
        Unit::decoder("model.", self.num_hidden_layers, |layer| {
            let kind = usize::from(self.experts_of(layer).is_some()) + 2 * usize::from(self.is_full(layer));
            (format!("model.layers.{layer}."), kind)
        })
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        match unit {
            0 => self.embedding(g),
            unit if unit <= self.num_hidden_layers => self.block(unit - 1, g),
            _ if self.classes.is_some() => self.classifier(g),
            _ => {
                let x = g.input(self.hidden_size);
                let normed = self.norm(g, x, "model.norm", self.hidden_size);
                let (out_features, bias) = (self.vocab_size, false.into());
                let std = self.initializer_range as f32;
                let output_layer = Linear { name: "lm_head", out_features, bias, std };
                g.language_model_head(normed, output_layer, self.logit_cap.map(|cap| cap as f32))
            }
        }
    }

    fn placements(&self) -> Vec<(&'static str, Split)> {
        let heads = Split::ColumnParallel { pieces: self.num_attention_heads };
        let key_value_heads = Split::ColumnParallel { pieces: self.num_key_value_heads };
        let features = Split::ColumnParallel { pieces: self.intermediate_size };
        let of_experts = self.experts.iter().flat_map(|experts| experts.tensor_splits());
        let of_model = [
            ("embed_tokens", Split::VocabularyParallel),
            ("self_attn.q_proj", heads),
            ("self_attn.k_proj", key_value_heads),
            ("self_attn.v_proj", key_value_heads),
            ("self_attn.o_proj", Split::RowParallel),
            ("mlp.gate_proj", features),
            ("mlp.up_proj", features),
            ("mlp.down_proj", Split::RowParallel),
            ("lm_head", Split::VocabularyParallel),
        ];
        of_model.into_iter().chain(of_experts).chain(self.latent_splits()).collect()
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        if self.classes.is_none() {
            return Vec::new();
        }
        let last = InputDeclaration::new(LAST_TOKEN, DType::U32, &[]).limited(InputLimit::SequenceLength);
        vec![last, InputDeclaration::new(LABELS, DType::I32, &[])]
    }

    fn ties(&self) -> Vec<Tie> {
        let head = self.num_hidden_layers + 1;
        Tie::output_layer(
            self.tie_word_embeddings && self.classes.is_none(),
            head,
            "model.embed_tokens.weight",
        )
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            layers: self.num_hidden_layers,
            vocab: self.vocab_size,
            classes: self.classes.as_ref().map_or(0, Classes::count),
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            heads: self.num_attention_heads,
            key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            positions: self.max_position_embeddings,
            fixed_seq_len: None,
            original_positions: self.rope.scaling.original_context(),
            window: self
                .sliding_window
                .filter(|_| !(0..self.num_hidden_layers).any(|layer| self.is_full(layer))),
            latent_dim: self.latent.as_ref().map(LatentAttention::cached_dim),
            norms_span_heads: self.family.traits().qk_norm == QueryKeyNorm::OfAll,
            experts_have_biases: self.experts.is_some() && self.expert_names().have_biases(),
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn finish_json(&self, table: &mut Map<String, Json>) {
        self.ropes().write_form_5(table);
    }

    fn architecture(&self) -> Option<&str> {
        self.classes.is_none().then(|| self.family.traits().architecture)
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn forget_derived(&self, table: &mut Map<String, Json>, overrides: &Map<String, Json>) {
        Classes::forget(table, overrides);
        let heads_change = overrides.contains_key("num_attention_heads");
        let width_changes = heads_change || overrides.contains_key("hidden_size");
        let is_derived = self.num_attention_heads * self.head_dim == self.hidden_size;
        if self.latent.is_none() && width_changes && is_derived {
            table.insert("head_dim".into(), Json::Null);
        }
        if heads_change && self.num_key_value_heads == self.num_attention_heads {
            table.insert("num_key_value_heads".into(), Json::Null);
        }
        self.forget_derived_lists(table, overrides);
    }

    /// transformers 5 writes `num_local_experts` for `num_experts`.
    fn canonical_key<'k>(&self, key: &'k str) -> &'k str {
        match self.family {
            LlamaFamily::Qwen2Moe | LlamaFamily::Qwen3Moe if key == "num_local_experts" => "num_experts",
            _ => key,
        }
    }

    fn tokens(&self) -> &SpecialTokens {
        &self.tokens
    }

    fn experts(&self) -> Option<&ExpertsConfig> {
        self.experts.as_deref()
    }

    fn has_dropout(&self) -> bool {
        self.attention_dropout > 0.0
    }

    fn with_dropout(&self, probability: f64) -> Option<Arc<dyn Model>> {
        Some(Arc::new(Self { attention_dropout: probability, ..self.clone() }))
    }

    fn without_capacity(&self) -> Option<Arc<dyn Model>> {
        let mut changed = self.clone();
        changed.experts.as_mut()?.capacity_factor.take()?;
        Some(Arc::new(changed))
    }

    fn constants(&self) -> Vec<Constant> {
        let frequencies = |rope: &Rope| rope.inverse_frequencies(self.rotary_dim());
        let of_all = Constant::new(INVERSE_FREQUENCIES, frequencies(&self.rope));
        let local = self.local_rope.iter();
        let local = local.map(|rope| Constant::new(LOCAL_INVERSE_FREQUENCIES, frequencies(rope)));
        let long = self.rope.long_inverse_frequencies(self.rotary_dim());
        let long = long.map(|frequencies| Constant::new(LONG_INVERSE_FREQUENCIES, frequencies));
        [of_all].into_iter().chain(local).chain(long).collect()
    }

    fn short_context(&self) -> Option<usize> {
        self.rope.short_context()
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "model."
    }

    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        self.stored_tensors(records)
    }
}

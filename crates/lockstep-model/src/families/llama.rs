//! Llama, Mistral, Qwen2 and Qwen3, and with experts Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3. A block has
//! RMSNorm before attention and feed-forward, rotary positions, grouped-query attention, and a SiLU-gated
//! feed-forward (Touvron et al., 2023; Qwen3 adds norms of queries and keys).

use std::sync::Arc;

use lockstep_graph::{AttentionShape, BatchInput, Linear, Recorder, Split, Value};
use lockstep_plan::ParameterRecord;
use lockstep_tensor::GatedActivation;
use serde_json::{Map, Value as Json};

use super::experts::{ExpertNames, unstacked};
use super::latent::latent_part;
use crate::config::{ExpertsConfig, LlamaConfig, LlamaFamily, SpecialTokens};
use crate::error::ConfigProblem;
use crate::hf_tensor::{HfContent, HfPlace, HfTensor};
use crate::hf_transform::HfTransform;
use crate::model::{Model, Sizes, Tie, Unit};

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

    fn norm(&self, g: &mut Recorder, x: Value, name: &str) -> Value {
        g.rms_norm(x, name, self.hidden_size, self.rms_norm_eps as f32)
    }

    /// Applies RoPE to a query or key, after its norm if the family has one.
    fn rotated(&self, g: &mut Recorder, x: Value, norm: &str) -> Value {
        let x = if self.qk_norm { g.rms_norm(x, norm, self.head_dim, self.rms_norm_eps as f32) } else { x };
        g.rope(x, self.head_dim)
    }

    fn attention(&self, g: &mut Recorder, x: Value) -> Value {
        if let Some(latent) = &self.latent {
            return self.latent_attention(g, x, latent);
        }
        let (heads, key_value_heads, head_dim) =
            (self.num_attention_heads, self.num_key_value_heads, self.head_dim);
        let q = self.linear(g, x, "self_attn.q_proj", heads * head_dim, self.qkv_bias);
        let k = self.linear(g, x, "self_attn.k_proj", key_value_heads * head_dim, self.qkv_bias);
        let v = self.linear(g, x, "self_attn.v_proj", key_value_heads * head_dim, self.qkv_bias);
        let q = self.rotated(g, q, "self_attn.q_norm");
        let k = self.rotated(g, k, "self_attn.k_norm");
        // RoPE scales all elements of queries and keys by the same factor, so its square goes into the score scale.
        let growth = self.rope.attention_factor();
        let scale = (head_dim as f32).powf(-0.5) * (growth * growth) as f32;
        let shape = AttentionShape { heads, key_value_heads, head_dim, scale, window: self.sliding_window };
        let attended = g.attention(q, k, v, shape, self.attention_dropout as f32);
        self.linear(g, attended, "self_attn.o_proj", self.hidden_size, self.output_bias)
    }

    fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let gate = self.linear(g, x, "mlp.gate_proj", self.intermediate_size, self.mlp_bias);
        let up = self.linear(g, x, "mlp.up_proj", self.intermediate_size, self.mlp_bias);
        let active = g.gated(GatedActivation::Silu, gate, up);
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
            _ => &ExpertNames::QWEN,
        }
    }

    fn block(&self, layer: usize, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "input_layernorm");
        let attended = self.attention(g, normed);
        let x = g.add(x, attended);
        let normed = self.norm(g, x, "post_attention_layernorm");
        let fed = match self.experts_of(layer) {
            Some(experts) => experts.record(g, normed, self.expert_names(), self.initializer_range as f32),
            None => self.feed_forward(g, normed),
        };
        g.add(x, fed)
    }
}

impl Model for LlamaConfig {
    fn model_type(&self) -> &str {
        self.family.model_type()
    }

    fn units(&self) -> Vec<Unit> {
        Unit::decoder("model.", self.num_hidden_layers, |layer| {
            (format!("model.layers.{layer}."), usize::from(self.experts_of(layer).is_some()))
        })
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        let std = self.initializer_range as f32;
        match unit {
            0 => g.embedding(BatchInput::Ids, "embed_tokens", self.vocab_size, self.hidden_size, std),
            unit if unit <= self.num_hidden_layers => self.block(unit - 1, g),
            _ => {
                let x = g.input(self.hidden_size);
                let normed = self.norm(g, x, "model.norm");
                let (out_features, bias) = (self.vocab_size, false.into());
                g.language_model_head(normed, Linear { name: "lm_head", out_features, bias, std })
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

    fn ties(&self) -> Vec<Tie> {
        let head = self.num_hidden_layers + 1;
        Tie::output_layer(self.tie_word_embeddings, head, "model.embed_tokens.weight")
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            layers: self.num_hidden_layers,
            vocab: self.vocab_size,
            classes: 0,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            heads: self.num_attention_heads,
            key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            positions: self.max_position_embeddings,
            fixed_seq_len: None,
            original_positions: self.rope.scaling.original_context(),
            window: self.sliding_window,
            has_latent_attention: self.latent.is_some(),
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn finish_json(&self, table: &mut Map<String, Json>) {
        self.rope.write_form_5(table);
    }

    fn architecture(&self) -> Option<&str> {
        Some(self.family.traits().architecture)
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn forget_derived(&self, table: &mut Map<String, Json>, overrides: &Map<String, Json>) {
        let heads_change = overrides.contains_key("num_attention_heads");
        let width_changes = heads_change || overrides.contains_key("hidden_size");
        let is_derived = self.num_attention_heads * self.head_dim == self.hidden_size;
        if self.latent.is_none() && width_changes && is_derived {
            table.insert("head_dim".into(), Json::Null);
        }
        if heads_change && self.num_key_value_heads == self.num_attention_heads {
            table.insert("num_key_value_heads".into(), Json::Null);
        }
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

    fn inverse_frequencies(&self) -> Option<Vec<f32>> {
        let rotated = self.latent.as_ref().map_or(self.head_dim, |latent| latent.rotary_dim);
        Some(self.rope.inverse_frequencies(rotated))
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "model."
    }

    /// Experts have a tensor each; some tensors of latent attention hold two parameters.
    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        let mut tensors: Vec<HfTensor> = Vec::new();
        for record in records.iter().filter(|record| record.tie.is_none()) {
            let part = self.latent.as_ref().and_then(|latent| latent_part(self, latent, &record.name));
            let Some((name, transform)) = part else {
                tensors.extend(unstacked(record));
                continue;
            };
            let HfTransform::Rows { of, blocks, .. } = transform else { continue };
            let place = HfPlace::new(record, name, vec![of * blocks, record.shape[1]], transform);
            match tensors.iter_mut().find(|tensor| tensor.name == place.tensor) {
                Some(HfTensor { content: HfContent::Parameters(places), .. }) => places.push(place),
                _ => tensors.push(HfTensor::single(place)),
            }
        }
        tensors
    }
}

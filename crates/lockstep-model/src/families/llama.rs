//! Llama, Mistral, Qwen2 and Qwen3, and with experts Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3. A block has
//! RMSNorm before attention and feed-forward, rotary positions, grouped-query attention, and a SiLU-gated
//! feed-forward (Touvron et al., 2023; Qwen3 adds norms of queries and keys).

use lockstep_graph::{AttentionShape, BatchInput, Linear, Recorder, Split, Value};

use super::{Family, experts::ExpertNames};
use crate::{ExpertsConfig, LlamaConfig, LlamaFamily};

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
        let active = g.swiglu(gate, up);
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
}

impl Family for LlamaConfig {
    fn embedding_prefix(&self) -> String {
        "model.".into()
    }

    fn block_prefix(&self, layer: usize) -> String {
        format!("model.layers.{layer}.")
    }

    fn embedding(&self, g: &mut Recorder) -> Value {
        let std = self.initializer_range as f32;
        g.embedding(BatchInput::Ids, "embed_tokens", self.vocab_size, self.hidden_size, std)
    }

    /// Returns 1 for a layer with experts, 0 for a dense one.
    fn block_kind(&self, layer: usize) -> usize {
        usize::from(self.experts_of(layer).is_some())
    }

    fn block(&self, kind: usize, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "input_layernorm");
        let attended = self.attention(g, normed);
        let x = g.add(x, attended);
        let normed = self.norm(g, x, "post_attention_layernorm");
        let fed = match self.experts.as_ref().filter(|_| kind == 1) {
            Some(experts) => experts.record(g, normed, self.expert_names(), self.initializer_range as f32),
            None => self.feed_forward(g, normed),
        };
        g.add(x, fed)
    }

    fn head(&self, g: &mut Recorder) -> (Value, Linear<'static>) {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "model.norm");
        let std = self.initializer_range as f32;
        (normed, Linear { name: "lm_head", out_features: self.vocab_size, bias: false.into(), std })
    }

    fn embedding_table(&self) -> &'static str {
        "model.embed_tokens.weight"
    }

    fn inverse_frequencies(&self) -> Option<Vec<f32>> {
        let rotated = self.latent.as_ref().map_or(self.head_dim, |latent| latent.rotary_dim);
        Some(self.rope.inverse_frequencies(rotated))
    }

    fn tensor_splits(&self) -> Vec<(&'static str, Split)> {
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
}

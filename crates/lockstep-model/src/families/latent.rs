//! Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1): keys and values are projected from a
//! low-rank value, the latent. Positions are in a separate part of each head, which all key heads share.
//!
//! In training, value heads are narrower than query and key heads; for the attention kernel they are padded with zeros. In inference
//! the latent and the rotary part are the only key and value of all heads, so a cache holds these alone (section 2.1.2): queries are
//! multiplied by the projection of keys, and outputs by that of values.

use lockstep_graph::{AttentionShape, Bias, Linear, Recorder, RotaryEmbedding, RotaryPairs, Split, Value};

use crate::config::{INVERSE_FREQUENCIES, LatentAttention, LlamaConfig};
use crate::hf_transform::HfTransform;

/// Layer that projects the keys without rotary embedding of all heads from the latent.
const KEYS: &str = "self_attn.kv_b_proj_key";
/// Layer that projects the values of all heads from the latent.
const VALUES: &str = "self_attn.kv_b_proj_value";

/// Epsilon of the norms of low-rank values, independent of the configuration's epsilon for the other norms.
const EPSILON: f32 = 1e-6;

impl LlamaConfig {
    pub(super) fn latent_attention(&self, g: &mut Recorder, x: Value, latent: &LatentAttention) -> Value {
        let queries = match latent.query_rank {
            None => self.latent_queries(g, x, latent, ["self_attn.q_proj_plain", "self_attn.q_proj_rotary"]),
            Some(rank) => {
                let narrow = self.linear(g, x, "self_attn.q_a_proj", rank, false);
                let narrow = g.rms_norm(narrow, "self_attn.q_a_layernorm", rank, EPSILON);
                let names = ["self_attn.q_b_proj_plain", "self_attn.q_b_proj_rotary"];
                self.latent_queries(g, narrow, latent, names)
            }
        };
        let attended = match g.attends_to_latents() {
            true => self.attention_to_latents(g, x, queries, latent),
            false => self.attention_to_heads(g, x, queries, latent),
        };
        self.linear(g, attended, "self_attn.o_proj", self.hidden_size, false)
    }

    /// Records attention to keys and values of each head.
    fn attention_to_heads(
        &self,
        g: &mut Recorder,
        x: Value,
        [plain, rotary]: [Value; 2],
        latent: &LatentAttention,
    ) -> Value {
        let LatentAttention { plain_dim, value_dim, .. } = *latent;
        let (heads, head_dim) = (self.num_attention_heads, latent.head_dim());
        let q = g.join_heads(plain, rotary, heads, heads);
        let [narrow, rotary] = self.latents(g, x, latent);
        let plain = self.linear(g, narrow, KEYS, heads * plain_dim, false);
        let k = g.join_heads(plain, rotary, heads, 1);
        let v = self.linear(g, narrow, VALUES, heads * value_dim, false);
        let v = g.resize_heads(v, heads, head_dim);
        let shape = AttentionShape {
            scale: self.latent_scale(latent),
            ..AttentionShape::new(heads, heads, head_dim)
        };
        let attended = g.attention(q, k, v, shape, self.attention_options());
        g.resize_heads(attended, heads, value_dim)
    }

    /// Records attention to latents, which are the keys and values of all heads.
    fn attention_to_latents(
        &self,
        g: &mut Recorder,
        x: Value,
        [plain, rotary]: [Value; 2],
        latent: &LatentAttention,
    ) -> Value {
        let LatentAttention { plain_dim, value_dim, key_value_rank: rank, .. } = *latent;
        let heads = self.num_attention_heads;
        let layer = |name, dim| {
            let std = self.initializer_range as f32;
            Linear { name, out_features: heads * dim, bias: Bias::Without, std }
        };
        let [narrow, shared_rotary] = self.latents(g, x, latent);
        let narrow = g.whole_tokens(narrow);
        let k = g.join_heads(narrow, shared_rotary, 1, 1);
        let q = g.heads_to_latents(plain, layer(KEYS, plain_dim), heads, rank);
        let q = g.join_heads(q, rotary, heads, heads);
        let scale = self.latent_scale(latent);
        let shape = AttentionShape { scale, ..AttentionShape::new(heads, 1, latent.cached_dim()) };
        let attended = g.attention(q, k, k, shape, self.attention_options());
        g.latents_to_heads(attended, layer(VALUES, value_dim), heads, rank)
    }

    fn latent_scale(&self, latent: &LatentAttention) -> f32 {
        (latent.head_dim() as f32).powf(-0.5) * self.rope.latent_score_factor() as f32
    }

    /// Records the normalized latent, and the rotary part of the keys.
    fn latents(&self, g: &mut Recorder, x: Value, latent: &LatentAttention) -> [Value; 2] {
        let LatentAttention { key_value_rank, rotary_dim, .. } = *latent;
        let narrow = self.linear(g, x, "self_attn.kv_a_proj_narrow", key_value_rank, false);
        let narrow = g.rms_norm(narrow, "self_attn.kv_a_layernorm", key_value_rank, EPSILON);
        let rotary = self.linear(g, x, "self_attn.kv_a_proj_rotary", rotary_dim, false);
        let rotary = g.whole_tokens(rotary);
        [narrow, self.latent_rope(g, rotary, latent)]
    }

    /// Records the parts of the queries without and with rotary embedding.
    fn latent_queries(
        &self,
        g: &mut Recorder,
        x: Value,
        latent: &LatentAttention,
        [plain, rotary]: [&str; 2],
    ) -> [Value; 2] {
        let heads = self.num_attention_heads;
        let plain = self.linear(g, x, plain, heads * latent.plain_dim, false);
        let rotary = self.linear(g, x, rotary, heads * latent.rotary_dim, false);
        let rotary = self.latent_rope(g, rotary, latent);
        [plain, rotary]
    }

    fn latent_rope(&self, g: &mut Recorder, x: Value, latent: &LatentAttention) -> Value {
        let frequencies = g.constant(INVERSE_FREQUENCIES);
        let embedding = RotaryEmbedding { pairs: latent.pairs(), ..RotaryEmbedding::new(frequencies) };
        let rotated = g.rotary(x, latent.rotary_dim, embedding);
        let growth = self.rope.attention_factor() as f32;
        if growth == 1.0 { rotated } else { g.scale(rotated, growth) }
    }

    /// Returns the tensor-parallel sharding of latent attention: by heads, after the low-rank values.
    pub(super) fn latent_splits(&self) -> Vec<(&'static str, Split)> {
        let heads = Split::ColumnParallel { pieces: self.num_attention_heads };
        let by_heads = [
            "self_attn.q_proj_plain",
            "self_attn.q_proj_rotary",
            "self_attn.q_b_proj_plain",
            "self_attn.q_b_proj_rotary",
            KEYS,
            VALUES,
        ];
        let splits = by_heads.map(|name| (name, heads));
        if self.latent.is_some() { splits.into() } else { Vec::new() }
    }
}

impl LatentAttention {
    fn pairs(&self) -> RotaryPairs {
        if self.rotates_neighbours { RotaryPairs::Neighbours } else { RotaryPairs::Halves }
    }
}

/// Returns the tensor and the layout of a parameter of latent attention that shares a tensor with another; `None` for all others.
pub(super) fn latent_part(
    config: &LlamaConfig,
    latent: &LatentAttention,
    parameter: &str,
) -> Option<(String, HfTransform)> {
    let LatentAttention { plain_dim, rotary_dim, value_dim, key_value_rank, .. } = *latent;
    let heads = config.num_attention_heads;
    // (suffix of the parameter, suffix of the tensor, first row in a block, rows, rows of a block, blocks)
    let parts = [
        ("q_proj_plain", "q_proj", 0, plain_dim, plain_dim + rotary_dim, heads),
        ("q_proj_rotary", "q_proj", plain_dim, rotary_dim, plain_dim + rotary_dim, heads),
        ("q_b_proj_plain", "q_b_proj", 0, plain_dim, plain_dim + rotary_dim, heads),
        ("q_b_proj_rotary", "q_b_proj", plain_dim, rotary_dim, plain_dim + rotary_dim, heads),
        ("kv_a_proj_narrow", "kv_a_proj_with_mqa", 0, key_value_rank, key_value_rank + rotary_dim, 1),
        (
            "kv_a_proj_rotary",
            "kv_a_proj_with_mqa",
            key_value_rank,
            rotary_dim,
            key_value_rank + rotary_dim,
            1,
        ),
        ("kv_b_proj_key", "kv_b_proj", 0, plain_dim, plain_dim + value_dim, heads),
        ("kv_b_proj_value", "kv_b_proj", plain_dim, value_dim, plain_dim + value_dim, heads),
    ];
    let module = parameter.strip_suffix(".weight")?;
    parts.into_iter().find_map(|(own, stored, first, len, of, blocks)| {
        let before = module.strip_suffix(own)?.strip_suffix('.').map(|before| format!("{before}."))?;
        let transform = HfTransform::Rows { rows: first..first + len, of, blocks };
        Some((format!("{before}{stored}.weight"), transform))
    })
}

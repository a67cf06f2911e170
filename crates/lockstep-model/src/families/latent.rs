//! Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1): keys and values are projected from a
//! low-rank value. Positions are in a separate part of each head, which all key heads share.
//!
//! Value heads are narrower than query and key heads; for the attention kernel they are padded with zeros.

use lockstep_graph::{AttentionShape, Recorder, RotaryPairs, Split, Value};

use crate::config::{INVERSE_FREQUENCIES, LatentAttention, LlamaConfig};
use crate::hf_transform::HfTransform;

/// Epsilon of the norms of low-rank values, independent of the configuration's epsilon for the other norms.
const EPSILON: f32 = 1e-6;

impl LlamaConfig {
    pub(super) fn latent_attention(&self, g: &mut Recorder, x: Value, latent: &LatentAttention) -> Value {
        let LatentAttention { plain_dim, rotary_dim, value_dim, key_value_rank, .. } = *latent;
        let (heads, head_dim) = (self.num_attention_heads, latent.head_dim());
        let q = match latent.query_rank {
            None => self.latent_queries(g, x, latent, ["self_attn.q_proj_plain", "self_attn.q_proj_rotary"]),
            Some(rank) => {
                let narrow = self.linear(g, x, "self_attn.q_a_proj", rank, false);
                let narrow = g.rms_norm(narrow, "self_attn.q_a_layernorm", rank, EPSILON);
                let names = ["self_attn.q_b_proj_plain", "self_attn.q_b_proj_rotary"];
                self.latent_queries(g, narrow, latent, names)
            }
        };
        let narrow = self.linear(g, x, "self_attn.kv_a_proj_narrow", key_value_rank, false);
        let narrow = g.rms_norm(narrow, "self_attn.kv_a_layernorm", key_value_rank, EPSILON);
        let rotary = self.linear(g, x, "self_attn.kv_a_proj_rotary", rotary_dim, false);
        let rotary = g.whole_tokens(rotary);
        let rotary = self.latent_rope(g, rotary, latent);
        let plain = self.linear(g, narrow, "self_attn.kv_b_proj_key", heads * plain_dim, false);
        let k = g.join_heads(plain, rotary, heads, 1);
        let v = self.linear(g, narrow, "self_attn.kv_b_proj_value", heads * value_dim, false);
        let v = g.resize_heads(v, heads, head_dim);
        let scale = (head_dim as f32).powf(-0.5) * self.rope.latent_score_factor() as f32;
        let shape = AttentionShape { scale, ..AttentionShape::new(heads, heads, head_dim) };
        let attended = g.attention(q, k, v, shape, self.attention_options());
        let attended = g.resize_heads(attended, heads, value_dim);
        self.linear(g, attended, "self_attn.o_proj", self.hidden_size, false)
    }

    fn latent_queries(
        &self,
        g: &mut Recorder,
        x: Value,
        latent: &LatentAttention,
        [plain, rotary]: [&str; 2],
    ) -> Value {
        let heads = self.num_attention_heads;
        let plain = self.linear(g, x, plain, heads * latent.plain_dim, false);
        let rotary = self.linear(g, x, rotary, heads * latent.rotary_dim, false);
        let rotary = self.latent_rope(g, rotary, latent);
        g.join_heads(plain, rotary, heads, heads)
    }

    fn latent_rope(&self, g: &mut Recorder, x: Value, latent: &LatentAttention) -> Value {
        let frequencies = g.constant(INVERSE_FREQUENCIES);
        let rotated = g.rope_in_pairs(x, latent.rotary_dim, frequencies, latent.pairs());
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
            "self_attn.kv_b_proj_key",
            "self_attn.kv_b_proj_value",
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

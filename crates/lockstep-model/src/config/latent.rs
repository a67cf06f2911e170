//! Configuration of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

use serde_json::{Map, Value, json};

use super::limits::{Checks, HEADS, WIDTH};
use super::reader::{Entry, Reader};

/// Attention whose keys and values are projected from a low-rank value, with positions in a separate part of each head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LatentAttention {
    /// Width of the low-rank value that queries are projected from; `None` projects them from the residual stream.
    pub query_rank: Option<usize>,
    /// Width of the low-rank value that keys and values are projected from.
    pub key_value_rank: usize,
    /// Elements of a query or key head without rotary position embedding.
    pub plain_dim: usize,
    /// Elements of a query or key head with rotary position embedding; all heads share those of keys.
    pub rotary_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// True if rotary embedding rotates neighbouring elements (interleaved), false for the half-split form.
    pub rotates_neighbours: bool,
}

impl LatentAttention {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        // transformers writes these keys, but the sizes below determine the head size.
        let _ = (reader.value("head_dim"), reader.value("qk_head_dim"));
        Self {
            query_rank: match reader.optional_size("q_lora_rank") {
                Entry::Absent => Some(1536),
                entry => entry.given(),
            },
            key_value_rank: reader.size("kv_lora_rank", 512),
            plain_dim: reader.size("qk_nope_head_dim", 128),
            rotary_dim: reader.size("qk_rope_head_dim", 64),
            value_dim: reader.size("v_head_dim", 128),
            rotates_neighbours: reader.flag("rope_interleave", true),
        }
    }

    /// Returns the number of elements of a query or key head.
    pub fn head_dim(&self) -> usize {
        self.plain_dim.saturating_add(self.rotary_dim)
    }

    /// Returns the number of elements that a cache holds for a token: the latent and the rotary part of the keys.
    pub fn cached_dim(&self) -> usize {
        self.key_value_rank.saturating_add(self.rotary_dim)
    }

    pub(super) fn write(&self, table: &mut Map<String, Value>) {
        let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
        put("q_lora_rank", json!(self.query_rank));
        put("kv_lora_rank", json!(self.key_value_rank));
        put("qk_nope_head_dim", json!(self.plain_dim));
        put("qk_rope_head_dim", json!(self.rotary_dim));
        put("v_head_dim", json!(self.value_dim));
        put("rope_interleave", json!(self.rotates_neighbours));
        put("head_dim", json!(self.rotary_dim));
    }

    pub(super) fn check(&self, checks: &mut Checks) {
        if let Some(rank) = self.query_rank {
            checks.size("q_lora_rank", rank, WIDTH);
        }
        checks.size("kv_lora_rank", self.key_value_rank, WIDTH);
        checks.size("qk_nope_head_dim", self.plain_dim, HEADS / 2);
        checks.size("qk_rope_head_dim", self.rotary_dim, HEADS / 2);
        checks.size("v_head_dim", self.value_dim, self.head_dim().min(HEADS));
        checks.divides(("RoPE's pair of elements", 2), ("qk_rope_head_dim", self.rotary_dim));
    }
}

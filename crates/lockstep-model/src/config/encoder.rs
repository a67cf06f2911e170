//! Keys that BERT and ViT have in common.

use super::limits::{Checks, HEADS, LAYERS, WIDTH};
use super::reader::Reader;

/// Sizes of an encoder's blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EncoderSizes {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of heads of a block.
    pub num_attention_heads: usize,
}

impl EncoderSizes {
    /// Reads the sizes; by default those of the base models.
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            hidden_size: reader.size("hidden_size", 768),
            intermediate_size: reader.size("intermediate_size", 3072),
            num_hidden_layers: reader.size("num_hidden_layers", 12),
            num_attention_heads: reader.size("num_attention_heads", 12),
        }
    }

    /// Returns the keys of `config.json` with their values.
    pub(super) const fn keys(self) -> [(&'static str, usize); 4] {
        [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
        ]
    }

    pub(super) fn check(self, checks: &mut Checks) {
        let limits = [WIDTH, WIDTH, LAYERS, HEADS];
        self.keys().into_iter().zip(limits).for_each(|((key, size), most)| checks.size(key, size, most));
        checks.divides(("num_attention_heads", self.num_attention_heads), ("hidden_size", self.hidden_size));
    }

    /// Number of elements of one head; the sizes have been checked.
    pub const fn head_dim(self) -> usize {
        self.hidden_size / self.num_attention_heads
    }
}

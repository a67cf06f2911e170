//! Sources of a configuration: the metadata of an architecture by its keys, and facts about the tensors.

use super::{metadata::GgufMetadata, names::Architecture};

/// Facts about the tensors that determine keys of the configuration.
#[derive(Debug)]
pub(super) struct TensorFacts {
    /// Rows of the embedding.
    pub(super) vocabulary: usize,
    /// True if the output layer has a tensor of its own.
    pub(super) has_output: bool,
    /// True if queries have a bias.
    pub(super) has_query_bias: bool,
    /// True if the feed-forward layers have biases.
    pub(super) has_feed_forward_bias: bool,
    /// Divisors of RoPE's frequencies.
    pub(super) rope_divisors: Option<Vec<f32>>,
    /// Divisors of RoPE's frequencies in short and in long sequences.
    pub(super) long_rope_factors: Option<[Vec<f32>; 2]>,
    /// Name of the first stack of experts, and the number of its matrices.
    pub(super) experts: Option<(String, usize)>,
}

/// Metadata of one architecture.
pub(super) struct Keys<'m> {
    pub(super) metadata: &'m GgufMetadata,
    pub(super) architecture: &'static Architecture,
}

impl Keys<'_> {
    pub(super) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    pub(super) fn size(&self, key: &str) -> Result<u64, String> {
        let name = self.name(key);
        self.metadata.integer(&name).ok_or_else(|| format!("`{name}` is missing or no number"))
    }

    pub(super) fn optional_size(&self, key: &str) -> Option<u64> {
        self.metadata.integer(&self.name(key))
    }

    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.metadata.number(&self.name(key))
    }

    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        self.metadata.flag(&self.name(key))
    }
}

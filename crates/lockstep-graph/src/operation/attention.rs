//! Attention as an operation: its shape, its operands, and the source of the keys of other ranks' tokens.

use super::facts::Facts;
use crate::block::{DropoutSite, SequenceRange, Value};

/// The elements of a head that a rotary embedding rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotaryPairs {
    /// Elements `i` and `i + head_dim / 2`: the half-split form.
    Halves,
    /// Elements `2i` and `2i + 1`: the interleaved form.
    Neighbours,
}

/// The model's parameters of an attention; the batch supplies the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Sliding window in tokens; `None` means full causal attention.
    pub window: Option<usize>,
}

/// An attention with its operands and results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionOperation {
    pub(crate) q: Value,
    pub(crate) k: Value,
    pub(crate) v: Value,
    /// Shape of this rank's part, where ranks shard the heads.
    pub(crate) shape: AttentionShape,
    /// Index of this rank's first query head.
    pub(crate) first_head: usize,
    /// The sequences that this rank attends within.
    pub(crate) sequences: SequenceRange,
    pub(crate) dropout: Option<DropoutSite>,
    /// Source of the keys of whole sequences.
    pub(crate) key_source: KeySource,
    pub(crate) y: Value,
    pub(crate) log_sum_exp: Value,
}

/// Source of the keys and values of other ranks' tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeySource {
    /// Queries and keys are those of whole sequences.
    Whole,
    /// Keys are those of whole sequences, queries those of local tokens. `sums`: f32 scratch for the gradients of
    /// keys and values, for dtypes narrower than f32.
    Gathered { sums: Option<[Value; 2]> },
    /// Queries and keys are those of local tokens; ring attention supplies the other keys. `sums`: f32 scratch for
    /// the outputs and the gradients of the queries, for dtypes narrower than f32.
    Ring { sums: Option<Value> },
}

impl AttentionOperation {
    pub(super) fn facts(&self) -> Facts {
        let Self { q, k, v, y, log_sum_exp, key_source, .. } = *self;
        Facts {
            scratch: match key_source {
                KeySource::Whole => vec![],
                KeySource::Gathered { sums } => sums.into_iter().flatten().collect(),
                KeySource::Ring { sums } => sums.into_iter().collect(),
            },
            saved_for_inputs: vec![q, k, v, y, log_sum_exp],
            ..Facts::of("attention", [q, k, v], [y, log_sum_exp])
        }
    }
}

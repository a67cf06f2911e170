//! Operations that only a block on several ranks has, and parts of them: linear layers in blocks, the collectives of
//! context parallelism, and the loss of a sharded vocabulary.

use lockstep_plan::GridPlace;

use super::facts::Facts;
use crate::block::{ParameterIndex, Value};

/// A linear layer `y = x Wᵀ + b` whose operands are sharded into blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SummaLinear {
    pub(crate) x: Value,
    pub(crate) weight: ParameterIndex,
    pub(crate) bias: Option<ParameterIndex>,
    pub(crate) grid: GridPlace,
    pub(crate) y: Value,
    /// Scratch for broadcast blocks: one of the input or its gradient, one of the weight.
    pub(crate) blocks: [Value; 2],
    /// f32 scratch that products are summed in, for dtypes narrower than f32.
    pub(crate) sums: Option<Value>,
    /// Scratch for the weight gradient: one block of the input, one of the weight gradient.
    pub(crate) blocks_for_weights: [Value; 2],
}

impl SummaLinear {
    pub(super) fn facts(&self) -> Facts {
        let Self { x, weight, bias, y, blocks, sums, blocks_for_weights, .. } = *self;
        Facts {
            scratch: blocks.into_iter().chain(sums).collect(),
            scratch_for_weights: blocks_for_weights.to_vec(),
            weight: Some(weight),
            bias,
            saved_for_weights: vec![x],
            accumulates: true,
            ..Facts::of("linear in blocks", [x], [y])
        }
    }
}

/// Kinds of context-parallel collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContextCollectiveKind {
    /// All-gather: from the local tokens of each sequence to all of them.
    Gather,
    /// All-to-all from the local tokens and all `heads` to all tokens and some heads. With fewer heads than ranks,
    /// heads are repeated.
    TokensToHeads { heads: usize },
    /// All-to-all from all tokens and some heads to the local tokens and all `heads`.
    HeadsToTokens { heads: usize },
}

/// A context-parallel collective that converts between local tokens and whole sequences.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContextCollective {
    pub(crate) change: ContextCollectiveKind,
    pub(crate) x: Value,
    pub(crate) y: Value,
    /// Scratch, each as large as the larger of `x` and `y`.
    pub(crate) scratch: [Value; 2],
    /// f32 scratch for the sum over ranks that have the same heads; `None` if no head is repeated.
    pub(crate) sum: Option<Value>,
}

impl ContextCollective {
    pub(super) fn facts(&self) -> Facts {
        let Self { change, x, y, scratch, sum } = *self;
        let name = match change {
            ContextCollectiveKind::Gather => "gather sequences of ranks",
            ContextCollectiveKind::TokensToHeads { .. } => "exchange tokens for heads",
            ContextCollectiveKind::HeadsToTokens { .. } => "exchange heads for tokens",
        };
        let is_gather = change == ContextCollectiveKind::Gather;
        Facts {
            scratch: if is_gather { vec![scratch[0]] } else { scratch.into_iter().chain(sum).collect() },
            is_gathered: is_gather,
            gathers_sequences: is_gather,
            ..Facts::of(name, [x], [y])
        }
    }
}

/// Inputs and scratch of a vocabulary-parallel loss, for the tokens of one range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VocabularyParallelLoss {
    pub(crate) first_column: usize,
    /// Softmax statistics, three numbers per token: see
    /// [`LossKernels::softmax_statistics`](lockstep_tensor::LossKernels::softmax_statistics).
    pub(crate) statistics: Value,
    /// The statistics of all ranks.
    pub(crate) gathered: Value,
    pub(crate) log_sum_exp: Value,
}

impl VocabularyParallelLoss {
    pub(super) fn scratch(&self) -> [Value; 3] {
        [self.statistics, self.gathered, self.log_sum_exp]
    }
}

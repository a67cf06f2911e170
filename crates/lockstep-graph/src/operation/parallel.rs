//! Operations that only a block on several ranks has, and parts of them: linear layers in blocks, the collectives of
//! context parallelism, and the loss of a sharded vocabulary.

use lockstep_plan::GridPlace;

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
    pub(crate) fn scratch(&self) -> Vec<Value> {
        self.blocks.into_iter().chain(self.sums).collect()
    }

    pub(crate) fn scratch_for_weights(&self) -> Vec<Value> {
        self.blocks_for_weights.to_vec()
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
    /// Name in tables and traces.
    pub(crate) fn name(&self) -> &'static str {
        match self.change {
            ContextCollectiveKind::Gather => "gather sequences of ranks",
            ContextCollectiveKind::TokensToHeads { .. } => "exchange tokens for heads",
            ContextCollectiveKind::HeadsToTokens { .. } => "exchange heads for tokens",
        }
    }

    /// Returns the scratch values of the collective.
    pub(crate) fn scratch(&self) -> Vec<Value> {
        match self.change {
            ContextCollectiveKind::Gather => vec![self.scratch[0]],
            _ => self.scratch.into_iter().chain(self.sum).collect(),
        }
    }
}

/// Inputs and scratch of a vocabulary-parallel loss, for the tokens of one range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitLoss {
    pub(crate) first_column: usize,
    /// Softmax statistics, three numbers per token: see
    /// [`Kernels::softmax_statistics`](lockstep_tensor::Kernels::softmax_statistics).
    pub(crate) statistics: Value,
    /// The statistics of all ranks.
    pub(crate) gathered: Value,
    pub(crate) log_sum_exp: Value,
}

//! Placements of values in the tensor-parallel group, and the collectives that redistribute a value from one placement
//! to another.
//!
//! Model code names no placement. The recorder is told how the weights of a block are sharded, and every value carries
//! its placement. An operation that needs another placement gets it by a `Redistribute` operation. There is no other
//! conversion, so a missing reduction fails while recording. After Shoeybi et al. (2019); token sharding between the
//! linear layers (sequence parallelism) after Korthikanti et al. (2022).
//!
//! ```text
//! placement         value                gradient
//! Replicate         replicated           replicated
//! PartialGradient   replicated           partial
//! Partial           partial              replicated
//! ShardColumns      sharded by columns   sharded by columns
//! ShardTokens       sharded by tokens    sharded by tokens
//! ShardBlocks       sharded by both      sharded by both
//!
//! redistribution                   forward                  backward
//! Replicate   -> PartialGradient   none                     all-reduce
//! ShardTokens -> PartialGradient   all-gather               reduce-scatter
//! Partial     -> Replicate         all-reduce               none
//! Partial     -> ShardTokens       reduce-scatter           all-gather
//! Replicate   -> ShardTokens       slice                    all-gather
//! ShardTokens -> Replicate         all-gather               slice
//! ShardTokens -> ShardBlocks       all-to-all along a row   all-to-all along a row
//! ShardBlocks -> ShardTokens       all-to-all along a row   all-to-all along a row
//! ```
//!
//! `ShardBlocks` is the placement of two-dimensional tensor parallelism (`ops::summa_linear`): each row of the grid has whole
//! sequences, and each rank of a row has a range of their columns.

use lockstep_plan::GridPlace;

/// Placement of a value and of its gradient in the tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// `Replicate`, with a replicated gradient.
    Replicate,
    /// `Replicate`, with a partial gradient: the input of column-parallel layers.
    PartialGradient,
    /// `Partial`, with a replicated gradient: the output of row-parallel layers.
    Partial,
    /// `Shard(columns)` into `parts` ranges. With fewer parts than ranks, neighbouring ranks hold the same range and
    /// a partial gradient of it.
    ShardColumns {
        /// Number of ranges.
        parts: usize,
    },
    /// `Shard(tokens)`: sequence parallelism.
    ShardTokens,
    /// A block of a two-dimensional grid: this rank's columns of its row's tokens.
    ShardBlocks(GridPlace),
}

/// Sharding of a module's weights in the tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// A column-parallel linear layer. Its outputs consist of pieces (heads, or single features) that stay whole.
    ColumnParallel {
        /// Number of pieces.
        pieces: usize,
    },
    /// A row-parallel linear layer, whose inputs are the outputs of a column-parallel one.
    RowParallel,
    /// A vocabulary-parallel embedding or output layer.
    VocabularyParallel,
}

/// A tensor-parallel collective that converts the placement of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redistribute {
    /// `Replicate` to `PartialGradient`: no forward communication, an all-reduce of the gradient.
    AllReduceGradient,
    /// `ShardTokens` to `PartialGradient`: all-gather, with a reduce-scatter of the gradient.
    AllGatherTokens,
    /// `Partial` to `Replicate`: all-reduce, with no communication of the gradient.
    AllReduce,
    /// `Partial` to `ShardTokens`: reduce-scatter, with an all-gather of the gradient.
    ReduceScatterTokens,
    /// `Replicate` to `ShardTokens`: slice, with an all-gather of the gradient.
    SliceTokens,
    /// `ShardTokens` to `Replicate`: all-gather, with a slice of the gradient.
    AllGatherReplicated,
    /// `ShardTokens` to `ShardBlocks`: all-to-all along a row.
    TokensToBlocks,
    /// `ShardBlocks` to `ShardTokens`: all-to-all along a row.
    BlocksToTokens,
}

/// Data movement of a redistribution in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// No transfer: the output is the input.
    Alias,
    /// Copy of this rank's tokens.
    Slice,
    /// All-gather of the rows of all ranks.
    AllGather,
    /// All-reduce of partial sums.
    AllReduce,
    /// Reduce-scatter of partial sums by rows.
    ReduceScatter,
    /// All-to-all along a row of the grid.
    TokensToBlocks,
    /// All-to-all along a row of the grid.
    BlocksToTokens,
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

impl Redistribute {
    /// Returns the data movement from the input to the output.
    pub(crate) fn forward(self) -> Transfer {
        match self {
            Self::AllReduceGradient => Transfer::Alias,
            Self::AllGatherTokens | Self::AllGatherReplicated => Transfer::AllGather,
            Self::AllReduce => Transfer::AllReduce,
            Self::ReduceScatterTokens => Transfer::ReduceScatter,
            Self::SliceTokens => Transfer::Slice,
            Self::TokensToBlocks => Transfer::TokensToBlocks,
            Self::BlocksToTokens => Transfer::BlocksToTokens,
        }
    }

    /// Returns the data movement from the gradient of the output to that of the input.
    pub(crate) fn backward(self) -> Transfer {
        match self {
            Self::AllReduceGradient => Transfer::AllReduce,
            Self::AllGatherTokens => Transfer::ReduceScatter,
            Self::AllReduce => Transfer::Alias,
            Self::ReduceScatterTokens | Self::SliceTokens => Transfer::AllGather,
            Self::AllGatherReplicated => Transfer::Slice,
            Self::TokensToBlocks => Transfer::BlocksToTokens,
            Self::BlocksToTokens => Transfer::TokensToBlocks,
        }
    }

    /// Name in tables and traces.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduceGradient => "sum gradients over ranks",
            Self::AllGatherTokens => "gather tokens of ranks",
            Self::AllReduce => "sum over ranks",
            Self::ReduceScatterTokens => "sum tokens over ranks",
            Self::SliceTokens => "own tokens",
            Self::AllGatherReplicated => "gather tokens of ranks",
            Self::TokensToBlocks => "exchange tokens for blocks",
            Self::BlocksToTokens => "exchange blocks for tokens",
        }
    }
}

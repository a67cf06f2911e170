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
//! `ShardBlocks` is the placement of two-dimensional tensor parallelism (`summa`): each row of the grid has whole
//! sequences, and each rank of a row has a range of their columns.

use lockstep_plan::{GridPlace, Shard, Share, TensorPlace};

use crate::{
    Recorder, Value,
    operation::{Operation, SequenceRange},
    recorder::ValueInfo,
};

/// Placement of a value and of its gradient in the tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// `Replicate`, with a replicated gradient.
    Replicate,
    /// `Replicate`, with a partial gradient: the input of column-parallel layers.
    PartialGradient,
    /// `Partial`, with a replicated gradient: the output of row-parallel layers.
    Partial,
    /// `Shard(columns)` into `parts` ranges. With fewer parts than ranks, neighbouring ranks hold the same range and
    /// a partial gradient of it.
    ShardColumns { parts: usize },
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

impl Redistribute {
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

impl Recorder {
    /// Records the block as rank `place` of the tensor-parallel group, which shards the modules that `splits` names.
    pub fn split(&mut self, place: TensorPlace, splits: impl IntoIterator<Item = (String, Split)>) {
        self.place = place;
        self.splits = splits.into_iter().collect();
    }

    /// Returns the sharding of a module's weights; `None` if it is not sharded or the rank is alone.
    pub(crate) fn split_of(&self, module: &str) -> Option<Split> {
        self.splits.get(module).copied().filter(|_| self.place.ranks > 1)
    }

    /// Returns the placement of values between blocks and on the residual stream.
    pub(crate) fn stream(&self) -> Placement {
        let TensorPlace { ranks, splits_tokens, .. } = self.place;
        if ranks > 1 && splits_tokens { Placement::ShardTokens } else { Placement::Replicate }
    }

    /// Returns the number of local rows, in tokens, of a value in `placement`.
    pub(crate) fn rows_of(&self, placement: Placement) -> usize {
        match placement {
            Placement::ShardTokens => self.place.even_range(self.shape.tokens()).len(),
            Placement::ShardBlocks(grid) => self.sequences_of(grid).len * self.shape.seq_len,
            _ => self.shape.tokens(),
        }
    }

    pub(crate) fn placement(&self, value: Value) -> Placement {
        self.placements[value.0]
    }

    /// Returns the value in `PartialGradient`, as column-parallel layers read it.
    pub(crate) fn partial_gradient(&mut self, x: Value) -> Value {
        let exchange = match self.placement(x) {
            Placement::PartialGradient => return x,
            Placement::Replicate => Redistribute::AllReduceGradient,
            Placement::ShardTokens => Redistribute::AllGatherTokens,
            placement => panic!("a layer that is split by its outputs reads whole values, not {placement:?}"),
        };
        self.redistribute_once(x, exchange, Placement::PartialGradient)
    }

    /// Returns the value in `ShardBlocks`, as linear layers under two-dimensional tensor parallelism read it.
    pub(crate) fn shard_blocks(&mut self, x: Value, grid: GridPlace) -> Value {
        match self.placement(x) {
            Placement::ShardBlocks(_) => x,
            Placement::ShardTokens => {
                self.redistribute_once(x, Redistribute::TokensToBlocks, Placement::ShardBlocks(grid))
            }
            placement => panic!("a layer that is split into blocks reads tokens, not {placement:?}"),
        }
    }

    /// Returns `x` in another placement; the collective is recorded once for all layers that read `x`.
    fn redistribute_once(&mut self, x: Value, exchange: Redistribute, placement: Placement) -> Value {
        let known = self.operations.iter().find_map(|operation| match *operation {
            Operation::Redistribute { exchange: other, x: from, y, .. } if (other, from) == (exchange, x) => {
                Some(y)
            }
            _ => None,
        });
        known.unwrap_or_else(|| self.exchange(x, exchange, placement))
    }

    /// Returns a `Partial` value reduced to the placement between blocks; any other value unchanged.
    pub(crate) fn reduce_partial(&mut self, x: Value) -> Value {
        match (self.placement(x), self.stream()) {
            (Placement::Partial, Placement::ShardTokens) => {
                self.exchange(x, Redistribute::ReduceScatterTokens, Placement::ShardTokens)
            }
            (Placement::Partial, stream) => self.exchange(x, Redistribute::AllReduce, stream),
            _ => x,
        }
    }

    /// Returns the value in `ShardTokens`, so that ranks do not repeat each other's work.
    pub(crate) fn shard_tokens(&mut self, x: Value) -> Value {
        match self.placement(x) {
            Placement::Replicate if self.place.ranks > 1 => {
                self.exchange(x, Redistribute::SliceTokens, Placement::ShardTokens)
            }
            Placement::Replicate | Placement::ShardTokens => x,
            placement => panic!("tokens of {placement:?} are not sharded"),
        }
    }

    /// Returns the value with all tokens on every rank, as operations on heads read it.
    pub fn whole_tokens(&mut self, x: Value) -> Value {
        if self.placement(x) == Placement::ShardTokens { self.partial_gradient(x) } else { x }
    }

    /// Returns the value in the placement between blocks.
    pub(crate) fn redistribute_to_stream(&mut self, x: Value) -> Value {
        match (self.placement(x), self.stream()) {
            (Placement::ShardTokens, Placement::Replicate) => {
                self.exchange(x, Redistribute::AllGatherReplicated, Placement::Replicate)
            }
            _ => x,
        }
    }

    pub(crate) fn exchange(&mut self, x: Value, exchange: Redistribute, placement: Placement) -> Value {
        let y = self.value_in(self.columns(x), placement);
        let is_of_blocks = matches!(exchange, Redistribute::TokensToBlocks | Redistribute::BlocksToTokens);
        let ValueInfo { rows, columns, dtype } = self.values[x.0];
        let scratch = is_of_blocks.then(|| self.scratch(rows, columns, dtype));
        self.operations.push(Operation::Redistribute { exchange, x, y, scratch });
        y
    }

    /// Returns the sequences of a micro-batch that belong to a row of the grid.
    ///
    /// # Panics
    /// If the sequences do not divide evenly among the rows.
    pub(crate) fn sequences_of(&self, grid: GridPlace) -> SequenceRange {
        let (all, rows) = (self.shape.sequences, grid.side);
        assert!(all.is_multiple_of(rows), "{all} sequences are not split over {rows} rows of ranks");
        let len = all / rows;
        SequenceRange { first: grid.row * len, len }
    }

    /// Returns the number of shards of a column-parallel layer with `pieces` pieces: the smaller of ranks and pieces.
    ///
    /// # Panics
    /// If the larger number is not a multiple of the smaller.
    pub(crate) fn parts(&self, module: &str, pieces: usize) -> usize {
        let ranks = self.place.ranks;
        let parts = pieces.min(ranks);
        assert!(
            pieces.is_multiple_of(parts) && ranks.is_multiple_of(parts),
            "{module}: {pieces} pieces are not split over {ranks} ranks"
        );
        parts
    }

    /// Returns this rank's share of dimension `dim` of `total` elements, cut into `parts` shards.
    pub(crate) fn shard(&self, dim: usize, total: usize, parts: usize) -> Share {
        let (copies, len) = (self.place.ranks / parts, total / parts);
        let shard = Some(Shard { dim, start: self.place.rank / copies * len, len });
        Share { shard, copies, summands: copies, ..Share::default() }
    }

    /// Returns this rank's share of a vocabulary of `total` rows.
    pub(crate) fn vocabulary_shard(&self, total: usize) -> Share {
        let range = self.place.vocabulary_range(total);
        let shard = Some(Shard { dim: 0, start: range.start, len: range.len() });
        Share { shard, ..Share::default() }
    }

    /// Returns the share of a replicated parameter that is applied to a value in `placement`. Its gradient is partial
    /// where ranks see different tokens or columns.
    pub(crate) fn whole_share(&self, placement: Placement) -> Share {
        let ranks = self.place.ranks;
        let summands = match placement {
            Placement::Replicate | Placement::Partial => 1,
            Placement::PartialGradient
            | Placement::ShardColumns { .. }
            | Placement::ShardTokens
            | Placement::ShardBlocks(_) => ranks,
        };
        Share { copies: ranks, summands, ..Share::default() }
    }

    pub(crate) fn expect_placement(&self, value: Value, allowed: impl Fn(Placement) -> bool, what: &str) {
        let placement = self.placement(value);
        assert!(allowed(placement), "{what} cannot read {placement:?}");
    }
}

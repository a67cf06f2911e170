//! Placements of values in the tensor-parallel group, and the collectives that convert one placement (here: layout) to another.
//!
//! Model code names no placement. The recorder is told how the weights of a block are split, and every value carries
//! its layout. An operation that needs another layout gets it by an exchange. There is no other conversion, so a
//! missing reduction fails while recording. After Shoeybi et al. (2019); token sharding between the linear layers
//! (sequence parallelism) after Korthikanti et al. (2022).
//!
//! ```text
//! layout               value                      gradient
//! Whole                replicated                 replicated
//! Spread               replicated                 partial
//! Summands             partial                    replicated
//! Columns              sharded by columns         sharded by columns
//! Tokens               sharded by tokens          sharded by tokens
//! Blocks               sharded by both            sharded by both
//!
//! exchange             forward                    backward
//! Whole    -> Spread   none                       all-reduce
//! Tokens   -> Spread   all-gather                 reduce-scatter
//! Summands -> Whole    all-reduce                 none
//! Summands -> Tokens   reduce-scatter             all-gather
//! Whole    -> Tokens   slice                      all-gather
//! Tokens   -> Whole    all-gather                 slice
//! Tokens   -> Blocks   all-to-all along a row     all-to-all along a row
//! Blocks   -> Tokens   all-to-all along a row     all-to-all along a row
//! ```
//!
//! Blocks belong to two-dimensional tensor parallelism (`summa`): each row of the square has whole sequences, and
//! each of its ranks a range of their columns.

use lockstep_plan::{GridPlace, Shard, Share, TensorPlace};

use crate::{
    Recorder, Value,
    operation::{Operation, SequenceRange},
    recorder::ValueInfo,
};

/// Placement of a value and of its gradient in the tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// `Replicate`, with a replicated gradient.
    Whole,
    /// `Replicate`, with a partial gradient: the input of column-parallel layers.
    Spread,
    /// `Partial`, with a replicated gradient: the output of row-parallel layers.
    Summands,
    /// `Shard(columns)` into `parts` ranges. With fewer parts than ranks, neighbouring ranks hold the same range and
    /// a partial gradient of it.
    Columns { parts: usize },
    /// `Shard(tokens)`: sequence parallelism.
    Tokens,
    /// A block of a two-dimensional grid: this rank's columns of its row's tokens.
    Blocks(GridPlace),
}

/// Sharding of a module's weights in the tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// A column-parallel linear layer. Its outputs consist of pieces (heads, or single features) that stay whole.
    Outputs {
        /// Number of pieces.
        pieces: usize,
    },
    /// A row-parallel linear layer, whose inputs are the outputs of a column-parallel one.
    Inputs,
    /// A vocabulary-parallel embedding or output layer.
    Vocabulary,
}

/// A tensor-parallel collective that converts the layout of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exchange {
    /// `Whole` to `Spread`: no forward communication, an all-reduce of the gradient.
    SumGradients,
    /// `Tokens` to `Spread`: all-gather, with a reduce-scatter of the gradient.
    GatherTokens,
    /// `Summands` to `Whole`: all-reduce, with no communication of the gradient.
    Sum,
    /// `Summands` to `Tokens`: reduce-scatter, with an all-gather of the gradient.
    SumTokens,
    /// `Whole` to `Tokens`: slice, with an all-gather of the gradient.
    OwnTokens,
    /// `Tokens` to `Whole`: all-gather, with a slice of the gradient.
    AllTokens,
    /// `Tokens` to `Blocks`: all-to-all along a row.
    TokensToBlocks,
    /// `Blocks` to `Tokens`: all-to-all along a row.
    BlocksToTokens,
}

impl Exchange {
    /// Name in tables and traces.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SumGradients => "sum gradients over ranks",
            Self::GatherTokens => "gather tokens of ranks",
            Self::Sum => "sum over ranks",
            Self::SumTokens => "sum tokens over ranks",
            Self::OwnTokens => "own tokens",
            Self::AllTokens => "gather tokens of ranks",
            Self::TokensToBlocks => "exchange tokens for blocks",
            Self::BlocksToTokens => "exchange blocks for tokens",
        }
    }
}

impl Recorder {
    /// Records the block as rank `place` of the tensor-parallel group, which shards the modules of the block that `splits` names.
    pub fn split(&mut self, place: TensorPlace, splits: impl IntoIterator<Item = (String, Split)>) {
        self.place = place;
        self.splits = splits.into_iter().collect();
    }

    /// Returns the sharding of a module's weights; `None` if it is not sharded or the rank is alone.
    pub(crate) fn split_of(&self, module: &str) -> Option<Split> {
        self.splits.get(module).copied().filter(|_| self.place.ranks > 1)
    }

    /// Returns the layout of values between blocks and on the residual stream.
    pub(crate) fn stream(&self) -> Layout {
        let TensorPlace { ranks, splits_tokens, .. } = self.place;
        if ranks > 1 && splits_tokens { Layout::Tokens } else { Layout::Whole }
    }

    /// Local rows of a value in `layout`, in tokens.
    pub(crate) fn rows_of(&self, layout: Layout) -> usize {
        match layout {
            Layout::Tokens => self.place.even_range(self.shape.tokens()).len(),
            Layout::Blocks(grid) => self.sequences_of(grid).len * self.shape.seq_len,
            _ => self.shape.tokens(),
        }
    }

    pub(crate) fn layout(&self, value: Value) -> Layout {
        self.layouts[value.0]
    }

    /// Returns the value as column-parallel layers read it: replicated, with a partial gradient.
    pub(crate) fn spread(&mut self, x: Value) -> Value {
        let exchange = match self.layout(x) {
            Layout::Spread => return x,
            Layout::Whole => Exchange::SumGradients,
            Layout::Tokens => Exchange::GatherTokens,
            layout => panic!("a layer that is split by its outputs reads whole values, not {layout:?}"),
        };
        self.exchanged_once(x, exchange, Layout::Spread)
    }

    /// Returns the value in blocks, as linear layers under two-dimensional tensor parallelism read it.
    pub(crate) fn in_blocks(&mut self, x: Value, grid: GridPlace) -> Value {
        match self.layout(x) {
            Layout::Blocks(_) => x,
            Layout::Tokens => self.exchanged_once(x, Exchange::TokensToBlocks, Layout::Blocks(grid)),
            layout => panic!("a layer that is split into blocks reads tokens, not {layout:?}"),
        }
    }

    /// Returns the output of an exchange, which is recorded once for all layers that read `x`.
    fn exchanged_once(&mut self, x: Value, exchange: Exchange, layout: Layout) -> Value {
        let known = self.operations.iter().find_map(|operation| match *operation {
            Operation::Exchange { exchange: other, x: from, y, .. } if (other, from) == (exchange, x) => {
                Some(y)
            }
            _ => None,
        });
        known.unwrap_or_else(|| self.exchange(x, exchange, layout))
    }

    /// Returns a partial value reduced to the layout between blocks; any other value as it is.
    pub(crate) fn settled(&mut self, x: Value) -> Value {
        match (self.layout(x), self.stream()) {
            (Layout::Summands, Layout::Tokens) => self.exchange(x, Exchange::SumTokens, Layout::Tokens),
            (Layout::Summands, stream) => self.exchange(x, Exchange::Sum, stream),
            _ => x,
        }
    }

    /// Returns the value sharded by tokens, for work that ranks need not repeat.
    pub(crate) fn by_tokens(&mut self, x: Value) -> Value {
        match self.layout(x) {
            Layout::Whole if self.place.ranks > 1 => self.exchange(x, Exchange::OwnTokens, Layout::Tokens),
            Layout::Whole | Layout::Tokens => x,
            layout => panic!("tokens of {layout:?} are not shared out"),
        }
    }

    /// Returns the value with all tokens on every rank, which operations on heads need.
    pub fn whole_tokens(&mut self, x: Value) -> Value {
        if self.layout(x) == Layout::Tokens { self.spread(x) } else { x }
    }

    /// Returns the value in the layout between blocks.
    pub(crate) fn in_stream(&mut self, x: Value) -> Value {
        match (self.layout(x), self.stream()) {
            (Layout::Tokens, Layout::Whole) => self.exchange(x, Exchange::AllTokens, Layout::Whole),
            _ => x,
        }
    }

    pub(crate) fn exchange(&mut self, x: Value, exchange: Exchange, layout: Layout) -> Value {
        let y = self.value_in(self.columns(x), layout);
        let is_of_blocks = matches!(exchange, Exchange::TokensToBlocks | Exchange::BlocksToTokens);
        let ValueInfo { rows, columns, dtype } = self.values[x.0];
        let scratch = is_of_blocks.then(|| self.scratch(rows, columns, dtype));
        self.operations.push(Operation::Exchange { exchange, x, y, scratch });
        y
    }

    /// Returns the sequences of a micro-batch that belong to a row of the square.
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

    /// Returns the share of a replicated parameter that is applied to a value in `layout`. Its gradient is partial
    /// where ranks see different tokens or columns.
    pub(crate) fn whole_share(&self, layout: Layout) -> Share {
        let ranks = self.place.ranks;
        let summands = match layout {
            Layout::Whole | Layout::Summands => 1,
            Layout::Spread | Layout::Columns { .. } | Layout::Tokens | Layout::Blocks(_) => ranks,
        };
        Share { copies: ranks, summands, ..Share::default() }
    }

    pub(crate) fn expect_layout(&self, value: Value, allowed: impl Fn(Layout) -> bool, what: &str) {
        let layout = self.layout(value);
        assert!(allowed(layout), "{what} cannot read {layout:?}");
    }
}

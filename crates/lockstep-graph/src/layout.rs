//! How the ranks of the tensor-parallel axis share values, and the exchanges that lead from one layout to another.
//!
//! Model code says nothing of this. The recorder is told how the weights of a block are split, every value carries its
//! layout, and an operation that needs another one gets it by an exchange: there is no other way from one to the other, and a sum
//! that is left out does not record. After Shoeybi et al. (2019); splitting by tokens between the products after Korthikanti et
//! al. (2022).
//!
//! ```text
//!                      value                  gradient
//! Whole                the same on all        the same on all
//! Spread               the same on all        a summand on each
//! Summands             a summand on each      the same on all
//! Columns              a range of columns     of these columns
//! Tokens               a range of rows        of these rows
//! Blocks               rows and columns       of this block
//!
//! Whole    -> Spread   nothing                sum
//! Tokens   -> Spread   gather                 sum, each its rows
//! Summands -> Whole    sum                    nothing
//! Summands -> Tokens   sum, each its rows     gather
//! Whole    -> Tokens   each its rows          gather
//! Tokens   -> Whole    gather                 each its rows
//! Tokens   -> Blocks   exchange               exchange
//! Blocks   -> Tokens   exchange               exchange
//! ```
//!
//! Blocks are for ranks that make a square (`summa`): a row of it has whole sequences, and of these a rank a range of the columns.

use lockstep_plan::{GridPlace, Shard, Share, TensorPlace};

use crate::{
    Recorder, Value,
    operation::{Operation, SequenceRange},
    recorder::ValueInfo,
};

/// How the ranks of the axis share a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// All hold the whole value and the whole gradient.
    Whole,
    /// All hold the whole value, and each a summand of the gradient.
    Spread,
    /// Each holds a summand of the value, and all the whole gradient.
    Summands,
    /// Each holds one of `parts` ranges of the columns. With fewer parts than ranks neighbours hold the same, and each a
    /// summand of its gradient.
    Columns { parts: usize },
    /// Each holds a range of the tokens.
    Tokens,
    /// Each holds a range of the columns of its row's tokens.
    Blocks(GridPlace),
}

/// How the ranks split the weights of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// A linear layer by its outputs, which are so many pieces (heads, or single features) that stay whole.
    Outputs {
        /// How many.
        pieces: usize,
    },
    /// A linear layer by its inputs: those of another one's outputs.
    Inputs,
    /// An embedding or an output layer by the vocabulary.
    Vocabulary,
}

/// An exchange between the ranks, which changes the layout of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exchange {
    /// From `Whole` to `Spread`.
    SumGradients,
    /// From `Tokens` to `Spread`.
    GatherTokens,
    /// From `Summands` to `Whole`.
    Sum,
    /// From `Summands` to `Tokens`.
    SumTokens,
    /// From `Whole` to `Tokens`.
    OwnTokens,
    /// From `Tokens` to `Whole`.
    AllTokens,
    /// From `Tokens` to `Blocks`.
    TokensToBlocks,
    /// From `Blocks` to `Tokens`.
    BlocksToTokens,
}

impl Exchange {
    /// As tables and traces call it.
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
    /// Records the block as rank `place` of the axis, which splits the modules that `splits` names within the block.
    pub fn split(&mut self, place: TensorPlace, splits: impl IntoIterator<Item = (String, Split)>) {
        self.place = place;
        self.splits = splits.into_iter().collect();
    }

    /// How a module's weights are split; alone nothing is.
    pub(crate) fn split_of(&self, module: &str) -> Option<Split> {
        self.splits.get(module).copied().filter(|_| self.place.ranks > 1)
    }

    /// The layout of values between the products: those that blocks hand on.
    pub(crate) fn stream(&self) -> Layout {
        let TensorPlace { ranks, splits_tokens, .. } = self.place;
        if ranks > 1 && splits_tokens { Layout::Tokens } else { Layout::Whole }
    }

    /// Tokens of a micro-batch that this rank holds of a value in `layout`.
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

    /// The value for linear layers that are split by their outputs: whole, with a summand of its gradient from each rank.
    pub(crate) fn spread(&mut self, x: Value) -> Value {
        let exchange = match self.layout(x) {
            Layout::Spread => return x,
            Layout::Whole => Exchange::SumGradients,
            Layout::Tokens => Exchange::GatherTokens,
            layout => panic!("a layer that is split by its outputs reads whole values, not {layout:?}"),
        };
        self.exchanged_once(x, exchange, Layout::Spread)
    }

    /// The value for linear layers that ranks share as a square.
    pub(crate) fn in_blocks(&mut self, x: Value, grid: GridPlace) -> Value {
        match self.layout(x) {
            Layout::Blocks(_) => x,
            Layout::Tokens => self.exchanged_once(x, Exchange::TokensToBlocks, Layout::Blocks(grid)),
            layout => panic!("a layer that is split into blocks reads tokens, not {layout:?}"),
        }
    }

    /// An exchange, which layers that read the same value share.
    fn exchanged_once(&mut self, x: Value, exchange: Exchange, layout: Layout) -> Value {
        let known = self.operations.iter().find_map(|operation| match *operation {
            Operation::Exchange { exchange: other, x: from, y, .. } if (other, from) == (exchange, x) => {
                Some(y)
            }
            _ => None,
        });
        known.unwrap_or_else(|| self.exchange(x, exchange, layout))
    }

    /// The value as blocks hand it on: summed, if it is summands.
    pub(crate) fn settled(&mut self, x: Value) -> Value {
        match (self.layout(x), self.stream()) {
            (Layout::Summands, Layout::Tokens) => self.exchange(x, Exchange::SumTokens, Layout::Tokens),
            (Layout::Summands, stream) => self.exchange(x, Exchange::Sum, stream),
            _ => x,
        }
    }

    /// The value by tokens: for what ranks need not do twice.
    pub(crate) fn by_tokens(&mut self, x: Value) -> Value {
        match self.layout(x) {
            Layout::Whole if self.place.ranks > 1 => self.exchange(x, Exchange::OwnTokens, Layout::Tokens),
            Layout::Whole | Layout::Tokens => x,
            layout => panic!("tokens of {layout:?} are not shared out"),
        }
    }

    /// The value with all tokens, which heads need.
    pub fn whole_tokens(&mut self, x: Value) -> Value {
        if self.layout(x) == Layout::Tokens { self.spread(x) } else { x }
    }

    /// The value by tokens as blocks hand it on.
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

    /// The sequences of a micro-batch that a row of the square has.
    ///
    /// # Panics
    /// If the rows cannot have as many each.
    pub(crate) fn sequences_of(&self, grid: GridPlace) -> SequenceRange {
        let (all, rows) = (self.shape.sequences, grid.side);
        assert!(all.is_multiple_of(rows), "{all} sequences are not split over {rows} rows of ranks");
        let len = all / rows;
        SequenceRange { first: grid.row * len, len }
    }

    /// Parts of a split by outputs into pieces that stay whole: as many as ranks, or as pieces if there are fewer.
    ///
    /// # Panics
    /// If neither number divides the other.
    pub(crate) fn parts(&self, module: &str, pieces: usize) -> usize {
        let ranks = self.place.ranks;
        let parts = pieces.min(ranks);
        assert!(
            pieces.is_multiple_of(parts) && ranks.is_multiple_of(parts),
            "{module}: {pieces} pieces are not split over {ranks} ranks"
        );
        parts
    }

    /// The range of `total` that is this rank's of so many parts.
    pub(crate) fn shard(&self, dim: usize, total: usize, parts: usize) -> Share {
        let (copies, len) = (self.place.ranks / parts, total / parts);
        let shard = Some(Shard { dim, start: self.place.rank / copies * len, len });
        Share { shard, copies, summands: copies, ..Share::default() }
    }

    /// The range of a vocabulary that is this rank's.
    pub(crate) fn vocabulary_shard(&self, total: usize) -> Share {
        let range = self.place.vocabulary_range(total);
        let shard = Some(Shard { dim: 0, start: range.start, len: range.len() });
        Share { shard, ..Share::default() }
    }

    /// The share of a parameter that every rank holds whole and applies to a value in `layout`: where ranks see different
    /// tokens or columns, each has a summand of the gradient.
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

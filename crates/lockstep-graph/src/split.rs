//! The sharding of a block over its tensor-parallel group while it is recorded: the rows, columns and parameters of
//! this rank.

use lockstep_plan::{GridPlace, Shard, Share, TensorPlace};

use crate::{
    block::{SequenceRange, Value},
    placement::{Placement, Split},
    recorder::Recorder,
};

impl Recorder {
    /// Records the block as rank `place` of the tensor-parallel group, which shards the modules that `splits` names.
    pub fn split(&mut self, place: TensorPlace, splits: impl IntoIterator<Item = (String, Split)>) {
        self.place = place;
        self.splits = splits.into_iter().collect();
    }

    /// Returns the sharding of a module's weights; `None` if it is not sharded or the rank is alone.
    pub fn split_of(&self, module: &str) -> Option<Split> {
        self.splits.get(module).copied().filter(|_| self.place.ranks > 1)
    }

    /// Returns the placement of values between blocks and on the residual stream.
    pub fn stream(&self) -> Placement {
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

    /// Returns the placement of a value in the tensor-parallel group.
    pub fn placement(&self, value: Value) -> Placement {
        self.placements[value.0]
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
    #[track_caller]
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
    pub fn shard(&self, dim: usize, total: usize, parts: usize) -> Share {
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
    pub fn whole_share(&self, placement: Placement) -> Share {
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

    /// Returns this rank's share of a vector parameter with one element for each column of `value`.
    pub fn share_of_columns(&self, value: Value) -> Share {
        self.share_of_elements(value, self.columns(value))
    }

    /// Returns this rank's share of a vector parameter of `elements`, each of which goes with an equal number of columns
    /// of `value`, such as a head's.
    pub fn share_of_elements(&self, value: Value, elements: usize) -> Share {
        match self.placement(value) {
            Placement::ShardColumns { parts } => self.shard(0, elements, parts),
            Placement::ShardBlocks(grid) => grid.share_of_bias(elements),
            placement => self.whole_share(placement),
        }
    }

    /// Asserts that the placement of a value is one that the operation `what` can read.
    ///
    /// # Panics
    /// If it is not.
    #[track_caller]
    pub fn expect_placement(&self, value: Value, allowed: impl Fn(Placement) -> bool, what: &str) {
        assert!(allowed(self.placement(value)), "{what} cannot read {}", self.describe(value));
    }
}

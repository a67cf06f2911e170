//! Redistribution of values in the tensor-parallel group: the recording of the collectives, and their execution forward
//! and backward.

use lockstep_comm::CommError;
use lockstep_plan::GridPlace;
use lockstep_tensor::View;

use crate::{
    block::{Value, ValueInfo},
    operation::Operation,
    placement::{Placement, Redistribute, Transfer},
    recorder::Recorder,
    replay::Run,
};

impl Recorder {
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
        let scratch = is_of_blocks.then(|| self.local(rows, columns, dtype));
        self.operations.push(Operation::Redistribute { exchange, x, y, scratch });
        y
    }
}

impl Run<'_> {
    /// Moves a value, or its gradient, to another placement; `scratch` is for exchanges of blocks. The flight recorder and the
    /// mutation test identify a collective by the line that calls this function.
    #[track_caller]
    pub(crate) fn transfer(
        &self,
        transfer: Transfer,
        from: View<'_>,
        to: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
        match transfer {
            Transfer::Alias => unreachable!("no instruction is derived for an alias"),
            Transfer::Slice => {
                self.own_rows(from, to);
                Ok(())
            }
            Transfer::AllGather => self.peers().gather(from, to),
            Transfer::AllReduce => self.all_reduce(from, to),
            Transfer::ReduceScatter => self.peers().reduce_scatter(from, to),
            Transfer::TokensToBlocks => self.tokens_to_blocks(from, to, scratch),
            Transfer::BlocksToTokens => self.blocks_to_tokens(from, to, scratch),
        }
    }

    /// Writes to `y` the all-reduced sum of `x`; the two may be the same view.
    #[track_caller]
    fn all_reduce(&self, x: View<'_>, y: View<'_>) -> Result<(), CommError> {
        if x.as_ptr() != y.as_ptr() {
            self.replay.queue.cast(x, y);
        }
        self.peers().all_reduce(y)
    }

    /// Copies this rank's range of the rows of `all` to `rows`.
    fn own_rows(&self, all: View<'_>, rows: View<'_>) {
        let (len, rank) = (rows.shape().as_matrix().0, self.peers().group.rank());
        self.replay.queue.cast(all.rows(rank * len..(rank + 1) * len), rows);
    }
}

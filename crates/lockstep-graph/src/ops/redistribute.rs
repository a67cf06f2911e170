//! Redistribution of values in the tensor-parallel group: the recording of the collectives, and their execution forward
//! and backward.

use lockstep_comm::CommError;
use lockstep_plan::{
    GridPlace,
    work::{Collective, Pass, Peers as Ranks},
};
use lockstep_tensor::View;

use crate::{
    block::{Value, ValueInfo},
    facts::Facts,
    op::Op,
    peers::Peers,
    placement::{Placement, Redistribute, Transfer},
    recorder::Recorder,
    replay::{InputGradients, Run},
    work_context::{Work, WorkContext},
};

/// A tensor-parallel collective that changes the placement of a value.
#[derive(Debug)]
struct RedistributeOperation {
    exchange: Redistribute,
    x: Value,
    y: Value,
    /// Scratch as large as `x`, for all-to-alls to and from blocks.
    scratch: Option<Value>,
}

impl Recorder {
    /// Returns the value in `PartialGradient`, as column-parallel layers read it.
    ///
    /// # Panics
    /// If the value is neither replicated nor sharded by tokens.
    #[track_caller]
    pub fn partial_gradient(&mut self, x: Value) -> Value {
        let exchange = match self.placement(x) {
            Placement::PartialGradient => return x,
            Placement::Replicate => Redistribute::AllReduceGradient,
            Placement::ShardTokens => Redistribute::AllGatherTokens,
            _ => panic!("a layer that is split by its outputs reads whole values, not {}", self.describe(x)),
        };
        self.redistribute_once(x, exchange, Placement::PartialGradient)
    }

    /// Returns the value in `ShardBlocks`, as linear layers under two-dimensional tensor parallelism read it.
    #[track_caller]
    pub(crate) fn shard_blocks(&mut self, x: Value, grid: GridPlace) -> Value {
        match self.placement(x) {
            Placement::ShardBlocks(_) => x,
            Placement::ShardTokens => {
                self.redistribute_once(x, Redistribute::TokensToBlocks, Placement::ShardBlocks(grid))
            }
            _ => panic!("a layer that is split into blocks reads tokens, not {}", self.describe(x)),
        }
    }

    /// Returns `x` in another placement; the collective is recorded once for all layers that read `x`.
    #[track_caller]
    fn redistribute_once(&mut self, x: Value, exchange: Redistribute, placement: Placement) -> Value {
        let is_known = |(from, other, _): &&(Value, Redistribute, Value)| (*from, *other) == (x, exchange);
        if let Some((.., y)) = self.redistributed.iter().find(is_known) {
            return *y;
        }
        let y = self.exchange(x, exchange, placement);
        self.redistributed.push((x, exchange, y));
        y
    }

    /// Returns a `Partial` value reduced to the placement between blocks; any other value unchanged.
    #[track_caller]
    pub fn reduce_partial(&mut self, x: Value) -> Value {
        match (self.placement(x), self.stream()) {
            (Placement::Partial, Placement::ShardTokens) => {
                self.exchange(x, Redistribute::ReduceScatterTokens, Placement::ShardTokens)
            }
            (Placement::Partial, stream) => self.exchange(x, Redistribute::AllReduce, stream),
            _ => x,
        }
    }

    /// Returns the value in `ShardTokens`, so that ranks do not repeat each other's work.
    #[track_caller]
    pub(crate) fn shard_tokens(&mut self, x: Value) -> Value {
        match self.placement(x) {
            Placement::Replicate if self.place.ranks > 1 => {
                self.exchange(x, Redistribute::SliceTokens, Placement::ShardTokens)
            }
            Placement::Replicate | Placement::ShardTokens => x,
            _ => panic!("tokens of {} are not sharded", self.describe(x)),
        }
    }

    /// Returns the value with all tokens on every rank, as operations on heads read it.
    #[track_caller]
    pub fn whole_tokens(&mut self, x: Value) -> Value {
        if self.placement(x) == Placement::ShardTokens { self.partial_gradient(x) } else { x }
    }

    /// Returns the value in the placement between blocks.
    #[track_caller]
    pub(crate) fn redistribute_to_stream(&mut self, x: Value) -> Value {
        match (self.placement(x), self.stream()) {
            (Placement::ShardTokens, Placement::Replicate) => {
                self.exchange(x, Redistribute::AllGatherReplicated, Placement::Replicate)
            }
            (Placement::Replicate, Placement::ShardTokens) => {
                self.exchange(x, Redistribute::SliceTokens, Placement::ShardTokens)
            }
            _ => x,
        }
    }

    #[track_caller]
    pub(crate) fn exchange(&mut self, x: Value, exchange: Redistribute, placement: Placement) -> Value {
        let y = self.value_in(self.columns(x), placement);
        let is_of_blocks = matches!(exchange, Redistribute::TokensToBlocks | Redistribute::BlocksToTokens);
        let ValueInfo { rows, columns, dtype } = self.values[x.0];
        let scratch = is_of_blocks.then(|| self.local(rows, columns, dtype));
        self.push(RedistributeOperation { exchange, x, y, scratch });
        y
    }
}

impl Op for RedistributeOperation {
    fn facts(&self) -> Facts {
        let Self { exchange, x, y, scratch } = *self;
        Facts {
            scratch: scratch.into_iter().collect(),
            in_place_inputs: if exchange == Redistribute::AllReduce { vec![x] } else { vec![] },
            backward_in_place: exchange == Redistribute::AllReduceGradient,
            passes_gradient_on: exchange == Redistribute::AllReduce,
            alias_of: (exchange == Redistribute::AllReduceGradient).then_some(x),
            is_gathered: exchange.forward() == Transfer::AllGather,
            // The output of a norm in blocks; the norm's output is not saved either.
            is_cheap: exchange == Redistribute::TokensToBlocks,
            transfers: Some([exchange.forward(), exchange.backward()]),
            ..Facts::of(exchange.name(), [x], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let Self { exchange, x, y, scratch } = *self;
        let (transfer, x, y) = (exchange.forward(), run.value(x), run.value(y));
        // Redistributions whose collective is the same have lines of their own: see `Run::transfer`.
        match exchange {
            Redistribute::AllGatherReplicated | Redistribute::BlocksToTokens => {
                run.transfer(transfer, x, y, scratch)
            }
            _ => run.transfer(transfer, x, y, scratch),
        }
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (transfer, dx, scratch) = (self.exchange.backward(), dx.view(0), self.scratch);
        match self.exchange {
            Redistribute::SliceTokens | Redistribute::BlocksToTokens => {
                run.transfer(transfer, dy, dx, scratch)
            }
            _ => run.transfer(transfer, dy, dx, scratch),
        }
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let (transfer, from, to) = match context.pass {
            Pass::Forward | Pass::Recompute => (self.exchange.forward(), self.x, self.y),
            _ => (self.exchange.backward(), self.y, self.x),
        };
        let all = |collective, value| {
            let exchange = Work::exchange(Ranks::Tensor, collective, context.shapes.bytes(value));
            vec![Work { cost: context.cost(), ..exchange }]
        };
        match transfer {
            Transfer::AllGather => all(Collective::AllGather, to),
            Transfer::AllReduce => all(Collective::AllReduce, to),
            Transfer::ReduceScatter => all(Collective::ReduceScatter, from),
            // A transpose, and the communication along a row.
            Transfer::TokensToBlocks | Transfer::BlocksToTokens => {
                let bytes = context.shapes.bytes(from);
                vec![context.stream(), Work::exchange(Ranks::TensorLine, Collective::AllToAll, bytes)]
            }
            Transfer::Slice | Transfer::Alias => vec![context.stream()],
        }
    }
}

impl<'a> Run<'a> {
    /// Moves a value, or its gradient, to another placement; `scratch` is for exchanges of blocks. The flight recorder and the
    /// mutation test identify a collective by the line that calls this function.
    #[track_caller]
    fn transfer(
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

    /// Converts `x [n, q · w]`, all columns of this rank's tokens, to `y [q · n, w]`, this rank's columns of the row's tokens.
    #[track_caller]
    fn tokens_to_blocks(&self, x: View<'_>, y: View<'_>, scratch: Option<Value>) -> Result<(), CommError> {
        let (row, sent, [n, q, w]) = self.row_and_scratch(x, scratch);
        self.replay.queue.transpose_blocks(x.reshape([n, q, w]), sent.reshape([q, n, w]));
        row.all_to_all(sent, y.reshape([q, n, w]))
    }

    /// Converts `x [q · n, w]`, this rank's columns of the row's tokens, to `y [n, q · w]`, all columns of this rank's tokens.
    #[track_caller]
    fn blocks_to_tokens(&self, x: View<'_>, y: View<'_>, scratch: Option<Value>) -> Result<(), CommError> {
        let (row, received, [n, q, w]) = self.row_and_scratch(y, scratch);
        row.all_to_all(x.reshape([q, n, w]), received)?;
        self.replay.queue.transpose_blocks(received.reshape([q, n, w]), y.reshape([n, q, w]));
        Ok(())
    }

    /// Returns the row group, the scratch, and the sizes of an all-to-all: tokens per rank, ranks, and columns per
    /// rank.
    fn row_and_scratch(&self, tokens: View<'_>, scratch: Option<Value>) -> (Peers<'a>, View<'a>, [usize; 3]) {
        let row = self.grid_peers().row;
        let ((n, columns), q) = (tokens.shape().as_matrix(), row.group.size());
        let scratch = self.value(scratch.expect("an exchange of blocks is recorded with scratch"));
        (row, scratch.reshape([q, n, columns / q]), [n, q, columns / q])
    }
}

//! Linear layers under two-dimensional tensor parallelism: the ranks form a square grid, each holds one block of every
//! weight, and blocks are broadcast along the rows and columns of the grid.
//!
//! SUMMA (van de Geijn and Watts, 1997), as Xu et al. (2021) use it for transformers. In a square of `q · q` ranks,
//! row `i` has `1/q` of the sequences. The rank in row `i` and column `j` holds the blocks below; attention and the
//! activation functions work on blocks as well, because they need no other sequence and no other head:
//!
//! ```text
//! X_ij   tokens of row i, range j of the inputs
//! W_ji   range j of the outputs, range i of the inputs
//! Y_ij   tokens of row i, range j of the outputs
//!
//! Y_ij  = sum over k of X_ik W_jkᵀ      for each k: broadcast X_ik along the row, W_jk along the column
//! dX_ik = sum over j of dY_ij W_jk      for each k: broadcast W_jk along the column, reduce the sum along the row to k
//! dW_jk = sum over i of dY_ijᵀ X_ik     for each k: broadcast X_ik along the row, reduce the sum along the column to k
//! ```
//!
//! Norms, residuals and dropout work on a range of tokens per rank, as in sequence parallelism (`ShardTokens`). Before
//! and after the linear layers of a branch an all-to-all along the row converts to and from `ShardBlocks`.

use lockstep_comm::CommError;
use lockstep_plan::{DType, GridPlace, Initializer};
use lockstep_tensor::{Gemm, GemmLayout, View, Write};

use crate::{
    block::{Bias, Value, ValueInfo},
    operation::{Operation, SummaLinear},
    peers::{GridGroups, Peers},
    placement::{Placement, Redistribute, Split},
    recorder::Recorder,
    replay::Run,
};

impl Recorder {
    /// Records [`Recorder::product`] under two-dimensional tensor parallelism.
    ///
    /// # Panics
    /// If the side of the grid does not divide the sharded dimension.
    pub(crate) fn product_of_blocks(
        &mut self,
        x: Value,
        name: &str,
        out_features: usize,
        (split, grid): (Split, GridPlace),
        (bias, initializer): (Bias, Initializer),
    ) -> Value {
        let side = grid.side;
        let x = match split {
            Split::ColumnParallel { pieces } => {
                assert!(pieces.is_multiple_of(side), "{name}: {pieces} pieces for a side of {side}");
                self.shard_blocks(x, grid)
            }
            Split::RowParallel => {
                self.expect_placement(x, |layout| layout == Placement::ShardBlocks(grid), name);
                x
            }
            Split::VocabularyParallel => panic!("{name}: only an output layer is split by a vocabulary"),
        };
        let shape = [out_features, self.columns(x)];
        let share = grid.share_of_weight(shape);
        let weight = self.parameter(format!("{name}.weight"), &shape, initializer, share);
        let bias = self.bias(bias, name, out_features, grid.share_of_bias(out_features));
        let y = self.value_in(out_features, Placement::ShardBlocks(grid));
        let [inputs, outputs] = [x, y].map(|value| self.values[value.0].columns);
        let ValueInfo { rows, dtype, .. } = self.values[x.0];
        let sums = (dtype != DType::F32).then(|| self.local(rows, outputs, DType::F32));
        let blocks = [self.local(rows, inputs, dtype), self.local(outputs, inputs, dtype)];
        let blocks_for_weights = [self.local(rows, inputs, dtype), self.local(outputs, inputs, DType::F32)];
        let linear = SummaLinear { x, weight, bias, grid, y, blocks, sums, blocks_for_weights };
        self.operations.push(Operation::SummaLinear(linear));
        match split {
            Split::RowParallel => self.exchange(y, Redistribute::BlocksToTokens, Placement::ShardTokens),
            _ => y,
        }
    }
}

impl<'a> Run<'a> {
    fn grid_peers(&self) -> GridGroups<'a> {
        self.replay
            .grid
            .expect("a program that was recorded for a square of ranks is given its rows and columns")
    }

    /// Runs the forward.
    pub(crate) fn block_linear(&self, linear: &SummaLinear) -> Result<(), CommError> {
        let SummaLinear { x, weight, bias, grid, y, blocks, sums, .. } = *linear;
        let (GridGroups { row, column }, queue) = (self.grid_peers(), self.replay.queue);
        let (x, weight, y) = (self.value(x), self.weight(weight), self.value(y));
        let [other_inputs, other_weights] = blocks.map(|block| self.value(block));
        let c = sums.map_or(y, |sums| self.value(sums));
        for step in 0..grid.side {
            let a = block_of(row, step, x, other_inputs)?;
            let b = block_of(column, step, weight, other_weights)?;
            let is_first = step == 0;
            let bias = bias.filter(|_| is_first).map(|bias| self.weight(bias));
            let write = if is_first { Write::Overwrite } else { Write::Accumulate };
            queue.gemm(Gemm { layout: GemmLayout::NT, a, b, c, bias, write });
        }
        if sums.is_some() {
            queue.cast(c, y);
        }
        Ok(())
    }

    /// Writes the gradient of the input to `dx`, or adds it.
    pub(crate) fn block_linear_input_gradient(
        &self,
        linear: &SummaLinear,
        dy: View<'_>,
        dx: View<'_>,
        write: Write,
    ) -> Result<(), CommError> {
        let SummaLinear { weight, grid, blocks, .. } = *linear;
        let GridGroups { row, column } = self.grid_peers();
        let (weight, [aside, other_weights]) = (self.weight(weight), blocks.map(|block| self.value(block)));
        for step in 0..grid.side {
            let b = block_of(column, step, weight, other_weights)?;
            let product = Product { layout: GemmLayout::NN, a: dy, b };
            self.reduce_product(row, step, product, (dx, write), aside)?;
        }
        Ok(())
    }

    /// Writes the gradient of the weight, or adds it.
    pub(crate) fn block_linear_weight_gradient(
        &self,
        linear: &SummaLinear,
        dy: View<'_>,
    ) -> Result<(), CommError> {
        let SummaLinear { x, weight, grid, blocks_for_weights, .. } = *linear;
        let GridGroups { row, column } = self.grid_peers();
        let (x, [other_inputs, aside]) = (self.value(x), blocks_for_weights.map(|block| self.value(block)));
        let gradient = self.replay.parameters.gradient(weight);
        for step in 0..grid.side {
            let b = block_of(row, step, x, other_inputs)?;
            let product = Product { layout: GemmLayout::TN, a: dy, b };
            self.reduce_product(column, step, product, gradient, aside)?;
        }
        Ok(())
    }

    /// Computes a product on every rank and reduces the results to rank `root`, which writes or adds the sum to `to`.
    #[track_caller]
    fn reduce_product(
        &self,
        peers: Peers<'_>,
        root: usize,
        Product { layout, a, b }: Product<'_>,
        (to, write): (View<'_>, Write),
        aside: View<'_>,
    ) -> Result<(), CommError> {
        let (queue, is_root) = (self.replay.queue, peers.group.rank() == root);
        let c = if is_root && write == Write::Overwrite { to } else { aside };
        queue.gemm(Gemm { layout, a, b, c, bias: None, write: Write::Overwrite });
        peers.reduce(c, root)?;
        if is_root && write == Write::Accumulate {
            queue.add(to, c, to);
        }
        Ok(())
    }

    /// Converts `x [n, q · w]`, all columns of this rank's tokens, to `y [q · n, w]`, this rank's columns of the row's tokens.
    #[track_caller]
    pub(crate) fn tokens_to_blocks(
        &self,
        x: View<'_>,
        y: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
        let (row, sent, [n, q, w]) = self.row_and_scratch(x, scratch);
        self.replay.queue.transpose_blocks(x.reshape([n, q, w]), sent.reshape([q, n, w]));
        row.all_to_all(sent, y.reshape([q, n, w]))
    }

    /// Converts `x [q · n, w]`, this rank's columns of the row's tokens, to `y [n, q · w]`, all columns of this rank's tokens.
    #[track_caller]
    pub(crate) fn blocks_to_tokens(
        &self,
        x: View<'_>,
        y: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
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

/// A matrix product of two blocks.
#[derive(Clone, Copy)]
struct Product<'a> {
    layout: GemmLayout,
    a: View<'a>,
    b: View<'a>,
}

/// Broadcasts the block of rank `root`, which is `own` there; the other ranks receive it in `other`. Returns the block.
#[track_caller]
fn block_of<'a>(
    peers: Peers<'_>,
    root: usize,
    own: View<'a>,
    other: View<'a>,
) -> Result<View<'a>, CommError> {
    let block = if peers.group.rank() == root { own } else { other };
    peers.broadcast(block, root)?;
    Ok(block)
}

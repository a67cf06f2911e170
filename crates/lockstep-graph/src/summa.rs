//! Linear layers of ranks that make a square: each holds one block of every weight, and blocks travel along rows and columns.
//!
//! SUMMA (van de Geijn and Watts, 1997), as Xu et al. (2021) use it for transformers. Of a square of `q · q` ranks the one in row
//! `i` and column `j` has these blocks, where row `i` has `1/q` of the sequences; all that stands between linear layers and looks at
//! no other sequence and no other head is computed on blocks:
//!
//! ```text
//! X_ij   tokens of row i, range j of the inputs
//! W_ji   range j of the outputs, range i of the inputs
//! Y_ij   tokens of row i, range j of the outputs
//!
//! Y_ij  = sum over k of X_ik W_jkᵀ      for each k: X_ik comes along the row, W_jk along the column
//! dX_ik = sum over j of dY_ij W_jk      for each k: W_jk comes along the column, the sum goes along the row to k
//! dW_jk = sum over i of dY_ijᵀ X_ik     for each k: X_ik comes along the row, the sum goes along the column to k
//! ```
//!
//! Norms, residuals and dropout work on the tokens of a rank, as with sequence parallelism; before and after the linear layers of a
//! branch the ranks of a row exchange their tokens for blocks.

use lockstep_comm::CommError;
use lockstep_plan::{DType, GridPlace, Initializer};
use lockstep_tensor::{Gemm, GemmLayout, View, Write};

use crate::{
    Bias, GridPeers, ParameterIndex, Peers, Recorder, Split, Value,
    layout::{Exchange, Layout},
    operation::Operation,
    recorder::ValueInfo,
    replay::Run,
};

/// `y = x Wᵀ + b` by blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockLinear {
    pub(crate) x: Value,
    pub(crate) weight: ParameterIndex,
    pub(crate) bias: Option<ParameterIndex>,
    pub(crate) grid: GridPlace,
    pub(crate) y: Value,
    /// Scratch for blocks of other ranks: of the input or its gradient, and of the weight.
    blocks: [Value; 2],
    /// Where dtypes are narrower than f32 products are summed aside.
    sums: Option<Value>,
    /// Scratch while the gradient of the weight is computed: a block of the input, and of that gradient.
    blocks_for_weights: [Value; 2],
}

impl BlockLinear {
    pub(crate) fn scratch(&self) -> Vec<Value> {
        self.blocks.into_iter().chain(self.sums).collect()
    }

    pub(crate) fn scratch_for_weights(&self) -> Vec<Value> {
        self.blocks_for_weights.to_vec()
    }
}

impl Recorder {
    /// [`Recorder::product`] of ranks that make a square.
    ///
    /// # Panics
    /// If its side does not divide what is split.
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
            Split::Outputs { pieces } => {
                assert!(pieces.is_multiple_of(side), "{name}: {pieces} pieces for a side of {side}");
                self.in_blocks(x, grid)
            }
            Split::Inputs => {
                self.expect_layout(x, |layout| layout == Layout::Blocks(grid), name);
                x
            }
            Split::Vocabulary => panic!("{name}: only an output layer is split by a vocabulary"),
        };
        let shape = [out_features, self.columns(x)];
        let share = grid.share_of_weight(shape);
        let weight = self.parameter_shared(format!("{name}.weight"), &shape, initializer, share);
        let bias = (bias == Bias::With).then(|| {
            let share = grid.share_of_bias(out_features);
            self.parameter_shared(format!("{name}.bias"), &shape[..1], Initializer::Zeros, share)
        });
        let y = self.value_in(out_features, Layout::Blocks(grid));
        let [inputs, outputs] = [x, y].map(|value| self.values[value.0].columns);
        let ValueInfo { rows, dtype, .. } = self.values[x.0];
        let sums = (dtype != DType::F32).then(|| self.scratch(rows, outputs, DType::F32));
        let blocks = [self.scratch(rows, inputs, dtype), self.scratch(outputs, inputs, dtype)];
        let blocks_for_weights =
            [self.scratch(rows, inputs, dtype), self.scratch(outputs, inputs, DType::F32)];
        let linear = BlockLinear { x, weight, bias, grid, y, blocks, sums, blocks_for_weights };
        self.operations.push(Operation::BlockLinear(linear));
        match split {
            Split::Inputs => self.exchange(y, Exchange::BlocksToTokens, Layout::Tokens),
            _ => y,
        }
    }
}

impl<'a> Run<'a> {
    fn grid_peers(&self) -> GridPeers<'a> {
        self.replay
            .grid
            .expect("a program that was recorded for a square of ranks is given its rows and columns")
    }

    /// The forward.
    pub(crate) fn block_linear(&self, linear: &BlockLinear) -> Result<(), CommError> {
        let BlockLinear { x, weight, bias, grid, y, blocks, sums, .. } = *linear;
        let (GridPeers { row, column }, queue) = (self.grid_peers(), self.replay.queue);
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

    /// `dx` becomes the gradient of the input, or has it added.
    pub(crate) fn block_linear_input_gradient(
        &self,
        linear: &BlockLinear,
        dy: View<'_>,
        dx: View<'_>,
        write: Write,
    ) -> Result<(), CommError> {
        let BlockLinear { weight, grid, blocks, .. } = *linear;
        let GridPeers { row, column } = self.grid_peers();
        let (weight, [aside, other_weights]) = (self.weight(weight), blocks.map(|block| self.value(block)));
        for step in 0..grid.side {
            let b = block_of(column, step, weight, other_weights)?;
            let product = Product { layout: GemmLayout::NN, a: dy, b };
            self.sum_to(row, step, product, (dx, write), aside)?;
        }
        Ok(())
    }

    /// Contributes to the gradient of the weight.
    pub(crate) fn block_linear_weight_gradient(
        &self,
        linear: &BlockLinear,
        dy: View<'_>,
    ) -> Result<(), CommError> {
        let BlockLinear { x, weight, grid, blocks_for_weights, .. } = *linear;
        let GridPeers { row, column } = self.grid_peers();
        let (x, [other_inputs, aside]) = (self.value(x), blocks_for_weights.map(|block| self.value(block)));
        let gradient = self.replay.parameters.gradient(weight);
        for step in 0..grid.side {
            let b = block_of(row, step, x, other_inputs)?;
            let product = Product { layout: GemmLayout::TN, a: dy, b };
            self.sum_to(column, step, product, gradient, aside)?;
        }
        Ok(())
    }

    /// The sum of what all ranks make of a product, to one of them.
    #[track_caller]
    fn sum_to(
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
        peers.sum_to(c, root)?;
        if is_root && write == Write::Accumulate {
            queue.add(to, c, to);
        }
        Ok(())
    }

    /// `x [n, q · w]` of the own tokens becomes `y [q · n, w]`, the own columns of the row's tokens.
    #[track_caller]
    pub(crate) fn tokens_to_blocks(
        &self,
        x: View<'_>,
        y: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
        let (row, sent, [n, q, w]) = self.of_exchange(x, scratch);
        self.replay.queue.transpose_blocks(x.reshape([n, q, w]), sent.reshape([q, n, w]));
        row.exchange(sent, y.reshape([q, n, w]))
    }

    /// And back.
    #[track_caller]
    pub(crate) fn blocks_to_tokens(
        &self,
        x: View<'_>,
        y: View<'_>,
        scratch: Option<Value>,
    ) -> Result<(), CommError> {
        let (row, received, [n, q, w]) = self.of_exchange(y, scratch);
        row.exchange(x.reshape([q, n, w]), received)?;
        self.replay.queue.transpose_blocks(received.reshape([q, n, w]), y.reshape([n, q, w]));
        Ok(())
    }

    /// The ranks that exchange, scratch, and the numbers of tokens, of ranks, and of columns that each has of the others' tokens.
    fn of_exchange(&self, tokens: View<'_>, scratch: Option<Value>) -> (Peers<'a>, View<'a>, [usize; 3]) {
        let row = self.grid_peers().row;
        let ((n, columns), q) = (tokens.shape().as_matrix(), row.group.size());
        let scratch = self.value(scratch.expect("an exchange of blocks is recorded with scratch"));
        (row, scratch.reshape([q, n, columns / q]), [n, q, columns / q])
    }
}

/// A product of two blocks.
#[derive(Clone, Copy)]
struct Product<'a> {
    layout: GemmLayout,
    a: View<'a>,
    b: View<'a>,
}

/// The block of rank `root`, which sends its own, and which the others receive in `other`.
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

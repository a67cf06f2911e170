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
use lockstep_plan::{
    DType, GridPlace, Initializer,
    work::{Collective, Pass, Peers as Ranks},
};
use lockstep_tensor::{Gemm, GemmLayout, View, Write};

use crate::{
    block::{Bias, ParameterIndex, Value, ValueInfo},
    facts::Facts,
    op::Op,
    peers::{GridGroups, Peers},
    placement::{Placement, Redistribute, Split},
    recorder::Recorder,
    replay::{InputGradients, Run},
    work_context::{Work, WorkContext},
};

/// A linear layer `y = x Wᵀ + b` whose operands are sharded into blocks.
#[derive(Debug)]
struct SummaLinear {
    x: Value,
    weight: ParameterIndex,
    bias: Option<ParameterIndex>,
    grid: GridPlace,
    y: Value,
    /// Scratch for broadcast blocks: one of the input or its gradient, one of the weight.
    blocks: [Value; 2],
    /// f32 scratch that products are summed in, for dtypes narrower than f32.
    sums: Option<Value>,
    /// Scratch for the weight gradient: one block of the input, one of the weight gradient.
    blocks_for_weights: [Value; 2],
}

impl Recorder {
    /// Records [`Recorder::product`] under two-dimensional tensor parallelism.
    ///
    /// # Panics
    /// If the side of the grid does not divide the sharded dimension.
    #[track_caller]
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
                let is_sharded = |placement| placement == Placement::ShardBlocks(grid);
                self.expect_placement(x, is_sharded, &format!("row-parallel linear {name}"));
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
        self.push(SummaLinear { x, weight, bias, grid, y, blocks, sums, blocks_for_weights });
        match split {
            Split::RowParallel => self.exchange(y, Redistribute::BlocksToTokens, Placement::ShardTokens),
            _ => y,
        }
    }
}

impl Op for SummaLinear {
    fn facts(&self) -> Facts {
        let Self { x, weight, bias, y, blocks, sums, blocks_for_weights, .. } = *self;
        Facts {
            scratch: blocks.into_iter().chain(sums).collect(),
            scratch_for_weights: blocks_for_weights.to_vec(),
            weights: vec![weight],
            bias,
            saved_for_weights: vec![x],
            accumulates: true,
            ..Facts::of("linear in blocks", [x], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let Self { x, weight, bias, grid, y, blocks, sums, .. } = *self;
        let (GridGroups { row, column }, queue) = (run.grid_peers(), run.queue());
        let (x, weight, y) = (run.value(x), run.weight(weight), run.value(y));
        let [other_inputs, other_weights] = blocks.map(|block| run.value(block));
        let c = sums.map_or(y, |sums| run.value(sums));
        for step in 0..grid.side {
            let a = block_of(row, step, x, other_inputs)?;
            let b = block_of(column, step, weight, other_weights)?;
            let is_first = step == 0;
            let bias = bias.filter(|_| is_first).map(|bias| run.weight(bias));
            let write = if is_first { Write::Overwrite } else { Write::Accumulate };
            queue.gemm(Gemm { layout: GemmLayout::NT, a, b, c, bias, write });
        }
        if sums.is_some() {
            queue.cast(c, y);
        }
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let Self { weight, grid, blocks, .. } = *self;
        let GridGroups { row, column } = run.grid_peers();
        let (weight, [aside, other_weights]) = (run.weight(weight), blocks.map(|block| run.value(block)));
        for step in 0..grid.side {
            let b = block_of(column, step, weight, other_weights)?;
            let product = Product { layout: GemmLayout::NN, a: dy, b };
            reduce_product(run, (row, step), product, (dx.view(0), dx.write(0)), aside)?;
        }
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        if run.trains(self.weight) {
            self.weight_gradient(run, dy)?;
        }
        if let Some(bias) = self.bias.filter(|bias| run.trains(*bias)) {
            run.queue().sum_rows(dy, run.gradient_of_weight(bias));
        }
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let (shapes, x, y) = (context.shapes, self.x, self.y);
        let shape @ [rows, inner, columns] = [shapes.rows(y), shapes.columns(x), shapes.columns(y)];
        let product = context.products(shape, self.grid.side as u64);
        if !context.has_product() {
            return vec![product];
        }
        let dtype = shapes.block().dtype;
        let line = |collective, elements: u64, dtype: DType| {
            Work::exchange(Ranks::TensorLine, collective, elements * dtype.size_bytes() as u64)
        };
        let broadcast = |elements| line(Collective::Broadcast, elements, dtype);
        let sent = match context.pass {
            Pass::Forward | Pass::Recompute => [broadcast(rows * inner), broadcast(columns * inner)],
            Pass::BackwardInputs => {
                [broadcast(columns * inner), line(Collective::Reduce, rows * inner, dtype)]
            }
            Pass::BackwardWeights => {
                [broadcast(rows * inner), line(Collective::Reduce, columns * inner, DType::F32)]
            }
        };
        // One product of blocks, and its transfers, per step of SUMMA.
        let steps = std::iter::repeat_n(sent, self.grid.side).flatten();
        steps.chain([product]).collect()
    }
}

impl SummaLinear {
    /// Writes the gradient of the weight, or adds it.
    fn weight_gradient(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let Self { x, weight, grid, blocks_for_weights, .. } = *self;
        let GridGroups { row, column } = run.grid_peers();
        let (x, [other_inputs, aside]) = (run.value(x), blocks_for_weights.map(|block| run.value(block)));
        let gradient = run.gradient_to_write(weight);
        for step in 0..grid.side {
            let b = block_of(row, step, x, other_inputs)?;
            let product = Product { layout: GemmLayout::TN, a: dy, b };
            reduce_product(run, (column, step), product, gradient, aside)?;
        }
        Ok(())
    }
}

/// Computes a product on every rank and reduces the results to rank `root`, which writes or adds the sum to `to`.
#[track_caller]
fn reduce_product(
    run: &Run<'_>,
    (peers, root): (Peers<'_>, usize),
    Product { layout, a, b }: Product<'_>,
    (to, write): (View<'_>, Write),
    aside: View<'_>,
) -> Result<(), CommError> {
    let (queue, is_root) = (run.queue(), peers.group.rank() == root);
    let c = if is_root && write == Write::Overwrite { to } else { aside };
    queue.gemm(Gemm { layout, a, b, c, bias: None, write: Write::Overwrite });
    peers.reduce(c, root)?;
    if is_root && write == Write::Accumulate {
        queue.add(to, c, to);
    }
    Ok(())
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

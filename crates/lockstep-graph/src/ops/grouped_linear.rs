//! A linear layer for each local expert, as a grouped matrix product; with weights that are quantized or on disk, as a product for each
//! expert that has rows.

use lockstep_comm::CommError;
use lockstep_plan::{Among, ExpertPlace, Initializer, Shard, Share, work::TaskKind};
use lockstep_tensor::{BlockGemm, BlockMatrix, GemmLayout, GroupedGemm, Matrix, View, Write};

use crate::{
    block::{Bias, ParameterIndex, Value},
    facts::{ExpertRows, Facts},
    op::Op,
    ops::{expert_rows::SlotTables, linear::Linear},
    recorder::Recorder,
    replay::{InputGradients, Run, StreamedExperts},
    work_context::{Work, WorkContext},
};

#[derive(Debug)]
struct GroupedLinear {
    x: Value,
    weight: ParameterIndex,
    /// Biases `[experts, out]`.
    bias: Option<ParameterIndex>,
    offsets: Value,
    rows: ExpertRows,
    y: Value,
}

impl Recorder {
    /// Records a grouped matrix product: each expert's rows with its matrix of `NAME.weight [experts, out, in]`.
    /// With a bias, each row also gets its expert's row of `NAME.bias [experts, out]`. Expert tensor parallelism shards
    /// dimension `cut`.
    ///
    /// # Panics
    /// If the parts do not divide that dimension, or if experts with biases have parts.
    #[track_caller]
    pub(crate) fn expert_linear(
        &mut self,
        (x, tables): (Value, SlotTables),
        Linear { name, out_features, bias, std }: Linear<'_>,
        [experts, in_features]: [usize; 2],
        cut: usize,
    ) -> Value {
        let shape = [experts, out_features, in_features];
        let ExpertPlace { ranks, rank, tensor_ranks, tensor_rank } = self.experts;
        let range = |dim: usize, ranks: usize, rank: usize| {
            let len = shape[dim] / ranks;
            (ranks > 1).then_some(Shard { dim, start: rank * len, len })
        };
        assert!(shape[cut].is_multiple_of(tensor_ranks), "{name}: {shape:?} for {tensor_ranks} parts");
        let share = Share {
            shard: range(0, ranks, rank),
            inner: range(cut, tensor_ranks, tensor_rank),
            among: Among::Experts,
            ..Share::default()
        };
        let initializer = Initializer::Normal { std };
        let weight = self.parameter(format!("{name}.weight"), &shape, initializer, share);
        let bias = (bias == Bias::With).then(|| {
            // Each part of an expert would add the whole bias of a product that is split by `in`.
            assert!(tensor_ranks == 1, "{name}: experts with biases are not split into {tensor_ranks} parts");
            self.parameter(format!("{name}.bias"), &shape[..2], Initializer::Zeros, share)
        });
        let held = share.shape_of(&shape);
        let y = self.local(self.values[x.0].rows, held[1], self.shape.dtype);
        let (offsets, rows) = (tables.offsets, tables.expert_rows);
        self.push(GroupedLinear { x, weight, bias, offsets, rows, y });
        y
    }
}

impl GroupedLinear {
    /// Computes a product for each local expert on its rows.
    fn multiply(&self, run: &Run<'_>, layout: GemmLayout, [a, b, c]: [View<'_>; 3], write: Write) {
        let is_forward = layout == GemmLayout::NT;
        let bias = self.bias.filter(|_| is_forward).map(|bias| run.weight(bias));
        let offsets = run.flat(self.offsets);
        run.queue().grouped_gemm(GroupedGemm { layout, a, b, c, bias, offsets, write });
    }

    /// Computes the product of one expert's rows `ends[0]..ends[1]` with its matrix.
    fn multiply_expert(
        &self,
        run: &Run<'_>,
        [x, y]: [View<'_>; 2],
        (expert, ends): (usize, &[u32]),
        weights: Matrix<'_>,
    ) {
        let bias = self.bias.map(|bias| run.weight(bias).rows(expert..expert + 1));
        match weights {
            Matrix::Dense(b) => {
                let ([rows, columns], offsets) =
                    (<[usize; 2]>::from(b.shape().as_matrix()), run.flat(self.offsets));
                let (layout, write) = (GemmLayout::NT, Write::Overwrite);
                let (b, offsets) = (b.reshape([1, rows, columns]), offsets.rows(expert..expert + 2));
                run.queue().grouped_gemm(GroupedGemm { layout, a: x, b, c: y, bias, offsets, write });
            }
            Matrix::Blocks(b) => {
                let rows = ends[0] as usize..ends[1] as usize;
                let bias = bias.map(|bias| bias.reshape([b.shape()[0]]));
                run.queue().block_gemm(BlockGemm::linear(x.rows(rows.clone()), b, y.rows(rows), bias));
            }
        }
    }

    /// Computes a product for each local expert that has rows, with quantized weights, whose experts follow each other.
    fn multiply_blocks(&self, run: &Run<'_>, operands: [View<'_>; 2], weights: BlockMatrix<'_>) {
        let ends = self.ends(run);
        let ([rows, columns], bytes) = (weights.shape(), weights.bytes());
        let experts = ends.len() - 1;
        let (height, len) = (rows / experts, bytes.elements() / experts);
        for expert in with_rows(&ends) {
            let own = bytes.rows(expert * len..(expert + 1) * len);
            let own = BlockMatrix::with_layout(weights.format(), weights.layout(), own, [height, columns]);
            self.multiply_expert(run, operands, (expert, &ends[expert..]), Matrix::Blocks(own));
        }
    }

    /// Computes a product for each local expert that has rows, with weights that are read from disk.
    fn multiply_streamed(&self, run: &Run<'_>, operands: [View<'_>; 2], weights: StreamedExperts<'_>) {
        let ends = self.ends(run);
        let experts: Vec<usize> = with_rows(&ends).collect();
        weights.for_each(&experts, |expert, matrix| {
            self.multiply_expert(run, operands, (expert, &ends[expert..]), matrix);
        });
    }

    /// Returns the offsets of the experts' rows on the host.
    fn ends(&self, run: &Run<'_>) -> Vec<u32> {
        let offsets = run.flat(self.offsets);
        let mut ends = vec![0; offsets.elements()];
        offsets.read(&mut ends).wait();
        ends
    }

    /// Adds the sum over each expert's rows of `dy` to the gradient of its bias.
    fn add_to_bias(&self, run: &Run<'_>, dy: View<'_>, bias: ParameterIndex) {
        let (gradient, offsets) = (run.gradient_of_weight(bias), run.flat(self.offsets));
        for expert in 0..offsets.elements() - 1 {
            let mut ends = [0_u32; 2];
            offsets.rows(expert..expert + 2).read(&mut ends).wait();
            let rows = ends[0] as usize..ends[1] as usize;
            run.queue().sum_rows(dy.rows(rows), gradient.rows(expert..expert + 1));
        }
    }
}

/// Returns the experts that have rows, given the offsets of the rows of all.
fn with_rows(ends: &[u32]) -> impl Iterator<Item = usize> {
    ends.windows(2).enumerate().filter(|(_, ends)| ends[0] < ends[1]).map(|(expert, _)| expert)
}

impl Op for GroupedLinear {
    fn facts(&self) -> Facts {
        let Self { x, weight, bias, offsets, rows, y, .. } = *self;
        Facts {
            tables: vec![offsets],
            // The gradient of the bias needs the offsets, so it counts among the weights.
            weights: [weight].into_iter().chain(bias).collect(),
            saved_for_inputs: vec![offsets],
            saved_for_weights: vec![x, offsets],
            accumulates: true,
            is_long: true,
            expert_rows: Some(rows),
            ..Facts::of("linear of experts", [x], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let [x, y] = [self.x, self.y].map(|value| run.value(value));
        if let Some(weights) = run.streamed_experts(self.weight) {
            self.multiply_streamed(run, [x, y], weights);
            return Ok(());
        }
        match run.matrix(self.weight) {
            Matrix::Dense(weights) => self.multiply(run, GemmLayout::NT, [x, weights, y], Write::Overwrite),
            Matrix::Blocks(weights) => self.multiply_blocks(run, [x, y], weights),
        }
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        self.multiply(run, GemmLayout::NN, [dy, run.weight(self.weight), dx.view(0)], dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        if run.trains(self.weight) {
            let (gradient, write) = run.gradient_to_write(self.weight);
            self.multiply(run, GemmLayout::TN, [dy, run.value(self.x), gradient], write);
        }
        if let Some(bias) = self.bias.filter(|bias| run.trains(*bias)) {
            self.add_to_bias(run, dy, bias);
        }
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let (shapes, even) = (context.shapes, self.rows.even as u64);
        let [inner, columns] = [self.x, self.y].map(|value| shapes.columns(value));
        let experts = shapes.rows(self.offsets) - 1;
        let product = context.product([even.div_ceil(experts), inner, columns], experts);
        vec![context.task(TaskKind::Product(product), 2 * even * inner * columns)]
    }
}

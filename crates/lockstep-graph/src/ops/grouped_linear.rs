//! A linear layer for each local expert, as a grouped matrix product.

use lockstep_comm::CommError;
use lockstep_plan::{Among, ExpertPlace, Initializer, Shard, Share, work::TaskKind};
use lockstep_tensor::{GemmLayout, GroupedGemm, View, Write};

use crate::{
    block::{ParameterIndex, Value},
    facts::{ExpertRows, Facts},
    op::Op,
    ops::expert_rows::SlotTables,
    recorder::Recorder,
    replay::{InputGradients, Run},
    work_context::{Work, WorkContext},
};

#[derive(Debug)]
struct GroupedLinear {
    x: Value,
    weight: ParameterIndex,
    offsets: Value,
    rows: ExpertRows,
    y: Value,
}

impl Recorder {
    /// Records a grouped matrix product: each expert's rows with its matrix of `NAME.weight [experts, out, in]`.
    /// Expert tensor parallelism shards dimension `cut`.
    ///
    /// # Panics
    /// If the parts do not divide that dimension.
    #[track_caller]
    pub(crate) fn expert_linear(
        &mut self,
        (x, tables): (Value, SlotTables),
        name: &str,
        shape: [usize; 3],
        cut: usize,
        std: f32,
    ) -> Value {
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
        let held = share.shape_of(&shape);
        let y = self.local(self.values[x.0].rows, held[1], self.shape.dtype);
        self.push(GroupedLinear { x, weight, offsets: tables.offsets, rows: tables.expert_rows, y });
        y
    }
}

impl GroupedLinear {
    /// Computes a product for each local expert on its rows.
    fn multiply(&self, run: &Run<'_>, layout: GemmLayout, [a, b, c]: [View<'_>; 3], write: Write) {
        let offsets = run.flat(self.offsets);
        run.queue().grouped_gemm(GroupedGemm { layout, a, b, c, offsets, write });
    }
}

impl Op for GroupedLinear {
    fn facts(&self) -> Facts {
        let Self { x, weight, offsets, rows, y } = *self;
        Facts {
            tables: vec![offsets],
            weights: vec![weight],
            saved_for_inputs: vec![offsets],
            saved_for_weights: vec![x, offsets],
            accumulates: true,
            is_long: true,
            expert_rows: Some(rows),
            ..Facts::of("linear of experts", [x], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let operands = [run.value(self.x), run.weight(self.weight), run.value(self.y)];
        self.multiply(run, GemmLayout::NT, operands, Write::Overwrite);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        self.multiply(run, GemmLayout::NN, [dy, run.weight(self.weight), dx.view(0)], dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let (gradient, write) = run.gradient_to_write(self.weight);
        self.multiply(run, GemmLayout::TN, [dy, run.value(self.x), gradient], write);
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

//! Linear layers: their recording, split over tensor-parallel ranks, and their matrix products, over all rows or a
//! range of them: `y = x Wᵀ + b` forward, `dx = dy W` backward.

use std::ops::Range;

use lockstep_comm::CommError;
use lockstep_plan::Initializer;
use lockstep_tensor::{Gemm, GemmLayout, View, Write};

#[cfg(feature = "faults")]
use crate::faults::Fault;
use crate::{
    block::{Bias, ParameterIndex, Value},
    column_scale::ColumnScale,
    facts::Facts,
    op::Op,
    placement::{Placement, Split},
    recorder::Recorder,
    replay::{InputGradients, Run},
    work_context::{Work, WorkContext},
};

/// A linear layer `y = x Wᵀ + b` with parameters `NAME.weight [out, in]` and `NAME.bias [out]`.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// Name of the module within its block.
    pub name: &'a str,
    /// Number of output columns.
    pub out_features: usize,
    /// Presence of a bias.
    pub bias: Bias,
    /// Standard deviation of the initial weights.
    pub std: f32,
}

impl Recorder {
    /// Records a linear layer, with the adapter that [`Recorder::adapt`] gives it.
    ///
    /// # Panics
    /// If the input's placement does not fit the layer's split.
    #[track_caller]
    pub fn linear(&mut self, x: Value, linear: Linear<'_>) -> Value {
        let Linear { name, out_features, bias, std } = linear;
        self.layer(x, name, out_features, (bias, Initializer::Normal { std }))
    }

    /// Records a linear layer with a bias, like [`Recorder::linear`], with weights uniform up to `1 / √in` as in
    /// `torch.nn.Linear`, and a bias of zeros.
    ///
    /// # Panics
    /// If the input's placement does not fit the layer's split.
    #[track_caller]
    pub fn dense(&mut self, x: Value, name: &str, out_features: usize) -> Value {
        let bound = (self.columns(x) as f32).sqrt().recip();
        self.layer(x, name, out_features, (Bias::With, Initializer::Uniform { bound }))
    }

    #[track_caller]
    fn layer(&mut self, x: Value, name: &str, out_features: usize, of: (Bias, Initializer)) -> Value {
        let y = self.product(x, name, out_features, self.split_of(name), of);
        self.adapted(name, x, y)
    }

    /// Records `x Wᵀ + b` with the parameters `NAME.weight` and, with a bias, `NAME.bias`.
    #[track_caller]
    pub(crate) fn product(
        &mut self,
        x: Value,
        name: &str,
        out_features: usize,
        split: Option<Split>,
        (bias, initializer): (Bias, Initializer),
    ) -> Value {
        if let (Some(split), Some(grid)) = (split, self.place.grid()) {
            return self.product_of_blocks(x, name, out_features, (split, grid), (bias, initializer));
        }
        let shape = [out_features, self.columns(x)];
        let (x, weight, of_bias, placement) = match split {
            None => {
                let placement = self.placement(x);
                self.expect_placement(
                    x,
                    |placement| matches!(placement, Placement::Replicate | Placement::ShardTokens),
                    &format!("linear {name} {shape:?}"),
                );
                (x, self.whole_share(placement), self.whole_share(placement), placement)
            }
            Some(Split::ColumnParallel { pieces }) => {
                let parts = self.parts(name, pieces);
                let share = self.shard(0, out_features, parts);
                (self.partial_gradient(x), share, share, Placement::ShardColumns { parts })
            }
            Some(Split::RowParallel) => {
                let parts = self.place.ranks;
                let is_sharded = |placement| placement == Placement::ShardColumns { parts };
                self.expect_placement(x, is_sharded, &format!("row-parallel linear {name} {shape:?}"));
                let whole = self.whole_share(Placement::Partial);
                (x, self.shard(1, shape[1], parts), whole, Placement::Partial)
            }
            Some(Split::VocabularyParallel) => {
                panic!("{name} {shape:?}: only an output layer is split by a vocabulary")
            }
        };
        let weight = self.parameter(format!("{name}.weight"), &shape, initializer, weight);
        let bias = self.bias(bias, name, out_features, of_bias);
        let y = self.value_beside(x, out_features, placement);
        // Only one of the partial sums includes the bias.
        let adds_bias = placement != Placement::Partial || self.place.rank == 0;
        self.push(LinearOperation { x, weight, bias, adds_bias, y });
        self.reduce_partial(y)
    }
}

/// A linear layer, or a rank's part of one.
#[derive(Debug)]
struct LinearOperation {
    x: Value,
    weight: ParameterIndex,
    bias: Option<ParameterIndex>,
    /// True if this rank adds the bias. In a row-parallel layer only rank 0 does.
    adds_bias: bool,
    y: Value,
}

impl Op for LinearOperation {
    fn facts(&self) -> Facts {
        let Self { x, weight, bias, y, .. } = *self;
        Facts {
            weights: vec![weight],
            bias,
            saved_for_weights: vec![x],
            accumulates: true,
            is_row_product: true,
            is_long: true,
            ..Facts::of("linear", [x], [y])
        }
    }

    fn column_scale(&self) -> Option<ColumnScale> {
        Some(ColumnScale::Parameters { weight: self.weight, bias: self.bias, offset: 0.0 })
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let y = run.value(self.y);
        self.forward_rows(run, all_rows(y), y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        self.backward_rows(run, dy, all_rows(dy), dx.view(0), dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        if run.trains(self.weight) {
            let (b, (c, write)) = (run.value(self.x), run.gradient_to_write(self.weight));
            run.queue().gemm(Gemm { layout: GemmLayout::TN, a: dy, b, c, bias: None, write });
        }
        if let Some(bias) = self.bias.filter(|bias| run.trains(*bias)) {
            run.queue().sum_rows(dy, run.gradient_of_weight(bias));
        }
        Ok(())
    }

    fn forward_rows(&self, run: &Run<'_>, rows: Range<usize>, y: View<'_>) {
        let bias = self.bias.filter(|_| self.adds_bias).map(|bias| run.weight(bias));
        let x = run.value(self.x);
        run.multiply(x.rows(rows), self.weight, bias, y, x.shape().as_matrix().0);
    }

    fn backward_rows(&self, run: &Run<'_>, dy: View<'_>, rows: Range<usize>, dx: View<'_>, write: Write) {
        run.multiply_back(dy.rows(rows), self.weight, (dx, write), dy.shape().as_matrix().0);
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let (shapes, x, y) = (context.shapes, self.x, self.y);
        vec![context.products([shapes.rows(y), shapes.columns(x), shapes.columns(y)], 1)]
    }

    #[cfg(feature = "faults")]
    fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::BiasOnEveryRank => self.adds_bias = true,
            Fault::BiasOnNoRank => self.adds_bias = false,
            _ => {}
        }
    }
}

fn all_rows(view: View<'_>) -> Range<usize> {
    0..view.shape().as_matrix().0
}

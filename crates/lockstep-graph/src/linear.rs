//! Linear layers: their recording, split over tensor-parallel ranks, and their matrix products, over all rows or a
//! range of them: `y = x Wᵀ + b` forward, `dx = dy W` backward.

use std::ops::Range;

use lockstep_plan::Initializer;
use lockstep_tensor::{Gemm, GemmLayout, View, Write};

use crate::{
    block::{Bias, Value},
    operation::Operation,
    placement::{Placement, Split},
    recorder::Recorder,
    replay::Run,
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
    pub fn linear(&mut self, x: Value, linear: Linear<'_>) -> Value {
        let Linear { name, out_features, bias, std } = linear;
        let (split, initializer) = (self.split_of(name), Initializer::Normal { std });
        let y = self.product(x, name, out_features, split, (bias, initializer));
        self.adapted(name, x, y)
    }

    /// Records `x Wᵀ + b` with the parameters `NAME.weight` and, with a bias, `NAME.bias`.
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
                    name,
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
                self.expect_placement(x, |placement| placement == Placement::ShardColumns { parts }, name);
                let whole = self.whole_share(Placement::Partial);
                (x, self.shard(1, shape[1], parts), whole, Placement::Partial)
            }
            Some(Split::VocabularyParallel) => {
                panic!("{name}: only an output layer is split by a vocabulary")
            }
        };
        let weight = self.parameter(format!("{name}.weight"), &shape, initializer, weight);
        let bias = self.bias(bias, name, out_features, of_bias);
        let y = self.value_in(out_features, placement);
        // Only one of the partial sums includes the bias.
        let adds_bias = placement != Placement::Partial || self.place.rank == 0;
        self.operations.push(Operation::Linear { x, weight, bias, adds_bias, y });
        self.reduce_partial(y)
    }
}

/// The operands of a matrix product; the caller supplies the output.
pub(crate) struct Product<'a> {
    layout: GemmLayout,
    /// `x` or `dy`, all rows.
    rows: View<'a>,
    weight: View<'a>,
    bias: Option<View<'a>>,
    write: Write,
}

impl<'a> Run<'a> {
    /// Returns the product that computes the output of a linear layer, and the output.
    pub(crate) fn output_product(&self, operation: &Operation) -> (Product<'a>, Value) {
        let Operation::Linear { x, weight, bias, adds_bias, y } = *operation else {
            unreachable!("called for a linear layer: {operation:?}")
        };
        let bias = bias.filter(|_| adds_bias).map(|bias| self.weight(bias));
        let (rows, weight) = (self.value(x), self.weight(weight));
        (Product { layout: GemmLayout::NT, rows, weight, bias, write: Write::Overwrite }, y)
    }

    /// Returns the product that computes the gradient of a linear layer's input.
    pub(crate) fn input_product(&self, operation: &Operation, dy: View<'a>, write: Write) -> Product<'a> {
        let Operation::Linear { weight, .. } = *operation else {
            unreachable!("called for a linear layer: {operation:?}")
        };
        Product { layout: GemmLayout::NN, rows: dy, weight: self.weight(weight), bias: None, write }
    }

    /// Computes all rows of a product.
    pub(crate) fn multiply(&self, product: &Product<'_>, result: View<'_>) {
        let rows = product.rows.shape().as_matrix().0;
        self.multiply_rows(product, 0..rows, result);
    }

    /// Computes a range of rows of a product; `result` has exactly these rows. They are bit-identical to those of the full product.
    pub(crate) fn multiply_rows(&self, product: &Product<'_>, rows: Range<usize>, result: View<'_>) {
        let Product { layout, rows: all, weight, bias, write } = *product;
        let gemm = Gemm { layout, a: all.rows(rows), b: weight, c: result, bias, write };
        self.replay.queue.gemm_rows(gemm, all.shape().as_matrix().0);
    }
}

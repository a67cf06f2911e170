//! Products with the weights of linear layers, whole or of some rows: `y = x Wᵀ + b` forward, `dx = dy W` backward.

use std::ops::Range;

use lockstep_tensor::{Gemm, GemmLayout, View, Write};

use crate::{operation::Operation, replay::Run};

/// Such a product but for where its result goes.
pub(crate) struct Product<'a> {
    layout: GemmLayout,
    /// `x` or `dy`, all rows.
    rows: View<'a>,
    weight: View<'a>,
    bias: Option<View<'a>>,
    write: Write,
}

impl<'a> Run<'a> {
    /// The output of a linear layer.
    pub(crate) fn output_product(&self, operation: &Operation) -> Product<'a> {
        let Operation::Linear { x, weight, bias, adds_bias, .. } = *operation else {
            unreachable!("called for a linear layer: {operation:?}")
        };
        let bias = bias.filter(|_| adds_bias).map(|bias| self.weight(bias));
        let (rows, weight) = (self.value(x), self.weight(weight));
        Product { layout: GemmLayout::NT, rows, weight, bias, write: Write::Overwrite }
    }

    /// The gradient of a linear layer's input.
    pub(crate) fn input_product(&self, operation: &Operation, dy: View<'a>, write: Write) -> Product<'a> {
        let Operation::Linear { weight, .. } = *operation else {
            unreachable!("called for a linear layer: {operation:?}")
        };
        Product { layout: GemmLayout::NN, rows: dy, weight: self.weight(weight), bias: None, write }
    }

    /// Computes a product.
    pub(crate) fn multiply(&self, product: &Product<'_>, result: View<'_>) {
        let rows = product.rows.shape().as_matrix().0;
        self.multiply_rows(product, 0..rows, result);
    }

    /// Computes some rows of a product, which `result` has room for. They have the bits that they have in the whole.
    pub(crate) fn multiply_rows(&self, product: &Product<'_>, rows: Range<usize>, result: View<'_>) {
        let Product { layout, rows: all, weight, bias, write } = *product;
        let gemm = Gemm { layout, a: all.rows(rows), b: weight, c: result, bias, write };
        self.replay.queue.gemm_part(gemm, all.shape().as_matrix().0);
    }
}

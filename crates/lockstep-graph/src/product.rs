//! Matrix products of linear layers, over all rows or a range of them: `y = x Wᵀ + b` forward, `dx = dy W` backward.

use std::ops::Range;

use lockstep_tensor::{Gemm, GemmLayout, View, Write};

use crate::{operation::Operation, replay::Run};

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
    /// Returns the product that computes the output of a linear layer.
    pub(crate) fn output_product(&self, operation: &Operation) -> Product<'a> {
        let Operation::Linear { x, weight, bias, adds_bias, .. } = *operation else {
            unreachable!("called for a linear layer: {operation:?}")
        };
        let bias = bias.filter(|_| adds_bias).map(|bias| self.weight(bias));
        let (rows, weight) = (self.value(x), self.weight(weight));
        Product { layout: GemmLayout::NT, rows, weight, bias, write: Write::Overwrite }
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

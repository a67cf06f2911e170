//! Kernels that move memory: conversions, transpositions, rows of sequences, zeroing, and quantization for communication.

use lockstep_plan::QuantizedType;

use crate::{View, Write};

/// Conversions, transpositions, rows of sequences and zeroing. Part of [`Kernels`](crate::Kernels).
pub trait CopyKernels {
    /// Converts between f32, bf16 and f16 (round to nearest even), or copies.
    fn cast(&self, x: View<'_>, y: View<'_>);

    /// Transposes the first two dimensions: `y [b, a, width]` becomes `x [a, b, width]` with them exchanged. Float
    /// types.
    fn transpose_blocks(&self, x: View<'_>, y: View<'_>);

    /// Prepends a row to each sequence: `y [batch, n + 1, width]` is `row [width]`, then the rows of
    /// `x [batch, n, width]`. Float types.
    fn prepend_row(&self, row: View<'_>, x: View<'_>, y: View<'_>);

    /// Computes the gradient of `x` of [`CopyKernels::prepend_row`].
    fn prepend_row_backward_input(&self, dy: View<'_>, dx: View<'_>, write: Write);

    /// Adds the gradient of the row of [`CopyKernels::prepend_row`], the sum over the sequences of
    /// `dy [batch, n + 1, width]`, to `drow` (f32 `[width]`).
    fn prepend_row_backward_row(&self, dy: View<'_>, drow: View<'_>);

    /// Copies row `index` of each sequence of `x [batch, n, width]` to `y [batch, width]`. Float types.
    fn select_row(&self, x: View<'_>, index: usize, y: View<'_>);

    /// Computes the gradient of [`CopyKernels::select_row`], which is zero in all other rows.
    fn select_row_backward(&self, dy: View<'_>, index: usize, dx: View<'_>, write: Write);

    /// Copies row `indices[b]` of sequence `b` of `x [batch, n, width]` to `y [batch, width]`; indices u32 `[batch]`. An
    /// index beyond the sequence gives a row of NaN. Float types.
    fn select_rows(&self, x: View<'_>, indices: View<'_>, y: View<'_>);

    /// Computes the gradient of [`CopyKernels::select_rows`], which is zero in all other rows.
    fn select_rows_backward(&self, dy: View<'_>, indices: View<'_>, dx: View<'_>, write: Write);

    /// Sets every byte to zero.
    fn zero(&self, y: View<'_>);
}

/// Block quantization of floats for communication. Part of [`Kernels`](crate::Kernels).
pub trait QuantizationKernels {
    /// Quantizes the elements of `x` (f32, bf16 or f16; whole blocks of
    /// [`QUANTIZATION_BLOCK`](lockstep_plan::QUANTIZATION_BLOCK)) into `records` (u8 `[kind.bytes(elements)]`).
    /// Records hold a scale for each block and a code for each element, whose error is at most half of that scale.
    ///
    /// A `residual` (f32 or bf16, one for each element) is added first, and becomes the new quantization error (error
    /// feedback: Seide et al., 2014; Karimireddy et al., 2019).
    ///
    /// A block with a non-finite element becomes NaN as a whole, and leaves no residual. A block whose largest
    /// magnitude is below 1.5e-36 (int8; 8.2e-38 for int4) becomes zeros.
    fn quantize(&self, kind: QuantizedType, x: View<'_>, residual: Option<View<'_>>, records: View<'_>);

    /// Dequantizes the output of [`QuantizationKernels::quantize`], rounded to the type of `y` (f32, bf16 or f16).
    fn dequantize(&self, kind: QuantizedType, records: View<'_>, y: View<'_>);

    /// Dequantizes `parts` tensors that are concatenated in `records`, each as long as `y` (f32), and sums them. The
    /// sum is in f32, in the order in which a reduction over as many ranks adds.
    fn dequantize_sum(&self, kind: QuantizedType, parts: usize, records: View<'_>, y: View<'_>);
}

//! RMS and layer normalization.

use crate::{View, Write};

/// The operands of layer normalization, `y = (x - mean) · rstd · weight + bias` over the last dimension.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<'a> {
    /// Input `[rows, width]`.
    pub x: View<'a>,
    /// Scale `[width]`.
    pub weight: View<'a>,
    /// f32 `[rows]`: mean of each row.
    pub mean: View<'a>,
    /// f32 `[rows]`: 1 / sqrt(variance + eps) of each row.
    pub rstd: View<'a>,
}

/// RMS and layer normalization. Part of [`Kernels`](crate::Kernels).
pub trait NormKernels {
    /// Computes `y = x · rstd · weight` over the last dimension; `rstd (f32 [rows]) = 1/sqrt(mean(x²) + eps)` is an
    /// output.
    fn rms_norm(&self, x: View<'_>, weight: View<'_>, eps: f32, y: View<'_>, rstd: View<'_>);

    /// Computes the gradient with respect to [`NormKernels::rms_norm`]'s input.
    fn rms_norm_backward_input(
        &self,
        dy: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        rstd: View<'_>,
        dx: View<'_>,
        write: Write,
    );

    /// Adds the gradient of [`NormKernels::rms_norm`]'s weight to `dweight` (f32 `[width]`).
    fn rms_norm_backward_weight(&self, dy: View<'_>, x: View<'_>, rstd: View<'_>, dweight: View<'_>);

    /// Computes layer normalization; writes `y` and the statistics of `norm`.
    fn layer_norm(&self, norm: LayerNorm<'_>, bias: Option<View<'_>>, eps: f32, y: View<'_>);

    /// Computes the gradient with respect to [`NormKernels::layer_norm`]'s input.
    fn layer_norm_backward_input(&self, norm: LayerNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write);

    /// Adds the gradients of [`NormKernels::layer_norm`]'s weight and bias (f32 `[width]`).
    fn layer_norm_backward_weight(
        &self,
        norm: LayerNorm<'_>,
        dy: View<'_>,
        dweight: View<'_>,
        dbias: Option<View<'_>>,
    );
}

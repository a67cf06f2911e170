//! RMS and layer normalization.

use crate::{View, Write};

/// The operands of RMS normalization, `y = x · rstd · (offset + weight)` over the last dimension.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    /// Input `[rows, width]`.
    pub x: View<'a>,
    /// Scale `[width]`, less the offset.
    pub weight: View<'a>,
    /// Constant that is added to the weight, in f32: 0, or 1 for weights around zero (Gemma).
    pub offset: f32,
    /// f32 `[rows]`: 1 / sqrt(mean(x²) + eps) of each row.
    pub rstd: View<'a>,
}

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
    /// Computes RMS normalization; writes `y` and the statistic of `norm`.
    fn rms_norm(&self, norm: RmsNorm<'_>, eps: f32, y: View<'_>);

    /// Computes the gradient with respect to [`NormKernels::rms_norm`]'s input.
    fn rms_norm_backward_input(&self, norm: RmsNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write);

    /// Adds the gradient of [`NormKernels::rms_norm`]'s weight to `dweight` (f32 `[width]`).
    fn rms_norm_backward_weight(&self, norm: RmsNorm<'_>, dy: View<'_>, dweight: View<'_>);

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

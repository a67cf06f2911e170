//! Batch normalization (Ioffe and Szegedy, 2015), in phases between which ranks can exchange statistics (SyncBatchNorm).
//!
//! Training: [`BatchNormKernels::batch_norm_statistics`] of the rank's rows, their merge, and
//! [`BatchNormKernels::batch_norm`]. Backward: the sums over rows, and the gradient of the input. Ranks that share their
//! statistics all-reduce those of [`BatchNormKernels::batch_norm_totals`] and [`BatchNormKernels::recentre_batch_norm`]
//! before the merge, and the sums of the backward.
//! Evaluation: [`BatchNormKernels::batch_norm`] with the running mean, and `rstd` of the running variance.

use crate::{View, Write};

/// The operands of batch normalization, `y = (x - mean) · rstd · weight + bias` for each channel.
#[derive(Debug, Clone, Copy)]
pub struct BatchNorm<'a> {
    /// Input `[.., channels]`; all dimensions but the last are rows.
    pub x: View<'a>,
    /// Scale `[channels]`, of the type of `x`.
    pub weight: View<'a>,
    /// f32 `[channels]`: mean of each channel.
    pub mean: View<'a>,
    /// f32 `[channels]`: 1 / sqrt(variance + eps) of each channel.
    pub rstd: View<'a>,
}

/// The running statistics of batch normalization, which evaluation uses.
#[derive(Debug, Clone, Copy)]
pub struct RunningStatistics<'a> {
    /// f32 `[channels]`: running mean.
    pub mean: View<'a>,
    /// f32 `[channels]`: running variance, of the unbiased variances of the batches.
    pub variance: View<'a>,
    /// Weight of the batch in `running = (1 - momentum) · running + momentum · batch`.
    pub momentum: f32,
}

/// Batch normalization. Part of [`Kernels`](crate::Kernels).
pub trait BatchNormKernels {
    /// Computes the statistics of the rows of `x [.., channels]`: f32 `[3, channels]`, the number of rows, the mean, and
    /// the sum of the squared differences from the mean.
    fn batch_norm_statistics(&self, x: View<'_>, statistics: View<'_>);

    /// Merges the statistics `parts` (f32 `[P, 3, channels]`) of `P` ranks in their order (Chan et al., 1979). Writes
    /// `mean` and `rstd = 1 / sqrt(variance + eps)` (f32 `[channels]`), and updates the running statistics. Without
    /// rows the mean is 0, and the running statistics stay unchanged; with one row their variance does.
    fn merge_batch_norm(
        &self,
        parts: View<'_>,
        eps: f32,
        running: Option<RunningStatistics<'_>>,
        mean: View<'_>,
        rstd: View<'_>,
    );

    /// Computes the totals `totals` (f32 `[2, channels]`) of `statistics`, which ranks sum: the number of rows, and the sum
    /// of the rows.
    fn batch_norm_totals(&self, statistics: View<'_>, totals: View<'_>);

    /// Changes the `statistics` of a rank's rows to those that ranks share: the number of rows and the mean follow from
    /// `totals`, summed over ranks, and the squared differences of the rank's own rows are from that mean. Their sum
    /// over ranks completes the shared statistics.
    fn recentre_batch_norm(&self, totals: View<'_>, statistics: View<'_>);

    /// Computes `rstd = 1 / sqrt(variance + eps)` (f32), for evaluation. May be in place.
    fn reciprocal_deviation(&self, variance: View<'_>, eps: f32, rstd: View<'_>);

    /// Computes batch normalization from its statistics.
    fn batch_norm(&self, norm: BatchNorm<'_>, bias: View<'_>, y: View<'_>);

    /// Computes the sums of the backward over the rank's rows, f32 `[2, channels]`: `Σ dy`, the gradient of the bias,
    /// and `Σ dy · (x - mean) · rstd`, that of the weight.
    fn batch_norm_backward_sums(&self, norm: BatchNorm<'_>, dy: View<'_>, sums: View<'_>);

    /// Computes the gradient with respect to [`BatchNormKernels::batch_norm`]'s input, from the sums over all `rows`
    /// rows of all ranks. With sums of zero it is the gradient for statistics that are constants.
    fn batch_norm_backward_input(
        &self,
        norm: BatchNorm<'_>,
        dy: View<'_>,
        sums: View<'_>,
        rows: usize,
        dx: View<'_>,
        write: Write,
    );
}

//! Cross-entropy, of whole and of sharded vocabularies, the squared error, and the correct predictions of a classifier.

use crate::View;

/// Cross-entropy, of whole and of sharded vocabularies, the squared error, and correct predictions. Part of [`Kernels`](crate::Kernels).
pub trait LossKernels {
    /// Computes the cross-entropy of `logits [T, vocabulary]` against `labels` (i32 `[T]`, -100 = masked): writes
    /// `losses` (f32 `[T]`, 0 where masked).
    fn cross_entropy(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>);

    /// Computes [`LossKernels::cross_entropy`], and overwrites the logits with its gradient:
    /// `seed · (softmax(logits) - onehot(labels))`, zero where masked. Each row is finished while it is in the cache.
    fn cross_entropy_with_gradient(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>, seed: f32);

    /// Computes the cross-entropy as [`LossKernels::cross_entropy`] does, with label smoothing as in PyTorch: the target
    /// of a row is `(1 - smoothing) · onehot(label) + smoothing / classes`. The logits may have any number of classes;
    /// `smoothing` lies in [0, 1].
    fn cross_entropy_smoothed(&self, logits: View<'_>, labels: View<'_>, smoothing: f32, losses: View<'_>);

    /// Computes [`LossKernels::cross_entropy_smoothed`], and overwrites the logits with its gradient:
    /// `seed · (softmax(logits) - target)`, zero where masked.
    fn cross_entropy_smoothed_with_gradient(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        smoothing: f32,
        losses: View<'_>,
        seed: f32,
    );

    /// Computes `losses` (f32 `[rows]`), the sum over each row of `(x - target)²`; all operands but `losses` share a
    /// type. The mean squared error is their sum divided by the number of elements.
    fn squared_error(&self, x: View<'_>, target: View<'_>, losses: View<'_>);

    /// Computes [`LossKernels::squared_error`], and overwrites `x` with its gradient, `2 seed · (x - target)`.
    fn squared_error_with_gradient(&self, x: View<'_>, target: View<'_>, losses: View<'_>, seed: f32);

    /// Writes `correct` (f32 `[rows]`): 1 for each row of `logits [rows, classes]` whose largest element is that of its label
    /// (i32 `[rows]`), else 0. Of equal elements the first is the largest. Masked rows (-100) and rows with a NaN are 0.
    fn correct(&self, logits: View<'_>, labels: View<'_>, correct: View<'_>);

    /// Computes the softmax statistics of one vocabulary shard, for vocabulary-parallel cross-entropy. Writes f32
    /// `[3, T]`: for each token the maximum of `logits [T, columns]`, the sum of `exp(logit - maximum)`, and the
    /// label's logit (0 if the label is in another shard). The shard's columns start at `first_column` of the
    /// vocabulary; there may be none. Labels are i32 `[T]`; a token with label -100 is masked, and its statistics are
    /// those of no columns. The caller must ensure that labels lie in the vocabulary.
    fn softmax_statistics(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        statistics: View<'_>,
    );

    /// Computes the cross-entropy of a vocabulary in `P` shards. Merges the shards' statistics `parts` (f32
    /// `[P, 3, T]`, of [`LossKernels::softmax_statistics`]) in their order. Writes `log_sum_exp` (f32 `[T]`, negative
    /// infinity where masked) and `losses` (f32 `[T]`, 0 where masked).
    fn merge_softmax(&self, parts: View<'_>, labels: View<'_>, log_sum_exp: View<'_>, losses: View<'_>);

    /// Overwrites the logits of one vocabulary shard with the gradient of the cross-entropy:
    /// `seed · (exp(logit - log_sum_exp) - onehot)`, zero where masked. The operands are those of
    /// [`LossKernels::softmax_statistics`] and [`LossKernels::merge_softmax`].
    fn softmax_gradient(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        log_sum_exp: View<'_>,
        seed: f32,
    );
}

//! Kernels of the embedding: rows of a table by token id, and the gradient of the table.

use crate::View;

/// Embedding lookup. Part of [`Kernels`](crate::Kernels).
pub trait EmbeddingKernels {
    /// Computes `out [T, width] = table[ids - first_id]`, ids u32 `[T]`. `table [rows, width]` is the vocabulary
    /// shard whose first row is `first_id`. An id outside the shard gives a row of zeros, so that the sum over all
    /// shards is the full lookup. The caller must ensure that ids lie in the vocabulary.
    fn embedding(&self, ids: View<'_>, table: View<'_>, first_id: u32, out: View<'_>);

    /// Computes `gradient [rows, width] (f32) += scatter of dy [T, width] by ids - first_id`, tokens added in
    /// ascending order. An id outside the shard contributes nothing.
    fn embedding_backward(&self, ids: View<'_>, dy: View<'_>, first_id: u32, gradient: View<'_>);
}

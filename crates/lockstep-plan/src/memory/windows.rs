//! Windows in which offloaded model state is streamed, and the memory for them.

use crate::DType;

/// Alignment of disk reads and writes.
pub const DISK_ALIGNMENT_BYTES: usize = 4096;
/// Number of windows in memory at a time.
pub const WINDOW_SLOTS: usize = 6;
/// Minimum size of a buffer for disk transfers; smaller buffers are not page-aligned.
const LEAST_BUFFER_BYTES: usize = 2 << 20;

/// Optimizer offload of a rank: the part of the model state that is on disk, or in host memory, which layouts treat the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OffloadPlan {
    /// Fraction of the rank's model state, from 0 to 1.
    pub share: f64,
    /// True if gradients are offloaded too.
    pub has_gradients: bool,
    /// True if the weights that kernels read are offloaded too.
    pub has_parameters: bool,
    /// Maximum number of elements in a window.
    pub window_elements: usize,
}

/// Returns the bytes of a window of `elements`, with one tensor of each dtype.
pub fn window_bytes(dtypes: impl IntoIterator<Item = DType>, elements: usize) -> usize {
    let of_tensor = |dtype: DType| (elements * dtype.size_bytes()).next_multiple_of(DISK_ALIGNMENT_BYTES);
    dtypes.into_iter().map(of_tensor).sum()
}

/// Returns the bytes of a buffer that a disk reads into.
pub fn aligned_buffer_bytes(bytes: usize) -> usize {
    bytes.max(LEAST_BUFFER_BYTES)
}

/// Returns the bytes of the memory for windows of at most `slot_bytes`.
pub fn window_memory_bytes(slot_bytes: usize) -> usize {
    aligned_buffer_bytes(WINDOW_SLOTS * slot_bytes)
}

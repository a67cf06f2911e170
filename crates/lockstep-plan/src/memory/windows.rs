//! Model state on disk: how it is cut into windows, and how many of them are in memory at a time.

use crate::DType;

/// Reads and writes of a disk begin and end at multiples of this.
pub const DISK_ALIGNMENT_BYTES: usize = 4096;
/// Windows in memory.
pub const WINDOW_SLOTS: usize = 6;
/// Buffers of less than this are not aligned to pages.
const LEAST_BUFFER_BYTES: usize = 2 << 20;

/// What of the optimizer's state is on disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiskPlan {
    /// How much of it, from 0 to 1.
    pub share: f64,
    /// Whether gradients are there too.
    pub has_gradients: bool,
    /// Whether the weights that kernels read are.
    pub has_parameters: bool,
    /// Elements of a window, at most.
    pub window_elements: usize,
}

/// Bytes of a window of so many elements, of which there are tensors of these types beside each other.
pub fn window_bytes(dtypes: impl IntoIterator<Item = DType>, elements: usize) -> usize {
    let of_tensor = |dtype: DType| (elements * dtype.size_bytes()).next_multiple_of(DISK_ALIGNMENT_BYTES);
    dtypes.into_iter().map(of_tensor).sum()
}

/// Bytes of a buffer of so many, if a disk is to fill it.
pub fn aligned_buffer_bytes(bytes: usize) -> usize {
    bytes.max(LEAST_BUFFER_BYTES)
}

/// Bytes of the memory for the windows of which the longest has `slot_bytes`.
pub fn window_memory_bytes(slot_bytes: usize) -> usize {
    aligned_buffer_bytes(WINDOW_SLOTS * slot_bytes)
}

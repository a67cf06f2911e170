//! Errors that can occur before a kernel runs. Misuse of a kernel (shapes that do not fit) is a bug in the caller and
//! panics with both shapes; running out of memory is an error.

use lockstep_plan::MemoryCategory;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The system refused an allocation.
    #[error("out of memory: {requested_bytes} bytes for {} ({in_use_bytes} bytes already in use)", category.name())]
    OutOfMemory {
        /// Category of the requested memory.
        category: MemoryCategory,
        /// Size of the failed allocation, in bytes.
        requested_bytes: usize,
        /// Bytes booked in the arena when the allocation failed.
        in_use_bytes: usize,
    },
    /// The thread pool could not be started.
    #[error("cannot start {threads} compute threads")]
    ThreadPool {
        /// Number of requested threads.
        threads: usize,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

//! What can go wrong before a kernel runs. Misuse of a kernel (shapes that do not fit) is a bug in the
//! caller and panics with both shapes; running out of memory is not.

use lockstep_plan::MemoryCategory;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The system refused an allocation.
    #[error("out of memory: {requested_bytes} bytes for {} ({in_use_bytes} bytes already in use)", category.name())]
    OutOfMemory {
        /// What the memory was for.
        category: MemoryCategory,
        /// Size of the allocation that failed.
        requested_bytes: usize,
        /// Everything booked in the arena at that moment.
        in_use_bytes: usize,
    },
    /// The thread pool could not be started.
    #[error("cannot start {threads} compute threads")]
    ThreadPool {
        /// How many threads were asked for.
        threads: usize,
        /// Why.
        source: std::io::Error,
    },
}

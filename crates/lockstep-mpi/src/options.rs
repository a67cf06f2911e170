//! Options of the MPI transport, which exist in programs without MPI too.

use lockstep_comm::CommError;

/// Options of the MPI transport.
#[derive(Debug, Clone, Copy)]
pub struct MpiOptions {
    /// Maximum number of elements, or bytes, per MPI call, whose counts are ints; longer data is split.
    pub per_call: usize,
    /// Function from an error to the exit code with which all processes end, for errors that only this crate can
    /// report.
    pub exit_code: fn(&CommError) -> i32,
}

impl Default for MpiOptions {
    /// Returns the maximum that MPI allows per call, and exit code 1.
    fn default() -> Self {
        Self { per_call: i32::MAX as usize, exit_code: |_| 1 }
    }
}

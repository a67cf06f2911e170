//! The MPI transport, for sites whose network is accessible only through MPI. Requires the feature `mpi`.
//!
//! - `shim.c` and `shim`: the few MPI functions that are used.
//! - `operation`: one operation in flight, as MPI requests.
//! - `engine`: the thread that makes all MPI calls.
//! - `machine`: the callers that wait for it.
//!
//! MPI chooses the order of additions, which may depend on the number of ranks, their placement and the message size. Its sums
//! are close to those of the other transports and the same on all ranks, but not reproducible bit by bit. After a failure MPI
//! cannot continue: the error is reported, and then all processes are aborted.

#[cfg(feature = "mpi")]
mod engine;
#[cfg(feature = "mpi")]
mod machine;
#[cfg(feature = "mpi")]
mod operation;
#[cfg(feature = "mpi")]
mod shim;

use crate::{CommError, Group};

/// Options of the MPI transport.
#[derive(Debug, Clone, Copy)]
pub struct MpiOptions {
    /// Maximum number of elements, or bytes, per MPI call, whose counts are ints; longer data is split.
    pub per_call: usize,
    /// Returns the exit code with which all processes end where only the library can report an error.
    pub exit_code: fn(&CommError) -> i32,
}

impl Default for MpiOptions {
    /// Returns the maximum that MPI allows per call, and exit code 1.
    fn default() -> Self {
        Self { per_call: i32::MAX as usize, exit_code: |_| 1 }
    }
}

/// Starts MPI, and returns the group of all ranks once they have joined. Works once per process.
///
/// # Errors
/// If MPI fails, or was started before.
#[cfg(feature = "mpi")]
pub fn join_mpi(options: MpiOptions) -> Result<Group, CommError> {
    machine::Machine::start(options).map(Group::world)
}

/// Starts MPI, and returns the group of all ranks once they have joined. Works once per process.
///
/// # Errors
/// Always: this program was built without the feature `mpi` ([`JoinProblem::NotBuilt`](crate::JoinProblem::NotBuilt)).
#[cfg(not(feature = "mpi"))]
pub fn join_mpi(_: MpiOptions) -> Result<Group, CommError> {
    Err(CommError::Join(crate::JoinProblem::NotBuilt))
}

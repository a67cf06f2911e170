//! Ranks joined by MPI: for sites whose network is reached by nothing else. Behind the feature `mpi`.
//!
//! - `shim.c` and `shim`: the few functions of MPI that are used.
//! - `operation`: one operation under way, as requests of MPI's.
//! - `engine`: the one thread that makes all calls of MPI.
//! - `machine`: those who wait for it.
//!
//! MPI adds in an order of its own, which may depend on the number of ranks, their places and the size of a message: its sums
//! are close to those of the other transports, and the same on all ranks, but no bit is promised from run to run. And it
//! cannot go on after a failure: an error is told, and then all processes are ended.

#[cfg(feature = "mpi")]
mod engine;
#[cfg(feature = "mpi")]
mod machine;
#[cfg(feature = "mpi")]
mod operation;
#[cfg(feature = "mpi")]
mod shim;

use crate::{CommError, Group};

/// How ranks talk over MPI.
#[derive(Debug, Clone, Copy)]
pub struct MpiOptions {
    /// The most elements, or bytes, of one call of MPI, whose counts are ints; what is longer is cut.
    pub per_call: usize,
    /// The code with which all processes end where an error can only be told by the library itself.
    pub exit_code: fn(&CommError) -> i32,
}

impl Default for MpiOptions {
    /// As much as MPI can, and code 1.
    fn default() -> Self {
        Self { per_call: i32::MAX as usize, exit_code: |_| 1 }
    }
}

/// Starts MPI, and returns the group of all ranks once they have come. Once in a process.
///
/// # Errors
/// [`JoinProblem::NotBuilt`](crate::JoinProblem::NotBuilt) without the feature `mpi`, and what MPI says.
#[cfg(feature = "mpi")]
pub fn join_mpi(options: MpiOptions) -> Result<Group, CommError> {
    machine::Machine::start(options).map(Group::world)
}

/// Starts MPI, and returns the group of all ranks once they have come. Once in a process.
///
/// # Errors
/// [`JoinProblem::NotBuilt`](crate::JoinProblem::NotBuilt): this program was built without the feature `mpi`.
#[cfg(not(feature = "mpi"))]
pub fn join_mpi(_: MpiOptions) -> Result<Group, CommError> {
    Err(CommError::Join(crate::JoinProblem::NotBuilt))
}

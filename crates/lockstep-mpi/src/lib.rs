//! The MPI transport of [`lockstep_comm`], for sites whose network is accessible only through MPI.
//!
//! Without the feature `mpi` this crate is empty but for [`MpiOptions`], and needs no MPI to be built. A program built with it
//! passes `join_mpi` on to where ranks join.
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

use lockstep_comm::CommError;
#[cfg(feature = "mpi")]
use lockstep_comm::Group;

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

/// Starts MPI, and returns the group of all ranks once they have joined. Works once per process.
///
/// # Errors
/// If MPI fails, or was started before.
#[cfg(feature = "mpi")]
pub fn join_mpi(options: MpiOptions) -> Result<Group, CommError> {
    machine::Machine::start(options).map(Group::world)
}

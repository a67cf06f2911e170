//! The MPI transport of [`lockstep_comm`], for sites whose network is accessible only through MPI.
//!
//! Without the feature `mpi` this crate is empty but for [`MpiOptions`], and needs no MPI to be built. A program built with it
//! passes `join_mpi` on to where ranks join.
//!
//! - `shim.c` and `shim`: the few MPI functions that are used.
//! - `operation`: one operation in flight, as MPI requests.
//! - `engine`: the thread that makes all MPI calls.
//! - `shared`: the state that it shares with callers; `transport`: the callers that wait for it.
//!
//! MPI chooses the order of additions, which may depend on the number of ranks, their placement and the message size. Its sums
//! are close to those of the other transports and the same on all ranks, but not reproducible bit by bit. After a failure MPI
//! cannot continue: the error is reported, and then all processes are aborted.

#[cfg(feature = "mpi")]
mod engine;
#[cfg(feature = "mpi")]
mod operation;
mod options;
#[cfg(feature = "mpi")]
mod shared;
#[cfg(feature = "mpi")]
mod shim;
#[cfg(feature = "mpi")]
mod transport;

pub use options::MpiOptions;
#[cfg(feature = "mpi")]
pub use transport::join_mpi;

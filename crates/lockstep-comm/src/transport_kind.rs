//! Choice of the transport between ranks.

/// Transport between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TransportKind {
    /// Shared memory if Lockstep's launcher started all ranks on one machine, TCP otherwise.
    #[default]
    Auto,
    /// Shared memory: all ranks are on one machine.
    SharedMemory,
    /// TCP between all ranks, even on one machine.
    Tcp,
    /// MPI, which knows where the ranks are.
    Mpi,
}

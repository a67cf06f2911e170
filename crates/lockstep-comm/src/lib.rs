//! Process groups and collectives that give the same bits on every rank and in every run.
//!
//! A [`Group`] is the handle that the upper layers work with. Its operations are [`Collective`]s. Each runs synchronously
//! ([`Group::run`], and one method per operation) or asynchronously on memory that is lent to it ([`Group::start`]). Every
//! call that can wait takes a [`Deadline`]. Every [`CommError`] that ends a run is the same on all ranks and names the rank
//! at fault.
//!
//! Reductions follow a fixed binary tree over the ranks of a group (`reduce`), whatever the message size, the chunking and
//! the transport. Pure code is separate from code that waits. `call` describes an operation, `task` validates and plans it
//! for one rank, `blocks` and `exchange` say which bytes go where. `shm` carries tasks out between ranks of one machine.
//! `world` creates and joins their shared memory. `tcp` connects machines by sockets, and holds the rendezvous of ranks and of
//! launchers. [`transport`] is what a transport implements; crates may add more of them, as `lockstep-mpi` does.

mod algorithm;
pub mod benchmark;
mod blocks;
mod call;
mod deadline;
mod error;
mod exchange;
#[cfg(any(test, feature = "faults"))]
pub mod faults;
mod group;
mod join_problem;
mod limits;
mod loss;
mod memory;
mod meter;
mod number;
mod placement;
mod record;
mod recorder;
mod reduce;
mod sequence;
mod shm;
mod stoppable_thread;
mod task;
mod tcp;
pub mod transport;
mod transport_kind;
mod world;

pub use algorithm::Algorithm;
pub use call::{Call, Kind};
pub use deadline::Deadline;
pub use error::{CommError, GroupName, OperationContext, Problem};
pub use group::{Group, Pending};
pub use join_problem::JoinProblem;
pub use limits::{MAX_LOCAL_RANKS, MAX_PARTITIONS, MAX_WORLD};
pub use loss::{LossCause, Malformed};
pub use memory::{LentBuffer, Source, Target};
pub use meter::{Meter, Metered};
pub use number::{Number, NumberType, ReduceOp};
pub use placement::{Leader, NodePlacement};
pub use record::{Recorded, now_us};
pub use task::Collective;
pub use tcp::{
    DEFAULT_PORT, JoinedNodes, NodeInfo, PairingCode, Rejections, RendezvousEndpoint, Secret, SecretInMemory,
    TcpOptions, join_by_address, join_nodes, join_with, read_frames, sample_frames, seal_frames,
};
pub use transport_kind::TransportKind;
pub use world::{Entered, SOCKET_VARIABLE, World, WorldOptions, enter, inherited, inherited_socket, join};

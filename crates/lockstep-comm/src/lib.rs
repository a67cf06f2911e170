//! Many ranks as one: process groups, and collectives that give the same bits on every rank and every run.
//!
//! A [`Group`] is what everything above is given. Its operations are [`Collective`]s; each is either carried out at once
//! ([`Group::run`], and a method for each) or started on memory that is lent to it ([`Group::start`]). Every call that can wait
//! takes a [`Deadline`]; every error is a [`CommError`] that is the same on all ranks, and names the one it is about.
//!
//! Reductions follow a fixed binary tree over the ranks of a group (`reduce`), whatever the size of a message, however it is
//! cut and by whatever way it travels. What is pure stands apart from what waits: `call` describes an operation, `task`
//! works out what it means for a rank, `blocks` and `exchange` say which bytes go where. `shm` carries it out between
//! ranks of one machine, which `world` brings together, `launch` starts, and [`environment`] finds others to have started;
//! `mpi` leaves it to MPI.

mod agent;
mod algorithm;
pub mod benchmark;
mod blocks;
mod call;
mod deadline;
pub mod environment;
mod error;
mod exchange;
#[cfg(any(test, feature = "faults"))]
pub mod faults;
mod group;
mod launch;
mod memory;
mod meter;
mod mpi;
mod number;
mod output;
mod recorder;
mod reduce;
mod shm;
mod started;
mod stillness;
mod task;
mod tcp;
mod transport;
mod world;

pub use agent::{Agent, Ended, Failure, Movement};
pub use algorithm::Algorithm;
pub use call::{Call, Kind};
pub use deadline::Deadline;
pub use error::{CommError, GroupName, JoinProblem, LossCause, Occasion, Problem};
pub use group::{Group, Pending};
pub use launch::{ERROR_FILE_VARIABLE, Elastic, Launch, Pinning, Placement};
pub use memory::{Lent, Source, Target};
pub use meter::{Meter, Metered};
pub use mpi::{MpiOptions, join_mpi};
pub use number::{Number, NumberType, ReduceOp};
pub use output::{Output, Route, Routing};
pub use recorder::{Recorded, now_us};
pub use started::{
    DEFAULT_PORT, JoinOptions, MEETING_LIMIT, SECRET_VARIABLE, Way, is_launched, join_from_environment,
    place, secret,
};
pub use task::Collective;
pub use tcp::{
    Malformed, Meeting, NodeCard, NodesMet, PairingCode, Secret, SecretInMemory, TcpOptions, TurnedAway,
    join_by_address, meet_nodes, read_frames, sample_frames, seal_frames,
};
pub use world::{SOCKET_VARIABLE, World, WorldOptions, join};

/// The most ranks of one machine.
pub const MAX_RANKS: usize = 64;
/// The most ranks of a world.
pub const MAX_WORLD: usize = 256;
/// The most partitions of the world, that of all ranks in one group included.
pub const MAX_PARTITIONS: usize = 64;

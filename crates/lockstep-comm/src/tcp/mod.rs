//! The TCP transport, between ranks on one machine or on many.
//!
//! - [`frame`]: the wire format; [`stream`]: one socket; [`link`]: all sockets to one rank.
//! - [`operation`]: one operation in flight; [`reduction`], [`layered`] and [`script`] are its ways to reduce.
//! - [`board`]: all operations of a rank, and the data that has arrived for them.
//! - [`machine`]: the progress thread, and the callers that wait for it.
//! - [`secret`]: the run's secret; [`handshake`]: the mutual proof of knowing it; [`door`] and [`visit`]: the server's and the
//!   client's side of the handshake; [`peer_credentials`]: the secret of ranks on one host.
//! - [`meeting`]: the rendezvous; [`join`]: the rendezvous of ranks; [`nodes`]: that of machines.

mod board;
pub(crate) mod door;
pub(crate) mod frame;
pub(crate) mod handshake;
mod join;
mod layered;
mod link;
mod machine;
pub(crate) mod meeting;
mod nodes;
mod operation;
pub(crate) mod peer_credentials;
mod reduction;
#[cfg(test)]
mod rogue;
mod script;
pub(crate) mod secret;
mod stream;
mod turned_away;
mod visit;
mod wire;

pub use frame::{Malformed, read_frames, sample_frames, seal_frames};
pub use join::{TcpOptions, join_by_address, join_with};
pub(crate) use machine::{Local, Machine};
pub use meeting::{DEFAULT_PORT, Meeting};
pub use nodes::{NodeCard, NodesMet, meet_nodes};
pub use secret::{PairingCode, Secret, SecretInMemory};
pub use turned_away::TurnedAway;

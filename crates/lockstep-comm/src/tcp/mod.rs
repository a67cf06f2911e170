//! Ranks joined by sockets, on one machine or on many.
//!
//! - [`frame`]: what they say to each other; [`stream`]: one socket, [`link`]: all sockets to one rank.
//! - [`operation`]: one operation under way; [`reduction`], [`layered`] and [`script`] are how it
//!   reduces.
//! - [`board`]: all operations of a rank, and what has come for them.
//! - [`machine`]: the thread that carries on, and those who wait for it.
//! - [`secret`]: what the ends of a connection must know; [`handshake`]: the proof that they do; [`door`] and [`visit`]: the
//!   server's and the client's side of it; [`peer_credentials`]: the secret of ranks on one host.
//! - [`meeting`]: how many find each other; [`join`]: how ranks do, [`nodes`]: and machines.

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
pub(crate) use join::join_with;
pub use join::{TcpOptions, join_by_address};
pub(crate) use machine::{Local, Machine};
pub use meeting::Meeting;
pub use nodes::{NodeCard, NodesMet, meet_nodes};
pub use secret::{PairingCode, Secret, SecretInMemory};
pub use turned_away::TurnedAway;

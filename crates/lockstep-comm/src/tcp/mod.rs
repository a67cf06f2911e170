//! Ranks joined by sockets, on one machine or on many.
//!
//! - [`frame`]: what they say to each other; [`stream`]: one socket, [`link`]: all sockets to one rank.
//! - [`operation`]: one operation under way; [`reduction`], [`layered`] and [`script`] are how it
//!   reduces.
//! - [`board`]: all operations of a rank, and what has come for them.
//! - [`machine`]: the thread that carries on, and those who wait for it.
//! - [`handshake`]: how two ends prove who they are; [`meeting`]: how many find each other; [`join`]: how ranks do,
//!   [`nodes`]: and machines.

mod board;
pub(crate) mod frame;
pub(crate) mod handshake;
mod join;
mod layered;
mod link;
mod machine;
pub(crate) mod meeting;
mod nodes;
mod operation;
mod reduction;
mod script;
mod stream;

pub use frame::{read_frames, sample_frames, seal_frames};
pub use handshake::{PairingCode, Secret, SecretInMemory};
pub(crate) use join::join_with;
pub use join::{TcpOptions, join_by_address};
pub(crate) use machine::{Local, Machine};
pub use meeting::Meeting;
pub use nodes::{NodeCard, NodesMet, meet_nodes};

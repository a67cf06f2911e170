//! The TCP transport, between ranks on one machine or on many.
//!
//! - [`frame`]: the wire format; [`stream`]: one socket; [`link`]: all sockets to one rank.
//! - [`operation`]: one operation in flight, on which members reach [`agreement`]; [`reduction`], [`hierarchical`] and
//!   [`stepwise`] are its ways to reduce; in a large group it is agreed on along a [`tree`], and small data takes the way of
//!   [`tree_movement`].
//! - [`operation_table`]: all operations of a rank, and the data that has arrived for them.
//! - [`state`]: a rank's operations and links; [`transport`]: the progress thread, and the callers that wait for it.
//! - [`descriptors`]: the number of connections that the system allows.
//! - [`secret`]: the run's secret; [`handshake`]: the mutual proof of knowing it; [`acceptor`] and [`connect`]: the server's
//!   and the client's side of the handshake; [`peer_credentials`]: the secret of ranks on one host.
//! - [`rendezvous`]: the rendezvous, whose result is a [`roster`]; [`join`]: the rendezvous of ranks; [`mesh`]: their
//!   connections; [`nodes`]: that of machines.

pub(crate) mod acceptor;
mod agreement;
mod connect;
mod descriptors;
pub(crate) mod frame;
pub(crate) mod handshake;
mod hierarchical;
mod join;
mod link;
mod members;
mod mesh;
mod nodes;
mod operation;
mod operation_table;
pub(crate) mod peer_credentials;
mod reduction;
mod rejections;
pub(crate) mod rendezvous;
#[cfg(test)]
mod rogue;
mod roster;
pub(crate) mod secret;
mod send_queues;
mod state;
mod stepwise;
mod stream;
mod transport;
mod tree;
mod tree_movement;
mod wire;

pub use frame::{read_frames, sample_frames, seal_frames};
pub use join::{TcpOptions, join_by_address, join_with};
pub use nodes::{JoinedNodes, NodeInfo, join_nodes};
pub use rejections::Rejections;
pub use rendezvous::{DEFAULT_PORT, RendezvousEndpoint};
pub use secret::{PairingCode, Secret, SecretInMemory};

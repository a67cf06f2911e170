//! The shared-memory transport, between processes of one machine or threads of one process; both run the same code.
//!
//! - [`layout`]: offsets of all structures in the ranks' segments.
//! - [`segments`]: the mappings of all segments; wake-up bells, and the error that ended the run.
//! - [`members`]: a group as seen by one of its ranks.
//! - [`queue`]: a group's operations; [`operation`]: one of them; [`reduction`], [`data_movement`] and [`point_to_point`]
//!   carry them out.
//! - [`transport`]: a rank with all its groups, and its waiting loop.
//! - [`heartbeat`]: the heartbeat thread, which also watches the other ranks.

mod buffer_location;
mod copy;
mod data_movement;
mod heartbeat;
pub(crate) mod layout;
mod members;
mod operation;
mod point_to_point;
mod queue;
mod reduction;
pub(crate) mod segments;
pub(crate) mod transport;

pub(crate) use transport::ShmTransport;

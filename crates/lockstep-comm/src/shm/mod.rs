//! The shared-memory transport, between processes of one machine or threads of one process; both run the same code.
//!
//! - [`layout`]: offsets of all structures in the ranks' segments.
//! - [`segments`]: the mappings of all segments; wake-up bells, and the error that ended the run.
//! - [`members`]: a group as seen by one of its ranks.
//! - [`queue`]: a group's operations; [`reduction`], [`moving`] and [`mail`] carry them out.
//! - [`machine`]: a rank with all its groups, and its waiting loop.
//! - [`heart`]: the heartbeat thread, which also watches the other ranks.

mod copy;
mod heart;
pub(crate) mod layout;
pub(crate) mod machine;
mod mail;
mod members;
mod moving;
mod place;
mod queue;
mod reduction;
pub(crate) mod segments;

pub(crate) use machine::Machine;

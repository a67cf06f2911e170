//! Ranks that share memory: processes of one machine, or threads of one process, which run the same code.
//!
//! - [`layout`]: where everything lies in the ranks' segments.
//! - [`segments`]: a mapping of all of them; bells, and why a run ended.
//! - [`members`]: a group as one of its ranks sees it.
//! - [`queue`]: the group's operations; [`reduction`], [`moving`] and [`mail`] carry them out.
//! - [`machine`]: a rank with all its groups, and how it waits.
//! - [`heart`]: a thread that shows that the rank moves, and watches the others.

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

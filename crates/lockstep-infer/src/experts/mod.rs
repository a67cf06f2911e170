//! Experts on disk: each of their matrices is read when rows are routed to it, and stays in a cache as long as there is room.
//!
//! A token is routed to a few of a layer's experts, and tokens that follow each other to many of the same. So a cache that holds a part of
//! the experts saves more reads than resident layers of the same size: what is not routed to is not read, and what is routed to often
//! stays.
//!
//! - [`stacks`]: the matrices, and their places in files.
//! - [`slots`]: the choice of the matrix that makes room for another, a function of the requests alone.
//! - [`cache`]: the memory and the reads.

mod cache;
mod slots;
mod stacks;

pub(crate) use cache::ExpertCache;
pub(crate) use stacks::{ExpertReads, ExpertRoom, ExpertStack};

//! Saving a run: in the background, overlapped with the training, or in the foreground if memory is short.
//!
//! If replicas span several ranks, all ranks save together: the first opens a save, each writes the part that it holds (`part`),
//! and the first commits a checkpoint of the parts. If each rank holds the whole model, the first saves alone. Whatever fails on
//! a rank, the rank still enters each collective and reports its failure there.
//!
//! A background save works on a snapshot, so it writes the same bytes as a save in the foreground. One save is in flight at a
//! time: the next one waits for it, and the time that the training waited is its stall. A failure in the background is reported
//! at the next step; it costs the checkpoint and not the run.
//!
//! Each save is attempted in one directory after another (`job`), and every wait is limited (`directories`). A file system that has
//! stopped answering costs a thread, which is abandoned in its system call.

mod background;
mod directories;
mod job;
mod part;
mod save;
mod saver;

pub(crate) use directories::Beginning;
pub(crate) use part::{RankSave, gather};
pub(crate) use save::SaveInterval;
pub(crate) use saver::Saver;

//! A save in flight: the phase that it has reached, and the work of this rank in that phase.
//!
//! Work on a snapshot owns it and gives it back with its result, so that there is one snapshot for all saves.

use std::sync::Arc;
use std::time::Instant;

use lockstep_checkpoint::{PendingSave, Staging};
use lockstep_engine::Snapshot;

use super::job::{Attempt, Job, Saved};
use super::part::Written;
use crate::Error;

/// Begin and end of work in the background.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SaveInterval {
    pub(crate) begin: Instant,
    pub(crate) end: Instant,
}

/// A save in flight.
pub(super) struct Save {
    pub(super) job: Arc<Job>,
    pub(super) attempt: Attempt,
    pub(super) begin: Instant,
    pub(super) phase: SavePhase,
}

/// Work of the first rank; `None` on the others.
pub(super) type OfFirst<T> = Option<PendingSave<Result<T, Error>>>;

/// Phase of a save in flight.
#[expect(clippy::large_enum_variant, reason = "there is one save at a time")]
pub(super) enum SavePhase {
    /// The only rank does everything.
    Alone(PendingSave<Done<Result<Saved, Error>>>),
    /// The first rank opens a directory for the parts.
    Opening(OfFirst<Staging>),
    /// Each rank writes its part.
    Writing(Own, Option<Staging>),
    /// The first rank makes a checkpoint of the parts.
    Committing(OfFirst<Saved>),
}

/// This rank's part of a save.
pub(super) enum Own {
    Pending(PendingSave<Done<Written>>),
    Written(Written),
}

/// Result of work on a snapshot, with the snapshot for reuse.
pub(super) struct Done<T> {
    pub(super) ran: SaveInterval,
    pub(super) snapshot: Snapshot,
    pub(super) result: T,
}

impl<T> Done<T> {
    /// Runs `work` on the snapshot and records when it ran.
    pub(super) fn on(mut snapshot: Snapshot, work: impl FnOnce(&mut Snapshot) -> T) -> Self {
        let begin = Instant::now();
        let result = work(&mut snapshot);
        Self { ran: SaveInterval { begin, end: Instant::now() }, snapshot, result }
    }
}

//! The interface between groups and transports (shared memory, TCP, and those of other crates): groups hand down tasks,
//! transports carry them out.
//!
//! A [`Task`] is an operation that has been validated and planned for one rank: its [`Call`](crate::Call), on which all ranks
//! must agree, the flow of its data, and the memory at both ends. A transport compares the calls of all members first
//! ([`Comparison`]), then moves the data, and completes the [`Ticket`]. [`Group::world`](crate::Group::world) makes a group of
//! a transport.

use std::{
    fmt,
    panic::Location,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Workers};

use crate::{CommError, Deadline, GroupName, LentBuffer, Recorded};
pub use crate::{
    blocks::{Blocks, window},
    error::ERROR_WORDS,
    exchange::{Exchange, Matrix, Piece},
    memory::MemoryRange,
    recorder::Recorder,
    reduce::reduce,
    sequence::{Lane, SequenceNumbers},
    task::{Comparison, Flow, Receiver, Task},
};

/// Transport of one rank, with all its groups. Every wait takes a deadline; an error ends the run on all ranks.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Returns the rank of this process in the world.
    fn rank(&self) -> usize;

    /// Returns the world ranks of a group, in group order.
    fn members(&self, group: usize) -> Vec<usize>;

    /// Returns the number of groups, including those that this rank is not in.
    fn groups(&self) -> usize;

    /// Adds the group of `ranks`, on which all ranks have agreed, and returns its index. An empty list is a group without this
    /// rank.
    fn add_group(&self, ranks: Vec<usize>) -> usize;

    /// Starts an operation. Waits only if too many are in flight.
    ///
    /// # Errors
    /// If the run has ended, or if there is no room before `deadline`.
    fn begin(
        &self,
        group: usize,
        task: Task,
        memory: Vec<LentBuffer>,
        deadline: Deadline,
        caller: &Location<'_>,
    ) -> Result<Arc<Ticket>, CommError>;

    /// Returns the number of operations started in a group.
    fn begun(&self, group: usize) -> u32;

    /// Waits for an operation to complete.
    ///
    /// # Errors
    /// If the run ends, or if the operation is not complete before `deadline`.
    fn wait(&self, group: usize, ticket: &Arc<Ticket>, deadline: Deadline) -> Result<(), CommError>;

    /// Advances all operations without waiting.
    ///
    /// # Errors
    /// If the run has ended.
    fn progress(&self) -> Result<(), CommError>;

    /// Ends the run on all ranks and returns the error that ended it. Afterwards no operation touches the callers' memory.
    fn fail(&self, error: CommError) -> CommError;

    /// Returns true if operations progress while their rank does something else.
    fn is_in_background(&self) -> bool;

    /// Returns true if a world rank is known to be on this machine.
    fn is_near(&self, rank: usize) -> bool;

    /// Ends the processes of all ranks with `code`, where an error leaves them no way to end by themselves.
    fn abort(&self, _code: i32) {}

    /// Returns an arena that places buffers of `categories` where operations need the fewest copies.
    fn arena(&self, categories: &[MemoryCategory]) -> Arena;

    /// Sets the threads that may take part in operations while this rank is in a call.
    fn set_workers(&self, workers: Workers);

    /// Returns the last operations that a world rank called, oldest first, as far as this rank can know them.
    fn recorded(&self, rank: usize) -> Vec<Recorded>;
}

/// Shared completion state of an operation in flight.
#[derive(Debug, Default)]
pub struct Ticket {
    is_complete: AtomicBool,
    completed_at: OnceLock<Instant>,
    /// Memory lent to the operation.
    memory: Mutex<Vec<LentBuffer>>,
}

impl Ticket {
    /// Creates the ticket of an operation that `memory` is lent to.
    pub fn new(memory: Vec<LentBuffer>) -> Arc<Self> {
        Arc::new(Self { memory: Mutex::new(memory), ..Self::default() })
    }

    /// Completes the operation, with the current time.
    pub fn complete(&self) {
        self.completed_at.get_or_init(Instant::now);
        self.is_complete.store(true, Ordering::Release);
    }

    /// Returns true once the operation is complete.
    pub fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }

    /// Returns the time of completion; `None` before it.
    pub(crate) fn completed_at(&self) -> Option<Instant> {
        self.completed_at.get().copied()
    }

    /// Returns true if any memory is lent to the operation.
    pub fn has_memory(&self) -> bool {
        !self.memory.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Returns the lent memory to the caller.
    pub(crate) fn take_memory(&self) -> Vec<LentBuffer> {
        std::mem::take(&mut *self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the name of the group that partition `index` made of `ranks`.
pub fn name(index: usize, ranks: &[usize]) -> GroupName {
    let first = ranks.iter().min().copied().unwrap_or(0);
    GroupName { index: index as u32, first: first as u32, size: ranks.len() as u32 }
}

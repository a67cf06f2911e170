//! What carries operations between ranks: shared memory, sockets. Groups are all that is above, tasks all that is below.

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

use crate::{CommError, Deadline, GroupName, memory::Lent, recorder::Recorded, task::Task};

/// One rank with all its groups. Every wait takes a deadline; an error ends the run on all ranks.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    /// The own rank in the world.
    fn rank(&self) -> usize;

    /// Ranks of the world in a group, in its order.
    fn members(&self, group: usize) -> Vec<usize>;

    /// How many groups there are, those included that this rank is not in.
    fn groups(&self) -> usize;

    /// Adds the group of `ranks`, on which all ranks have agreed; with no ranks, one that this rank is not in.
    fn add_group(&self, ranks: Vec<usize>) -> usize;

    /// Begins an operation; waits only if too many are under way.
    fn begin(
        &self,
        group: usize,
        task: Task,
        memory: Vec<Lent>,
        deadline: Deadline,
        caller: &Location<'_>,
    ) -> Result<Arc<Ticket>, CommError>;

    /// Number of the operations that have begun in a group.
    fn begun(&self, group: usize) -> u32;

    /// Waits for an operation to complete.
    fn wait(&self, group: usize, ticket: &Arc<Ticket>, deadline: Deadline) -> Result<(), CommError>;

    /// Carries on with everything, without waiting.
    fn progress(&self) -> Result<(), CommError>;

    /// Ends the run for all; returns why it has ended. Afterwards no operation touches the callers' memory.
    fn fail(&self, error: CommError) -> CommError;

    /// Whether operations go on by themselves while their rank does something else.
    fn is_in_background(&self) -> bool;

    /// Whether a rank of the world is known to be on this machine.
    fn is_near(&self, rank: usize) -> bool;

    /// Ends the processes of all ranks with `code`, after an error that leaves the others no way to end by themselves.
    fn abort(&self, _code: i32) {}

    /// An arena whose buffers of `categories` operations like best.
    fn arena(&self, categories: &[MemoryCategory]) -> Arena;

    /// Threads that may share the work of operations while this rank is in a call.
    fn set_workers(&self, workers: Workers);

    /// What a rank of the world called last, oldest first, as far as this rank can know.
    fn recorded(&self, rank: usize) -> Vec<Recorded>;
}

/// The other end of an operation that runs on by itself.
#[derive(Debug, Default)]
pub(crate) struct Ticket {
    is_complete: AtomicBool,
    completed_at: OnceLock<Instant>,
    /// What was lent to the operation.
    memory: Mutex<Vec<Lent>>,
}

impl Ticket {
    /// For an operation that `memory` is lent to.
    pub(crate) fn new(memory: Vec<Lent>) -> Arc<Self> {
        Arc::new(Self { memory: Mutex::new(memory), ..Self::default() })
    }

    pub(crate) fn complete(&self) {
        self.completed_at.get_or_init(Instant::now);
        self.is_complete.store(true, Ordering::Release);
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }

    /// When it was complete, if it is.
    pub(crate) fn completed_at(&self) -> Option<Instant> {
        self.completed_at.get().copied()
    }

    /// Whether something is lent to it.
    #[cfg(feature = "mpi")]
    pub(crate) fn has_memory(&self) -> bool {
        !self.memory.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Gives back what was lent.
    pub(crate) fn take_memory(&self) -> Vec<Lent> {
        std::mem::take(&mut *self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The name of the group that partition `index` made of `ranks`.
pub(crate) fn name(index: usize, ranks: &[usize]) -> GroupName {
    let first = ranks.iter().min().copied().unwrap_or(0);
    GroupName { index: index as u32, first: first as u32, size: ranks.len() as u32 }
}

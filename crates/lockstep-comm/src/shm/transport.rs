//! A rank with all its groups, and its waiting loop.
//!
//! A waiting rank advances all operations in flight, of all its groups; otherwise two ranks that wait in different groups
//! could deadlock. After a while without progress it sleeps until another rank wakes it.

use std::{
    panic::Location,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, SharedHeap, Workers};

use super::{heartbeat::Heartbeat, layout::Status, members::Members, queue::Queue, segments::Segments};
use crate::{
    CommError, Deadline, LossCause, OperationContext,
    memory::LentBuffer,
    record::Recorded,
    recorder::Recorder,
    task::Task,
    transport::{self, Ticket, Transport},
};

/// Maximum sleep before the deadline and the presence of other ranks are checked again.
const MAX_SLEEP: Duration = Duration::from_millis(10);

/// Shared-memory transport of one rank, with every group that it is in.
#[derive(Debug)]
pub(crate) struct ShmTransport {
    pub(crate) segments: Segments,
    pub(crate) rank: usize,
    heap: Arc<SharedHeap>,
    spin_limits: SpinLimits,
    state: Mutex<State>,
    /// Heartbeat thread, which must end before the segments are unmapped.
    heartbeat: Option<Heartbeat>,
}

#[derive(Debug)]
struct State {
    /// Queues by index of the partition; `None` where this rank is in no group of it.
    queues: Vec<Option<Queue>>,
    workers: Option<Workers>,
    recorder: Recorder,
}

/// Number of polls before a waiting rank sleeps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpinLimits {
    /// Consecutive polls that spin.
    spins: u32,
    /// Further polls that yield the core in between.
    yields: u32,
}

impl SpinLimits {
    /// Returns the limits for one of `ranks` ranks that share `cores` cores.
    pub(crate) fn new(ranks: usize, cores: usize) -> Self {
        if ranks <= cores { Self { spins: 2000, yields: 0 } } else { Self { spins: 0, yields: 4 } }
    }
}

impl ShmTransport {
    /// Enters the world as `rank` and starts the heartbeat.
    pub(crate) fn new(
        segments: Segments,
        rank: usize,
        cores: usize,
        silence: Duration,
    ) -> Result<Self, CommError> {
        let header = segments.header(rank);
        header.pid.store(std::process::id(), Ordering::Relaxed);
        let namespace = rustix::fs::stat("/proc/self/ns/pid").map_or(0, |file| file.st_ino);
        header.pid_namespace.store(namespace, Ordering::Relaxed);
        header.status.store(Status::Here as u32, Ordering::SeqCst);
        let heap = SharedHeap::new(Arc::clone(segments.memory(rank)), segments.layout.heap_at());
        let heartbeat =
            Heartbeat::start(&segments, rank, silence).map_err(CommError::io("start a thread"))?;
        let spin_limits = SpinLimits::new(segments.ranks(), cores);
        let recorder = Recorder::new(Some((segments.clone(), rank)));
        let state = Mutex::new(State { queues: Vec::new(), workers: None, recorder });
        let own = Self { segments, rank, heap, spin_limits, state, heartbeat: Some(heartbeat) };
        own.add_group((0..own.segments.ranks()).collect());
        Ok(own)
    }

    fn with_queue<R>(&self, group: usize, ask: impl FnOnce(&Queue) -> R) -> R {
        ask(self.lock().queue(group))
    }

    /// Advances all operations until `attempt` returns a result. `late` returns the rank and operation that it waits for.
    fn wait_until<R>(
        &self,
        group: usize,
        deadline: Deadline,
        mut attempt: impl FnMut(&mut State) -> Option<R>,
        late: impl Fn(&State) -> (usize, Option<OperationContext>),
    ) -> Result<R, CommError> {
        let (mut spins, mut suspect) = (0, None);
        loop {
            let is_spinning = spins < self.spin_limits.spins + self.spin_limits.yields;
            // From here on other ranks wake this one; the attempt sees what they wrote before.
            let wakeups = (!is_spinning).then(|| Sleeper::listen(&self.segments, self.rank));
            match self.attempt(&mut attempt) {
                Ok(Attempt { result: Some(result), .. }) => return Ok(result),
                Ok(Attempt { has_moved: true, .. }) => spins = 0,
                Ok(_) => spins += 1,
                Err(error) => {
                    let context = late(&self.lock()).1;
                    return Err(self.fail(error).during(context));
                }
            }
            let Some(wakeups) = wakeups else {
                if spins > self.spin_limits.spins {
                    std::thread::yield_now()
                } else {
                    std::hint::spin_loop()
                }
                continue;
            };
            let (rank, context) = late(&self.lock());
            // Checked twice: the rank may have made its last progress between the attempt and this check.
            let cause = self.cause_of_loss(rank);
            if let (Some(cause), Some((suspected, _))) = (cause, suspect)
                && suspected == rank
            {
                return Err(self.fail(CommError::PeerLost { rank, cause, context: None }).during(context));
            }
            suspect = cause.map(|cause| (rank, cause));
            if deadline.has_passed() {
                let name = transport::name(group, &self.members(group));
                return Err(self.fail(CommError::timed_out(self.rank, rank, deadline, context, name)));
            }
            if suspect.is_none() && spins > 0 {
                wakeups.sleep(MAX_SLEEP.min(deadline.remaining()));
            }
        }
    }

    /// Returns the cause of loss that the rank itself has announced, if any.
    fn cause_of_loss(&self, rank: usize) -> Option<LossCause> {
        match self.segments.status(rank) {
            Status::Absent | Status::Here => None,
            Status::Left => Some(LossCause::Left),
            Status::Panicked => Some(LossCause::Panicked),
        }
    }

    fn attempt<R>(&self, attempt: &mut impl FnMut(&mut State) -> Option<R>) -> Result<Attempt<R>, CommError> {
        if let Some(error) = self.segments.ending() {
            return Err(error);
        }
        let mut state = self.lock();
        let State { queues, workers, .. } = &mut *state;
        let mut has_moved = false;
        for queue in queues.iter_mut().flatten().filter(|queue| !queue.is_idle()) {
            has_moved |= queue.advance(workers.as_ref())?;
        }
        Ok(Attempt { result: attempt(&mut state), has_moved })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for ShmTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self, group: usize) -> Vec<usize> {
        self.with_queue(group, |queue| queue.members.ranks.clone())
    }

    fn groups(&self) -> usize {
        self.lock().queues.len()
    }

    fn begun(&self, group: usize) -> u32 {
        self.with_queue(group, Queue::begun)
    }

    fn is_in_background(&self) -> bool {
        false
    }

    fn is_near(&self, _: usize) -> bool {
        true
    }

    fn arena(&self, categories: &[MemoryCategory]) -> Arena {
        Arena::sharing(Arc::clone(&self.heap), categories)
    }

    fn set_workers(&self, workers: Workers) {
        self.lock().workers = Some(workers);
    }

    fn recorded(&self, rank: usize) -> Vec<Recorded> {
        self.segments.records(rank)
    }

    fn begin(
        &self,
        group: usize,
        task: Task,
        memory: Vec<LentBuffer>,
        deadline: Deadline,
        caller: &Location<'_>,
    ) -> Result<Arc<Ticket>, CommError> {
        let ticket = Ticket::new(memory);
        let call = task.call;
        let mut waiting = Some(task);
        let begin = |state: &mut State| {
            let queue = state.queue_mut(group);
            let task = waiting.take_if(|task| queue.has_room(task))?;
            let (name, sequence) = (queue.members.name(), queue.next(&task));
            let recorded = state.recorder.write(call, name, sequence, caller);
            state.queue_mut(group).begin(task, recorded, Arc::clone(&ticket));
            Some(())
        };
        let late = |state: &State| {
            let queue = state.queue(group);
            (
                queue.slowest(),
                Some(OperationContext { call, sequence: queue.begun(), group: queue.members.name() }),
            )
        };
        self.wait_until(group, deadline, begin, late)?;
        Ok(ticket)
    }

    fn wait(&self, group: usize, ticket: &Arc<Ticket>, deadline: Deadline) -> Result<(), CommError> {
        let is_complete = |_: &mut State| ticket.is_complete().then_some(());
        let late = |state: &State| match state.queue(group).awaited() {
            Some((rank, context)) => (rank, Some(context)),
            None => (self.rank, None),
        };
        self.wait_until(group, deadline, is_complete, late)
    }

    fn progress(&self) -> Result<(), CommError> {
        self.attempt(&mut |_| None::<()>).map(|_| ()).map_err(|error| self.fail(error))
    }

    fn add_group(&self, ranks: Vec<usize>) -> usize {
        let mut state = self.lock();
        let index = state.queues.len();
        let own = ranks.iter().position(|rank| *rank == self.rank);
        let queue = own.map(|own| Queue::new(Members { segments: self.segments.clone(), index, ranks, own }));
        state.queues.push(queue);
        index
    }

    fn fail(&self, error: CommError) -> CommError {
        let ending = self.segments.end(&error, self.rank);
        // No operation may access the callers' memory after the error has been returned to them.
        self.lock().queues.iter_mut().flatten().for_each(Queue::abandon);
        ending.or_local(error, self.rank)
    }
}

/// Outcome of one poll of all operations.
struct Attempt<R> {
    result: Option<R>,
    has_moved: bool,
}

impl State {
    fn queue(&self, group: usize) -> &Queue {
        self.queues[group].as_ref().expect("a group's handle is only given to its members")
    }

    fn queue_mut(&mut self, group: usize) -> &mut Queue {
        self.queues[group].as_mut().expect("a group's handle is only given to its members")
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        // Peers must see the status before the heartbeat stops.
        let status = if std::thread::panicking() { Status::Panicked } else { Status::Left };
        self.segments.header(self.rank).status.store(status as u32, Ordering::SeqCst);
        for rank in (0..self.segments.ranks()).filter(|rank| *rank != self.rank) {
            self.segments.wake(rank);
        }
        self.heartbeat = None;
    }
}

/// A rank about to sleep, visible to other ranks as such until dropped.
struct Sleeper<'a> {
    segments: &'a Segments,
    rank: usize,
    seen: u32,
}

impl<'a> Sleeper<'a> {
    fn listen(segments: &'a Segments, rank: usize) -> Self {
        let header = segments.header(rank);
        let seen = header.wakeups.0.load(Ordering::SeqCst);
        header.asleep.0.fetch_add(1, Ordering::SeqCst);
        Self { segments, rank, seen }
    }

    fn sleep(&self, limit: Duration) {
        self.segments.sleep(self.rank, self.seen, limit);
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.segments.header(self.rank).asleep.0.fetch_sub(1, Ordering::SeqCst);
    }
}

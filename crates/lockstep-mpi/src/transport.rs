//! The MPI transport of a rank, as seen by the callers that start operations and wait for them.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::panic::Location;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use lockstep_comm::transport::{self, Lane, Recorder, SequenceNumbers, Task, Ticket, Transport};
use lockstep_comm::{CommError, Deadline, Group, LentBuffer, LossCause, Recorded};
use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Workers};

use crate::MpiOptions;
use crate::engine::Engine;
use crate::shared::{CallerState, Job, REPORTING_TIME, Shared};

/// Maximum sleep of a caller.
const NAP: Duration = Duration::from_millis(100);
/// Time limit for the thread to react to a passed deadline. Only an MPI call that does not return takes longer.
const STUCK: Duration = Duration::from_secs(10);

/// MPI transport of one rank, with every group that it is in.
#[derive(Debug)]
pub(crate) struct MpiTransport {
    rank: usize,
    shared: Arc<Shared>,
    groups: Mutex<Vec<CallerGroup>>,
    options: MpiOptions,
    thread: Option<JoinHandle<()>>,
}

/// Ranks of a group, and the operations that callers have started in it.
#[derive(Debug)]
struct CallerGroup {
    ranks: Vec<usize>,
    numbers: SequenceNumbers,
}

impl CallerGroup {
    fn new(ranks: Vec<usize>) -> Self {
        Self { ranks, numbers: SequenceNumbers::default() }
    }
}

/// Starts MPI, and returns the group of all ranks once they have joined. Works once per process.
///
/// # Errors
/// If MPI fails, or was started before.
pub fn join_mpi(options: MpiOptions) -> Result<Group, CommError> {
    MpiTransport::start(options).map(Group::world)
}

impl MpiTransport {
    /// Starts MPI and its thread.
    ///
    /// # Errors
    /// If MPI or the thread cannot be started.
    pub(crate) fn start(options: MpiOptions) -> Result<Self, CommError> {
        let state = CallerState {
            jobs: VecDeque::new(),
            ending: None,
            details: None,
            is_settled: false,
            callers: 0,
            recorder: Recorder::private(),
        };
        let shared =
            Shared { state: Mutex::new(state), jobs_queued: Condvar::new(), progressed: Condvar::new() };
        let shared = Arc::new(shared);
        let (started, start) = mpsc::channel();
        let theirs = Arc::clone(&shared);
        let thread = Builder::new().name("lockstep-mpi".to_owned());
        let thread = thread.spawn(move || Engine::run(theirs, options, started));
        let thread = thread.map_err(CommError::io("start a thread"))?;
        let gone = || CommError::Stopped { by: None };
        let (rank, ranks) = start.recv().unwrap_or_else(|_| Err(gone()))?;
        let groups = Mutex::new(vec![CallerGroup::new((0..ranks).collect())]);
        Ok(Self { rank, shared, groups, options, thread: Some(thread) })
    }

    fn groups(&self) -> MutexGuard<'_, Vec<CallerGroup>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until `look` returns a result. Queues the job of `deadline` once it has passed.
    fn sleep_until<R>(
        &self,
        mut deadline: Option<(Deadline, Job)>,
        mut look: impl FnMut(&mut CallerState) -> Option<R>,
    ) -> R {
        let mut answer_by: Option<Instant> = deadline.is_none().then(|| Instant::now() + STUCK);
        let mut state = self.shared.lock();
        state.callers += 1;
        loop {
            if let Some(seen) = look(&mut state) {
                state.callers -= 1;
                return seen;
            }
            if let Some((_, job)) = deadline.take_if(|(deadline, _)| deadline.has_passed()) {
                answer_by = Some(Instant::now() + STUCK);
                state.jobs.push_back(job);
                self.shared.jobs_queued.notify_one();
            }
            if answer_by.is_some_and(|at| Instant::now() > at) && state.ending.is_none() {
                // MPI may still write to the caller's memory, so the call cannot return to it.
                let _ = writeln!(
                    io::stderr(),
                    "error: rank {}: MPI does not return from a call; this process ends",
                    self.rank
                );
                std::process::exit((self.options.exit_code)(&CommError::Stopped { by: Some(self.rank) }));
            }
            let nap = deadline.as_ref().map_or(NAP, |(deadline, _)| deadline.remaining().min(NAP));
            let woken = self.shared.progressed.wait_timeout(state, nap.max(Duration::from_micros(10)));
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Transport for MpiTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self, group: usize) -> Vec<usize> {
        self.groups()[group].ranks.clone()
    }

    fn groups(&self) -> usize {
        self.groups().len()
    }

    fn begun(&self, group: usize) -> u32 {
        self.groups()[group].numbers.next(Lane::Collective)
    }

    fn arena(&self, _: &[MemoryCategory]) -> Arena {
        // MPI accepts any memory.
        Arena::new()
    }

    fn set_workers(&self, _: Workers) {
        // MPI works on its own thread.
    }

    fn recorded(&self, rank: usize) -> Vec<Recorded> {
        if rank == self.rank { self.shared.lock().recorder.read() } else { Vec::new() }
    }

    fn begin(
        &self,
        group: usize,
        task: Task,
        memory: Vec<LentBuffer>,
        _: Deadline,
        caller: &Location<'_>,
    ) -> Result<Arc<Ticket>, CommError> {
        let ticket = Ticket::new(memory);
        let mut groups = self.groups();
        let callers = &mut groups[group];
        let sequence = callers.numbers.start(Lane::of(&task.flow));
        let name = transport::name(group, &callers.ranks);
        let mut state = self.shared.lock();
        if let Some(ending) = state.ending(self.rank) {
            return Err(ending);
        }
        let recorded = state.recorder.write(task.call, name, sequence, caller);
        state.jobs.push_back(Job::Begin { group, sequence, recorded, task, ticket: Arc::clone(&ticket) });
        drop(state);
        self.shared.jobs_queued.notify_one();
        Ok(ticket)
    }

    fn wait(&self, group: usize, ticket: &Arc<Ticket>, deadline: Deadline) -> Result<(), CommError> {
        let late = Job::Expire { group, ticket: Arc::clone(ticket), limit: deadline.limit() };
        self.sleep_until(Some((deadline, late)), |state| {
            if ticket.is_complete() {
                return Some(Ok(()));
            }
            let is_over = state.ending.is_some() && state.is_settled;
            is_over.then(|| state.ending(self.rank)).flatten().map(Err)
        })
    }

    fn progress(&self) -> Result<(), CommError> {
        self.shared.lock().ending(self.rank).map_or(Ok(()), Err)
    }

    fn add_group(&self, ranks: Vec<usize>) -> usize {
        let mut groups = self.groups();
        groups.push(CallerGroup::new(ranks.clone()));
        self.shared.ask(Job::AddGroup { ranks });
        groups.len() - 1
    }

    fn fail(&self, error: CommError) -> CommError {
        self.shared.ask(Job::Fail(error));
        self.sleep_until(None, |state| if state.is_settled { state.ending(self.rank) } else { None })
    }

    fn is_in_background(&self) -> bool {
        true
    }

    /// Only MPI knows which ranks are on this machine; this returns true for the rank itself alone.
    fn is_near(&self, rank: usize) -> bool {
        rank == self.rank()
    }

    fn abort(&self, code: i32) {
        let ending = self.shared.lock().ending.map(CommError::from_words);
        if ending.and_then(|ending| ending.teller()).is_some_and(|teller| teller != self.rank) {
            std::thread::sleep(REPORTING_TIME);
        }
        self.shared.ask(Job::Abort(code));
        std::thread::sleep(STUCK);
        std::process::exit(code);
    }
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let cause = LossCause::Panicked;
            self.shared.ask(Job::Fail(CommError::PeerLost { rank: self.rank, cause, context: None }));
        }
        self.shared.ask(Job::Leave);
        // After the end of the run the thread aborts the processes, after time to report the error. A panic has been
        // reported already.
        let is_to_tell = self.shared.lock().ending.is_some() && !std::thread::panicking();
        if let Some(thread) = self.thread.take().filter(|_| !is_to_tell) {
            let _ = thread.join();
        }
    }
}

//! The MPI transport of a rank, as seen by the callers that start operations and wait for them.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::panic::Location;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use lockstep_comm::transport::{self, ERROR_WORDS, Flow, Recorder, Task, Ticket, Transport};
use lockstep_comm::{CommError, Deadline, Lent, LossCause, Recorded};
use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Workers};

use crate::MpiOptions;
use crate::engine::Engine;

/// Maximum sleep of a caller.
const NAP: Duration = Duration::from_millis(100);
/// Time limit for the thread to react to a passed deadline. Only an MPI call that does not return takes longer.
const STUCK: Duration = Duration::from_secs(10);
/// Time for the rank that detected an error to report it, and before that for MPI to release memory, until other ranks abort.
pub(crate) const TELLERS_TURN: Duration = Duration::from_secs(2);

/// MPI transport of one rank, with every group that it is in.
#[derive(Debug)]
pub(crate) struct Machine {
    rank: usize,
    shared: Arc<Shared>,
    groups: Mutex<Vec<Counts>>,
    options: MpiOptions,
    thread: Option<JoinHandle<()>>,
}

/// Operation counts of a group, on the callers' side.
#[derive(Debug)]
struct Counts {
    ranks: Vec<usize>,
    /// Number of collectives started.
    begun: u32,
    /// Numbers of messages started to and from each member.
    sent: Vec<u32>,
    received: Vec<u32>,
}

impl Counts {
    fn new(ranks: Vec<usize>) -> Self {
        let none = vec![0; ranks.len()];
        Self { begun: 0, sent: none.clone(), received: none, ranks }
    }
}

/// State shared by callers and the MPI thread.
#[derive(Debug)]
pub(crate) struct Shared {
    desk: Mutex<Desk>,
    /// Notified when the thread has a job.
    pub(crate) bell: Condvar,
    /// Notified when callers should check again.
    news: Condvar,
}

#[derive(Debug)]
pub(crate) struct Desk {
    /// Jobs for the thread.
    pub(crate) jobs: VecDeque<Job>,
    /// Error that ended the run, as words; `None` while it goes on.
    pub(crate) ending: Option<[u64; ERROR_WORDS]>,
    /// Details of that error, if it is local to this rank.
    pub(crate) details: Option<CommError>,
    /// True once MPI has released all borrowed memory after the end of the run.
    pub(crate) is_settled: bool,
    /// Number of waiting callers.
    pub(crate) callers: usize,
    pub(crate) recorder: Recorder,
}

/// Job for the MPI thread.
#[derive(Debug)]
pub(crate) enum Job {
    Begin {
        group: usize,
        sequence: u32,
        recorded: u64,
        task: Task,
        ticket: Arc<Ticket>,
    },
    AddGroup {
        ranks: Vec<usize>,
    },
    /// Deadline of an operation that has passed.
    Expire {
        group: usize,
        ticket: Arc<Ticket>,
        limit: Duration,
    },
    Fail(CommError),
    Leave,
    Abort(i32),
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, job: Job) {
        self.lock().jobs.push_back(job);
        self.bell.notify_one();
    }

    /// Wakes the waiting callers.
    pub(crate) fn tell(&self) {
        // A caller that has already checked holds the lock until it sleeps.
        drop(self.lock());
        self.news.notify_all();
    }
}

impl Desk {
    /// Returns the error that ended the run, for another caller; `None` while it goes on.
    fn ending(&mut self, rank: usize) -> Option<CommError> {
        match CommError::from_words(self.ending?) {
            CommError::Stopped { by: Some(by) } if by == rank => {
                self.details.take().or(Some(CommError::Stopped { by: Some(by) }))
            }
            ending => Some(ending),
        }
    }
}

impl Machine {
    /// Starts MPI and its thread.
    ///
    /// # Errors
    /// If MPI or the thread cannot be started.
    pub(crate) fn start(options: MpiOptions) -> Result<Self, CommError> {
        let desk = Desk {
            jobs: VecDeque::new(),
            ending: None,
            details: None,
            is_settled: false,
            callers: 0,
            recorder: Recorder::private(),
        };
        let shared = Shared { desk: Mutex::new(desk), bell: Condvar::new(), news: Condvar::new() };
        let shared = Arc::new(shared);
        let (tell, told) = mpsc::channel();
        let theirs = Arc::clone(&shared);
        let thread = Builder::new().name("lockstep-mpi".to_owned());
        let thread = thread.spawn(move || Engine::run(theirs, options, tell));
        let thread = thread.map_err(CommError::io("start a thread"))?;
        let gone = || CommError::Stopped { by: None };
        let (rank, ranks) = told.recv().unwrap_or_else(|_| Err(gone()))?;
        let groups = Mutex::new(vec![Counts::new((0..ranks).collect())]);
        Ok(Self { rank, shared, groups, options, thread: Some(thread) })
    }

    fn groups(&self) -> MutexGuard<'_, Vec<Counts>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until `look` returns a result. Queues the job of `deadline` once it has passed.
    fn sleep_until<R>(
        &self,
        mut deadline: Option<(Deadline, Job)>,
        mut look: impl FnMut(&mut Desk) -> Option<R>,
    ) -> R {
        let mut judged_by: Option<Instant> = deadline.is_none().then(|| Instant::now() + STUCK);
        let mut desk = self.shared.lock();
        desk.callers += 1;
        loop {
            if let Some(seen) = look(&mut desk) {
                desk.callers -= 1;
                return seen;
            }
            if let Some((_, job)) = deadline.take_if(|(deadline, _)| deadline.has_passed()) {
                judged_by = Some(Instant::now() + STUCK);
                desk.jobs.push_back(job);
                self.shared.bell.notify_one();
            }
            if judged_by.is_some_and(|at| Instant::now() > at) && desk.ending.is_none() {
                // MPI may still write to the caller's memory, so the call cannot return to it.
                let _ = writeln!(
                    io::stderr(),
                    "error: rank {}: MPI does not return from a call; this process ends",
                    self.rank
                );
                std::process::exit((self.options.exit_code)(&CommError::Stopped { by: Some(self.rank) }));
            }
            let nap = deadline.as_ref().map_or(NAP, |(deadline, _)| deadline.remaining().min(NAP));
            let woken = self.shared.news.wait_timeout(desk, nap.max(Duration::from_micros(10)));
            desk = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Transport for Machine {
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
        self.groups()[group].begun
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
        memory: Vec<Lent>,
        _: Deadline,
        caller: &Location<'_>,
    ) -> Result<Arc<Ticket>, CommError> {
        let ticket = Ticket::new(memory);
        let mut groups = self.groups();
        let counts = &mut groups[group];
        let count = match task.flow {
            Flow::Send { to } => &mut counts.sent[to],
            Flow::Receive { from } => &mut counts.received[from],
            _ => &mut counts.begun,
        };
        let sequence = *count;
        *count = count.wrapping_add(1);
        let name = transport::name(group, &counts.ranks);
        let mut desk = self.shared.lock();
        if let Some(ending) = desk.ending(self.rank) {
            return Err(ending);
        }
        let recorded = desk.recorder.write(task.call, name, sequence, caller);
        desk.jobs.push_back(Job::Begin { group, sequence, recorded, task, ticket: Arc::clone(&ticket) });
        drop(desk);
        self.shared.bell.notify_one();
        Ok(ticket)
    }

    fn wait(&self, group: usize, ticket: &Arc<Ticket>, deadline: Deadline) -> Result<(), CommError> {
        let late = Job::Expire { group, ticket: Arc::clone(ticket), limit: deadline.limit() };
        self.sleep_until(Some((deadline, late)), |desk| {
            if ticket.is_complete() {
                return Some(Ok(()));
            }
            let is_over = desk.ending.is_some() && desk.is_settled;
            is_over.then(|| desk.ending(self.rank)).flatten().map(Err)
        })
    }

    fn progress(&self) -> Result<(), CommError> {
        self.shared.lock().ending(self.rank).map_or(Ok(()), Err)
    }

    fn add_group(&self, ranks: Vec<usize>) -> usize {
        let mut groups = self.groups();
        groups.push(Counts::new(ranks.clone()));
        self.shared.ask(Job::AddGroup { ranks });
        groups.len() - 1
    }

    fn fail(&self, error: CommError) -> CommError {
        self.shared.ask(Job::Fail(error));
        self.sleep_until(None, |desk| if desk.is_settled { desk.ending(self.rank) } else { None })
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
            std::thread::sleep(TELLERS_TURN);
        }
        self.shared.ask(Job::Abort(code));
        std::thread::sleep(STUCK);
        std::process::exit(code);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let cause = LossCause::Panicked;
            self.shared.ask(Job::Fail(CommError::PeerLost { rank: self.rank, cause, occasion: None }));
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

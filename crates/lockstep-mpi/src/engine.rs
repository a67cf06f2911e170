//! The one thread of a process that calls MPI. It advances all operations, receives messages of other ranks about the run, and
//! sleeps when idle. It must poll, because MPI makes progress only within its calls.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use lockstep_comm::transport::{self, ERROR_WORDS, Ticket};
use lockstep_comm::{CommError, JoinProblem, LossCause, MAX_WORLD};

use crate::MpiOptions;
use crate::operation::{Lanes, Members, Running, Step, Tag};
use crate::shared::{Job, REPORTING_TIME, Shared};
use crate::shim::{Mpi, Request};

/// Polling interval while no operation is in flight.
const IDLE_NAP: Duration = Duration::from_millis(5);
/// Shortest and longest polling interval while an operation is in flight.
const NAPS: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];
/// Number of polls before the first sleep, if ranks share cores.
const POLLS: u32 = 16;
/// Number of polls without sleeping, if every rank has a core and a caller waits.
const POLLS_ALONE: u32 = 100_000;
/// Time for messages of a rank that has left to arrive.
const NOTICE_TIME: Duration = Duration::from_millis(20);
/// Time for MPI to release borrowed memory after the end of the run.
const GRACE: Duration = Duration::from_secs(1);

/// First tag for the creation of groups, whose messages OpenMPI does not keep apart from others.
const GROUP_TAGS: usize = 1000;

/// Number of words of a message about the run: its kind, its sender, and an error.
const NOTICE_WORDS: usize = 2 + ERROR_WORDS;
const LEAVING: u64 = 1;
const ENDING: u64 = 2;

pub(crate) struct Engine {
    mpi: Mpi,
    shared: Arc<Shared>,
    options: MpiOptions,
    /// Lanes by index of the partition; `None` where this rank is in no group of it.
    groups: Vec<Option<Lanes>>,
    notice: Box<[u64; NOTICE_WORDS]>,
    notice_request: [Request; 1],
    sent_notices: Vec<([Request; 1], Box<[u64; NOTICE_WORDS]>)>,
    /// True for ranks that have left.
    left: Vec<bool>,
    /// A rank that has left and is waited for, and since when.
    suspect: Option<(usize, Instant)>,
    is_leaving: bool,
    ended_at: Option<Instant>,
    /// Operations that did not start to move data, with buffers that MPI may still access.
    abandoned: Vec<Running>,
    /// True if every rank of this host has a core.
    has_core: bool,
    polls: u32,
}

impl Engine {
    /// Starts MPI, sends rank and number of ranks to `started`, and makes progress until the rank leaves.
    pub(crate) fn run(
        shared: Arc<Shared>,
        options: MpiOptions,
        started: Sender<Result<(usize, usize), CommError>>,
    ) {
        // The receiver waits for this answer.
        match Mpi::start().and_then(|mpi| Self::new(mpi, shared, options)) {
            Ok(engine) => {
                let _ = started.send(Ok((engine.mpi.rank, engine.mpi.ranks)));
                engine.make_progress();
            }
            Err(error) => drop(started.send(Err(error))),
        }
    }

    fn new(mpi: Mpi, shared: Arc<Shared>, options: MpiOptions) -> Result<Self, CommError> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (has_core, ranks) = (mpi.local_ranks <= cores, mpi.ranks);
        if ranks > MAX_WORLD {
            let (what, allowed) = ("number of ranks", format!("1 to {MAX_WORLD}"));
            return Err(CommError::Join(JoinProblem::OutOfRange { what, value: ranks, allowed }));
        }
        let mut engine = Self {
            mpi,
            shared,
            options,
            groups: Vec::new(),
            notice: Box::new([0; NOTICE_WORDS]),
            notice_request: [Request::default()],
            sent_notices: Vec::new(),
            left: vec![false; ranks],
            suspect: None,
            is_leaving: false,
            ended_at: None,
            abandoned: Vec::new(),
            has_core,
            polls: 0,
        };
        engine.receive_notice()?;
        engine.add_group((0..ranks).collect())?;
        Ok(engine)
    }

    fn make_progress(mut self) {
        loop {
            let jobs = std::mem::take(&mut self.shared.lock().jobs);
            let mut has_moved = !jobs.is_empty();
            for job in jobs {
                if let Err(error) = self.take(job) {
                    self.end(error);
                }
            }
            if self.ended_at.is_some() {
                self.settle();
            } else {
                match self.advance() {
                    Ok(moved) => has_moved |= moved,
                    Err(error) => self.end(error),
                }
            }
            if self.has_left() {
                break;
            }
            self.rest(has_moved);
        }
        let Self { mpi, notice_request: [notice_request], .. } = self;
        if let Err(error) = mpi.finish(notice_request) {
            let _ = writeln!(io::stderr(), "error: {error}");
        }
    }

    fn take(&mut self, job: Job) -> Result<(), CommError> {
        match job {
            Job::Abort(code) => self.mpi.abort(code),
            Job::Leave => self.is_leaving = true,
            // No operation starts after the end.
            _ if self.ended_at.is_some() => {}
            Job::Begin { group, sequence, recorded, task, ticket } => {
                let Self { mpi, groups, .. } = self;
                let Some(lanes) = &mut groups[group] else { return Ok(()) };
                let mut running = Running::new(task, sequence, recorded, ticket);
                let begun = running.begin(mpi, &lanes.members);
                let is_sent = running.ticket.is_complete();
                // Kept even after an error: MPI may still access its memory.
                lanes.lane(&running.task).push_back(running);
                begun?;
                if is_sent {
                    self.shared.notify_callers();
                }
            }
            Job::AddGroup { ranks } => self.add_group(ranks)?,
            Job::Expire { group, ticket, limit } => self.expire(group, &ticket, limit)?,
            Job::Fail(error) => return Err(error),
        }
        Ok(())
    }

    fn add_group(&mut self, ranks: Vec<usize>) -> Result<(), CommError> {
        let index = self.groups.len();
        let Some(own) = ranks.iter().position(|rank| *rank == self.mpi.rank) else {
            self.groups.push(None);
            return Ok(());
        };
        let comm = if index == 0 { self.mpi.world } else { self.mpi.group(&ranks, GROUP_TAGS + index)? };
        let (name, per_call) = (transport::name(index, &ranks), self.options.per_call.min(i32::MAX as usize));
        self.groups.push(Some(Lanes::new(Members { comm, name, ranks, own, per_call })));
        Ok(())
    }

    /// Advances all operations. Returns true if anything moved.
    fn advance(&mut self) -> Result<bool, CommError> {
        let mut has_moved = self.take_notices()?;
        for Lanes { members, lanes } in self.groups.iter_mut().flatten() {
            for lane in lanes.values_mut() {
                for running in lane.iter_mut() {
                    let (before, was_complete) = (running.step, running.ticket.is_complete());
                    has_moved |= running.advance(&self.mpi, members)?;
                    if before == Step::Meet && running.step != Step::Meet {
                        self.shared.lock().recorder.stamp(running.recorded, 0);
                    }
                    if running.step == Step::Done {
                        self.shared.lock().recorder.stamp(running.recorded, 1);
                    }
                    if !was_complete && running.ticket.is_complete() {
                        self.shared.notify_callers();
                    }
                    // Data moves in the order of the operations.
                    if matches!(running.step, Step::Meet | Step::Tables) {
                        break;
                    }
                }
                while lane.pop_front_if(|running| running.step == Step::Done).is_some() {}
            }
        }
        self.check_for_lost_ranks()?;
        Ok(has_moved)
    }

    /// Posts the receive of the next message about the run.
    fn receive_notice(&mut self) -> Result<(), CommError> {
        let (to, bytes) = (self.notice.as_mut_ptr().cast(), size_of_val(&*self.notice));
        // SAFETY: the words do not move, and are not read before the request is complete.
        self.notice_request =
            [unsafe { self.mpi.receive(self.mpi.world, to, bytes, None, Tag::Control as i32)? }];
        Ok(())
    }

    /// Handles received messages about the run. Returns true if there were any.
    fn take_notices(&mut self) -> Result<bool, CommError> {
        let mut has_noticed = false;
        while self.mpi.test(&mut self.notice_request)?.is_none() {
            has_noticed = true;
            let [what, rank, words @ ..] = *self.notice;
            self.receive_notice()?;
            if what == LEAVING {
                self.left[rank as usize] = true;
            } else {
                self.end_by(words, None);
                break;
            }
        }
        Ok(has_noticed)
    }

    /// Sends a message about the run to all other ranks.
    fn notify_ranks(&mut self, what: u64, error: [u64; ERROR_WORDS]) -> Result<(), CommError> {
        let mut words = Box::new([0; NOTICE_WORDS]);
        words[0] = what;
        words[1] = self.mpi.rank as u64;
        words[2..].copy_from_slice(&error);
        for rank in (0..self.mpi.ranks).filter(|rank| *rank != self.mpi.rank) {
            let words = words.clone();
            let (from, bytes) = (words.as_ptr().cast(), size_of_val(&*words));
            // SAFETY: the words are kept until the request is complete.
            let sent = unsafe { self.mpi.send(self.mpi.world, from, bytes, rank, Tag::Control as i32)? };
            self.sent_notices.push(([sent], words));
        }
        Ok(())
    }

    /// Checks whether an operation waits for a rank that has left.
    ///
    /// # Errors
    /// If one does for longer than `NOTICE_TIME`.
    fn check_for_lost_ranks(&mut self) -> Result<(), CommError> {
        if !self.left.contains(&true) {
            return Ok(());
        }
        let mut lost = None;
        for Lanes { members, lanes } in self.groups.iter_mut().flatten() {
            for running in lanes.values_mut().filter_map(|lane| lane.front_mut()) {
                let awaited = running.awaited(&self.mpi, members)?.filter(|rank| self.left[*rank]);
                lost = lost.or(awaited.map(|rank| (rank, running.context(members))));
            }
        }
        match (lost, self.suspect) {
            (Some((rank, context)), Some((suspect, since))) if rank == suspect => {
                if since.elapsed() > NOTICE_TIME {
                    let cause = LossCause::Left;
                    return Err(CommError::PeerLost { rank, cause, context: Some(context) });
                }
            }
            (lost, _) => self.suspect = lost.map(|(rank, _)| (rank, Instant::now())),
        }
        Ok(())
    }

    /// Determines why an operation is late, and returns that as the error; `Ok` if it is complete.
    fn expire(&mut self, group: usize, ticket: &Arc<Ticket>, limit: Duration) -> Result<(), CommError> {
        let Some(Lanes { members, lanes }) = &mut self.groups[group] else { return Ok(()) };
        let is_it = |running: &Running| Arc::ptr_eq(&running.ticket, ticket);
        let Some(lane) = lanes.values_mut().find(|lane| lane.iter().any(is_it)) else { return Ok(()) };
        let Some(running) = lane.iter_mut().find(|running| running.step != Step::Done) else { return Ok(()) };
        let (awaited, context) = (running.awaited(&self.mpi, members)?, running.context(members));
        let waited_ms = limit.as_millis() as u64;
        Err(match awaited {
            Some(rank) => CommError::TimedOut { rank, waiting: self.mpi.rank, waited_ms, context },
            None => {
                let words = format!("{context} was not done after {waited_ms} ms, though all ranks had come");
                CommError::io("go on over MPI")(std::io::Error::other(words))
            }
        })
    }

    /// Ends the run on all ranks, unless it has ended.
    fn end(&mut self, error: CommError) {
        if self.ended_at.is_none() {
            let words = error.to_words(self.mpi.rank);
            // If MPI cannot send it, MPI ends the processes itself.
            let _ = self.notify_ranks(ENDING, words);
            self.end_by(words, Some(error));
        }
    }

    fn end_by(&mut self, words: [u64; ERROR_WORDS], details: Option<CommError>) {
        self.ended_at = Some(Instant::now());
        for lane in self.groups.iter_mut().flatten().flat_map(|group| group.lanes.values_mut()) {
            let (moving, others) = lane.drain(..).partition(|running| running.step == Step::Move);
            *lane = moving;
            self.abandoned.extend::<VecDeque<_>>(others);
        }
        let mut state = self.shared.lock();
        state.ending = Some(words);
        state.details = details;
        drop(state);
        self.settle();
    }

    /// Progresses after the end of the run until MPI no longer accesses callers' memory; callers may not return before.
    /// Operations that can complete do. If it takes too long, aborts all processes.
    fn settle(&mut self) {
        let mut holds_memory = false;
        for Lanes { members, lanes } in self.groups.iter_mut().flatten() {
            for running in lanes.values_mut().flatten() {
                // After an error, a further one adds nothing.
                let _ = running.advance(&self.mpi, members);
                holds_memory |= running.holds_borrowed_memory();
            }
        }
        let since = self.ended_at.map_or(Duration::ZERO, |at| at.elapsed());
        if !holds_memory {
            self.shared.lock().is_settled = true;
            self.shared.notify_callers();
        }
        let time = if holds_memory { GRACE } else { REPORTING_TIME };
        if (holds_memory || self.is_leaving) && since > time {
            let state = self.shared.lock();
            let ending = state.ending.map_or(CommError::Stopped { by: None }, CommError::from_words);
            if holds_memory {
                let _ = writeln!(
                    io::stderr(),
                    "error: rank {}: {}",
                    self.mpi.rank,
                    state.details.as_ref().unwrap_or(&ending)
                );
            }
            drop(state);
            self.mpi.abort((self.options.exit_code)(&ending));
        }
    }

    fn is_busy(&self) -> bool {
        self.groups.iter().flatten().any(Lanes::is_busy)
    }

    /// Returns true if this rank is to leave, and all others have announced that they leave.
    fn has_left(&mut self) -> bool {
        if !self.is_leaving || self.ended_at.is_some() || self.is_busy() {
            return false;
        }
        let own = self.mpi.rank;
        if !std::mem::replace(&mut self.left[own], true)
            && let Err(error) = self.notify_ranks(LEAVING, [0; ERROR_WORDS])
        {
            self.end(error);
        }
        self.sent_notices.retain_mut(|(sent, _)| !matches!(self.mpi.test(sent), Ok(None)));
        self.ended_at.is_none() && self.sent_notices.is_empty() && self.left.iter().all(|left| *left)
    }

    /// Sleeps until the next poll, or until a caller has a job.
    fn rest(&mut self, has_moved: bool) {
        if has_moved {
            self.polls = 0;
            return;
        }
        self.polls = self.polls.saturating_add(1);
        let state = self.shared.lock();
        if !state.jobs.is_empty() {
            return;
        }
        let nap = if !self.is_busy() && !self.is_leaving {
            IDLE_NAP
        } else if self.has_core && state.callers > 0 && self.polls < POLLS_ALONE {
            drop(state);
            return std::hint::spin_loop();
        } else if self.polls < POLLS {
            drop(state);
            return std::thread::yield_now();
        } else {
            NAPS[0].saturating_mul(1 << ((self.polls - POLLS) / 64).min(10)).min(NAPS[1])
        };
        // Woken or not, the thread polls again.
        let _ = self.shared.jobs_queued.wait_timeout(state, nap);
    }
}

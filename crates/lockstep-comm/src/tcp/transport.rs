//! The TCP transport of a rank: a progress thread, and callers that start operations and wait for them.
//!
//! One lock protects all state. Callers make progress themselves once when they start or wait, which saves small operations the
//! handover to the thread. The thread makes progress while its rank computes.

use std::{
    io,
    net::TcpStream,
    os::fd::{AsFd, OwnedFd},
    panic::Location,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Workers};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::{
    frame::{Channel, Header, Key, Kind},
    hierarchical::UniformNodes,
    link::{Link, Status},
    operation_table::{OperationTable, RankMessage, lane_of},
    wire::Connection,
};
use crate::{
    Call, CommError, Deadline, LossCause, OperationContext,
    memory::Lent,
    record::Recorded,
    recorder::Recorder,
    shm,
    task::Task,
    transport::{Ticket, Transport, name},
};

/// Number of heartbeats within the time after which a silent rank counts as lost.
const BEATS: u32 = 20;
/// Polling interval for operations in shared memory, which no socket reports.
const NEIGHBOURS: Duration = Duration::from_micros(100);
/// Time to learn how a rank ended that has closed its connections.
const RUMOUR: Duration = Duration::from_millis(100);
/// Maximum sleep before the deadline is checked again.
const NAP: Duration = Duration::from_millis(50);
/// Time for a leaving rank to say so.
const FAREWELL: Duration = Duration::from_millis(300);

/// Shared-memory transport to the ranks of this machine.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) machine: Arc<shm::ShmTransport>,
    /// Number of ranks per machine, if there are several machines and all have the same power of two.
    pub(crate) of_each: Option<usize>,
}

/// TCP transport of one rank.
#[derive(Debug)]
pub(crate) struct TcpTransport {
    rank: usize,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Notified when an operation completes or the run ends.
    news: Condvar,
    /// Event counter that wakes the thread, which polls sockets.
    wake: OwnedFd,
    silence: Duration,
}

#[derive(Debug)]
struct State {
    table: OperationTable,
    /// Links by rank; `None` for this rank.
    links: Vec<Option<Link>>,
    ending: Option<CommError>,
    /// Shared-memory transport of this machine. An error that ends the run there ends it here.
    local: Option<Arc<shm::ShmTransport>>,
    /// Farewell to send, once this rank leaves.
    leaving: Option<Kind>,
}

impl TcpTransport {
    /// Enters the world as `rank`, over connections to each other rank; some of them may be on this machine as well.
    /// Ranks may be silent for `silence`.
    pub(crate) fn new(
        rank: usize,
        connections: Vec<Vec<Connection>>,
        silence: Duration,
        local: Option<Local>,
    ) -> Result<Self, CommError> {
        let ranks = connections.len();
        let link =
            |(peer, connections)| (peer != rank).then(|| Link::new(peer, connections, silence)).transpose();
        let links = connections.into_iter().enumerate().map(link).collect::<io::Result<Vec<_>>>();
        let links = links.map_err(CommError::io("use a connection to a rank"))?;
        let machine = local.as_ref().map(|local| Arc::clone(&local.machine));
        let recorder = Recorder::new(machine.as_ref().map(|local| (local.segments.clone(), local.rank)));
        let mut table = OperationTable::new(rank, ranks, recorder);
        let machines = |local: Local| Some(UniformNodes::new(local.machine, local.of_each?));
        table.machines = local.and_then(machines);
        let state = State { table, links, ending: None, local: machine, leaving: None };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|error| CommError::io("make an event counter")(error.into()))?;
        let shared = Arc::new(Shared { state: Mutex::new(state), news: Condvar::new(), wake, silence });
        let carrier = Arc::clone(&shared);
        let thread = Builder::new().name("lockstep-tcp".to_owned()).spawn(move || carrier.carry());
        let thread = Some(thread.map_err(CommError::io("start a thread"))?);
        Ok(Self { rank, shared, thread })
    }

    /// Waits until `attempt` returns a result. `late` returns the rank and operation that it waits for.
    fn drive<R>(
        &self,
        group: usize,
        deadline: Deadline,
        mut attempt: impl FnMut(&mut State) -> Option<R>,
        late: impl Fn(&State) -> Option<(usize, OperationContext)>,
    ) -> Result<R, CommError> {
        let mut state = self.shared.lock();
        let mut awaited = late(&state);
        loop {
            if let Some(error) = &state.ending {
                return Err(error.copy().during(awaited.map(|(_, context)| context)));
            }
            if let Some(result) = attempt(&mut state) {
                return Ok(result);
            }
            if state.pump() {
                self.shared.tell();
                continue;
            }
            awaited = late(&state);
            let (rank, context) = awaited.unzip();
            let rank = rank.unwrap_or(self.rank);
            let error = match state.links[rank].as_ref().filter(|link| link.is_gone()).map(|link| link.status)
            {
                Some(Status::Panicked) => CommError::PeerLost { rank, cause: LossCause::Panicked, context },
                Some(_) => CommError::PeerLost { rank, cause: LossCause::Left, context },
                None if deadline.has_passed() => {
                    let nothing = || OperationContext {
                        call: Call::bare(crate::Kind::Barrier),
                        sequence: 0,
                        group: name(group, &state.table.group(group).members.ranks),
                    };
                    CommError::TimedOut {
                        rank,
                        waiting: self.rank,
                        waited_ms: deadline.limit().as_millis() as u64,
                        context: context.unwrap_or_else(nothing),
                    }
                }
                None => {
                    let nap = NAP.min(deadline.remaining());
                    state =
                        self.shared.news.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
            };
            let error = state.end(error);
            self.shared.tell();
            return Err(error.during(context));
        }
    }
}

impl Transport for TcpTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self, group: usize) -> Vec<usize> {
        self.shared.lock().table.group(group).members.ranks.clone()
    }

    fn groups(&self) -> usize {
        self.shared.lock().table.groups.len()
    }

    fn add_group(&self, ranks: Vec<usize>) -> usize {
        self.shared.lock().table.add_group(ranks)
    }

    fn begin(
        &self,
        group: usize,
        task: Task,
        memory: Vec<Lent>,
        deadline: Deadline,
        caller: &Location<'_>,
    ) -> Result<Arc<Ticket>, CommError> {
        let ticket = Ticket::new(memory);
        let (call, lane) = (task.call, lane_of(&task));
        let mut waiting = Some(task);
        let begin = |state: &mut State| {
            let task = waiting.take_if(|task| state.table.has_room(group, task))?;
            state.table.begin(group, task, Arc::clone(&ticket), caller);
            state.pump();
            Some(())
        };
        let late = |state: &State| {
            let operations = state.table.group(group);
            let (sequence, group) = (operations.next(lane), operations.members.name);
            Some((operations.oldest(lane)?, OperationContext { call, sequence, group }))
        };
        self.drive(group, deadline, begin, late)?;
        self.shared.tell();
        Ok(ticket)
    }

    fn begun(&self, group: usize) -> u32 {
        self.shared.lock().table.group(group).begun
    }

    fn wait(&self, group: usize, ticket: &Arc<Ticket>, deadline: Deadline) -> Result<(), CommError> {
        let is_complete = |_: &mut State| ticket.is_complete().then_some(());
        let late = |state: &State| state.table.group(group).waits_for(ticket);
        self.drive(group, deadline, is_complete, late)
    }

    fn progress(&self) -> Result<(), CommError> {
        let mut state = self.shared.lock();
        if state.pump() {
            self.shared.tell();
        }
        state.ending.as_ref().map_or(Ok(()), |error| Err(error.copy()))
    }

    fn fail(&self, error: CommError) -> CommError {
        let ending = self.shared.lock().end(error);
        self.shared.tell();
        ending
    }

    fn is_in_background(&self) -> bool {
        true
    }

    fn is_near(&self, rank: usize) -> bool {
        let state = self.shared.lock();
        state.local.as_ref().is_some_and(|local| local.segments.local_rank(rank).is_some())
    }

    fn arena(&self, categories: &[MemoryCategory]) -> Arena {
        self.shared.lock().local.as_ref().map_or_else(Arena::new, |local| local.arena(categories))
    }

    /// The thread runs while the rank computes, so it does not use the compute threads.
    fn set_workers(&self, _: Workers) {}

    fn recorded(&self, rank: usize) -> Vec<Recorded> {
        let state = self.shared.lock();
        if rank == self.rank {
            return state.table.recorder.read();
        }
        let segments = state.local.as_ref().map(|local| &local.segments);
        let found = segments.and_then(|segments| Some(segments.records(segments.local_rank(rank)?)));
        found.unwrap_or_default()
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shared.lock().leaving = Some(Kind::Leaving { in_panic: std::thread::panicking() });
        self.shared.tell();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread and all waiting callers.
    fn tell(&self) {
        self.news.notify_all();
        // A write fails only if the event counter is at its limit; the thread is awake then.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Runs the thread: makes progress until its rank leaves.
    fn carry(&self) {
        let interval = self.silence / BEATS;
        let mut next_beat = Instant::now() + interval;
        loop {
            let mut state = self.lock();
            if let Some(farewell) = state.leaving {
                return self.leave(state, farewell);
            }
            if Instant::now() >= next_beat {
                next_beat = Instant::now() + interval;
                state.beat(self.silence);
            }
            let has_moved = state.pump();
            self.news.notify_all();
            if has_moved {
                continue;
            }
            let interests = state.interests();
            let is_busy = state.table.machines.as_ref().is_some_and(UniformNodes::is_busy);
            drop(state);
            let limit = next_beat.saturating_duration_since(Instant::now());
            self.sleep(&interests, if is_busy { limit.min(NEIGHBOURS) } else { limit });
        }
    }

    /// Sleeps until a socket is ready, the thread is woken, or `limit` has passed.
    fn sleep(&self, interests: &[(Arc<TcpStream>, PollFlags)], limit: Duration) {
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut polled: Vec<_> = interests
            .iter()
            .map(|(socket, flags)| PollFd::from_borrowed_fd(socket.as_fd(), *flags))
            .collect();
        polled.push(PollFd::new(&self.wake, PollFlags::IN));
        // Whatever the result, the next round checks everything.
        if poll(&mut polled, Some(&timeout)).is_ok_and(|ready| ready > 0) {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    /// Says farewell, and waits a little for its arrival: closing earlier could destroy it in transit.
    fn leave<'a>(&'a self, mut state: MutexGuard<'a, State>, farewell: Kind) {
        state.abandon();
        if state.ending.is_none() {
            state.tell_all(Header::bare(farewell), &[]);
        }
        let deadline = Instant::now() + FAREWELL;
        let mut is_said = false;
        loop {
            state.write();
            let outgoing = state.interests().into_iter().any(|(_, flags)| flags.contains(PollFlags::OUT));
            if !outgoing && !std::mem::replace(&mut is_said, true) {
                state.links.iter().flatten().for_each(Link::hang_up);
            }
            let open =
                state.links.iter_mut().flatten().filter_map(|link| (!link.drain()).then_some(())).count();
            if open == 0 || Instant::now() >= deadline {
                return;
            }
            let flags = PollFlags::IN | if is_said { PollFlags::empty() } else { PollFlags::OUT };
            let links = state.links.iter().flatten();
            let interests: Vec<_> = links.flat_map(|link| link.interests(&state.table)).collect();
            let interests: Vec<_> = interests
                .into_iter()
                .map(|(socket, found)| (socket, (found | PollFlags::IN) & flags))
                .collect();
            drop(state);
            self.sleep(&interests, Duration::from_millis(20));
            state = self.lock();
        }
    }
}

impl State {
    /// Reads, advances operations and writes, as far as possible without waiting. Returns true if anything moved.
    fn pump(&mut self) -> bool {
        if self.ending.is_some() {
            return self.write();
        }
        let mut has_moved = self.read();
        if let Some(machines) = self.table.machines.as_ref().filter(|machines| machines.is_busy()) {
            // A failure is recorded in the segments, which `listen` reads next.
            let _ = machines.local.progress();
        }
        self.listen();
        if self.ending.is_none() {
            match self.table.advance() {
                Ok(has_completed) => has_moved |= has_completed,
                Err(error) => {
                    self.end(error);
                }
            }
        }
        self.write() || has_moved
    }

    fn read(&mut self) -> bool {
        self.with_links(Link::read)
    }

    fn write(&mut self) -> bool {
        self.with_links(Link::write)
    }

    /// Calls `work` with all links. Returns true if anything moved on any of them.
    fn with_links(
        &mut self,
        work: impl Fn(&mut Link, &mut OperationTable) -> Result<bool, LossCause>,
    ) -> bool {
        let Self { table, links, .. } = self;
        let (mut has_moved, mut lost) = (false, None);
        for (rank, link) in links.iter_mut().enumerate() {
            match link.as_mut().map_or(Ok(false), |link| work(link, table)) {
                Ok(here) => has_moved |= here,
                Err(cause) => lost = lost.or(Some((rank, cause))),
            }
        }
        self.lose(lost);
        has_moved
    }

    fn lose(&mut self, lost: Option<(usize, LossCause)>) {
        self.listen();
        let Some((rank, cause)) = lost else { return };
        let begin = Instant::now();
        // The lost rank's launcher knows the cause, and has told the ranks of its machine, which tell all others.
        while cause == LossCause::Disconnected && self.ending.is_none() && begin.elapsed() < RUMOUR {
            std::thread::sleep(RUMOUR / 20);
            let Self { table, links, .. } = self;
            for link in links.iter_mut().flatten() {
                // More ranks may be lost; one is enough to end the run.
                let _ = link.read(table);
            }
            self.listen();
        }
        self.end(CommError::PeerLost { rank, cause, context: None });
    }

    /// Handles messages of other ranks about themselves and the run.
    fn listen(&mut self) {
        if let Some(error) = self.local.as_ref().and_then(|local| local.segments.ending()) {
            self.end(error);
        }
        while let Some((rank, messages)) = self.table.messages.pop_front() {
            match messages {
                RankMessage::Leaving { in_panic } => {
                    if let Some(link) = &mut self.links[rank] {
                        link.status = if in_panic { Status::Panicked } else { Status::Left };
                    }
                }
                RankMessage::Ending(error) => {
                    self.end(error);
                }
            }
        }
    }

    /// Sends heartbeats, and checks those of the other ranks.
    fn beat(&mut self, silence: Duration) {
        let mut lost = None;
        for (rank, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            lost = lost.or(link.beat(BEATS, silence).map(|cause| (rank, cause)));
            let control = &mut self.table.sending.control[rank];
            if link.status == Status::Here && control.is_empty() {
                control.push_back((Header::bare(Kind::Beat), Vec::new()));
            }
        }
        self.lose(lost);
    }

    /// Ends the run on all ranks, unless it has ended. Returns the error that ended it. No operation accesses memory
    /// afterwards.
    fn end(&mut self, error: CommError) -> CommError {
        if let Some(ending) = &self.ending {
            return ending.copy();
        }
        let words = error.to_words(self.table.rank);
        let ending = self.ending.insert(CommError::from_words(words)).copy();
        if let Some(local) = &self.local {
            local.fail(ending.copy());
        }
        self.abandon();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let key = Key { group: 0, channel: Channel::Collective, sequence: 0 };
        self.tell_all(Header::of(Kind::Ending, key, &bytes), &bytes);
        self.write();
        match ending {
            // Only this rank has the details of a local error.
            CommError::Stopped { by: Some(rank) } if rank == self.table.rank => error,
            ending => ending,
        }
    }

    /// Drops all operations and all references to their memory.
    fn abandon(&mut self) {
        self.table.abandon();
        self.links.iter_mut().flatten().for_each(Link::abandon);
    }

    /// Queues a frame for all ranks that are present.
    fn tell_all(&mut self, header: Header, bytes: &[u8]) {
        for (rank, link) in self.links.iter().enumerate() {
            if link.as_ref().is_some_and(|link| link.status == Status::Here) {
                self.table.sending.control[rank].push_back((header, bytes.to_vec()));
            }
        }
    }

    fn interests(&self) -> Vec<(Arc<TcpStream>, PollFlags)> {
        let links = self.links.iter().flatten();
        let all = links.flat_map(|link| link.interests(&self.table));
        // After the end nothing is read any more; arriving data would keep the thread awake.
        let keep = if self.ending.is_some() { PollFlags::OUT } else { PollFlags::IN | PollFlags::OUT };
        all.map(|(socket, flags)| (socket, flags & keep)).filter(|(_, flags)| !flags.is_empty()).collect()
    }
}

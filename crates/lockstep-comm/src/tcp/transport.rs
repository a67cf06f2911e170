//! The TCP transport of a rank: a progress thread, and callers that start operations and wait for them.
//!
//! Two more threads connect this rank to others than its neighbours, if there are any: `lockstep-dial` connects to them and
//! knocks, `lockstep-accept` takes their connections and knocks.
//!
//! One lock protects all state. Callers make progress themselves once when they start or wait, which saves small operations the
//! handover to the thread. The thread makes progress while its rank computes.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io::{self, ErrorKind},
    net::TcpStream,
    os::fd::{AsFd, OwnedFd},
    panic::Location,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Workers};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::{
    acceptor::Acceptor,
    agreement::LONG_WAIT,
    frame::{Header, Kind},
    hierarchical::UniformNodes,
    link::Link,
    mesh::{Arrival, Arrivals, Connections, Mesh},
    operation::Awaited,
    operation_table::OperationTable,
    state::{BEATS, State, connect_limit},
};
use crate::{
    CommError, Deadline, JoinProblem, LossCause, OperationContext,
    memory::LentBuffer,
    record::Recorded,
    recorder::Recorder,
    sequence::Lane,
    shm,
    task::Task,
    transport::{Ticket, Transport, name},
};

/// Polling interval for operations in shared memory, which no socket reports.
const SHARED_MEMORY_POLL: Duration = Duration::from_micros(100);
/// Maximum sleep before the deadline is checked again.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Time after which the thread that accepts ranks looks if the transport still exists.
const CALLS_POLL: Duration = Duration::from_millis(100);
/// Time for the last data of a leaving rank, and for its farewell if the run has ended with an error.
const LAST_DATA: Duration = Duration::from_millis(300);

/// Shared-memory transport to the ranks of this machine.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) transport: Arc<shm::ShmTransport>,
    /// Number of ranks per machine, if there are several machines and all have the same power of two.
    pub(crate) of_each: Option<usize>,
}

/// Result of the rendezvous of ranks: the neighbours' connections, and all that connecting others needs.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) mesh: Mesh,
    pub(crate) acceptor: Acceptor,
    pub(crate) arrivals: Arrivals,
    pub(crate) links: BTreeMap<usize, Connections>,
    /// Ranks that have asked for a connection.
    pub(crate) knocks: Vec<usize>,
    /// Number of ranks per machine, if there are several machines that share memory between equally many, a power of two.
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
    changed: Condvar,
    /// Event counter that wakes the thread, which polls sockets.
    wake: OwnedFd,
    silence: Duration,
}

impl TcpTransport {
    /// Enters the world over the connections of `joined`. Ranks may be silent for `silence`.
    pub(crate) fn new(joined: Joined, silence: Duration, local: Option<Local>) -> Result<Self, CommError> {
        let Joined { mesh, acceptor, arrivals, links, knocks, .. } = joined;
        let (rank, ranks) = (mesh.rank, mesh.ranks());
        let link = |(peer, connections)| Ok((peer, Link::new(peer, connections, silence)?));
        let links = links.into_iter().map(link).collect::<io::Result<BTreeMap<_, _>>>();
        let links = links.map_err(CommError::io("use a connection to a rank"))?;
        let shared_memory = local.as_ref().map(|local| Arc::clone(&local.transport));
        let recorder =
            Recorder::new(shared_memory.as_ref().map(|local| (local.segments.clone(), local.rank)));
        let mut table = OperationTable::new(rank, ranks, recorder);
        let nodes = |local: Local| Some(UniformNodes::new(local.transport, local.of_each?));
        table.nodes = local.and_then(nodes);
        let (dialer, wanted) = mpsc::channel();
        let dialer = Some(dialer).filter(|_| !mesh.is_complete());
        let state = State {
            table,
            links,
            dialer,
            dialed: HashSet::new(),
            unreachable: HashMap::new(),
            knocked: HashMap::new(),
            ending: None,
            own_failure: None,
            local: shared_memory,
            leaving: None,
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|error| CommError::io("make an event counter")(error.into()))?;
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), wake, silence });
        if shared.lock().dialer.is_some() {
            let (streams, mesh, weak) = (mesh.streams, Arc::new(mesh), Arc::downgrade(&shared));
            let (dialing, taking) = ((Arc::clone(&mesh), Weak::clone(&weak)), (mesh, weak));
            // From now on ranks come one at a time; strangers must not use up the descriptors of the run.
            acceptor.expect(streams);
            spawn("lockstep-dial", move || connect_ranks(&dialing.0, &dialing.1, &wanted))?;
            spawn("lockstep-accept", move || accept_ranks(&taking.0, &taking.1, &acceptor, arrivals))?;
            knocks.into_iter().for_each(|peer| shared.lock().take_knock(peer));
        }
        let running = Arc::clone(&shared);
        let thread = Some(spawn("lockstep-tcp", move || running.run())?);
        Ok(Self { rank, shared, thread })
    }

    /// Waits until `attempt` returns a result. `late` returns what it waits for.
    fn wait_until<R>(
        &self,
        group: usize,
        deadline: Deadline,
        mut attempt: impl FnMut(&mut State) -> Option<R>,
        late: impl Fn(&State) -> Option<Awaited>,
    ) -> Result<R, CommError> {
        let mut state = self.shared.lock();
        let mut awaited = late(&state);
        loop {
            if let Some(error) = state.take_ending() {
                return Err(error.during(awaited.map(|awaited| awaited.context)));
            }
            if let Some(result) = attempt(&mut state) {
                return Ok(result);
            }
            if state.progress_all() {
                self.shared.notify();
                continue;
            }
            awaited = late(&state);
            let context = awaited.map(|awaited| awaited.context);
            let lost = awaited.and_then(|awaited| awaited.needed);
            let lost = lost.and_then(|rank| Some((rank, state.cause_of_absence(rank)?)));
            let error = if let Some((rank, cause)) = lost {
                CommError::PeerLost { rank, cause, context }
            } else if deadline.has_passed() {
                let group = name(group, &state.table.group(group).members.ranks);
                let rank = awaited.map_or(self.rank, |awaited| awaited.rank);
                CommError::timed_out(self.rank, rank, deadline, context, group)
            } else {
                let nap = MAX_SLEEP.min(deadline.remaining());
                let woken = self.shared.changed.wait_timeout(state, nap);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            };
            let error = state.end(error);
            self.shared.notify();
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
        memory: Vec<LentBuffer>,
        deadline: Deadline,
        caller: &Location<'_>,
    ) -> Result<Arc<Ticket>, CommError> {
        let ticket = Ticket::new(memory);
        let (call, lane) = (task.call, Lane::of(&task.flow));
        let mut waiting = Some(task);
        let begin = |state: &mut State| {
            let task = waiting.take_if(|task| state.table.has_room(group, task))?;
            state.table.begin(group, task, Arc::clone(&ticket), caller);
            state.progress_all();
            Some(())
        };
        let late = |state: &State| {
            let operations = state.table.group(group);
            let (sequence, group) = (operations.numbers.next(lane), operations.members.name);
            Some(Awaited { context: OperationContext { call, sequence, group }, ..operations.oldest(lane)? })
        };
        self.wait_until(group, deadline, begin, late)?;
        self.shared.notify();
        Ok(ticket)
    }

    fn begun(&self, group: usize) -> u32 {
        self.shared.lock().table.group(group).numbers.next(Lane::Collective)
    }

    fn wait(&self, group: usize, ticket: &Arc<Ticket>, deadline: Deadline) -> Result<(), CommError> {
        let is_complete = |_: &mut State| ticket.is_complete().then_some(());
        let late = |state: &State| state.table.group(group).waits_for(ticket);
        self.wait_until(group, deadline, is_complete, late)
    }

    fn progress(&self) -> Result<(), CommError> {
        let mut state = self.shared.lock();
        if state.progress_all() {
            self.shared.notify();
        }
        state.take_ending().map_or(Ok(()), Err)
    }

    fn fail(&self, error: CommError) -> CommError {
        let ending = self.shared.lock().end(error);
        self.shared.notify();
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
        self.shared.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts a thread.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, CommError> {
    Builder::new().name(name.to_owned()).spawn(run).map_err(CommError::io("start a thread"))
}

/// Connects to the ranks that `wanted` names, until the transport is gone.
fn connect_ranks(mesh: &Mesh, transport: &Weak<Shared>, wanted: &mpsc::Receiver<usize>) {
    while let Ok(peer) = wanted.recv() {
        let Some(limit) = transport.upgrade().map(|shared| shared.connect_limit()) else { return };
        let deadline = Deadline::after(limit);
        let dialed = if peer < mesh.rank {
            mesh.dial(peer, deadline).map(Some)
        } else {
            mesh.knock(peer, deadline).map(|()| None)
        };
        let Some(shared) = transport.upgrade() else { return };
        match dialed {
            Ok(Some(connections)) => shared.add_link(peer, connections),
            // The other rank connects.
            Ok(None) => {
                shared.lock().knocked.insert(peer, Instant::now());
            }
            Err(error @ CommError::Io { .. }) => {
                shared.lock().end_by_own_failure(error);
                shared.notify();
            }
            Err(error) => {
                tracing::debug!(peer, %error, "cannot connect to a rank");
                // Ranks listen until they leave.
                let is_gone =
                    matches!(error, CommError::Join(JoinProblem::Connection(ErrorKind::ConnectionRefused)));
                let cause = if is_gone { LossCause::Disconnected } else { LossCause::Unreachable };
                shared.lock().unreached(peer, cause);
                shared.notify();
            }
        }
    }
}

/// Takes the connections and knocks of other ranks, until the transport is gone.
fn accept_ranks(mesh: &Mesh, transport: &Weak<Shared>, acceptor: &Acceptor, mut arrivals: Arrivals) {
    loop {
        let client = acceptor.next(Deadline::after(CALLS_POLL));
        let Some(shared) = transport.upgrade() else { return };
        match client.and_then(|client| arrivals.add(mesh, client)) {
            Some(Arrival::Connected(peer, connections)) => shared.add_link(peer, connections),
            Some(Arrival::Knocked(peer)) => shared.lock().take_knock(peer),
            None => {}
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread and all waiting callers.
    fn notify(&self) {
        self.changed.notify_all();
        // A write fails only if the event counter is at its limit; the thread is awake then.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Returns the time in which another rank must answer a connection.
    fn connect_limit(&self) -> Duration {
        connect_limit(self.silence)
    }

    /// Adds a link to a rank that was connected after the start, unless there is one.
    fn add_link(&self, peer: usize, connections: Connections) {
        let link = Link::new(peer, connections, self.silence);
        let mut state = self.lock();
        match link {
            Ok(link) if !state.links.contains_key(&peer) => {
                state.links.insert(peer, link);
                state.send_what_it_missed(peer);
            }
            Ok(_) => {}
            Err(error) => {
                state.end_by_own_failure(CommError::io("use a connection to a rank")(error));
            }
        }
        drop(state);
        self.notify();
    }

    /// Runs the thread: makes progress until its rank leaves.
    fn run(&self) {
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
            let has_moved = state.progress_all();
            self.changed.notify_all();
            if has_moved {
                continue;
            }
            let interests = state.interests();
            let is_busy = state.table.nodes.as_ref().is_some_and(UniformNodes::is_busy);
            let waits = state.table.has_waiting_trees();
            drop(state);
            let limit = next_beat.saturating_duration_since(Instant::now());
            let limit = if waits { limit.min(LONG_WAIT) } else { limit };
            self.sleep(&interests, if is_busy { limit.min(SHARED_MEMORY_POLL) } else { limit });
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

    /// Says farewell and waits until the other ranks have received it, which they confirm by closing their control connections.
    ///
    /// Heartbeats that arrive at a closed socket are answered with a reset, which would overtake a farewell that TCP has to send
    /// again; the other rank would then take this one for lost. Ranks whose run has ended with an error confirm nothing.
    fn leave<'a>(&'a self, mut state: MutexGuard<'a, State>, farewell: Kind) {
        state.abandon();
        let is_orderly = state.ending.is_none();
        if is_orderly {
            state.send_to_all(Header::bare(farewell), &[]);
        }
        // Small data for ranks that are still being connected is not lost.
        let has_more =
            |state: &State| state.table.queues.waiting().any(|rank| !state.links.contains_key(&rank));
        let limit = if is_orderly || has_more(&state) { self.connect_limit() } else { LAST_DATA };
        let mut deadline = Instant::now() + limit;
        let mut is_known = false;
        loop {
            state.write();
            let State { links, table, .. } = &mut *state;
            for link in links.values_mut() {
                link.drain();
                link.hang_up(table);
            }
            if !is_known && !has_more(&state) && state.links.values().all(Link::has_confirmed) {
                is_known = true;
                deadline = deadline.min(Instant::now() + LAST_DATA);
            }
            let is_done = is_known && state.links.values().all(Link::is_gone);
            if is_done || Instant::now() >= deadline {
                return;
            }
            let links = state.links.values();
            let interests = links.flat_map(|link| link.interests(&state.table));
            let interests: Vec<_> =
                interests.map(|(socket, flags)| (socket, flags | PollFlags::IN)).collect();
            drop(state);
            self.sleep(&interests, Duration::from_millis(20));
            state = self.lock();
        }
    }
}

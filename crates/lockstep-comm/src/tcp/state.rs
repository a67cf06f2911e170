//! State of a rank's TCP transport: its operations, its links to other ranks, and the error that ended the run. Nothing here
//! waits, but for the cause of a loss.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::TcpStream,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use super::{
    frame::{Channel, Header, Key, Kind},
    handshake::HANDSHAKE_LIMIT,
    link::{Link, Status},
    operation_table::{OperationTable, RankMessage},
};
use crate::{CommError, LossCause, error::ERROR_WORDS, shm, transport::Transport};

/// Number of heartbeats within the time after which a silent rank counts as lost.
pub(crate) const BEATS: u32 = 20;
/// Time to learn how a rank ended that has closed its connections.
const CAUSE_TIME: Duration = Duration::from_millis(100);

/// Returns the time in which another rank must answer a connection, if ranks may be silent for `silence`.
pub(crate) fn connect_limit(silence: Duration) -> Duration {
    silence.max(HANDSHAKE_LIMIT)
}

/// All state of a rank, under the lock of its transport.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) table: OperationTable,
    /// Links by rank.
    pub(crate) links: BTreeMap<usize, Link>,
    /// Ranks to connect to, for the thread that dials; `None` if all ranks are connected from the start.
    pub(crate) dialer: Option<mpsc::Sender<usize>>,
    /// Ranks that were passed to it.
    pub(crate) dialed: HashSet<usize>,
    /// Dialed ranks that do not answer, each with the cause of its loss.
    pub(crate) unreachable: HashMap<usize, LossCause>,
    /// Ranks above this one that were asked for a connection, each with the time of its answer.
    pub(crate) knocked: HashMap<usize, Instant>,
    /// Error that ended the run.
    pub(crate) ending: Option<CommError>,
    /// Details of a local failure that ended the run, until a caller receives them.
    pub(crate) own_failure: Option<CommError>,
    /// Shared-memory transport of this machine. An error that ends the run there ends it here.
    pub(crate) local: Option<Arc<shm::ShmTransport>>,
    /// Farewell to send, once this rank leaves.
    pub(crate) leaving: Option<Kind>,
}

impl State {
    /// Reads, advances operations and writes, as far as possible without waiting. Returns true if anything moved.
    pub(crate) fn progress_all(&mut self) -> bool {
        if self.ending.is_some() {
            return self.write();
        }
        let mut has_moved = self.read();
        if let Some(nodes) = self.table.nodes.as_ref().filter(|nodes| nodes.is_busy()) {
            // A failure is recorded in the segments, which `take_rank_messages` reads next.
            let _ = nodes.local.progress();
        }
        self.take_rank_messages();
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

    pub(crate) fn read(&mut self) -> bool {
        self.for_each_link(Link::read)
    }

    pub(crate) fn write(&mut self) -> bool {
        for rank in self.table.queues.take_new() {
            self.connect(rank);
        }
        self.for_each_link(Link::write)
    }

    /// Returns why nothing more comes from a rank; `None` if something may.
    pub(crate) fn cause_of_absence(&self, rank: usize) -> Option<LossCause> {
        match self.links.get(&rank) {
            Some(link) if !link.is_gone() => None,
            Some(link) if link.status == Status::Panicked => Some(LossCause::Panicked),
            Some(_) => Some(LossCause::Left),
            None => self.unreachable.get(&rank).copied(),
        }
    }

    /// Has a rank connected, unless it is or is being connected.
    pub(crate) fn connect(&mut self, rank: usize) {
        let Some(dialer) = &self.dialer else { return };
        let is_wanted = rank != self.table.rank && !self.links.contains_key(&rank) && self.ending.is_none();
        if is_wanted && self.dialed.insert(rank) {
            // The thread lives as long as this rank.
            let _ = dialer.send(rank);
        }
    }

    /// Takes the knock of a rank below this one: has it connected. A heartbeat is queued for it, so that it is lost if it
    /// cannot be reached.
    pub(crate) fn take_knock(&mut self, rank: usize) {
        let is_waiting = self.table.queues.are_waiting(rank).contains(&true);
        if !self.links.contains_key(&rank) && !is_waiting && self.ending.is_none() {
            self.table.queues.tell(rank, Header::bare(Kind::Beat));
        }
        self.connect(rank);
    }

    /// Notes that a rank does not answer. It is lost if there is something for it; it may have left otherwise.
    pub(crate) fn unreached(&mut self, rank: usize, cause: LossCause) {
        if self.links.contains_key(&rank) {
            return;
        }
        if self.leaving.is_some() {
            // Nothing for it holds up the farewell.
            return self.table.queues.retain(|other| other != rank);
        }
        self.unreachable.insert(rank, cause);
        if self.table.queues.waiting().any(|waiting| waiting == rank) {
            self.report_loss(Some((rank, cause)));
        }
    }

    /// Checks that the ranks that were asked for a connection have made it. They get twice the time of a connection, since
    /// they may still be trying to reach another rank.
    fn check_knocked(&mut self, silence: Duration) {
        let limit = 2 * connect_limit(silence);
        let Self { knocked, links, .. } = self;
        knocked.retain(|rank, _| !links.contains_key(rank));
        let late = knocked.iter().find(|(_, answered)| answered.elapsed() >= limit).map(|(rank, _)| *rank);
        if let Some(rank) = late {
            self.knocked.remove(&rank);
            self.unreached(rank, LossCause::Unreachable);
        }
    }

    /// Tells a rank that was connected late what it has missed.
    pub(crate) fn send_what_it_missed(&mut self, rank: usize) {
        let missed = self.ending.as_ref().map(|ending| ending_frame(&ending.to_words(self.table.rank)));
        let farewell = self.leaving.filter(|_| missed.is_none());
        let control = &mut self.table.queues.to(rank).control;
        control.extend(missed);
        control.extend(farewell.map(|farewell| (Header::bare(farewell), Vec::new())));
    }

    /// Calls `work` with all links. Returns true if anything moved on any of them.
    pub(crate) fn for_each_link(
        &mut self,
        work: impl Fn(&mut Link, &mut OperationTable) -> Result<bool, LossCause>,
    ) -> bool {
        let Self { table, links, .. } = self;
        let (mut has_moved, mut lost) = (false, None);
        for (rank, link) in links {
            match work(link, table) {
                Ok(here) => has_moved |= here,
                Err(cause) => lost = lost.or(Some((*rank, cause))),
            }
        }
        self.report_loss(lost);
        has_moved
    }

    pub(crate) fn report_loss(&mut self, lost: Option<(usize, LossCause)>) {
        self.take_rank_messages();
        let Some((rank, cause)) = lost else { return };
        let begin = Instant::now();
        // The lost rank's launcher knows the cause, and has told the ranks of its machine, which tell all others.
        while cause == LossCause::Disconnected && self.ending.is_none() && begin.elapsed() < CAUSE_TIME {
            std::thread::sleep(CAUSE_TIME / 20);
            let Self { table, links, .. } = self;
            for link in links.values_mut() {
                // More ranks may be lost; one is enough to end the run.
                let _ = link.read(table);
            }
            self.take_rank_messages();
        }
        self.end(CommError::PeerLost { rank, cause, context: None });
    }

    /// Handles messages of other ranks about themselves and the run.
    pub(crate) fn take_rank_messages(&mut self) {
        if let Some(error) = self.local.as_ref().and_then(|local| local.segments.ending()) {
            self.end(error);
        }
        while let Some((rank, messages)) = self.table.messages.pop_front() {
            match messages {
                RankMessage::Leaving { in_panic } => {
                    if let Some(link) = self.links.get_mut(&rank) {
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
    pub(crate) fn beat(&mut self, silence: Duration) {
        let mut lost = None;
        for (rank, link) in &mut self.links {
            lost = lost.or(link.beat(BEATS, silence).map(|cause| (*rank, cause)));
            let control = &mut self.table.queues.to(*rank).control;
            if link.status == Status::Here && control.is_empty() {
                control.push_back((Header::bare(Kind::Beat), Vec::new()));
            }
        }
        self.report_loss(lost);
        self.check_knocked(silence);
    }

    /// Ends the run because of a failure of this rank that no caller sees. The next caller receives it with its details.
    pub(crate) fn end_by_own_failure(&mut self, error: CommError) {
        let ending = self.end(error);
        if !ending.is_known_to_all() {
            self.own_failure = Some(ending);
        }
    }

    /// Returns the error that ended the run, for a caller; `None` if it goes on.
    pub(crate) fn take_ending(&mut self) -> Option<CommError> {
        let ending = self.ending.as_ref()?;
        Some(self.own_failure.take().unwrap_or_else(|| ending.copy()))
    }

    /// Ends the run on all ranks, unless it has ended. Returns the error that ended it. No operation accesses memory
    /// afterwards.
    pub(crate) fn end(&mut self, error: CommError) -> CommError {
        if let Some(ending) = &self.ending {
            return ending.copy();
        }
        let words = error.to_words(self.table.rank);
        let ending = self.ending.insert(CommError::from_words(words)).copy();
        if let Some(local) = &self.local {
            local.fail(ending.copy());
        }
        self.abandon();
        let links = &self.links;
        self.table.queues.retain(|rank| links.contains_key(&rank));
        let (header, bytes) = ending_frame(&words);
        self.send_to_all(header, &bytes);
        self.write();
        ending.or_local(error, self.table.rank)
    }

    /// Drops all operations and all references to their memory.
    pub(crate) fn abandon(&mut self) {
        self.table.abandon();
        self.links.values_mut().for_each(Link::abandon);
    }

    /// Queues a frame for all ranks that are present.
    pub(crate) fn send_to_all(&mut self, header: Header, bytes: &[u8]) {
        for (rank, link) in &self.links {
            if link.status == Status::Here {
                self.table.queues.to(*rank).control.push_back((header, bytes.to_vec()));
            }
        }
    }

    pub(crate) fn interests(&self) -> Vec<(Arc<TcpStream>, PollFlags)> {
        let links = self.links.values();
        let all = links.flat_map(|link| link.interests(&self.table));
        // After the end nothing is read any more; arriving data would keep the thread awake.
        let keep = if self.ending.is_some() { PollFlags::OUT } else { PollFlags::IN | PollFlags::OUT };
        all.map(|(socket, flags)| (socket, flags & keep)).filter(|(_, flags)| !flags.is_empty()).collect()
    }
}

/// Returns the frame that ends the run with the error in `words`.
fn ending_frame(words: &[u64; ERROR_WORDS]) -> (Header, Vec<u8>) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let key = Key { group: 0, channel: Channel::Collective, sequence: 0 };
    (Header::of(Kind::Ending, key, &bytes), bytes)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::recorder::Recorder;

    /// Returns the state of rank 4 of 12, without links, and the ranks that it has passed to its dialer.
    fn state() -> (State, mpsc::Receiver<usize>) {
        let (dialer, wanted) = mpsc::channel();
        let state = State {
            table: OperationTable::new(4, 12, Recorder::private()),
            links: BTreeMap::new(),
            dialer: Some(dialer),
            dialed: HashSet::new(),
            unreachable: HashMap::new(),
            knocked: HashMap::new(),
            ending: None,
            own_failure: None,
            local: None,
            leaving: None,
        };
        (state, wanted)
    }

    #[test]
    fn a_rank_that_knocks_is_connected_once_and_lost_if_that_fails() {
        let (mut state, wanted) = state();
        state.take_knock(1);
        state.take_knock(1);
        state.write();
        assert_eq!(wanted.try_iter().collect::<Vec<_>>(), [1]);
        assert_eq!(state.table.queues.to(1).control.len(), 1);
        state.unreached(1, LossCause::Unreachable);
        let lost = state.take_ending();
        assert!(
            matches!(lost, Some(CommError::PeerLost { rank: 1, cause: LossCause::Unreachable, .. })),
            "{lost:?}"
        );
    }

    #[test]
    fn a_rank_that_does_not_connect_after_a_knock_is_lost() {
        let (mut state, _wanted) = state();
        let silence = Duration::from_secs(1);
        state.table.queues.tell(7, Header::bare(Kind::Beat));
        state.knocked.insert(7, Instant::now());
        state.beat(silence);
        assert!(state.take_ending().is_none());
        state.knocked.insert(7, Instant::now().checked_sub(2 * HANDSHAKE_LIMIT).unwrap());
        state.beat(silence);
        let lost = state.take_ending();
        assert!(
            matches!(lost, Some(CommError::PeerLost { rank: 7, cause: LossCause::Unreachable, .. })),
            "{lost:?}"
        );
    }

    #[test]
    fn a_leaving_rank_keeps_nothing_for_a_rank_that_it_cannot_reach() {
        let (mut state, _wanted) = state();
        state.take_knock(1);
        state.leaving = Some(Kind::Leaving { in_panic: false });
        state.unreached(1, LossCause::Disconnected);
        assert!(state.take_ending().is_none());
        assert_eq!(state.table.queues.waiting().count(), 0);
    }

    #[test]
    fn the_first_caller_learns_the_cause_of_a_failure_that_ended_the_run_in_the_background() {
        let (mut state, _wanted) = state();
        let failure = || CommError::io("connect to another rank or node")(io::ErrorKind::OutOfMemory.into());
        state.end_by_own_failure(failure());
        state.end_by_own_failure(failure());
        let told: Vec<String> =
            (0..2).filter_map(|_| state.take_ending()).map(|error| error.to_string()).collect();
        assert_eq!(told, [failure().to_string(), "the run was stopped by rank 4".to_owned()]);
    }
}

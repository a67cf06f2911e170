//! Point-to-point messages between two ranks of a group. A message travels in parts through slots of the sender's segment, or
//! as one part with the offset of data that is in shared memory.
//!
//! Messages from one rank to another are received in the order in which they were sent, independently of all other ranks.
//! Several messages in shared memory can be announced before the first is fetched: the sender need not make progress for the
//! others to go out.

use std::{collections::VecDeque, sync::atomic::Ordering};

use lockstep_tensor::Workers;

use super::{
    buffer_location::BufferLocation,
    copy::copy,
    layout::{MAIL_BYTES, MAIL_PARTS, MAIL_SLOTS, Mailbox, SMALL_BYTES},
    members::{Members, has_reached},
    operation::{Running, Step, post, posted_words},
};
use crate::{Call, CommError, Kind, OperationContext, blocks::window, task::Flow};

/// A rank's messages to and from each member of a group.
#[derive(Debug)]
pub(crate) struct PointToPoint {
    to: Vec<Lane>,
    from: Vec<Lane>,
}

/// Messages in one direction between two ranks.
#[derive(Debug, Default)]
struct Lane {
    /// Number of parts sent, or received.
    parts: u32,
    messages: VecDeque<Running>,
}

impl PointToPoint {
    pub(crate) fn new(members: usize) -> Self {
        let lanes = || (0..members).map(|_| Lane::default()).collect();
        Self { to: lanes(), from: lanes() }
    }

    pub(crate) fn begin(&mut self, running: Running) {
        let lane = match running.task.flow {
            Flow::Send { to } => &mut self.to[to],
            Flow::Receive { from } => &mut self.from[from],
            _ => return,
        };
        lane.messages.push_back(running);
    }

    /// Moves all parts that can be moved. Returns true if there were any.
    pub(crate) fn advance(
        &mut self,
        members: &Members,
        workers: Option<&Workers>,
    ) -> Result<bool, CommError> {
        let mut has_moved = false;
        for peer in 0..members.len() {
            let post = MailboxPair { members, peer, workers };
            let Lane { parts, messages, .. } = &mut self.to[peer];
            for running in &mut *messages {
                has_moved |= post.send(running, parts);
                if !matches!(running.step, Step::Filled | Step::Done) {
                    break;
                }
            }
            while end_if_done(messages, members) {}
            let Lane { parts, messages, .. } = &mut self.from[peer];
            while let Some(running) = messages.front_mut() {
                has_moved |= post.receive(running, parts)?;
                if !end_if_done(messages, members) {
                    break;
                }
            }
        }
        Ok(has_moved)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.to.iter().chain(&self.from).all(|lane| lane.messages.is_empty())
    }

    pub(crate) fn abandon(&mut self) {
        self.to.iter_mut().chain(&mut self.from).for_each(|lane| lane.messages.clear());
    }

    /// Returns the world rank that the first message in flight waits for, and the message.
    pub(crate) fn awaited(&self, members: &Members) -> Option<(usize, OperationContext)> {
        let lanes = self.to.iter().chain(&self.from).zip((0..members.len()).cycle());
        let waiting = lanes.filter_map(|(lane, peer)| Some((peer, lane.messages.front()?)));
        waiting.map(|(peer, running)| (members.ranks[peer], running.context(members))).next()
    }
}

/// Removes and completes the first message if it is done. Returns true if it was.
fn end_if_done(messages: &mut VecDeque<Running>, members: &Members) -> bool {
    let Some(running) = messages.pop_front_if(|running| running.step == Step::Done) else { return false };
    running.stamp(members, 1);
    running.complete();
    true
}

/// The two mailboxes between this rank and a peer.
struct MailboxPair<'a> {
    members: &'a Members,
    peer: usize,
    workers: Option<&'a Workers>,
}

impl MailboxPair<'_> {
    fn own(&self) -> &Mailbox {
        self.mailbox(self.members.own, self.peer)
    }

    fn peers(&self) -> &Mailbox {
        self.mailbox(self.peer, self.members.own)
    }

    fn mailbox(&self, of: usize, with: usize) -> &Mailbox {
        let segments = &self.members.segments;
        segments.layout.mailbox(segments.memory(self.members.ranks[of]), self.members.index, with)
    }

    /// Sends as many parts as there is room for. Returns true if there were any.
    fn send(&self, running: &mut Running, sent: &mut u32) -> bool {
        let (source, mut has_moved) = (running.task.source, false);
        let location = self.members.location_of(&source);
        let shared = Some(location)
            .filter(|location| matches!(location, BufferLocation::Shared(_)) && source.bytes() > SMALL_BYTES);
        let room = if shared.is_some() { MAIL_PARTS } else { MAIL_SLOTS };
        while running.step != Step::Done {
            let received = self.peers().received.load(Ordering::SeqCst);
            // For a message in shared memory, `window` is the count of received parts at which it is complete.
            if running.step == Step::Filled {
                if !has_reached(received, running.window as u32) {
                    break;
                }
                running.step = Step::Done;
            } else if !has_reached(received, sent.wrapping_add(1).wrapping_sub(room)) {
                break;
            } else {
                let part = &self.own().parts[(*sent % MAIL_PARTS) as usize];
                if let Some(location) = shared {
                    part.bytes.store(source.bytes() as u64, Ordering::Relaxed);
                    post(part, running.task.call, location, location);
                    running.window = sent.wrapping_add(1) as usize;
                    running.step = Step::Filled;
                } else {
                    let bytes = window(&(0..source.bytes()), MAIL_BYTES, running.window);
                    let slot = self.members.segments.layout.mail_slot(self.members.index, self.peer, *sent);
                    let to = self.members.at(self.members.own, slot);
                    // SAFETY: the source is the caller's. The slot is this rank's, and its previous contents have been
                    // received.
                    unsafe { copy(self.workers, source.pointer.wrapping_add(bytes.start), to, bytes.len()) };
                    part.bytes.store(bytes.len() as u64, Ordering::Relaxed);
                    post(part, running.task.call, BufferLocation::Private, BufferLocation::Private);
                    running.window += 1;
                    if bytes.end == source.bytes() {
                        running.step = Step::Done;
                    }
                }
                *sent = sent.wrapping_add(1);
                self.own().sent.store(*sent, Ordering::SeqCst);
                self.members.segments.wake(self.members.ranks[self.peer]);
            }
            has_moved = true;
        }
        has_moved
    }

    /// Receives all available parts. Returns true if there were any.
    fn receive(&self, running: &mut Running, received: &mut u32) -> Result<bool, CommError> {
        let (target, mut has_moved) = (running.task.target, false);
        while running.step != Step::Done
            && has_reached(self.peers().sent.load(Ordering::SeqCst), received.wrapping_add(1))
        {
            let part = &self.peers().parts[(*received % MAIL_PARTS) as usize];
            if running.window == 0 {
                self.compare(running, posted_words(part))?;
                running.stamp(self.members, 0);
            }
            let (from, bytes) = match BufferLocation::from_word(part.source.load(Ordering::Relaxed)) {
                BufferLocation::Shared(offset) => (self.members.at(self.peer, offset), 0..target.bytes()),
                _ => {
                    let slot = self.members.segments.layout.mail_slot(
                        self.members.index,
                        self.members.own,
                        *received,
                    );
                    (
                        self.members.at(self.peer, slot),
                        window(&(0..target.bytes()), MAIL_BYTES, running.window),
                    )
                }
            };
            // SAFETY: the part does not change until it is received. The target is the caller's, and as long as the sent data.
            unsafe { copy(self.workers, from, target.pointer.wrapping_add(bytes.start), bytes.len()) };
            running.window += 1;
            if bytes.end == target.bytes() {
                running.step = Step::Done;
            }
            *received = received.wrapping_add(1);
            self.own().received.store(*received, Ordering::SeqCst);
            self.members.segments.wake(self.members.ranks[self.peer]);
            has_moved = true;
        }
        Ok(has_moved)
    }

    /// Checks that the sent message matches the receive.
    fn compare(&self, running: &Running, sent: [u64; 3]) -> Result<(), CommError> {
        let expected = Call { kind: Kind::Send, root: Some(self.members.own), ..running.task.call };
        if sent == expected.to_words() {
            return Ok(());
        }
        let found = Call::from_words(sent).unwrap_or(expected);
        Err(running.comparison(self.members).mismatch(self.peer, found, self.members.own, running.task.call))
    }
}

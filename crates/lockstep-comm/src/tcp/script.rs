//! An all-reduce by the steps of the plan's algorithm (ring, recursive doubling, Rabenseifner). Steps are cut into parts; each
//! part proceeds as soon as the parts that it depends on are complete.

use std::ops::Range;

use super::{
    frame::{Header, Key, Kind, Malformed},
    operation::{Members, Sending, send},
    reduction::{Inbox, PARTS_AHEAD},
    stream::Room,
};
use crate::{
    Algorithm, ReduceOp,
    algorithm::{Merge, Step},
    blocks::{intersection, window},
    reduce::reduce,
    task::{Flow, Receiver, Task},
};

/// Size of a part in bytes.
const PART_BYTES: usize = 1 << 20;

/// Steps of one rank, cut into parts.
#[derive(Debug)]
pub(crate) struct Script {
    op: ReduceOp,
    sends: Vec<Part>,
    receives: Vec<Part>,
    /// Number of parts queued for sending, and of parts received and merged.
    sent: usize,
    merged: usize,
    peers: Vec<Peer>,
}

/// Range of elements that is sent to, or received from, one rank at a time.
#[derive(Debug)]
struct Part {
    member: usize,
    range: Range<usize>,
    merge: Merge,
    /// Number of the part between the two ranks in this direction.
    index: u32,
    /// Number of parts of the other direction that must be complete before.
    after: usize,
}

#[derive(Debug)]
struct Peer {
    /// First part that the peer has no room for yet.
    room: u32,
    inbox: [Inbox; PARTS_AHEAD as usize],
}

impl Script {
    /// Plans the steps of the task's algorithm; `None` if it has none.
    pub(crate) fn new(task: &Task, members: &Members) -> Option<Self> {
        let algorithm = Algorithm::of(&task.call)?;
        let Flow::Reduction { op, receiver: Receiver::All, .. } = task.flow else { return None };
        let steps = algorithm.steps(members.own, members.len(), task.source.elements);
        if steps.is_empty() {
            return None;
        }
        let width = PART_BYTES / task.source.number.size_bytes();
        let (sends, receives) = cut(&steps, width, members.len());
        let peer = || Peer { room: PARTS_AHEAD, inbox: Default::default() };
        let peers = (0..members.len()).map(|_| peer()).collect();
        Some(Self { op, sends, receives, sent: 0, merged: 0, peers })
    }

    /// Advances the operation. Returns true if all parts are received and queued for sending.
    pub(crate) fn advance(
        &mut self,
        key: Key,
        task: &Task,
        members: &Members,
        sending: &mut Sending,
        unsent: &mut usize,
    ) -> bool {
        loop {
            let before = (self.sent, self.merged);
            while let Some(part) = self.sends.get(self.sent)
                && part.after <= self.merged
                && part.index < self.peers[part.member].room
            {
                let piece = task.target.part(part.range.start, part.range.len());
                let kind = Kind::Part { index: part.index, offset: 0 };
                send(sending, members.ranks[part.member], key, kind, piece, unsent);
                self.sent += 1;
            }
            while let Some(part) = self.receives.get(self.merged) {
                let bytes = part.range.len() * task.target.number.size_bytes();
                let inbox = &mut self.peers[part.member].inbox[(part.index % PARTS_AHEAD) as usize];
                // Data sent from the range of this part must have been written to the socket.
                let is_free = part.after == 0 || (part.after <= self.sent && *unsent == 0);
                if inbox.filled < bytes || !is_free {
                    break;
                }
                inbox.empty();
                merge(self.op, part, &inbox.bytes, task);
                let turn = Header::of(Kind::Turn { index: part.index + 1 + PARTS_AHEAD }, key, &[]);
                sending.control[members.ranks[part.member]].push_back((turn, Vec::new()));
                self.merged += 1;
            }
            if before == (self.sent, self.merged) {
                return self.sent == self.sends.len() && self.merged == self.receives.len();
            }
        }
    }

    pub(crate) fn room(
        &mut self,
        task: &Task,
        member: usize,
        index: u32,
        offset: usize,
        bytes: usize,
    ) -> Result<Room, Malformed> {
        let is_it = |part: &&Part| part.member == member && part.index == index;
        let part = self.receives[self.merged..].iter().find(is_it).ok_or(Malformed::Operation)?;
        let is_first = |part: &&Part| part.member == member;
        let first = self.receives[self.merged..].iter().find(is_first).map_or(0, |part| part.index);
        if index >= first + PARTS_AHEAD {
            return Err(Malformed::Operation);
        }
        let len = part.range.len() * task.target.number.size_bytes();
        self.peers[member].inbox[(index % PARTS_AHEAD) as usize].room(len, offset, bytes)
    }

    pub(crate) fn take(&mut self, member: usize, index: u32, bytes: usize) {
        self.peers[member].inbox[(index % PARTS_AHEAD) as usize].filled += bytes;
    }

    pub(crate) fn turn(&mut self, member: usize, index: u32) {
        let room = &mut self.peers[member].room;
        *room = (*room).max(index);
    }

    pub(crate) fn waits_for(&self) -> Option<usize> {
        let receiving = self.receives.get(self.merged).map(|part| part.member);
        receiving.or_else(|| self.sends.get(self.sent).map(|part| part.member))
    }
}

/// Cuts steps into parts of up to `width` elements, and determines the dependencies of each.
fn cut(steps: &[Step], width: usize, ranks: usize) -> (Vec<Part>, Vec<Part>) {
    let (mut sends, mut receives): (Vec<Part>, Vec<Part>) = (Vec::new(), Vec::new());
    let (mut to, mut from) = (vec![0; ranks], vec![0; ranks]);
    let last = |parts: &[Part], range: &Range<usize>| {
        let shares = |part: &Part| !intersection(&part.range, range).is_empty();
        parts.iter().rposition(shares).map_or(0, |index| index + 1)
    };
    for step in steps {
        let first_send = sends.len();
        if let Some((member, range)) = &step.send {
            for index in 0..range.len().div_ceil(width) {
                let range = window(range, width, index);
                let after = last(&receives, &range);
                sends.push(Part { member: *member, range, merge: Merge::Replace, index: to[*member], after });
                to[*member] += 1;
            }
        }
        if let Some((member, range, merge)) = &step.receive {
            for index in 0..range.len().div_ceil(width) {
                let range = window(range, width, index);
                // Only an exchange of the same elements in both directions has this dependency.
                let after = match last(&sends[first_send..], &range) {
                    0 => 0,
                    count => first_send + count,
                };
                receives.push(Part { member: *member, range, merge: *merge, index: from[*member], after });
                from[*member] += 1;
            }
        }
    }
    (sends, receives)
}

fn merge(op: ReduceOp, part: &Part, bytes: &[u8], task: &Task) {
    let own = task.target.part(part.range.start, part.range.len());
    match part.merge {
        // SAFETY: the part is complete; the target is the caller's.
        Merge::Replace => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), own.pointer, own.bytes()) },
        Merge::Reduce => {
            let sources = [bytes.as_ptr(), own.pointer.cast_const()];
            // SAFETY: as above; the target is identical to one of the sources.
            unsafe { reduce(own.number, op, &sources, &[own.pointer], own.elements) };
        }
    }
}

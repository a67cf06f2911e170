//! An all-reduce by the steps of the plan's algorithm (ring, recursive doubling, Rabenseifner). Steps are cut into chunks; each
//! chunk proceeds as soon as the chunks that it depends on are complete.

use std::{collections::BTreeMap, ops::Range};

use super::{
    frame::{Header, Key, Kind},
    members::Members,
    reduction::{CHUNKS_AHEAD, ChunkBuffer},
    send_queues::{SendQueues, UnsentBytes},
    stream::Room,
};
use crate::{
    Malformed, ReduceOp,
    algorithm::{Merge, Step},
    blocks::{intersection, window},
    reduce::reduce,
    task::{Flow, Receiver, Task},
};

/// Size of a chunk in bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// Steps of one rank, cut into chunks.
#[derive(Debug)]
pub(crate) struct StepwiseAllReduce {
    op: ReduceOp,
    sends: Vec<Chunk>,
    receives: Vec<Chunk>,
    /// Number of chunks queued for sending, and of chunks received and merged.
    sent: usize,
    merged: usize,
    /// Ranks that this one sends to or receives from, by member.
    peers: BTreeMap<usize, Peer>,
}

/// Range of elements that is sent to, or received from, one rank at a time.
#[derive(Debug)]
struct Chunk {
    member: usize,
    range: Range<usize>,
    merge: Merge,
    /// Number of the chunk between the two ranks in this direction.
    index: u32,
    /// Number of chunks of the other direction that must be complete before.
    after: usize,
}

#[derive(Debug)]
struct Peer {
    /// First chunk that the peer has no room for yet.
    room: u32,
    buffers: [ChunkBuffer; CHUNKS_AHEAD as usize],
}

impl StepwiseAllReduce {
    /// Plans the steps of the task's algorithm; `None` if it has none.
    pub(crate) fn new(task: &Task, members: &Members) -> Option<Self> {
        let algorithm = task.call.algorithm()?;
        let Flow::Reduction { op, receiver: Receiver::All, .. } = task.flow else { return None };
        let steps = algorithm.steps(members.own, members.len(), task.source.elements);
        if steps.is_empty() {
            return None;
        }
        let width = CHUNK_BYTES / task.source.number.size_bytes();
        let (sends, receives) = cut(&steps, width, members.len());
        let peer = |chunk: &Chunk| (chunk.member, Peer { room: CHUNKS_AHEAD, buffers: Default::default() });
        let peers = sends.iter().chain(&receives).map(peer).collect();
        Some(Self { op, sends, receives, sent: 0, merged: 0, peers })
    }

    /// Advances the operation. Returns true if all chunks are received and queued for sending.
    pub(crate) fn advance(
        &mut self,
        key: Key,
        task: &Task,
        members: &Members,
        queues: &mut SendQueues,
        unsent: &mut UnsentBytes,
    ) -> bool {
        loop {
            let before = (self.sent, self.merged);
            while let Some(chunk) = self.sends.get(self.sent)
                && chunk.after <= self.merged
                && self.peers.get(&chunk.member).is_some_and(|peer| chunk.index < peer.room)
            {
                let piece = task.target.slice(chunk.range.start, chunk.range.len());
                let kind = Kind::Chunk { index: chunk.index, offset: 0 };
                queues.send(members.ranks[chunk.member], key, kind, piece, unsent);
                self.sent += 1;
            }
            while let Some(chunk) = self.receives.get(self.merged) {
                let bytes = chunk.range.len() * task.target.number.size_bytes();
                let Some(peer) = self.peers.get_mut(&chunk.member) else { break };
                let buffer = &mut peer.buffers[(chunk.index % CHUNKS_AHEAD) as usize];
                // Data sent from the range of this chunk must have been written to the socket.
                let is_free = chunk.after == 0 || (chunk.after <= self.sent && unsent.is_empty());
                if buffer.filled < bytes || !is_free {
                    break;
                }
                buffer.empty();
                merge(self.op, chunk, &buffer.bytes, task);
                let turn = Header::of(Kind::Turn { index: chunk.index + 1 + CHUNKS_AHEAD }, key, &[]);
                queues.tell(members.ranks[chunk.member], turn);
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
        let is_it = |chunk: &&Chunk| chunk.member == member && chunk.index == index;
        let chunk = self.receives[self.merged..].iter().find(is_it).ok_or(Malformed::Operation)?;
        let is_first = |chunk: &&Chunk| chunk.member == member;
        let first = self.receives[self.merged..].iter().find(is_first).map_or(0, |chunk| chunk.index);
        if index >= first + CHUNKS_AHEAD {
            return Err(Malformed::Operation);
        }
        let len = chunk.range.len() * task.target.number.size_bytes();
        self.buffer(member, index).ok_or(Malformed::Operation)?.room(len, offset, bytes)
    }

    pub(crate) fn take(&mut self, member: usize, index: u32, bytes: usize) {
        if let Some(buffer) = self.buffer(member, index) {
            buffer.filled += bytes;
        }
    }

    pub(crate) fn turn(&mut self, member: usize, index: u32) {
        if let Some(peer) = self.peers.get_mut(&member) {
            peer.room = peer.room.max(index);
        }
    }

    fn buffer(&mut self, member: usize, index: u32) -> Option<&mut ChunkBuffer> {
        Some(&mut self.peers.get_mut(&member)?.buffers[(index % CHUNKS_AHEAD) as usize])
    }

    pub(crate) fn waits_for(&self) -> Option<usize> {
        let receiving = self.receives.get(self.merged).map(|chunk| chunk.member);
        receiving.or_else(|| self.sends.get(self.sent).map(|chunk| chunk.member))
    }
}

/// Cuts steps into chunks of up to `width` elements, and determines the dependencies of each.
fn cut(steps: &[Step], width: usize, ranks: usize) -> (Vec<Chunk>, Vec<Chunk>) {
    let (mut sends, mut receives): (Vec<Chunk>, Vec<Chunk>) = (Vec::new(), Vec::new());
    let (mut to, mut from) = (vec![0; ranks], vec![0; ranks]);
    let last = |chunks: &[Chunk], range: &Range<usize>| {
        let shares = |chunk: &Chunk| !intersection(&chunk.range, range).is_empty();
        chunks.iter().rposition(shares).map_or(0, |index| index + 1)
    };
    for step in steps {
        let first_send = sends.len();
        if let Some((member, range)) = &step.send {
            for index in 0..range.len().div_ceil(width) {
                let range = window(range, width, index);
                let after = last(&receives, &range);
                sends.push(Chunk {
                    member: *member,
                    range,
                    merge: Merge::Replace,
                    index: to[*member],
                    after,
                });
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
                receives.push(Chunk { member: *member, range, merge: *merge, index: from[*member], after });
                from[*member] += 1;
            }
        }
    }
    (sends, receives)
}

fn merge(op: ReduceOp, chunk: &Chunk, bytes: &[u8], task: &Task) {
    let own = task.target.slice(chunk.range.start, chunk.range.len());
    match chunk.merge {
        // SAFETY: the chunk is complete; the target is the caller's.
        Merge::Replace => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), own.pointer, own.bytes()) },
        Merge::Reduce => {
            let sources = [bytes.as_ptr(), own.pointer.cast_const()];
            // SAFETY: as above; the target is identical to one of the sources.
            unsafe { reduce(own.number, op, &sources, &[own.pointer], own.elements) };
        }
    }
}

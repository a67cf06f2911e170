//! Reductions over sockets, in the order of the tree. Every rank sends every other rank its block, chunk by chunk, reduces its
//! own block over all ranks' data, and sends the result to the ranks that want it. A rank sends each byte at most twice, less
//! its own block, which is as little as a ring does.

use super::{
    frame::{Header, Key, Kind},
    members::Members,
    send_queues::{SendQueues, UnsentBytes},
    stream::Room,
};
use crate::{
    Malformed, ReduceOp,
    blocks::{Blocks, window},
    memory::MemoryRange,
    reduce::reduce,
    task::{Receiver, Task},
};

/// Size in bytes of a chunk of a block, the unit in which blocks are sent and reduced.
const CHUNK_BYTES: usize = 2 << 20;
/// Maximum number of chunks sent to a rank that it has not reduced yet.
pub(crate) const CHUNKS_AHEAD: u32 = 2;

/// Progress of a reduction.
#[derive(Debug)]
pub(crate) struct Reduction {
    op: ReduceOp,
    blocks: Blocks,
    receiver: Receiver,
    peers: Vec<Peer>,
    /// Number of chunks of this rank's block that are reduced.
    reduced: u32,
    /// Results, if they are not in the caller's memory.
    results: Vec<u8>,
}

/// Data sent to, and received from, one other rank.
#[derive(Debug, Default)]
struct Peer {
    sent: u32,
    /// First chunk that the peer has no room for yet.
    room: u32,
    /// Numbers of bytes of the peer's results that are accepted, and that have arrived.
    promised_bytes: usize,
    arrived_bytes: usize,
    /// Ring of buffers for incoming chunks.
    buffers: [ChunkBuffer; CHUNKS_AHEAD as usize],
}

/// Buffer of an incoming chunk.
#[derive(Debug, Default)]
pub(crate) struct ChunkBuffer {
    pub(crate) bytes: Vec<u8>,
    /// Number of accepted bytes: never more than the chunk has, so that no frame is still being received when the chunk
    /// is complete.
    promised: usize,
    pub(crate) filled: usize,
}

impl ChunkBuffer {
    /// Returns the destination of a frame's bytes within a chunk of `len` bytes.
    pub(crate) fn room(&mut self, len: usize, offset: usize, bytes: usize) -> Result<Room, Malformed> {
        if offset.checked_add(bytes).is_none_or(|end| end > len) || self.promised + bytes > len {
            return Err(Malformed::Range);
        }
        self.promised += bytes;
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        // SAFETY: the range has been checked to be within the vector, which does not move before the chunk is complete.
        Ok(Room::At(unsafe { self.bytes.as_mut_ptr().add(offset) }))
    }

    /// Prepares the buffer for the next chunk.
    pub(crate) fn empty(&mut self) {
        (self.promised, self.filled) = (0, 0);
    }
}

impl Reduction {
    pub(crate) fn new(
        task: &Task,
        op: ReduceOp,
        blocks: &Blocks,
        receiver: Receiver,
        members: &Members,
    ) -> Self {
        let peers = (0..members.len()).map(|_| Peer { room: CHUNKS_AHEAD, ..Peer::default() }).collect();
        let mut reduction =
            Self { op, blocks: blocks.clone(), receiver, peers, reduced: 0, results: Vec::new() };
        if matches!(receiver, Receiver::One(root) if root != members.own) {
            // The other ranks' buffers keep their contents.
            let own = blocks.range(members.own).len() * task.source.number.size_bytes();
            reduction.results = vec![0; own];
        }
        reduction
    }

    /// Returns the number of elements of a chunk.
    fn width(task: &Task) -> usize {
        CHUNK_BYTES / task.source.number.size_bytes()
    }

    /// Returns the number of chunks of a member's block.
    fn chunks(&self, task: &Task, member: usize) -> u32 {
        self.blocks.range(member).len().div_ceil(Self::width(task)) as u32
    }

    fn chunk(&self, task: &Task, member: usize, index: u32) -> std::ops::Range<usize> {
        window(&self.blocks.range(member), Self::width(task), index as usize)
    }

    /// Advances the operation. Returns true if all chunks are reduced and queued for sending, and all other results have
    /// arrived.
    pub(crate) fn advance(
        &mut self,
        key: Key,
        task: &Task,
        members: &Members,
        queues: &mut SendQueues,
        unsent: &mut UnsentBytes,
    ) -> bool {
        for member in members.others() {
            while self.peers[member].sent < self.chunks(task, member).min(self.peers[member].room) {
                let index = self.peers[member].sent;
                let chunk = self.chunk(task, member, index);
                let piece = task.source.slice(chunk.start, chunk.len());
                queues.send(members.ranks[member], key, Kind::Chunk { index, offset: 0 }, piece, unsent);
                self.peers[member].sent += 1;
            }
        }
        let own_chunks = self.chunks(task, members.own);
        while self.reduced < own_chunks && self.missing(task, members).is_none() {
            let result = self.reduce_chunk(task, members);
            self.reduced += 1;
            let offset = (self.reduced as usize - 1) * CHUNK_BYTES;
            for member in members.others() {
                if self.wants(member) {
                    let kind = Kind::Direct { offset: offset as u64 };
                    queues.send(members.ranks[member], key, kind, result, unsent);
                }
                if self.reduced - 1 + CHUNKS_AHEAD < own_chunks {
                    let turn = Header::of(Kind::Turn { index: self.reduced + CHUNKS_AHEAD }, key, &[]);
                    queues.tell(members.ranks[member], turn);
                }
            }
        }
        let is_sent = |member: usize| self.peers[member].sent == self.chunks(task, member);
        self.reduced == own_chunks && members.others().all(is_sent) && self.owes(task, members).is_none()
    }

    /// Returns true if a member receives this rank's results.
    fn wants(&self, member: usize) -> bool {
        match self.receiver {
            Receiver::All => true,
            Receiver::One(root) => member == root,
            Receiver::Owner => false,
        }
    }

    /// Returns a member whose data is missing for the next chunk of this rank's block.
    fn missing(&self, task: &Task, members: &Members) -> Option<usize> {
        let bytes = self.chunk(task, members.own, self.reduced).len() * task.source.number.size_bytes();
        let slot = (self.reduced % CHUNKS_AHEAD) as usize;
        members.others().find(|member| self.peers[*member].buffers[slot].filled < bytes)
    }

    /// Reduces the next chunk of this rank's block and returns the location of the result.
    fn reduce_chunk(&mut self, task: &Task, members: &Members) -> MemoryRange {
        let chunk = self.chunk(task, members.own, self.reduced);
        let own = self.blocks.range(members.own);
        let source = task.source.slice(chunk.start, chunk.len());
        let slot = (self.reduced % CHUNKS_AHEAD) as usize;
        let sources: Vec<*const u8> = (0..members.len())
            .map(|member| match member {
                _ if member == members.own => source.pointer.cast_const(),
                _ => self.peers[member].buffers[slot].bytes.as_ptr(),
            })
            .collect();
        let start = chunk.start - own.start;
        let result = match self.receiver {
            Receiver::All => task.target.slice(chunk.start, chunk.len()),
            Receiver::Owner => task.target.slice(start, chunk.len()),
            Receiver::One(root) if root == members.own => task.target.slice(chunk.start, chunk.len()),
            Receiver::One(_) => {
                let at = start * source.number.size_bytes();
                MemoryRange { pointer: self.results[at..].as_mut_ptr(), ..source }
            }
        };
        // SAFETY: source and target are ranges of the caller's memory. The inboxes hold as many elements. A target that
        // overlaps the source is identical to it.
        unsafe { reduce(source.number, self.op, &sources, &[result.pointer], chunk.len()) };
        for peer in &mut self.peers {
            peer.buffers[slot].empty();
        }
        result
    }

    pub(crate) fn room(
        &mut self,
        task: &Task,
        members: &Members,
        member: usize,
        index: u32,
        offset: usize,
        bytes: usize,
    ) -> Result<Room, Malformed> {
        if index < self.reduced || index >= self.reduced + CHUNKS_AHEAD || member == members.own {
            return Err(Malformed::Operation);
        }
        let len = self.chunk(task, members.own, index).len() * task.source.number.size_bytes();
        self.peers[member].buffers[(index % CHUNKS_AHEAD) as usize].room(len, offset, bytes)
    }

    pub(crate) fn take(&mut self, member: usize, index: u32, bytes: usize) {
        self.peers[member].buffers[(index % CHUNKS_AHEAD) as usize].filled += bytes;
    }

    pub(crate) fn turn(&mut self, member: usize, index: u32) {
        let room = &mut self.peers[member].room;
        *room = (*room).max(index);
    }

    pub(crate) fn waits_for(&self, task: &Task, members: &Members) -> Option<usize> {
        if self.reduced < self.chunks(task, members.own) {
            return self.missing(task, members);
        }
        let is_unsent = |member: &usize| self.peers[*member].sent < self.chunks(task, *member);
        members.others().find(is_unsent).or_else(|| self.owes(task, members))
    }

    /// Returns the destination of bytes of a member's results.
    pub(crate) fn place(
        &mut self,
        task: &Task,
        members: &Members,
        member: usize,
        offset: u64,
        bytes: usize,
    ) -> Result<Room, Malformed> {
        let results = self.results_of(task, members, member);
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes));
        let promised_bytes = &mut self.peers[member].promised_bytes;
        match end {
            Some(end) if end <= results.bytes() && *promised_bytes + bytes <= results.bytes() => {
                *promised_bytes += bytes;
                Ok(Room::At(results.pointer.wrapping_add(end - bytes)))
            }
            _ => Err(Malformed::Range),
        }
    }

    pub(crate) fn take_results(&mut self, member: usize, bytes: usize) {
        self.peers[member].arrived_bytes += bytes;
    }

    /// Returns a member whose results have not all arrived.
    pub(crate) fn owes(&self, task: &Task, members: &Members) -> Option<usize> {
        let is_short = |member: &usize| {
            self.peers[*member].arrived_bytes < self.results_of(task, members, *member).bytes()
        };
        members.others().find(is_short)
    }

    fn results_of(&self, task: &Task, members: &Members, member: usize) -> MemoryRange {
        if member == members.own || !self.wants(members.own) {
            return MemoryRange::EMPTY;
        }
        let range = self.blocks.range(member);
        task.target.slice(range.start, range.len())
    }
}

/// Reduces small data, which is attached to the announcements. Each receiver reduces all of the elements itself.
///
/// # Errors
/// If the data of a member does not have the length that its call says; returns the member.
pub(crate) fn reduce_small(
    task: &Task,
    op: ReduceOp,
    blocks: &Blocks,
    receiver: Receiver,
    members: &Members,
    announcements: &[&[u8]],
) -> Result<(), usize> {
    let size = task.source.number.size_bytes();
    let chunk = match receiver {
        Receiver::Owner => blocks.range(members.own),
        Receiver::All => 0..task.source.elements,
        Receiver::One(root) if root == members.own => 0..task.source.elements,
        Receiver::One(_) => return Ok(()),
    };
    if let Some(member) = members.others().find(|member| announcements[*member].len() != task.source.bytes())
    {
        return Err(member);
    }
    let sources: Vec<*const u8> = (0..members.len())
        .map(|member| {
            let data = if member == members.own {
                task.source.pointer.cast_const()
            } else {
                announcements[member].as_ptr()
            };
            data.wrapping_add(chunk.start * size)
        })
        .collect();
    // SAFETY: all buffers have this many elements. The target is the caller's own; if it overlaps the source, it is
    // identical to it.
    unsafe { reduce(task.source.number, op, &sources, &[task.target.pointer], chunk.len()) };
    Ok(())
}

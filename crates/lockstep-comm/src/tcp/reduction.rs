//! Reductions over sockets, in the order of the tree: every rank sends every other that one's share, part by part, reduces its
//! own share over all ranks' data, and sends the result to whoever wants it. Each byte leaves a rank twice at most, less its
//! own share, which is as good as a ring's.

use super::{
    frame::{Header, Key, Kind, Malformed},
    operation::{Members, Sending, send},
    stream::Room,
};
use crate::{
    ReduceOp,
    blocks::{Blocks, window},
    memory::Stretch,
    reduce::reduce,
    task::{Receiver, Task},
};

/// Bytes of a share that are sent, and reduced, at a time.
const PART_BYTES: usize = 2 << 20;
/// Parts that may be on their way to a rank which has not reduced them yet.
pub(crate) const PARTS_AHEAD: u32 = 2;

/// How far a reduction has come.
#[derive(Debug)]
pub(crate) struct Reduction {
    op: ReduceOp,
    blocks: Blocks,
    receiver: Receiver,
    peers: Vec<Peer>,
    /// Parts of the own share that are reduced.
    reduced: u32,
    /// Where they lie if not in the caller's memory.
    results: Vec<u8>,
}

/// What this rank has sent to another, and has from it.
#[derive(Debug, Default)]
struct Peer {
    sent: u32,
    /// It has room for parts below this.
    room: u32,
    /// Bytes of its results for which frames have been given room, and that have come.
    promised_bytes: usize,
    arrived_bytes: usize,
    /// Buffers of the parts that come, in turn.
    inbox: [Inbox; PARTS_AHEAD as usize],
}

/// A part on its way in.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(crate) bytes: Vec<u8>,
    /// Bytes for which frames have been given room: never more than the part has, so that none is still on its way in when the
    /// part is complete.
    promised: usize,
    pub(crate) filled: usize,
}

impl Inbox {
    /// Room for a frame's bytes in a part of `len` bytes.
    pub(crate) fn room(&mut self, len: usize, offset: usize, bytes: usize) -> Result<Room, Malformed> {
        if offset.checked_add(bytes).is_none_or(|end| end > len) || self.promised + bytes > len {
            return Err(Malformed::Range);
        }
        self.promised += bytes;
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        // SAFETY: the range has just been seen to lie in the vector, which does not move before the part is complete.
        Ok(Room::At(unsafe { self.bytes.as_mut_ptr().add(offset) }))
    }

    /// Makes it ready for the next part.
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
        let peers = (0..members.len()).map(|_| Peer { room: PARTS_AHEAD, ..Peer::default() }).collect();
        let mut reduction =
            Self { op, blocks: blocks.clone(), receiver, peers, reduced: 0, results: Vec::new() };
        if matches!(receiver, Receiver::One(root) if root != members.own) {
            // The others keep their data.
            let own = blocks.range(members.own).len() * task.source.number.size_bytes();
            reduction.results = vec![0; own];
        }
        reduction
    }

    /// Elements of a part.
    fn width(task: &Task) -> usize {
        PART_BYTES / task.source.number.size_bytes()
    }

    /// Number of parts of a member's share.
    fn parts(&self, task: &Task, member: usize) -> u32 {
        self.blocks.range(member).len().div_ceil(Self::width(task)) as u32
    }

    fn part(&self, task: &Task, member: usize, index: u32) -> std::ops::Range<usize> {
        window(&self.blocks.range(member), Self::width(task), index as usize)
    }

    /// Carries on; says whether everything is reduced and handed over to be sent, and everybody's results are here.
    pub(crate) fn advance(
        &mut self,
        key: Key,
        task: &Task,
        members: &Members,
        sending: &mut Sending,
        unsent: &mut usize,
    ) -> bool {
        for member in members.others() {
            while self.peers[member].sent < self.parts(task, member).min(self.peers[member].room) {
                let index = self.peers[member].sent;
                let part = self.part(task, member, index);
                let piece = task.source.part(part.start, part.len());
                send(sending, members.ranks[member], key, Kind::Part { index, offset: 0 }, piece, unsent);
                self.peers[member].sent += 1;
            }
        }
        let own_parts = self.parts(task, members.own);
        while self.reduced < own_parts && self.missing(task, members).is_none() {
            let result = self.reduce_part(task, members);
            self.reduced += 1;
            let offset = (self.reduced as usize - 1) * PART_BYTES;
            for member in members.others() {
                if self.wants(member) {
                    let kind = Kind::Direct { offset: offset as u64 };
                    send(sending, members.ranks[member], key, kind, result, unsent);
                }
                if self.reduced - 1 + PARTS_AHEAD < own_parts {
                    let turn = Header::of(Kind::Turn { index: self.reduced + PARTS_AHEAD }, key, &[]);
                    sending.control[members.ranks[member]].push_back((turn, Vec::new()));
                }
            }
        }
        let is_sent = |member: usize| self.peers[member].sent == self.parts(task, member);
        self.reduced == own_parts && members.others().all(is_sent) && self.owes(task, members).is_none()
    }

    /// Whether a member gets this rank's results.
    fn wants(&self, member: usize) -> bool {
        match self.receiver {
            Receiver::All => true,
            Receiver::One(root) => member == root,
            Receiver::Owner => false,
        }
    }

    /// A member whose data are missing for the next part of the own share.
    fn missing(&self, task: &Task, members: &Members) -> Option<usize> {
        let bytes = self.part(task, members.own, self.reduced).len() * task.source.number.size_bytes();
        let slot = (self.reduced % PARTS_AHEAD) as usize;
        members.others().find(|member| self.peers[*member].inbox[slot].filled < bytes)
    }

    /// Reduces the next part of the own share; returns where the result lies.
    fn reduce_part(&mut self, task: &Task, members: &Members) -> Stretch {
        let part = self.part(task, members.own, self.reduced);
        let own = self.blocks.range(members.own);
        let source = task.source.part(part.start, part.len());
        let slot = (self.reduced % PARTS_AHEAD) as usize;
        let sources: Vec<*const u8> = (0..members.len())
            .map(|member| match member {
                _ if member == members.own => source.pointer.cast_const(),
                _ => self.peers[member].inbox[slot].bytes.as_ptr(),
            })
            .collect();
        let start = part.start - own.start;
        let result = match self.receiver {
            Receiver::All => task.target.part(part.start, part.len()),
            Receiver::Owner => task.target.part(start, part.len()),
            Receiver::One(root) if root == members.own => task.target.part(part.start, part.len()),
            Receiver::One(_) => {
                let at = start * source.number.size_bytes();
                Stretch { pointer: self.results[at..].as_mut_ptr(), ..source }
            }
        };
        // SAFETY: source and target are the caller's, whose ranges these are; the inboxes hold as many elements; a target is
        // the own source's place or overlaps nothing.
        unsafe { reduce(source.number, self.op, &sources, &[result.pointer], part.len()) };
        for peer in &mut self.peers {
            peer.inbox[slot].empty();
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
        if index < self.reduced || index >= self.reduced + PARTS_AHEAD || member == members.own {
            return Err(Malformed::Operation);
        }
        let len = self.part(task, members.own, index).len() * task.source.number.size_bytes();
        self.peers[member].inbox[(index % PARTS_AHEAD) as usize].room(len, offset, bytes)
    }

    pub(crate) fn take(&mut self, member: usize, index: u32, bytes: usize) {
        self.peers[member].inbox[(index % PARTS_AHEAD) as usize].filled += bytes;
    }

    pub(crate) fn turn(&mut self, member: usize, index: u32) {
        let room = &mut self.peers[member].room;
        *room = (*room).max(index);
    }

    pub(crate) fn waits_for(&self, task: &Task, members: &Members) -> Option<usize> {
        if self.reduced < self.parts(task, members.own) {
            return self.missing(task, members);
        }
        let is_unsent = |member: &usize| self.peers[*member].sent < self.parts(task, *member);
        members.others().find(is_unsent).or_else(|| self.owes(task, members))
    }

    /// Where bytes of a member's results go.
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

    /// A member whose results have not all come.
    pub(crate) fn owes(&self, task: &Task, members: &Members) -> Option<usize> {
        let is_short = |member: &usize| {
            self.peers[*member].arrived_bytes < self.results_of(task, members, *member).bytes()
        };
        members.others().find(is_short)
    }

    fn results_of(&self, task: &Task, members: &Members, member: usize) -> Stretch {
        if member == members.own || !self.wants(members.own) {
            return Stretch::EMPTY;
        }
        let range = self.blocks.range(member);
        task.target.part(range.start, range.len())
    }
}

/// Reduces what has come along with the posts. Whoever wants a result reduces all of it.
///
/// # Errors
/// If a post has not as much data as the call says.
pub(crate) fn reduce_small(
    task: &Task,
    op: ReduceOp,
    blocks: &Blocks,
    receiver: Receiver,
    members: &Members,
    posts: &[&[u8]],
) -> Result<(), usize> {
    let size = task.source.number.size_bytes();
    let part = match receiver {
        Receiver::Owner => blocks.range(members.own),
        Receiver::All => 0..task.source.elements,
        Receiver::One(root) if root == members.own => 0..task.source.elements,
        Receiver::One(_) => return Ok(()),
    };
    if let Some(member) = members.others().find(|member| posts[*member].len() != task.source.bytes()) {
        return Err(member);
    }
    let sources: Vec<*const u8> = (0..members.len())
        .map(|member| {
            let data =
                if member == members.own { task.source.pointer.cast_const() } else { posts[member].as_ptr() };
            data.wrapping_add(part.start * size)
        })
        .collect();
    // SAFETY: all have as many elements; the target is the caller's own, and the source's place or overlaps it nowhere.
    unsafe { reduce(task.source.number, op, &sources, &[task.target.pointer], part.len()) };
    Ok(())
}

//! One operation in flight over TCP, and its data movement.
//!
//! First all ranks announce their calls, with small data attached. Once a rank has all announcements it compares them, and data
//! flows. Members of a group of more than [`FLAT_MEMBERS`] agree along a tree, and attach nothing (`agreement`).
//! Pieces go directly into the receiver's memory, parts of reductions into buffers of the reducing rank, which grants room
//! for more. Nothing here blocks or uses sockets: outgoing data is queued in [`SendQueues`].

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use super::{
    frame::{Header, Key, Kind},
    hierarchical::{Hierarchical, Turn, UniformNodes},
    members::Members,
    reduction::Reduction,
    send_queues::{SendQueues, UnsentBytes},
    stepwise::StepwiseAllReduce,
    stream::Room,
    tree::FLAT_MEMBERS,
    tree_movement::TreeMovement,
};
use crate::{
    CommError, LossCause, Malformed, OperationContext,
    memory::MemoryRange,
    shm::layout::SMALL_BYTES,
    task::{Comparison, Flow, Task},
    transport::Ticket,
};

/// Kind of a piece that is sent from its first byte on.
const WHOLE: Kind = Kind::Direct { offset: 0 };

/// Announcement of an operation by a rank: its call and the attached data.
#[derive(Debug, Clone, Default)]
pub(crate) struct Announcement {
    pub(crate) call: [u64; 3],
    pub(crate) data: Vec<u8>,
}

/// An operation in flight.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) key: Key,
    /// Peer of a point-to-point message, as a member.
    pub(crate) peer: Option<usize>,
    pub(crate) task: Task,
    pub(crate) ticket: Arc<Ticket>,
    /// Number in the flight recorder.
    pub(crate) recorded: u64,
    /// Progress of the other members that have sent anything, by member.
    pub(crate) peers: BTreeMap<usize, PeerProgress>,
    /// True if all members announce their calls to each other, false if they agree along a tree.
    pub(crate) is_flat: bool,
    /// True once the calls of this member's subtree have been passed to its parent.
    pub(crate) has_told_parent: bool,
    /// True once all members are known to have made the same call.
    pub(crate) is_agreed: bool,
    pub(crate) begun_at: Instant,
    /// Member that this one last named to its neighbours in the tree as missing.
    pub(crate) named_missing: Option<usize>,
    pub(crate) movement: Movement,
    pub(crate) unsent: UnsentBytes,
    /// Number of bytes of pieces that have not arrived yet.
    owed_bytes: usize,
}

/// Rank that an operation waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Awaited {
    /// Rank to name in messages. If other ranks named it a while ago, it may have completed the operation and left since.
    pub(crate) rank: usize,
    /// Rank without which the operation cannot complete, since it has frames to send or to receive. It is lost if it is gone.
    pub(crate) needed: Option<usize>,
    pub(crate) context: OperationContext,
}

/// Progress of a member that has sent something for an operation.
#[derive(Debug, Default)]
pub(crate) struct PeerProgress {
    pub(crate) announcement: Option<Announcement>,
    /// Member that it waits for before it can announce its subtree's calls or the consent of all.
    pub(crate) missing: Option<usize>,
    /// Number of accepted bytes of its piece: never more than the piece has, so that no frame is still being received when the
    /// operation is complete.
    promised_bytes: usize,
    /// Number of arrived bytes of its piece.
    arrived_bytes: usize,
}

/// Data movement of an operation once all ranks have announced it.
#[derive(Debug)]
pub(crate) enum Movement {
    /// Waiting for announcements.
    Announced,
    /// Pieces go directly to their destination.
    Pieces,
    /// Small data of a large group goes along a tree.
    Tree(TreeMovement),
    /// Every rank reduces its block.
    Shares(Reduction),
    /// Hierarchical reduction, within nodes and between them.
    Hierarchical(Box<Hierarchical>),
    /// Steps of an algorithm that the plan has chosen.
    Stepwise(StepwiseAllReduce),
    Done,
}

impl Running {
    /// Returns the small data that is attached to the announcement; empty if the data is large.
    pub(crate) fn eager(task: &Task) -> Vec<u8> {
        match &task.flow {
            Flow::Unknown { sends, receives } => {
                sends.iter().chain(receives).flat_map(|bytes| (*bytes as u64).to_le_bytes()).collect()
            }
            _ if is_small(task, task.source.bytes()) => {
                // SAFETY: the source is the caller's for the duration of the operation.
                unsafe { std::slice::from_raw_parts(task.source.pointer, task.source.bytes()) }.to_vec()
            }
            _ => Vec::new(),
        }
    }

    /// Creates an operation of a group of `members` that this rank has started.
    pub(crate) fn new(
        key: Key,
        peer: Option<usize>,
        task: Task,
        ticket: Arc<Ticket>,
        recorded: u64,
        members: usize,
    ) -> Self {
        Self {
            key,
            peer,
            task,
            ticket,
            recorded,
            peers: BTreeMap::new(),
            is_flat: peer.is_some() || members <= FLAT_MEMBERS,
            has_told_parent: false,
            is_agreed: false,
            begun_at: Instant::now(),
            named_missing: None,
            movement: Movement::Announced,
            unsent: UnsentBytes::default(),
            owed_bytes: 0,
        }
    }

    /// Starts to move data, if all announcements are there. Returns true if it did.
    ///
    /// # Errors
    /// If ranks called different operations, or one attached data of the wrong length.
    pub(crate) fn start_if_agreed(
        &mut self,
        members: &Members,
        queues: &mut SendQueues,
        nodes: Option<&mut UniformNodes>,
    ) -> Result<bool, CommError> {
        if !matches!(self.movement, Movement::Announced) || !self.agree(members, queues)? {
            return Ok(false);
        }
        let nodes = nodes.filter(|nodes| self.can_be_hierarchical(nodes));
        if nodes.as_ref().is_some_and(|nodes| !nodes.has_room()) {
            return Ok(false);
        }
        let tree = if self.is_flat { None } else { TreeMovement::new(&self.task, members) };
        self.movement = match &self.task.flow {
            Flow::Reduction { .. } | Flow::Exchange(_) if let Some(tree) = tree => Movement::Tree(tree),
            Flow::Reduction { op, blocks, receiver } => {
                if is_small(&self.task, self.task.source.bytes()) {
                    let data = |member| self.announcement(member).map_or(&[][..], |post| &post.data[..]);
                    let attached: Vec<&[u8]> = (0..members.len()).map(data).collect();
                    super::reduction::reduce_small(&self.task, *op, blocks, *receiver, members, &attached)
                        .map_err(|member| self.malformed(members, member))?;
                    Movement::Pieces
                } else if let Some(stepwise) = StepwiseAllReduce::new(&self.task, members) {
                    Movement::Stepwise(stepwise)
                } else if let Some(nodes) = nodes {
                    Movement::Hierarchical(Box::new(Hierarchical::new(nodes, &self.task, *op, members)))
                } else {
                    Movement::Shares(Reduction::new(&self.task, *op, blocks, *receiver, members))
                }
            }
            Flow::Exchange(_) | Flow::Send { .. } | Flow::Receive { .. } => {
                self.exchange(members, queues)?;
                Movement::Pieces
            }
            Flow::Barrier | Flow::Unknown { .. } => Movement::Pieces,
        };
        Ok(true)
    }

    /// Returns true if a rank's stream of `bytes` bytes is attached to its announcement.
    fn attaches(&self, bytes: usize) -> bool {
        self.is_flat && is_small(&self.task, bytes)
    }

    /// Returns true if it is an all-reduce that can be hierarchical.
    fn can_be_hierarchical(&self, nodes: &UniformNodes) -> bool {
        let is_plain = self.task.call.kind == crate::Kind::AllReduce && self.task.call.detail == 0;
        is_plain && nodes.allows(self.task.call.number) && !is_small(&self.task, self.task.source.bytes())
    }

    /// Advances the operation. Returns true if it is complete. `is_next` is true if all earlier hierarchical operations have
    /// started their all-gather.
    pub(crate) fn advance(
        &mut self,
        members: &Members,
        queues: &mut SendQueues,
        nodes: Option<&mut UniformNodes>,
        is_next: bool,
    ) -> bool {
        let Self { key, task, movement, unsent, .. } = self;
        let is_moved = match (movement, nodes) {
            (Movement::Announced | Movement::Done, _) => return false,
            (Movement::Pieces, _) => true,
            (Movement::Tree(tree), _) => tree.advance(*key, task, members, queues, unsent),
            (Movement::Shares(reduction), _) => reduction.advance(*key, task, members, queues, unsent),
            (Movement::Stepwise(stepwise), _) => stepwise.advance(*key, task, members, queues, unsent),
            (Movement::Hierarchical(hierarchical), Some(nodes)) => {
                let turn = Turn { key: *key, is_next };
                hierarchical.advance(nodes, turn, task, members, queues, unsent)
            }
            (Movement::Hierarchical(_), None) => false,
        };
        is_moved && self.unsent.is_empty() && self.owed_bytes == 0
    }

    /// Returns true if later hierarchical operations may start their all-gather.
    pub(crate) fn has_started_all_gather(&self) -> bool {
        match &self.movement {
            Movement::Hierarchical(hierarchical) => hierarchical.has_started_all_gather(),
            Movement::Announced => false,
            _ => true,
        }
    }

    /// Returns the destination of a frame's bytes from `member`; `None` until it is known.
    pub(crate) fn room(
        &mut self,
        members: &Members,
        member: usize,
        header: &Header,
    ) -> Result<Option<Room>, Malformed> {
        let bytes = header.bytes as usize;
        if matches!(&self.movement, Movement::Hierarchical(hierarchical) if hierarchical.is_in_reduce_scatter())
        {
            return Ok(None);
        }
        let Self { movement, task, .. } = self;
        match (header.kind, movement) {
            (_, Movement::Announced) => return Ok(None),
            (Kind::Direct { offset }, Movement::Tree(tree)) => tree.room(members, member, offset, bytes),
            (Kind::Chunk { index, offset }, movement) => {
                let offset = usize::try_from(offset).map_err(|_| Malformed::Range)?;
                if let Movement::Stepwise(stepwise) = movement {
                    return stepwise.room(task, member, index, offset, bytes).map(Some);
                }
                let (reduction, task, members, member) = reduction_of(movement, task, members, member)?;
                reduction.room(task, members, member, index, offset, bytes)
            }
            (Kind::Direct { offset }, Movement::Pieces) => {
                let piece = self.piece(members, member);
                let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes));
                let promised_bytes = &mut self.peers.entry(member).or_default().promised_bytes;
                if end.is_none_or(|end| end > piece.bytes()) || *promised_bytes + bytes > piece.bytes() {
                    return Err(Malformed::Range);
                }
                *promised_bytes += bytes;
                Ok(Room::At(piece.pointer.wrapping_add(offset as usize)))
            }
            (Kind::Direct { offset }, movement) => {
                let (reduction, task, members, member) = reduction_of(movement, task, members, member)?;
                reduction.place(task, members, member, offset, bytes)
            }
            _ => Err(Malformed::Operation),
        }
        .map(Some)
    }

    /// Notes that a frame's bytes have arrived.
    pub(crate) fn take(
        &mut self,
        members: &Members,
        member: usize,
        header: &Header,
    ) -> Result<(), Malformed> {
        let bytes = header.bytes as usize;
        let Self { movement, task, peers, owed_bytes, .. } = self;
        match (header.kind, movement) {
            (Kind::Direct { .. }, Movement::Pieces) => {
                peers.entry(member).or_default().arrived_bytes += bytes;
                *owed_bytes -= bytes;
            }
            (Kind::Direct { .. }, Movement::Tree(tree)) => tree.take(members, member, bytes),
            (Kind::Chunk { index, .. }, Movement::Stepwise(stepwise)) => stepwise.take(member, index, bytes),
            (kind, movement) => {
                let (reduction, _, _, member) = reduction_of(movement, task, members, member)?;
                match kind {
                    Kind::Direct { .. } => reduction.take_results(member, bytes),
                    Kind::Chunk { index, .. } => reduction.take(member, index, bytes),
                    _ => return Err(Malformed::Operation),
                }
            }
        }
        Ok(())
    }

    /// Notes that a member has room for more parts.
    pub(crate) fn turn(&mut self, members: &Members, member: usize, index: u32) {
        match &mut self.movement {
            Movement::Stepwise(stepwise) => return stepwise.turn(member, index),
            Movement::Announced => return self.note_missing(members, member, index),
            _ => {}
        }
        // The operation may be complete, if all parts were sent already.
        if let Ok((reduction, _, _, member)) = reduction_of(&mut self.movement, &self.task, members, member) {
            reduction.turn(member, index);
        }
    }

    /// Returns the rank that it waits for.
    pub(crate) fn waits_for(&self, members: &Members) -> Awaited {
        let needed = match &self.movement {
            Movement::Announced => self.unannounced(members),
            Movement::Shares(reduction) => reduction.waits_for(&self.task, members),
            Movement::Hierarchical(hierarchical) => hierarchical.waits_for(members),
            Movement::Stepwise(stepwise) => stepwise.waits_for(),
            Movement::Tree(tree) => tree.waits_for(members),
            Movement::Pieces => {
                let arrived = |member: &usize| self.peers.get(member).map_or(0, |peer| peer.arrived_bytes);
                let is_short = |member: &usize| arrived(member) < self.piece(members, *member).bytes();
                members.others().find(is_short)
            }
            Movement::Done => None,
        };
        let world = |member: usize| members.ranks[member];
        let needed = needed.or(self.peer).map(world).or_else(|| self.unsent.receiver());
        let named = match &self.movement {
            Movement::Announced => self.awaited(members),
            Movement::Hierarchical(hierarchical) if needed.is_none() => hierarchical.neighbour(members),
            _ => None,
        };
        let any = || members.others().next().unwrap_or(members.own);
        let rank = named.map(world).or(needed).unwrap_or_else(|| world(any()));
        Awaited { rank, needed, context: self.context(members) }
    }

    pub(crate) fn context(&self, members: &Members) -> OperationContext {
        OperationContext { call: self.task.call, sequence: self.key.sequence, group: members.name }
    }

    /// Returns the destination of the piece that `member` sends without flow control.
    fn piece(&self, members: &Members, member: usize) -> MemoryRange {
        let target = self.task.target;
        match &self.task.flow {
            Flow::Exchange(exchange) if member != members.own => {
                let piece = exchange.piece(members.own, member);
                if self.attaches(exchange.stream(member)) {
                    MemoryRange::EMPTY
                } else {
                    target.bytes_at(piece.to, piece.bytes)
                }
            }
            Flow::Receive { from } if *from == member && !self.attaches(target.bytes()) => target,
            _ => MemoryRange::EMPTY,
        }
    }

    /// Copies attached data to the target, and queues larger data for sending.
    fn exchange(&mut self, members: &Members, queues: &mut SendQueues) -> Result<(), CommError> {
        let (source, target) = (self.task.source, self.task.target);
        match &self.task.flow {
            Flow::Exchange(exchange) => {
                for member in 0..members.len() {
                    let piece = exchange.piece(members.own, member);
                    let to = target.pointer.wrapping_add(piece.to);
                    if member == members.own {
                        let from = source.pointer.wrapping_add(piece.from);
                        // SAFETY: the own piece is within source and target, which are identical or do not overlap.
                        unsafe { std::ptr::copy(from, to, piece.bytes) };
                        continue;
                    }
                    if self.attaches(exchange.stream(member)) {
                        let data = self.announcement(member).and_then(|post| post.data.get(piece.from..));
                        let Some(data) = data.and_then(|data| data.get(..piece.bytes)) else {
                            return Err(self.malformed(members, member));
                        };
                        // SAFETY: the piece is within the target.
                        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, piece.bytes) };
                    } else {
                        self.owed_bytes += piece.bytes;
                    }
                    let sent = exchange.piece(member, members.own);
                    if !self.attaches(source.bytes()) {
                        let piece = source.bytes_at(sent.from, sent.bytes);
                        queues.send(members.ranks[member], self.key, WHOLE, piece, &mut self.unsent);
                    }
                }
            }
            Flow::Send { to } if !self.attaches(source.bytes()) => {
                queues.send(members.ranks[*to], self.key, WHOLE, source, &mut self.unsent);
            }
            Flow::Receive { .. } if !self.attaches(target.bytes()) => self.owed_bytes = target.bytes(),
            Flow::Receive { from } => {
                let data = self.announcement(*from).map_or(&[][..], |post| &post.data[..]);
                if data.len() != target.bytes() {
                    return Err(self.malformed(members, *from));
                }
                // SAFETY: the target has the same length.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target.pointer, data.len()) };
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the loss of a member whose data contradicts its call.
    pub(crate) fn malformed(&self, members: &Members, member: usize) -> CommError {
        let (rank, cause) = (members.ranks[member], LossCause::Malformed(Malformed::Call));
        CommError::PeerLost { rank, cause, context: Some(self.context(members)) }
    }

    pub(crate) fn comparison<'a>(&self, members: &'a Members) -> Comparison<'a> {
        Comparison { ranks: &members.ranks, context: self.context(members) }
    }
}

/// Returns the reduction that frames from `member` belong to, with its task, its members, and `member`'s index among them.
fn reduction_of<'a>(
    movement: &'a mut Movement,
    task: &'a Task,
    members: &'a Members,
    member: usize,
) -> Result<(&'a mut Reduction, &'a Task, &'a Members, usize), Malformed> {
    match movement {
        Movement::Shares(reduction) => Ok((reduction, task, members, member)),
        Movement::Hierarchical(hierarchical) => {
            hierarchical.between(members, member).ok_or(Malformed::Operation)
        }
        _ => Err(Malformed::Operation),
    }
}

/// Returns true if a rank's stream of `bytes` bytes is attached to its announcement. An all-to-all of uneven blocks attaches
/// their lengths instead.
pub(crate) fn is_small(task: &Task, bytes: usize) -> bool {
    let is_uneven_exchange = task.call.kind == crate::Kind::AllToAll && task.call.detail != 0;
    bytes <= SMALL_BYTES && !is_uneven_exchange
}

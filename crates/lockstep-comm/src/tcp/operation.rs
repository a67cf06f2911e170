//! One operation under way between ranks that are joined by sockets, and how it moves data.
//!
//! First all ranks post how they call it, small data included. When a rank has all posts it compares them, and from then on
//! data flows: pieces straight into the memory of whoever they are for, parts of reductions into buffers of whoever
//! reduces them, which says when it has room for more. Nothing here waits or knows of sockets: what is to be sent goes to
//! [`Sending`].

use std::{collections::VecDeque, sync::Arc};

use super::{
    frame::{Header, Key, Kind, Malformed},
    layered::{Layered, Machines},
    reduction::Reduction,
    script::Script,
    stream::{Message, Room},
};
use crate::{
    Call, CommError, GroupName, LossCause, Occasion,
    memory::Stretch,
    shm::layout::SMALL_BYTES,
    task::{Comparison, Flow, Task},
    transport::Ticket,
};

/// A piece from its first byte on.
const WHOLE: Kind = Kind::Direct { offset: 0 };

/// Frames and messages for each rank of the world.
#[derive(Debug, Default)]
pub(crate) struct Sending {
    pub(crate) control: Vec<VecDeque<(Header, Vec<u8>)>>,
    pub(crate) data: Vec<VecDeque<Message>>,
}

/// A group, as its operations see it.
#[derive(Debug)]
pub(crate) struct Members {
    pub(crate) name: GroupName,
    /// Ranks of the world, in the order of the group.
    pub(crate) ranks: Vec<usize>,
    /// The own position.
    pub(crate) own: usize,
}

impl Members {
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.own;
        (0..self.len()).filter(move |member| *member != own)
    }
}

/// How a rank has called an operation, and the data that came along.
#[derive(Debug, Clone, Default)]
pub(crate) struct Post {
    pub(crate) call: [u64; 3],
    pub(crate) data: Vec<u8>,
}

/// An operation that has begun.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) key: Key,
    /// The other end, of a message between two ranks.
    pub(crate) peer: Option<usize>,
    pub(crate) task: Task,
    pub(crate) ticket: Arc<Ticket>,
    /// Number in the flight recorder.
    pub(crate) recorded: u64,
    /// By member; of messages between two ranks only the peer's.
    pub(crate) posts: Vec<Option<Post>>,
    pub(crate) movement: Movement,
    /// Bytes handed over to be sent that are not sent.
    pub(crate) unsent_bytes: usize,
    /// Bytes of pieces for which frames have been given room, by member: never more than the piece has, so that no frame is
    /// still on its way in when the operation is done.
    pub(crate) promised_bytes: Vec<usize>,
    /// Bytes of pieces that have come, by member.
    pub(crate) arrived_bytes: Vec<usize>,
}

/// What an operation does once all have come.
#[derive(Debug)]
pub(crate) enum Movement {
    /// Not all have come.
    Meeting,
    /// Pieces go to where they belong.
    Pieces,
    /// Every rank reduces its share.
    Shares(Reduction),
    /// The same within machines, and between them.
    Layers(Box<Layered>),
    /// Steps that a plan has chosen.
    Steps(Script),
    Done,
}

impl Running {
    /// Small data that comes along with the post.
    pub(crate) fn eager(task: &Task) -> Vec<u8> {
        match &task.flow {
            Flow::Unknown { sends, receives } => {
                sends.iter().chain(receives).flat_map(|bytes| (*bytes as u64).to_le_bytes()).collect()
            }
            _ if is_small(task, task.source.bytes()) => {
                // SAFETY: the source is the caller's for the time of the operation.
                unsafe { std::slice::from_raw_parts(task.source.pointer, task.source.bytes()) }.to_vec()
            }
            _ => Vec::new(),
        }
    }

    /// Members whose posts are waited for.
    fn awaited(&self, members: &Members) -> Option<usize> {
        let is_missing = |member: &usize| self.posts[*member].is_none();
        match self.peer {
            Some(peer) => Some(peer).filter(is_missing),
            None => members.others().find(is_missing),
        }
    }

    /// Begins to move data, if all have come.
    ///
    /// # Errors
    /// [`CommError::Mismatch`].
    pub(crate) fn meet(
        &mut self,
        members: &Members,
        sending: &mut Sending,
        machines: Option<&mut Machines>,
    ) -> Result<bool, CommError> {
        if !matches!(self.movement, Movement::Meeting) || self.awaited(members).is_some() {
            return Ok(false);
        }
        let machines = machines.filter(|machines| self.goes_by_machines(machines));
        if machines.as_ref().is_some_and(|machines| !machines.have_room()) {
            return Ok(false);
        }
        match self.peer {
            Some(peer) => self.compare_with(members, peer)?,
            None => self.compare(members)?,
        }
        self.movement = match &self.task.flow {
            Flow::Reduction { op, blocks, receiver } => {
                if is_small(&self.task, self.task.source.bytes()) {
                    let posts: Vec<&[u8]> = self
                        .posts
                        .iter()
                        .map(|post| post.as_ref().map_or(&[][..], |post| &post.data[..]))
                        .collect();
                    super::reduction::reduce_small(&self.task, *op, blocks, *receiver, members, &posts)
                        .map_err(|member| self.malformed(members, member))?;
                    Movement::Pieces
                } else if let Some(script) = Script::new(&self.task, members) {
                    Movement::Steps(script)
                } else if let Some(machines) = machines {
                    Movement::Layers(Box::new(Layered::new(machines, &self.task, *op, members)))
                } else {
                    Movement::Shares(Reduction::new(&self.task, *op, blocks, *receiver, members))
                }
            }
            Flow::Exchange(_) | Flow::Send { .. } | Flow::Receive { .. } => {
                self.exchange(members, sending)?;
                Movement::Pieces
            }
            Flow::Barrier | Flow::Unknown { .. } => Movement::Pieces,
        };
        Ok(true)
    }

    /// Whether it is a sum that all ranks want, and that machines are to sum first.
    fn goes_by_machines(&self, machines: &Machines) -> bool {
        let is_plain = self.task.call.kind == crate::Kind::AllReduce && self.task.call.detail == 0;
        is_plain && machines.suit(self.task.call.number) && !is_small(&self.task, self.task.source.bytes())
    }

    /// Carries on; says whether the operation is done. `is_next` says that all before it that go by machines have had their
    /// turn there.
    pub(crate) fn advance(
        &mut self,
        members: &Members,
        sending: &mut Sending,
        machines: Option<&mut Machines>,
        is_next: bool,
    ) -> bool {
        let Self { key, task, movement, unsent_bytes, .. } = self;
        let is_moved = match (movement, machines) {
            (Movement::Meeting | Movement::Done, _) => return false,
            (Movement::Pieces, _) => true,
            (Movement::Shares(reduction), _) => reduction.advance(*key, task, members, sending, unsent_bytes),
            (Movement::Steps(script), _) => script.advance(*key, task, members, sending, unsent_bytes),
            (Movement::Layers(layered), Some(machines)) => {
                let turn = Turn { key: *key, is_next };
                layered.advance(machines, turn, task, members, sending, unsent_bytes)
            }
            (Movement::Layers(_), None) => false,
        };
        is_moved
            && self.unsent_bytes == 0
            && (0..members.len())
                .all(|member| self.arrived_bytes[member] == self.piece(members, member).bytes())
    }

    /// Whether it keeps none of those after it from their last part within the machine.
    pub(crate) fn has_had_its_turn(&self) -> bool {
        match &self.movement {
            Movement::Layers(layered) => layered.is_past_its_turn(),
            Movement::Meeting => false,
            _ => true,
        }
    }

    /// Where a frame's bytes from `member` go; `None` if that is not known before all have come.
    pub(crate) fn room(
        &mut self,
        members: &Members,
        member: usize,
        header: &Header,
    ) -> Result<Option<Room>, Malformed> {
        let bytes = header.bytes as usize;
        if matches!(&self.movement, Movement::Layers(layered) if layered.is_early()) {
            return Ok(None);
        }
        let Self { movement, task, .. } = self;
        match (header.kind, movement) {
            (_, Movement::Meeting) => return Ok(None),
            (Kind::Part { index, offset }, movement) => {
                let offset = usize::try_from(offset).map_err(|_| Malformed::Range)?;
                if let Movement::Steps(script) = movement {
                    return script.room(task, member, index, offset, bytes).map(Some);
                }
                let (reduction, task, members, member) = reduction_of(movement, task, members, member)?;
                reduction.room(task, members, member, index, offset, bytes)
            }
            (Kind::Direct { offset }, Movement::Pieces) => {
                let piece = self.piece(members, member);
                let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(bytes));
                let promised_bytes = &mut self.promised_bytes[member];
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

    /// A frame's bytes have come.
    pub(crate) fn take(
        &mut self,
        members: &Members,
        member: usize,
        header: &Header,
    ) -> Result<(), Malformed> {
        let bytes = header.bytes as usize;
        let Self { movement, task, arrived_bytes, .. } = self;
        match (header.kind, movement) {
            (Kind::Direct { .. }, Movement::Pieces) => arrived_bytes[member] += bytes,
            (Kind::Part { index, .. }, Movement::Steps(script)) => script.take(member, index, bytes),
            (kind, movement) => {
                let (reduction, _, _, member) = reduction_of(movement, task, members, member)?;
                match kind {
                    Kind::Direct { .. } => reduction.take_results(member, bytes),
                    Kind::Part { index, .. } => reduction.take(member, index, bytes),
                    _ => return Err(Malformed::Operation),
                }
            }
        }
        Ok(())
    }

    /// A member has room for more.
    pub(crate) fn turn(&mut self, members: &Members, member: usize, index: u32) {
        if let Movement::Steps(script) = &mut self.movement {
            return script.turn(member, index);
        }
        // It may be over, if the room is for nothing more.
        if let Ok((reduction, _, _, member)) = reduction_of(&mut self.movement, &self.task, members, member) {
            reduction.turn(member, index);
        }
    }

    /// Whom it waits for, as a rank of the world; and what it is.
    pub(crate) fn waits_for(&self, members: &Members) -> (usize, Occasion) {
        let late = match &self.movement {
            Movement::Meeting => self.awaited(members),
            Movement::Shares(reduction) => reduction.waits_for(&self.task, members),
            Movement::Layers(layered) => layered.waits_for(members),
            Movement::Steps(script) => script.waits_for(),
            Movement::Pieces | Movement::Done => None,
        };
        let is_short = |member: &usize| self.arrived_bytes[*member] < self.piece(members, *member).bytes();
        let late = late.or_else(|| members.others().find(is_short)).or(self.peer);
        let late = late.or_else(|| members.others().next()).unwrap_or(members.own);
        (members.ranks[late], self.occasion(members))
    }

    pub(crate) fn occasion(&self, members: &Members) -> Occasion {
        Occasion { call: self.task.call, sequence: self.key.sequence, group: members.name }
    }

    /// Where the bytes belong that come from `member` without being asked for.
    fn piece(&self, members: &Members, member: usize) -> Stretch {
        let target = self.task.target;
        match &self.task.flow {
            Flow::Exchange(exchange) if member != members.own => {
                let piece = exchange.piece(members.own, member);
                if is_small(&self.task, exchange.stream(member)) {
                    Stretch::EMPTY
                } else {
                    target.bytes_at(piece.to, piece.bytes)
                }
            }
            Flow::Receive { from } if *from == member && !is_small(&self.task, target.bytes()) => target,
            _ => Stretch::EMPTY,
        }
    }

    /// Takes what came along with the posts, and hands over what did not.
    fn exchange(&mut self, members: &Members, sending: &mut Sending) -> Result<(), CommError> {
        let (source, target) = (self.task.source, self.task.target);
        match &self.task.flow {
            Flow::Exchange(exchange) => {
                for member in 0..members.len() {
                    let piece = exchange.piece(members.own, member);
                    let to = target.pointer.wrapping_add(piece.to);
                    if member == members.own {
                        let from = source.pointer.wrapping_add(piece.from);
                        // SAFETY: the own piece lies in source and target, which are one place or do not overlap.
                        unsafe { std::ptr::copy(from, to, piece.bytes) };
                        continue;
                    }
                    if is_small(&self.task, exchange.stream(member)) {
                        let data = self.posts[member].as_ref().and_then(|post| post.data.get(piece.from..));
                        let Some(data) = data.and_then(|data| data.get(..piece.bytes)) else {
                            return Err(self.malformed(members, member));
                        };
                        // SAFETY: the piece lies in the target.
                        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, piece.bytes) };
                    }
                    let sent = exchange.piece(member, members.own);
                    if !is_small(&self.task, source.bytes()) {
                        let piece = source.bytes_at(sent.from, sent.bytes);
                        send(sending, members.ranks[member], self.key, WHOLE, piece, &mut self.unsent_bytes);
                    }
                }
            }
            Flow::Send { to } if !is_small(&self.task, source.bytes()) => {
                send(sending, members.ranks[*to], self.key, WHOLE, source, &mut self.unsent_bytes);
            }
            Flow::Receive { from } if is_small(&self.task, target.bytes()) => {
                let data = self.posts[*from].as_ref().map_or(&[][..], |post| &post.data[..]);
                if data.len() != target.bytes() {
                    return Err(self.malformed(members, *from));
                }
                // SAFETY: the target is as long.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target.pointer, data.len()) };
            }
            _ => {}
        }
        Ok(())
    }

    /// The loss of a member whose data are not what its call says.
    fn malformed(&self, members: &Members, member: usize) -> CommError {
        let (rank, cause) = (members.ranks[member], LossCause::Malformed(Malformed::Call));
        CommError::PeerLost { rank, cause, occasion: Some(self.occasion(members)) }
    }

    fn comparison<'a>(&self, members: &'a Members) -> Comparison<'a> {
        Comparison { ranks: &members.ranks, occasion: self.occasion(members) }
    }

    /// Sees that all ranks have called the same, and learns what they could not know before.
    fn compare(&mut self, members: &Members) -> Result<(), CommError> {
        let own = self.task.call.to_words();
        let calls: Vec<[u64; 3]> =
            self.posts.iter().map(|post| post.as_ref().map_or(own, |post| post.call)).collect();
        self.comparison(members).of_calls(&calls)?;
        if matches!(self.task.flow, Flow::Unknown { .. }) {
            let tables = self.tables(members.len()).map_err(|member| self.malformed(members, member))?;
            let word = |member: usize, index: usize| tables[member][index];
            self.task.flow = Flow::Exchange(self.comparison(members).of_tables(word)?);
        }
        Ok(())
    }

    /// What each of `ranks` members sends to and receives from each.
    ///
    /// # Errors
    /// The first member that has posted anything else.
    fn tables(&self, ranks: usize) -> Result<Vec<Vec<usize>>, usize> {
        let own = Self::eager(&self.task);
        let table = |post: &Option<Post>| {
            let (words, rest) = post.as_ref().map_or(&own, |post| &post.data).as_chunks::<8>();
            let table: Vec<usize> = words.iter().map(|word| u64::from_le_bytes(*word) as usize).collect();
            let total = table.iter().try_fold(0_usize, |sum, bytes| sum.checked_add(*bytes));
            (table.len() == 2 * ranks && rest.is_empty() && total.is_some()).then_some(table)
        };
        self.posts.iter().enumerate().map(|(member, post)| table(post).ok_or(member)).collect()
    }

    /// Sees that what one sends is what the other waits for. Of the two the sender is told of first.
    fn compare_with(&self, members: &Members, peer: usize) -> Result<(), CommError> {
        let Some(post) = &self.posts[peer] else { return Ok(()) };
        let own = self.task.call;
        let is_sender = own.kind == crate::Kind::Send;
        let kind = if is_sender { crate::Kind::Receive } else { crate::Kind::Send };
        if post.call == (Call { kind, root: Some(members.own), ..own }).to_words() {
            return Ok(());
        }
        let theirs = Call::from_words(post.call).unwrap_or(own);
        let comparison = self.comparison(members);
        Err(if is_sender {
            comparison.mismatch(members.own, own, peer, theirs)
        } else {
            comparison.mismatch(peer, theirs, members.own, own)
        })
    }
}

/// An operation's place in the order of its group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) key: Key,
    /// All before it that go by machines have had their turn there.
    pub(crate) is_next: bool,
}

/// The reduction that frames from `member` are for, with its task, its members, and `member`'s place among them.
fn reduction_of<'a>(
    movement: &'a mut Movement,
    task: &'a Task,
    members: &'a Members,
    member: usize,
) -> Result<(&'a mut Reduction, &'a Task, &'a Members, usize), Malformed> {
    match movement {
        Movement::Shares(reduction) => Ok((reduction, task, members, member)),
        Movement::Layers(layered) => layered.between(members, member).ok_or(Malformed::Operation),
        _ => Err(Malformed::Operation),
    }
}

/// Whether a rank's stream of so many bytes comes along with its post. An all-to-all of uneven blocks posts their lengths.
pub(crate) fn is_small(task: &Task, bytes: usize) -> bool {
    let is_uneven_exchange = task.call.kind == crate::Kind::AllToAll && task.call.detail != 0;
    bytes <= SMALL_BYTES && !is_uneven_exchange
}

/// Hands over a piece to be sent.
pub(crate) fn send(
    sending: &mut Sending,
    rank: usize,
    key: Key,
    kind: Kind,
    piece: Stretch,
    unsent_bytes: &mut usize,
) {
    if piece.bytes() > 0 {
        *unsent_bytes += piece.bytes();
        let message = Message { key, kind, start: piece.pointer, len: piece.bytes(), framed: 0 };
        sending.data[rank].push_back(message);
    }
}

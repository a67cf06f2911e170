//! One operation under way over MPI.
//!
//! All ranks of a group first tell each other, pair by pair, how they call it: so unlike calls are found before any data moves,
//! and who has not come is known. Then data moves, in one call of MPI's if it fits.

use std::{collections::VecDeque, ffi::c_int, ops::Range, sync::Arc};

use super::shim::{Comm, Mpi, Request};
use crate::{
    Call, CommError, GroupName, Kind, Occasion, ReduceOp,
    blocks::{Blocks, window},
    exchange::Exchange,
    memory::Stretch,
    task::{Comparison, Flow, Receiver, Task},
    transport::Ticket,
};

/// Messages between two ranks that are no longer travel with their description, and wait for nobody.
const SMALL_BYTES: usize = 32 << 10;
/// Words of a description.
const CALL_WORDS: usize = 3;

/// What a message is about. Within one of these, messages between two ranks arrive in order.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(super) enum Tag {
    /// The run itself.
    Control = 1,
    /// How a rank calls an operation.
    Meeting = 2,
    /// How much it sends and receives.
    Table = 3,
    /// Blocks of an operation that only moves data.
    Piece = 4,
    /// The description of a message between two ranks, and all of a small one.
    Letter = 5,
    /// The rest of it.
    Parcel = 6,
}

/// A group, as its operations see it.
#[derive(Debug)]
pub(super) struct Members {
    pub(super) comm: Comm,
    pub(super) name: GroupName,
    /// Ranks of the world, in the order of the group.
    pub(super) ranks: Vec<usize>,
    /// The own position.
    pub(super) own: usize,
    /// The most elements or bytes of one call.
    pub(super) per_call: usize,
}

impl Members {
    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.own;
        (0..self.ranks.len()).filter(move |member| *member != own)
    }
}

/// An operation that has begun.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) task: Task,
    pub(super) sequence: u32,
    /// Number in the flight recorder.
    pub(super) recorded: u64,
    pub(super) ticket: Arc<Ticket>,
    pub(super) step: Step,
    /// Whether MPI has refused something, so that what it completes is not the whole.
    is_broken: bool,
    /// Of the step at hand.
    requests: Vec<Request>,
    /// What members have said, one after the other; the own words are among them.
    words: Vec<u64>,
    /// A small message between two ranks, after its description.
    letter: Vec<u8>,
    /// Counts and starts of a call that MPI reads until it is complete.
    lists: Vec<c_int>,
    /// Where MPI writes what belongs into memory that it reads.
    scratch: Vec<u8>,
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// All have to say how they call it.
    Meet,
    /// All have to say how much they send.
    Tables,
    /// Data has to move.
    Move,
    Done,
}

impl Running {
    /// An operation that is about to begin.
    pub(super) fn new(task: Task, sequence: u32, recorded: u64, ticket: Arc<Ticket>) -> Self {
        Self {
            task,
            sequence,
            recorded,
            ticket,
            step: Step::Meet,
            is_broken: false,
            requests: Vec::new(),
            words: Vec::new(),
            letter: Vec::new(),
            lists: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// Tells the others.
    pub(super) fn begin(&mut self, mpi: &Mpi, members: &Members) -> Result<(), CommError> {
        let call = self.task.call.to_words();
        let begun = match self.task.flow {
            Flow::Send { to } => self.begin_send(mpi, members, to, call),
            Flow::Receive { from } => {
                self.letter = vec![0; size_of_val(&call) + SMALL_BYTES];
                let (letter, room) = (self.letter.as_mut_ptr(), self.letter.len());
                // SAFETY: the letter stays where it is until it has come.
                unsafe { mpi.receive(members.comm, letter, room, Some(from), Tag::Letter as i32) }
                    .map(|request| self.requests.push(request))
            }
            _ => self.tell(mpi, members, &call, Tag::Meeting),
        };
        begun.inspect_err(|_| self.is_broken = true)
    }

    fn begin_send(
        &mut self,
        mpi: &Mpi,
        members: &Members,
        to: usize,
        call: [u64; CALL_WORDS],
    ) -> Result<(), CommError> {
        let source = self.task.source;
        self.step = Step::Move;
        self.letter = bytemuck::cast_slice(&call).to_vec();
        let is_small = source.bytes() <= SMALL_BYTES;
        if is_small {
            // SAFETY: the source is the caller's for the time of the operation.
            self.letter.extend_from_slice(unsafe {
                std::slice::from_raw_parts(source.pointer.cast_const(), source.bytes())
            });
        }
        let (letter, bytes) = (self.letter.as_ptr(), self.letter.len());
        // SAFETY: the letter stays where it is until it is sent.
        self.requests.push(unsafe { mpi.send(members.comm, letter, bytes, to, Tag::Letter as i32)? });
        if !is_small {
            return self.send(mpi, members, source, to, Tag::Parcel);
        }
        self.ticket.complete();
        Ok(())
    }

    /// Tells all other members `words`, and begins to hear theirs.
    fn tell(&mut self, mpi: &Mpi, members: &Members, words: &[u64], tag: Tag) -> Result<(), CommError> {
        self.words = words.repeat(members.ranks.len());
        self.requests.clear();
        let bytes = size_of_val(words);
        let base = self.words.as_mut_ptr().cast::<u8>();
        for member in members.others() {
            let to = base.wrapping_add(member * bytes);
            // SAFETY: each member has its own part of the words, which stay where they are until this step is done.
            let request = unsafe { mpi.receive(members.comm, to, bytes, Some(member), tag as i32)? };
            self.requests.push(request);
        }
        let own = base.wrapping_add(members.own * bytes);
        for member in members.others() {
            // SAFETY: the own part of the words is written by nobody.
            self.requests.push(unsafe { mpi.send(members.comm, own, bytes, member, tag as i32)? });
        }
        Ok(())
    }

    /// Goes on as far as MPI has come; says whether it has moved.
    pub(super) fn advance(&mut self, mpi: &Mpi, members: &Members) -> Result<bool, CommError> {
        let before = self.step;
        while self.step != Step::Done && mpi.test(&mut self.requests)?.is_none() {
            self.requests.clear();
            match self.step {
                Step::Meet => self.meet(mpi, members),
                Step::Tables => self.read_tables(mpi, members),
                Step::Move | Step::Done => {
                    self.finish();
                    Ok(())
                }
            }
            .inspect_err(|_| self.is_broken = true)?;
        }
        Ok(self.step != before)
    }

    /// MPI is done with the caller's memory.
    fn finish(&mut self) {
        let (target, bytes) = (self.task.target, self.scratch.len().min(self.task.target.bytes()));
        // SAFETY: nobody else uses the target, which is the caller's until the operation is complete.
        unsafe { std::ptr::copy_nonoverlapping(self.scratch.as_ptr(), target.pointer, bytes) };
        self.step = Step::Done;
        if !self.is_broken {
            self.ticket.complete();
        }
    }

    /// All have come.
    fn meet(&mut self, mpi: &Mpi, members: &Members) -> Result<(), CommError> {
        if let Flow::Receive { from } = self.task.flow {
            return self.open(mpi, members, from);
        }
        let (calls, _) = self.words.as_chunks::<CALL_WORDS>();
        self.comparison(members).of_calls(calls)?;
        match &self.task.flow {
            Flow::Unknown { sends, receives } => {
                let table: Vec<u64> = sends.iter().chain(receives).map(|bytes| *bytes as u64).collect();
                self.step = Step::Tables;
                self.tell(mpi, members, &table, Tag::Table)
            }
            _ => self.start(mpi, members),
        }
    }

    /// All have said how much they send and receive.
    fn read_tables(&mut self, mpi: &Mpi, members: &Members) -> Result<(), CommError> {
        let words = 2 * members.ranks.len();
        let word = |member: usize, index: usize| self.words[member * words + index] as usize;
        self.task.flow = Flow::Exchange(self.comparison(members).of_tables(word)?);
        self.start(mpi, members)
    }

    /// Reads a letter, and begins to receive what did not fit into it.
    fn open(&mut self, mpi: &Mpi, members: &Members, from: usize) -> Result<(), CommError> {
        let target = self.task.target;
        let (call, small) = self.letter.split_at(size_of::<[u64; CALL_WORDS]>());
        let expected = Call { kind: Kind::Send, root: Some(members.own), ..self.task.call };
        if call != bytemuck::cast_slice::<u64, u8>(&expected.to_words()) {
            let mut words = [0; CALL_WORDS];
            bytemuck::cast_slice_mut(&mut words).copy_from_slice(call);
            let found = Call::from_words(words).unwrap_or(expected);
            return Err(self.comparison(members).mismatch(from, found, members.own, self.task.call));
        }
        self.step = Step::Move;
        if target.bytes() > SMALL_BYTES {
            return self.receive(mpi, members, target, from, Tag::Parcel);
        }
        // SAFETY: the target is the caller's for the time of the operation.
        unsafe { std::ptr::copy_nonoverlapping(small.as_ptr(), target.pointer, target.bytes()) };
        Ok(())
    }

    /// Begins to move data. All members do so in the order of the operations.
    fn start(&mut self, mpi: &Mpi, members: &Members) -> Result<(), CommError> {
        self.step = Step::Move;
        match &self.task.flow {
            Flow::Reduction { op, blocks, receiver } => {
                let (op, blocks, receiver) = (*op, blocks.clone(), *receiver);
                self.reduce(mpi, members, op, &blocks, receiver)
            }
            Flow::Exchange(exchange) => {
                let exchange = exchange.clone();
                self.exchange(mpi, members, &exchange)
            }
            Flow::Barrier | Flow::Unknown { .. } | Flow::Send { .. } | Flow::Receive { .. } => Ok(()),
        }
    }

    fn reduce(
        &mut self,
        mpi: &Mpi,
        members: &Members,
        op: ReduceOp,
        blocks: &Blocks,
        receiver: Receiver,
    ) -> Result<(), CommError> {
        let Task { source, target, .. } = self.task;
        let all = 0..source.elements;
        match receiver {
            Receiver::All => {
                for part in parts(all, members.per_call) {
                    // SAFETY: the data is the caller's for the time of the operation.
                    let request =
                        unsafe { mpi.all_reduce(members.comm, source.part(part.start, part.len()), op)? };
                    self.requests.push(request);
                }
            }
            Receiver::One(root) => self.reduce_to(mpi, members, op, all, root, target.pointer)?,
            Receiver::Owner if source.elements > members.per_call => {
                for owner in 0..members.ranks.len() {
                    self.reduce_to(mpi, members, op, blocks.range(owner), owner, target.pointer)?;
                }
            }
            Receiver::Owner if source.elements == 0 => {}
            Receiver::Owner => {
                let ranks = 0..members.ranks.len();
                self.lists = ranks.map(|rank| int(blocks.range(rank).len())).collect();
                let mut output = target.pointer;
                // MPI looks at addresses, even of what is empty.
                if target.overlaps(&source) || target.elements == 0 {
                    self.scratch = vec![0; target.bytes().max(1)];
                    output = self.scratch.as_mut_ptr();
                }
                // SAFETY: source and target are the caller's, scratch and list this operation's.
                let request = unsafe { mpi.reduce_scatter(members.comm, source, output, &self.lists, op)? };
                self.requests.push(request);
            }
        }
        Ok(())
    }

    /// Reduces elements `all` of the source to memory of the root's.
    fn reduce_to(
        &mut self,
        mpi: &Mpi,
        members: &Members,
        op: ReduceOp,
        all: Range<usize>,
        root: usize,
        target: *mut u8,
    ) -> Result<(), CommError> {
        let (source, size) = (self.task.source, self.task.source.number.size_bytes());
        for part in parts(all.clone(), members.per_call) {
            let output = target.wrapping_add((part.start - all.start) * size);
            let output = (root == members.own).then_some(output);
            let input = source.part(part.start, part.len());
            // SAFETY: source and target are the caller's for the time of the operation.
            self.requests.push(unsafe { mpi.reduce(members.comm, input, output, op, root)? });
        }
        Ok(())
    }

    fn exchange(&mut self, mpi: &Mpi, members: &Members, exchange: &Exchange) -> Result<(), CommError> {
        let Task { source, target, .. } = self.task;
        match exchange {
            Exchange::Broadcast { root, bytes } => {
                for part in parts(0..*bytes, members.per_call) {
                    let data = target.bytes_at(part.start, part.len());
                    // SAFETY: the target, on the root the source as well, is the caller's for the time of the operation.
                    self.requests.push(unsafe { mpi.broadcast(members.comm, data, *root)? });
                }
            }
            Exchange::AllGather(blocks) if blocks.total() <= members.per_call => {
                let ranks = 0..members.ranks.len();
                let counts = ranks.clone().map(|rank| int(blocks.range(rank).len()));
                self.lists = counts.chain(ranks.map(|rank| int(blocks.range(rank).start))).collect();
                let (counts, starts) = self.lists.split_at(members.ranks.len());
                let own = target.pointer.wrapping_add(blocks.range(members.own).start);
                let input = Some(source).filter(|source| source.pointer != own);
                // SAFETY: source and target are the caller's, the lists this operation's.
                let request = unsafe { mpi.all_gather(members.comm, input, target.pointer, counts, starts)? };
                self.requests.push(request);
            }
            _ => self.exchange_pieces(mpi, members, exchange)?,
        }
        Ok(())
    }

    /// Every member sends to every other what that pulls.
    fn exchange_pieces(
        &mut self,
        mpi: &Mpi,
        members: &Members,
        exchange: &Exchange,
    ) -> Result<(), CommError> {
        let Task { source, target, .. } = self.task;
        let own = exchange.piece(members.own, members.own);
        let (from, to) = (source.pointer.wrapping_add(own.from), target.pointer.wrapping_add(own.to));
        if from != to {
            // SAFETY: source and target are the caller's, and do not overlap but in place.
            unsafe { std::ptr::copy_nonoverlapping(from, to, own.bytes) };
        }
        for member in members.others() {
            let piece = exchange.piece(members.own, member);
            let data = target.bytes_at(piece.to, piece.bytes);
            self.receive(mpi, members, data, member, Tag::Piece)?;
        }
        for member in members.others() {
            let piece = exchange.piece(member, members.own);
            let data = source.bytes_at(piece.from, piece.bytes);
            self.send(mpi, members, data, member, Tag::Piece)?;
        }
        Ok(())
    }

    fn send(
        &mut self,
        mpi: &Mpi,
        members: &Members,
        data: Stretch,
        to: usize,
        tag: Tag,
    ) -> Result<(), CommError> {
        for part in parts(0..data.bytes(), members.per_call) {
            let from = data.pointer.wrapping_add(part.start);
            // SAFETY: the data is the caller's for the time of the operation.
            self.requests.push(unsafe { mpi.send(members.comm, from, part.len(), to, tag as i32)? });
        }
        Ok(())
    }

    fn receive(
        &mut self,
        mpi: &Mpi,
        members: &Members,
        data: Stretch,
        from: usize,
        tag: Tag,
    ) -> Result<(), CommError> {
        for part in parts(0..data.bytes(), members.per_call) {
            let to = data.pointer.wrapping_add(part.start);
            // SAFETY: the data is the caller's for the time of the operation.
            let request = unsafe { mpi.receive(members.comm, to, part.len(), Some(from), tag as i32)? };
            self.requests.push(request);
        }
        Ok(())
    }

    /// The member that has not come, if one has not; the other end of a message between two ranks.
    pub(super) fn awaited(&mut self, mpi: &Mpi, members: &Members) -> Result<Option<usize>, CommError> {
        if let Flow::Send { to: peer } | Flow::Receive { from: peer } = self.task.flow {
            return Ok(Some(members.ranks[peer]));
        }
        if !matches!(self.step, Step::Meet | Step::Tables) {
            return Ok(None);
        }
        // What is awaited from the others stands first.
        let first = mpi.test(&mut self.requests)?;
        Ok(first.and_then(|first| members.others().nth(first)).map(|member| members.ranks[member]))
    }

    pub(super) fn occasion(&self, members: &Members) -> Occasion {
        Occasion { call: self.task.call, sequence: self.sequence, group: members.name }
    }

    fn comparison<'a>(&self, members: &'a Members) -> Comparison<'a> {
        Comparison { ranks: &members.ranks, occasion: self.occasion(members) }
    }

    /// Whether MPI may read or write memory of a caller's that waits for it.
    pub(super) fn holds_borrowed_memory(&self) -> bool {
        self.step == Step::Move && !self.ticket.is_complete() && !self.ticket.has_memory()
    }
}

/// The operations of a group: collectives, messages from this rank, messages from each of the others.
#[derive(Debug)]
pub(super) struct Lanes {
    pub(super) members: Members,
    pub(super) lanes: Vec<VecDeque<Running>>,
}

impl Lanes {
    pub(super) fn new(members: Members) -> Self {
        let lanes = (0..2 + members.ranks.len()).map(|_| VecDeque::new()).collect();
        Self { members, lanes }
    }

    /// The lane of a task.
    pub(super) fn lane(&mut self, task: &Task) -> &mut VecDeque<Running> {
        let index = match task.flow {
            Flow::Send { .. } => 1,
            Flow::Receive { from } => 2 + from,
            _ => 0,
        };
        &mut self.lanes[index]
    }
}

/// Parts of a range that are no longer than one call of MPI's may be.
fn parts(range: Range<usize>, width: usize) -> impl Iterator<Item = Range<usize>> {
    (0..range.len().div_ceil(width)).map(move |index| window(&range, width, index))
}

fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("no block is longer than what fits a call")
}

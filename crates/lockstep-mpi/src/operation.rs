//! One operation in flight over MPI.
//!
//! All ranks of a group first exchange their calls, pair by pair, so that mismatches are found before any data moves, and ranks
//! that have not come are known. Then the data moves, in one MPI call if it fits.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use lockstep_comm::transport::{
    Blocks, Comparison, Exchange, Flow, Lane, MemoryRange, Receiver, Task, Ticket, window,
};
use lockstep_comm::{Call, CommError, GroupName, Kind, OperationContext, ReduceOp};

use crate::shim::{Comm, Mpi, Request};

/// Maximum size in bytes of a point-to-point message that is sent with its description, without waiting for the receiver.
const SMALL_BYTES: usize = 32 << 10;
/// Maximum number of members that tell each other their whole table, so that all name the same two if any disagree.
const TABLE_MEMBERS: usize = 64;
/// Number of words of a description.
const CALL_WORDS: usize = 3;

/// Message tag. Messages between two ranks with the same tag arrive in order.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(crate) enum Tag {
    /// Messages about the run.
    Control = 1,
    /// Call of an operation.
    Call = 2,
    /// Table of bytes that a rank sends and receives, for an all-to-all with uneven blocks.
    Table = 3,
    /// Blocks of a data-movement operation.
    Piece = 4,
    /// Description of a point-to-point message, with the data of a small one.
    Message = 5,
    /// Data of a larger point-to-point message.
    MessageData = 6,
}

/// Members of a group.
#[derive(Debug)]
pub(crate) struct Members {
    pub(crate) comm: Comm,
    pub(crate) name: GroupName,
    /// World ranks of the members, in group order.
    pub(crate) ranks: Vec<usize>,
    /// Index of this rank in `ranks`.
    pub(crate) own: usize,
    /// Maximum number of elements or bytes per MPI call.
    pub(crate) per_call: usize,
}

impl Members {
    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.own;
        (0..self.ranks.len()).filter(move |member| *member != own)
    }
}

/// An operation in flight.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) task: Task,
    pub(crate) sequence: u32,
    /// Number in the flight recorder.
    pub(crate) recorded: u64,
    pub(crate) ticket: Arc<Ticket>,
    pub(crate) step: Step,
    /// True if MPI has refused a call, so that the completed requests are not the whole operation.
    is_broken: bool,
    /// Requests of the current step.
    requests: Vec<Request>,
    /// Words of all members, in group order, including this rank's own.
    words: Vec<u64>,
    /// Description and data of a small point-to-point message.
    message: Vec<u8>,
    /// Counts and offsets that an MPI call reads until it is complete.
    lists: Vec<c_int>,
    /// Output buffer for an MPI call whose target overlaps its source.
    scratch: Vec<u8>,
}

/// Next step of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait for the calls of all members.
    Meet,
    /// Wait for the tables of all members.
    Tables,
    /// Wait for the data.
    Move,
    Done,
}

impl Running {
    /// Creates an operation that has not started.
    pub(crate) fn new(task: Task, sequence: u32, recorded: u64, ticket: Arc<Ticket>) -> Self {
        Self {
            task,
            sequence,
            recorded,
            ticket,
            step: Step::Meet,
            is_broken: false,
            requests: Vec::new(),
            words: Vec::new(),
            message: Vec::new(),
            lists: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// Starts the operation: sends this rank's call to the other members.
    pub(crate) fn begin(&mut self, mpi: &Mpi, members: &Members) -> Result<(), CommError> {
        let call = self.task.call.to_words();
        let begun = match self.task.flow {
            Flow::Send { to } => self.begin_send(mpi, members, to, call),
            Flow::Receive { from } => {
                self.message = vec![0; size_of_val(&call) + SMALL_BYTES];
                let (message, room) = (self.message.as_mut_ptr(), self.message.len());
                // SAFETY: the message does not move until it has arrived.
                unsafe { mpi.receive(members.comm, message, room, Some(from), Tag::Message as i32) }
                    .map(|request| self.requests.push(request))
            }
            _ => self.tell_members(mpi, members, &call, Tag::Call),
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
        self.message = bytemuck::cast_slice(&call).to_vec();
        let is_small = source.bytes() <= SMALL_BYTES;
        if is_small {
            // SAFETY: the source is the caller's for the duration of the operation.
            self.message.extend_from_slice(unsafe {
                std::slice::from_raw_parts(source.pointer.cast_const(), source.bytes())
            });
        }
        let (message, bytes) = (self.message.as_ptr(), self.message.len());
        // SAFETY: the message does not move until it is sent.
        self.requests.push(unsafe { mpi.send(members.comm, message, bytes, to, Tag::Message as i32)? });
        if !is_small {
            return self.send(mpi, members, source, to, Tag::MessageData);
        }
        self.ticket.complete();
        Ok(())
    }

    /// Sends `words` to all other members, and posts the receives of theirs.
    fn tell_members(
        &mut self,
        mpi: &Mpi,
        members: &Members,
        words: &[u64],
        tag: Tag,
    ) -> Result<(), CommError> {
        self.words = words.repeat(members.ranks.len());
        self.requests.clear();
        let bytes = size_of_val(words);
        let base = self.words.as_mut_ptr().cast::<u8>();
        for member in members.others() {
            let to = base.wrapping_add(member * bytes);
            // SAFETY: each member has its own part of the words, which do not move until this step is complete.
            let request = unsafe { mpi.receive(members.comm, to, bytes, Some(member), tag as i32)? };
            self.requests.push(request);
        }
        let own = base.wrapping_add(members.own * bytes);
        for member in members.others() {
            // SAFETY: nothing writes to this rank's own part of the words.
            self.requests.push(unsafe { mpi.send(members.comm, own, bytes, member, tag as i32)? });
        }
        Ok(())
    }

    /// Sends each other member its two words of `own`, the lengths of what this rank sends to it and expects from it, and
    /// posts the receives of theirs.
    fn tell_lengths(&mut self, mpi: &Mpi, members: &Members, own: &[u64]) -> Result<(), CommError> {
        self.words = own.repeat(2);
        self.requests.clear();
        let bytes = size_of::<[u64; 2]>();
        let (theirs, own) = (self.words.as_mut_ptr().cast::<u8>(), size_of_val(own));
        for member in members.others() {
            let to = theirs.wrapping_add(member * bytes);
            // SAFETY: each member has its own part of the words, which do not move until this step is complete.
            let request = unsafe { mpi.receive(members.comm, to, bytes, Some(member), Tag::Table as i32)? };
            self.requests.push(request);
        }
        for member in members.others() {
            let from = theirs.wrapping_add(own + member * bytes);
            // SAFETY: nothing writes to the second half of the words.
            self.requests.push(unsafe { mpi.send(members.comm, from, bytes, member, Tag::Table as i32)? });
        }
        Ok(())
    }

    /// Advances the operation as far as its requests are complete. Returns true if it moved on.
    pub(crate) fn advance(&mut self, mpi: &Mpi, members: &Members) -> Result<bool, CommError> {
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

    /// Completes the operation, once MPI has released the caller's memory.
    fn finish(&mut self) {
        let (target, bytes) = (self.task.target, self.scratch.len().min(self.task.target.bytes()));
        // SAFETY: no other code uses the target, which is the caller's until the operation is complete.
        unsafe { std::ptr::copy_nonoverlapping(self.scratch.as_ptr(), target.pointer, bytes) };
        self.step = Step::Done;
        if !self.is_broken {
            self.ticket.complete();
        }
    }

    /// Compares the calls, once all have arrived, and starts the next step.
    fn meet(&mut self, mpi: &Mpi, members: &Members) -> Result<(), CommError> {
        if let Flow::Receive { from } = self.task.flow {
            return self.open(mpi, members, from);
        }
        let (calls, _) = self.words.as_chunks::<CALL_WORDS>();
        self.comparison(members).of_calls(calls)?;
        match &self.task.flow {
            Flow::Unknown { sends, receives } if members.ranks.len() <= TABLE_MEMBERS => {
                let table: Vec<u64> = sends.iter().chain(receives).map(|bytes| *bytes as u64).collect();
                self.step = Step::Tables;
                self.tell_members(mpi, members, &table, Tag::Table)
            }
            Flow::Unknown { sends, receives } => {
                let pairs = sends.iter().zip(receives).flat_map(|(sent, received)| [*sent, *received]);
                let own: Vec<u64> = pairs.map(|bytes| bytes as u64).collect();
                self.step = Step::Tables;
                self.tell_lengths(mpi, members, &own)
            }
            _ => self.start(mpi, members),
        }
    }

    /// Plans the exchange, once the tables of all members have arrived, and starts it.
    fn read_tables(&mut self, mpi: &Mpi, members: &Members) -> Result<(), CommError> {
        let (words, comparison) = (2 * members.ranks.len(), self.comparison(members));
        let exchange = if members.ranks.len() <= TABLE_MEMBERS {
            comparison.of_tables(|member, index| self.words[member * words + index] as usize)?
        } else {
            let (theirs, own) = self.words.split_at(words);
            let lengths =
                |words: &[u64], member: usize| [0, 1].map(|index| words[2 * member + index] as usize);
            for member in 0..members.ranks.len() {
                let ([sent, expected], [own_sent, own_expected]) =
                    (lengths(theirs, member), lengths(own, member));
                comparison.of_lengths((member, sent), (members.own, own_expected))?;
                comparison.of_lengths((members.own, own_sent), (member, expected))?;
            }
            let of_own =
                |which: usize| (0..members.ranks.len()).map(|member| lengths(own, member)[which]).collect();
            let (sends, receives): (Vec<usize>, Vec<usize>) = (of_own(0), of_own(1));
            Exchange::of_own_blocks(members.own, &sends, &receives)
        };
        self.task.flow = Flow::Exchange(exchange);
        self.start(mpi, members)
    }

    /// Checks a received description, and takes the data or posts the receive of a larger message.
    fn open(&mut self, mpi: &Mpi, members: &Members, from: usize) -> Result<(), CommError> {
        let target = self.task.target;
        let (call, small) = self.message.split_at(size_of::<[u64; CALL_WORDS]>());
        let expected = Call { kind: Kind::Send, root: Some(members.own), ..self.task.call };
        if call != bytemuck::cast_slice::<u64, u8>(&expected.to_words()) {
            let mut words = [0; CALL_WORDS];
            bytemuck::cast_slice_mut(&mut words).copy_from_slice(call);
            let found = Call::from_words(words).unwrap_or(expected);
            return Err(self.comparison(members).mismatch(from, found, members.own, self.task.call));
        }
        self.step = Step::Move;
        if target.bytes() > SMALL_BYTES {
            return self.receive(mpi, members, target, from, Tag::MessageData);
        }
        // SAFETY: the target is the caller's for the duration of the operation.
        unsafe { std::ptr::copy_nonoverlapping(small.as_ptr(), target.pointer, target.bytes()) };
        Ok(())
    }

    /// Starts to move data. All members do so in the order of the operations.
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
                    // SAFETY: the data is the caller's for the duration of the operation.
                    let request =
                        unsafe { mpi.all_reduce(members.comm, source.slice(part.start, part.len()), op)? };
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
                // MPI inspects addresses, even of empty buffers.
                if target.overlaps(&source) || target.elements == 0 {
                    self.scratch = vec![0; target.bytes().max(1)];
                    output = self.scratch.as_mut_ptr();
                }
                // SAFETY: source and target are the caller's; scratch buffer and list are this operation's.
                let request = unsafe { mpi.reduce_scatter(members.comm, source, output, &self.lists, op)? };
                self.requests.push(request);
            }
        }
        Ok(())
    }

    /// Reduces elements `all` of the source to `target` on the root.
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
            let input = source.slice(part.start, part.len());
            // SAFETY: source and target are the caller's for the duration of the operation.
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
                    // SAFETY: the target, on the root also the source, is the caller's for the duration of the operation.
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
                // SAFETY: source and target are the caller's; the lists are this operation's.
                let request = unsafe { mpi.all_gather(members.comm, input, target.pointer, counts, starts)? };
                self.requests.push(request);
            }
            _ => self.exchange_pieces(mpi, members, exchange)?,
        }
        Ok(())
    }

    /// Starts sends and receives of all pieces between this rank and the others.
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
            // SAFETY: source and target are the caller's, and do not overlap unless they are identical.
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
        data: MemoryRange,
        to: usize,
        tag: Tag,
    ) -> Result<(), CommError> {
        for part in parts(0..data.bytes(), members.per_call) {
            let from = data.pointer.wrapping_add(part.start);
            // SAFETY: the data is the caller's for the duration of the operation.
            self.requests.push(unsafe { mpi.send(members.comm, from, part.len(), to, tag as i32)? });
        }
        Ok(())
    }

    fn receive(
        &mut self,
        mpi: &Mpi,
        members: &Members,
        data: MemoryRange,
        from: usize,
        tag: Tag,
    ) -> Result<(), CommError> {
        for part in parts(0..data.bytes(), members.per_call) {
            let to = data.pointer.wrapping_add(part.start);
            // SAFETY: the data is the caller's for the duration of the operation.
            let request = unsafe { mpi.receive(members.comm, to, part.len(), Some(from), tag as i32)? };
            self.requests.push(request);
        }
        Ok(())
    }

    /// Returns the world rank that the operation waits for: the peer of a point-to-point message, or a member that has
    /// not come.
    pub(crate) fn awaited(&mut self, mpi: &Mpi, members: &Members) -> Result<Option<usize>, CommError> {
        if let Flow::Send { to: peer } | Flow::Receive { from: peer } = self.task.flow {
            return Ok(Some(members.ranks[peer]));
        }
        if !matches!(self.step, Step::Meet | Step::Tables) {
            return Ok(None);
        }
        // The receives come first in the list of requests.
        let first = mpi.test(&mut self.requests)?;
        Ok(first.and_then(|first| members.others().nth(first)).map(|member| members.ranks[member]))
    }

    pub(crate) fn context(&self, members: &Members) -> OperationContext {
        OperationContext { call: self.task.call, sequence: self.sequence, group: members.name }
    }

    fn comparison<'a>(&self, members: &'a Members) -> Comparison<'a> {
        Comparison { ranks: &members.ranks, context: self.context(members) }
    }

    /// Returns true if MPI may access memory of a caller that is blocked in the operation.
    pub(crate) fn holds_borrowed_memory(&self) -> bool {
        self.step == Step::Move && !self.ticket.is_complete() && !self.ticket.has_memory()
    }
}

/// Operations of a group in flight.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) members: Members,
    /// Operations by lane. Only lanes that were ever used exist.
    pub(crate) lanes: BTreeMap<Lane, VecDeque<Running>>,
}

impl Lanes {
    pub(crate) fn new(members: Members) -> Self {
        Self { members, lanes: BTreeMap::new() }
    }

    /// Returns the lane of a task.
    pub(crate) fn lane(&mut self, task: &Task) -> &mut VecDeque<Running> {
        self.lanes.entry(Lane::of(&task.flow)).or_default()
    }

    /// Returns true if any operation is in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.lanes.values().any(|lane| !lane.is_empty())
    }
}

/// Splits a range into parts of at most `width`, the maximum of an MPI call.
fn parts(range: Range<usize>, width: usize) -> impl Iterator<Item = Range<usize>> {
    (0..range.len().div_ceil(width)).map(move |index| window(&range, width, index))
}

fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("no block is longer than what fits a call")
}

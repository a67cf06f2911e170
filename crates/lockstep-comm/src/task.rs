//! One operation of one rank, validated and planned, but not yet bound to a transport.

use crate::{
    Call, CommError, Kind, OperationContext, Problem, ReduceOp,
    blocks::Blocks,
    call,
    exchange::{Exchange, Matrix},
    memory::{HandOver, LentBuffer, MemoryRange},
};

/// An operation of a group on given memory: `I` is the type of its inputs, `O` that of its outputs.
///
/// In place means that a rank's own block already lies in the larger buffer.
#[derive(Debug)]
pub enum Collective<I, O> {
    /// Barrier: no rank returns before all have called it.
    Barrier,
    /// Broadcast of the root's data to all ranks.
    Broadcast {
        /// Buffer that the root sends and the other ranks overwrite.
        data: O,
        /// Root, as a rank of the group.
        root: usize,
    },
    /// Reduction of all ranks' data into the root's buffer. The other ranks' buffers keep their contents.
    Reduce {
        /// Buffer of the same length on all ranks.
        data: O,
        /// Operator of the reduction.
        op: ReduceOp,
        /// Root, as a rank of the group.
        root: usize,
    },
    /// Reduction of all ranks' data into the buffers of all ranks.
    AllReduce {
        /// Buffer of the same length on all ranks.
        data: O,
        /// Operator of the reduction.
        op: ReduceOp,
    },
    /// Reduction of all ranks' inputs, block r of which goes to rank r.
    ReduceScatter {
        /// Input of the same length on all ranks.
        input: I,
        /// This rank's block of the result.
        output: O,
        /// Operator of the reduction.
        op: ReduceOp,
        /// Number of elements of each block; `None` if all blocks are of equal length.
        counts: Option<Vec<usize>>,
    },
    /// `ReduceScatter` that writes this rank's block at its place in the input. The rest of the buffer is unspecified
    /// afterwards.
    ReduceScatterInPlace {
        /// Buffer of the same length on all ranks.
        data: O,
        /// Operator of the reduction.
        op: ReduceOp,
        /// Number of elements of each block; `None` if all blocks are of equal length.
        counts: Option<Vec<usize>>,
    },
    /// Concatenation of all ranks' inputs on every rank.
    AllGather {
        /// This rank's block.
        input: I,
        /// All ranks' blocks, in rank order.
        output: O,
        /// Number of elements of each block; `None` if all blocks are of equal length.
        counts: Option<Vec<usize>>,
    },
    /// `AllGather` with this rank's block already at its place in the output.
    AllGatherInPlace {
        /// All ranks' blocks, in rank order.
        data: O,
        /// Number of elements of each block; `None` if all blocks are of equal length.
        counts: Option<Vec<usize>>,
    },
    /// Block r of every rank's input goes to rank r, which stores the blocks in sender order.
    AllToAll {
        /// Blocks to send, one per rank.
        input: I,
        /// Blocks received, one per rank.
        output: O,
        /// Numbers of elements sent to, and received from, each rank; `None` if all blocks are of equal length.
        counts: Option<(Vec<usize>, Vec<usize>)>,
    },
    /// Block r of the root's input goes to rank r.
    Scatter {
        /// All blocks; `None` except on the root.
        input: Option<I>,
        /// This rank's block.
        output: O,
        /// Root, as a rank of the group.
        root: usize,
        /// Number of elements of each block; `None` if all blocks are of equal length.
        counts: Option<Vec<usize>>,
    },
    /// Concatenation of all ranks' inputs on the root.
    Gather {
        /// This rank's block.
        input: I,
        /// All ranks' blocks, in rank order; `None` except on the root.
        output: Option<O>,
        /// Root, as a rank of the group.
        root: usize,
        /// Number of elements of each block; `None` if all blocks are of equal length.
        counts: Option<Vec<usize>>,
    },
    /// Point-to-point send to one other rank.
    Send {
        /// Data to send.
        input: I,
        /// Receiver, as a rank of the group.
        to: usize,
    },
    /// Point-to-point receive from one other rank.
    Receive {
        /// Buffer to overwrite, as long as the sent data.
        output: O,
        /// Sender, as a rank of the group.
        from: usize,
    },
}

impl<I, O> Collective<I, O> {
    /// Waits until the operation, of kind `by`, may use the memory that it was given.
    pub(crate) fn hand_over(&mut self, by: Kind)
    where
        I: HandOver,
        O: HandOver,
    {
        let (input, output) = match self {
            Self::Barrier => (None, None),
            Self::Broadcast { data, .. }
            | Self::Reduce { data, .. }
            | Self::AllReduce { data, .. }
            | Self::ReduceScatterInPlace { data, .. }
            | Self::AllGatherInPlace { data, .. } => (None, Some(data)),
            Self::ReduceScatter { input, output, .. }
            | Self::AllGather { input, output, .. }
            | Self::AllToAll { input, output, .. } => (Some(input), Some(output)),
            Self::Scatter { input, output, .. } => (input.as_mut(), Some(output)),
            Self::Gather { input, output, .. } => (Some(input), output.as_mut()),
            Self::Send { input, .. } => (Some(input), None),
            Self::Receive { output, .. } => (None, Some(output)),
        };
        input.into_iter().for_each(|input| input.hand_over(by));
        output.into_iter().for_each(|output| output.hand_over(by));
    }
}

impl Collective<LentBuffer, LentBuffer> {
    /// Returns all lent memory, inputs first.
    pub(crate) fn into_memory(self) -> Vec<LentBuffer> {
        match self {
            Self::Barrier => Vec::new(),
            Self::Broadcast { data, .. }
            | Self::Reduce { data, .. }
            | Self::AllReduce { data, .. }
            | Self::ReduceScatterInPlace { data, .. }
            | Self::AllGatherInPlace { data, .. } => vec![data],
            Self::ReduceScatter { input, output, .. }
            | Self::AllGather { input, output, .. }
            | Self::AllToAll { input, output, .. } => vec![input, output],
            Self::Scatter { input, output, .. } => input.into_iter().chain([output]).collect(),
            Self::Gather { input, output, .. } => [input].into_iter().chain(output).collect(),
            Self::Send { input, .. } => vec![input],
            Self::Receive { output, .. } => vec![output],
        }
    }
}

/// Unit of work for a transport: a validated operation and its buffers.
#[derive(Debug)]
pub struct Task {
    /// The operation as this rank called it.
    pub call: Call,
    /// Flow of its data.
    pub flow: Flow,
    /// Memory that other ranks may read.
    pub source: MemoryRange,
    /// Destination of the result.
    pub target: MemoryRange,
}

/// Flow of an operation's data between the ranks of its group.
#[derive(Debug)]
pub enum Flow {
    /// Synchronization of all ranks, without data.
    Barrier,
    /// Reduction of all ranks' sources.
    Reduction {
        /// Operator of the reduction.
        op: ReduceOp,
        /// Block of each rank, in elements.
        blocks: Blocks,
        /// Destination of the result.
        receiver: Receiver,
    },
    /// Movement of data.
    Exchange(Exchange),
    /// An all-to-all with uneven blocks: bytes sent to, and received from, each rank. The exchange is known once all ranks have
    /// entered.
    Unknown {
        /// Bytes sent to each rank.
        sends: Vec<usize>,
        /// Bytes received from each rank.
        receives: Vec<usize>,
    },
    /// Point-to-point send to one rank of the group.
    Send {
        /// Receiver, as a rank of the group.
        to: usize,
    },
    /// Point-to-point receive from one rank of the group.
    Receive {
        /// Sender, as a rank of the group.
        from: usize,
    },
}

/// Destination of a reduction's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receiver {
    /// All ranks of the group.
    All,
    /// This rank of the group.
    One(usize),
    /// Each rank receives its own block.
    Owner,
}

impl Task {
    /// Validates and plans `collective` for `rank` of `ranks`.
    ///
    /// # Errors
    /// If the call is invalid whatever the other ranks call; returns the call and its problem.
    pub(crate) fn new<I, O>(
        collective: &Collective<I, O>,
        rank: usize,
        ranks: usize,
    ) -> Result<Self, (Call, Problem)>
    where
        for<'a> MemoryRange: From<&'a I> + From<&'a O>,
    {
        let builder = Builder { rank, ranks };
        match collective {
            Collective::Barrier => {
                let call = Call::bare(Kind::Barrier);
                Ok(Self { call, flow: Flow::Barrier, source: MemoryRange::EMPTY, target: MemoryRange::EMPTY })
            }
            Collective::Broadcast { data, root } => builder.broadcast(MemoryRange::from(data), *root),
            Collective::Reduce { data, op, root } => {
                builder.reduce(MemoryRange::from(data), *op, Some(*root))
            }
            Collective::AllReduce { data, op } => builder.reduce(MemoryRange::from(data), *op, None),
            Collective::ReduceScatter { input, output, op, counts } => builder.reduce_scatter(
                MemoryRange::from(input),
                Some(MemoryRange::from(output)),
                *op,
                counts.as_deref(),
            ),
            Collective::ReduceScatterInPlace { data, op, counts } => {
                builder.reduce_scatter(MemoryRange::from(data), None, *op, counts.as_deref())
            }
            Collective::AllGather { input, output, counts } => builder.all_gather(
                Some(MemoryRange::from(input)),
                MemoryRange::from(output),
                counts.as_deref(),
            ),
            Collective::AllGatherInPlace { data, counts } => {
                builder.all_gather(None, MemoryRange::from(data), counts.as_deref())
            }
            Collective::AllToAll { input, output, counts } => {
                let counts = counts.as_ref().map(|(sends, receives)| (sends.as_slice(), receives.as_slice()));
                builder.all_to_all(MemoryRange::from(input), MemoryRange::from(output), counts)
            }
            Collective::Scatter { input, output, root, counts } => {
                let whole = input.as_ref().map(MemoryRange::from);
                builder.rooted(Kind::Scatter, whole, MemoryRange::from(output), *root, counts.as_deref())
            }
            Collective::Gather { input, output, root, counts } => {
                let whole = output.as_ref().map(MemoryRange::from);
                builder.rooted(Kind::Gather, whole, MemoryRange::from(input), *root, counts.as_deref())
            }
            Collective::Send { input, to } => builder.between(Kind::Send, MemoryRange::from(input), *to),
            Collective::Receive { output, from } => {
                builder.between(Kind::Receive, MemoryRange::from(output), *from)
            }
        }
    }
}

/// Comparison of the members' descriptions of one operation.
#[derive(Debug)]
pub struct Comparison<'a> {
    /// World ranks of the members, in group order.
    pub ranks: &'a [usize],
    /// The operation as this rank called it.
    pub context: OperationContext,
}

impl Comparison<'_> {
    /// Checks that all members made the same call.
    ///
    /// # Errors
    /// If they did not; the error is the same on all ranks.
    pub fn of_calls(&self, calls: &[[u64; 3]]) -> Result<(), CommError> {
        let Some((odd, reference)) = call::odd_one_out(calls) else { return Ok(()) };
        let call = |member: usize| Call::from_words(calls[member]).unwrap_or(self.context.call);
        Err(self.mismatch(odd, call(odd), reference, call(reference)))
    }

    /// Builds the exchange of an all-to-all with uneven blocks from the members' tables. A member's table has one word per
    /// member for the bytes it sends to it, then one word per member for the bytes it receives from it.
    ///
    /// # Errors
    /// If a sender and a receiver disagree on a length; the error is the same on all ranks.
    pub fn of_tables(&self, word: impl Fn(usize, usize) -> usize) -> Result<Exchange, CommError> {
        let ranks = self.ranks.len();
        for sender in 0..ranks {
            for receiver in 0..ranks {
                let (sent, expected) = (word(sender, receiver), word(receiver, ranks + sender));
                self.of_lengths((sender, sent), (receiver, expected))?;
            }
        }
        let sends = (0..ranks * ranks).map(|index| word(index / ranks, index % ranks)).collect();
        Ok(Exchange::AllToAll(Matrix::Uneven { sends, ranks }))
    }

    /// Checks that a member sends as many bytes to another as that one expects of it.
    ///
    /// # Errors
    /// If it does not.
    pub fn of_lengths(
        &self,
        (sender, sent): (usize, usize),
        (receiver, expected): (usize, usize),
    ) -> Result<(), CommError> {
        if sent == expected {
            return Ok(());
        }
        let own = self.context.call;
        let size = own.number.size_bytes();
        let call = |bytes| Call { elements: bytes / size, root: Some(receiver), detail: 0, ..own };
        Err(self.mismatch(sender, call(sent), receiver, call(expected)))
    }

    /// Builds the error for member `odd`, which called `found` where `reference` called `expected`.
    pub fn mismatch(&self, odd: usize, found: Call, reference: usize, expected: Call) -> CommError {
        CommError::Mismatch {
            rank: self.ranks[odd],
            found,
            reference: self.ranks[reference],
            context: OperationContext { call: expected, ..self.context },
        }
    }
}

struct Builder {
    rank: usize,
    ranks: usize,
}

type Built = Result<Task, (Call, Problem)>;

impl Builder {
    fn broadcast(&self, data: MemoryRange, root: usize) -> Built {
        let call = Call { root: Some(root), ..of(Kind::Broadcast, data) };
        self.check(call, root < self.ranks, Problem::Rank)?;
        let flow = Flow::Exchange(Exchange::Broadcast { root, bytes: data.bytes() });
        let source =
            if self.rank == root { data } else { MemoryRange { number: data.number, ..MemoryRange::EMPTY } };
        Ok(Task { call, flow, source, target: data })
    }

    fn reduce(&self, data: MemoryRange, op: ReduceOp, root: Option<usize>) -> Built {
        let kind = if root.is_some() { Kind::Reduce } else { Kind::AllReduce };
        let call = Call { op: Some(op), root, ..of(kind, data) };
        self.check(call, root.is_none_or(|root| root < self.ranks), Problem::Rank)?;
        let receiver = root.map_or(Receiver::All, Receiver::One);
        let flow = Flow::Reduction { op, blocks: Blocks::shares(data.elements, self.ranks), receiver };
        Ok(Task { call, flow, source: data, target: data })
    }

    fn reduce_scatter(
        &self,
        data: MemoryRange,
        output: Option<MemoryRange>,
        op: ReduceOp,
        counts: Option<&[usize]>,
    ) -> Built {
        let call = Call { op: Some(op), detail: detail(counts), ..of(Kind::ReduceScatter, data) };
        let blocks = self.blocks(call, data.elements, counts)?;
        let own = blocks.range(self.rank);
        let target = output.unwrap_or_else(|| data.slice(own.start, own.len()));
        self.check(call, target.number == data.number, Problem::Types)?;
        self.check(call, target.elements == own.len(), Problem::Length)?;
        self.check(call, output.is_none() || !target.overlaps(&data), Problem::Overlap)?;
        let flow = Flow::Reduction { op, blocks, receiver: Receiver::Owner };
        Ok(Task { call, flow, source: data, target })
    }

    fn all_gather(&self, input: Option<MemoryRange>, data: MemoryRange, counts: Option<&[usize]>) -> Built {
        let call = Call { detail: detail(counts), ..of(Kind::AllGather, data) };
        let blocks = self.blocks(call, data.elements, counts)?;
        let own = blocks.range(self.rank);
        let source = input.unwrap_or_else(|| data.slice(own.start, own.len()));
        self.check(call, source.number == data.number, Problem::Types)?;
        self.check(call, source.elements == own.len(), Problem::Length)?;
        self.check(call, input.is_none() || !source.overlaps(&data), Problem::Overlap)?;
        let flow = Flow::Exchange(Exchange::AllGather(blocks.scaled(data.number.size_bytes())));
        Ok(Task { call, flow, source, target: data })
    }

    fn all_to_all(
        &self,
        input: MemoryRange,
        output: MemoryRange,
        counts: Option<(&[usize], &[usize])>,
    ) -> Built {
        let (ranks, size) = (self.ranks, input.number.size_bytes());
        // Lengths of uneven blocks differ from rank to rank; they are compared pair by pair.
        let elements = if counts.is_some() { 0 } else { input.elements };
        let call = Call { elements, detail: u64::from(counts.is_some()), ..of(Kind::AllToAll, input) };
        self.check(call, input.number == output.number, Problem::Types)?;
        self.check(call, !input.overlaps(&output), Problem::Overlap)?;
        let flow = match counts {
            None => {
                self.check(call, input.elements == output.elements, Problem::Length)?;
                self.check(call, input.elements.is_multiple_of(ranks), Problem::Uneven)?;
                Flow::Exchange(Exchange::AllToAll(Matrix::Even { bytes: input.bytes() / ranks, ranks }))
            }
            Some((sends, receives)) => {
                self.blocks(call, input.elements, Some(sends))?;
                self.blocks(call, output.elements, Some(receives))?;
                let bytes = |counts: &[usize]| counts.iter().map(|count| count * size).collect();
                Flow::Unknown { sends: bytes(sends), receives: bytes(receives) }
            }
        };
        Ok(Task { call, flow, source: input, target: output })
    }

    /// Plans a scatter or gather: `whole` is the root's buffer, `own` that of each rank.
    fn rooted(
        &self,
        kind: Kind,
        whole: Option<MemoryRange>,
        own: MemoryRange,
        root: usize,
        counts: Option<&[usize]>,
    ) -> Built {
        let total = match (counts, whole) {
            (Some(counts), _) => counts.iter().fold(0_usize, |sum, count| sum.saturating_add(*count)),
            (None, _) => own.elements.saturating_mul(self.ranks),
        };
        let call = Call { root: Some(root), elements: total, detail: detail(counts), ..of(kind, own) };
        self.check(call, root < self.ranks, Problem::Rank)?;
        let blocks = self.blocks(call, total, counts)?;
        self.check(call, own.elements == blocks.range(self.rank).len(), Problem::Length)?;
        self.check(call, whole.is_some() || self.rank != root, Problem::Length)?;
        // `counts` are given on the root only.
        let whole = whole.filter(|_| self.rank == root);
        if let Some(whole) = whole {
            self.check(call, whole.number == own.number, Problem::Types)?;
            self.check(call, whole.elements == total, Problem::Length)?;
            self.check(call, !whole.overlaps(&own), Problem::Overlap)?;
        }
        let blocks = blocks.scaled(own.number.size_bytes());
        let whole = whole.unwrap_or(MemoryRange { number: own.number, ..MemoryRange::EMPTY });
        Ok(if kind == Kind::Scatter {
            Task {
                call,
                flow: Flow::Exchange(Exchange::Scatter { root, blocks }),
                source: whole,
                target: own,
            }
        } else {
            Task { call, flow: Flow::Exchange(Exchange::Gather { root, blocks }), source: own, target: whole }
        })
    }

    fn between(&self, kind: Kind, data: MemoryRange, peer: usize) -> Built {
        let call = Call { root: Some(peer), ..of(kind, data) };
        self.check(call, peer < self.ranks, Problem::Rank)?;
        self.check(call, peer != self.rank, Problem::Itself)?;
        Ok(if kind == Kind::Send {
            Task { call, flow: Flow::Send { to: peer }, source: data, target: MemoryRange::EMPTY }
        } else {
            Task { call, flow: Flow::Receive { from: peer }, source: MemoryRange::EMPTY, target: data }
        })
    }

    fn blocks(&self, call: Call, total: usize, counts: Option<&[usize]>) -> Result<Blocks, (Call, Problem)> {
        let Some(counts) = counts else {
            return Blocks::even(total, self.ranks).ok_or((call, Problem::Uneven));
        };
        self.check(call, counts.len() == self.ranks, Problem::Counts)?;
        let blocks = Blocks::of_lengths(counts).filter(|blocks| blocks.total() == total);
        blocks.ok_or((call, Problem::Counts))
    }

    fn check(&self, call: Call, is_right: bool, problem: Problem) -> Result<(), (Call, Problem)> {
        if is_right { Ok(()) } else { Err((call, problem)) }
    }
}

fn of(kind: Kind, data: MemoryRange) -> Call {
    Call { number: data.number, elements: data.elements, ..Call::bare(kind) }
}

fn detail(counts: Option<&[usize]>) -> u64 {
    counts.map_or(0, |counts| call::hash(counts.iter().copied()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Source, Target};

    #[test]
    fn what_cannot_be_right_is_told_with_its_reason() {
        let (mut a, mut b) = ([0.0_f32; 8], [0.0_f32; 8]);
        let mut ids = [0_u8; 8];
        let check = |collective: Collective<Source<'_>, Target<'_>>| {
            Task::new(&collective, 1, 4).err().map(|(_, problem)| problem)
        };
        let sum = ReduceOp::Sum;
        assert_eq!(
            check(Collective::Broadcast { data: a[..].as_mut().into(), root: 4 }),
            Some(Problem::Rank)
        );
        assert_eq!(
            check(Collective::Reduce { data: a[..].as_mut().into(), op: sum, root: 9 }),
            Some(Problem::Rank)
        );
        let scattered = |input: &[f32], output: &mut [f32], counts: Option<&[usize]>| {
            let counts = counts.map(<[usize]>::to_vec);
            check(Collective::ReduceScatter { input: input.into(), output: output.into(), op: sum, counts })
        };
        assert_eq!(scattered(&a[..7], &mut b[..2], None), Some(Problem::Uneven));
        assert_eq!(scattered(&a[..8], &mut b[..3], None), Some(Problem::Length));
        assert_eq!(scattered(&a[..8], &mut b[..2], None), None);
        assert_eq!(scattered(&a[..8], &mut b[..3], Some(&[1, 3, 2, 1])), Some(Problem::Counts));
        assert_eq!(scattered(&a[..8], &mut b[..3], Some(&[1, 3, 4])), Some(Problem::Counts));
        assert_eq!(scattered(&a[..8], &mut b[..3], Some(&[1, 3, 0, 4])), None);
        let typed =
            Collective::AllGather { input: (&ids[..2]).into(), output: a[..].as_mut().into(), counts: None };
        assert_eq!(check(typed), Some(Problem::Types));
        let to_itself = Collective::Send { input: (&ids[..]).into(), to: 1 };
        assert_eq!(check(to_itself), Some(Problem::Itself));
        let no_input =
            Collective::Scatter { input: None, output: ids[..].as_mut().into(), root: 1, counts: None };
        assert_eq!(check(no_input), Some(Problem::Length));
        let counts = Some((vec![2, 2, 2, 2], vec![2, 2, 2, 1]));
        let received =
            Collective::AllToAll { input: a[..].as_ref().into(), output: b[..].as_mut().into(), counts };
        assert_eq!(check(received), Some(Problem::Counts));
    }

    #[test]
    fn an_output_that_overlaps_its_input_is_refused() {
        let arena = lockstep_tensor::Arena::new();
        let buffer = arena.allocate(256, lockstep_plan::MemoryCategory::Workspace).unwrap();
        let view = |start: usize, floats: usize| buffer.view(lockstep_plan::DType::F32, start * 4, [floats]);
        let gather = |input, output| {
            let collective: Collective<Source<'_>, Target<'_>> = Collective::AllGather {
                input: Source::from(input),
                output: Target::from(output),
                counts: None,
            };
            Task::new(&collective, 0, 2).err().map(|(_, problem)| problem)
        };
        assert_eq!(gather(view(0, 4), view(4, 8)), None);
        assert_eq!(gather(view(4, 4), view(4, 8)), Some(Problem::Overlap));
        assert_eq!(gather(view(3, 4), view(4, 8)), Some(Problem::Overlap));
    }
}

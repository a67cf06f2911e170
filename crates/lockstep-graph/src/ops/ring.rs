//! Ring attention (Liu et al., 2023): keys and values travel around the context-parallel group, and the partial
//! outputs of each rank's queries are merged by their log-sum-exps. In the backward the gradients of keys and values
//! travel after them, growing on each rank, until they reach their owner.
//!
//! A rank sends a block on before it computes with it, so transfers overlap with compute wherever the transport makes
//! progress by itself. The order of additions is fixed, so no bit depends on timing.

use lockstep_comm::{Collective, CommError, LentBuffer, Pending};
use lockstep_plan::{ContextPlace, DType};
use lockstep_tensor::{AttentionWrite, Buffer, TokenSpan, View, Write};

use crate::{
    block::Value,
    buffers::Ring,
    context::{may_see, spans},
    ops::attention::{AttentionGradients, AttentionOperation},
    peers::Peers,
    replay::Run,
};

/// Slot of the copy that kernels read while its block is sent on.
const COPY: usize = 2;
/// Slot that gradients are received in.
const COMING: usize = 2;

/// Sends to the next rank of the ring, and receives from the previous one.
struct Neighbours<'a> {
    peers: Peers<'a>,
    next: usize,
    before: usize,
}

impl<'a> Neighbours<'a> {
    fn new(peers: Peers<'a>) -> Self {
        let (rank, ranks) = (peers.group.rank(), peers.group.size());
        Self { peers, next: (rank + 1) % ranks, before: (rank + ranks - 1) % ranks }
    }

    fn send(&self, buffer: &mut Buffer, bytes: usize) -> Result<Pending, CommError> {
        self.peers.start(Collective::Send { input: lent(buffer, bytes), to: self.next })
    }

    #[track_caller]
    fn receive(&self, buffer: &mut Buffer, bytes: usize) -> Result<Pending, CommError> {
        self.peers.start(Collective::Receive { output: lent(buffer, bytes), from: self.before })
    }

    /// Waits for a message; its buffer returns to the owner.
    fn wait(&self, pending: Option<Pending>) -> Result<(), CommError> {
        pending.map_or(Ok(()), |pending| self.peers.wait(pending))
    }
}

fn lent(buffer: &mut Buffer, bytes: usize) -> LentBuffer {
    LentBuffer::new(buffer.lend(0..bytes), DType::U8)
}

/// Blocks of keys and values in flight: this rank's block first, then the previous rank's, and so on around the ring.
struct Blocks<'a> {
    neighbours: Neighbours<'a>,
    bytes: usize,
    /// Slots of the block being sent and of the block being received.
    going: usize,
    coming: usize,
    sent: Option<Pending>,
    received: Option<Pending>,
}

impl<'a> Blocks<'a> {
    /// Starts to send this rank's block, which is in the send slot, and to receive the previous rank's.
    fn start(neighbours: Neighbours<'a>, blocks: &mut [Buffer; 3], bytes: usize) -> Result<Self, CommError> {
        let (going, coming) = (0, 1);
        let sent = Some(neighbours.send(&mut blocks[going], bytes)?);
        let received = Some(neighbours.receive(&mut blocks[coming], bytes)?);
        Ok(Self { neighbours, bytes, going, coming, sent, received })
    }

    /// Waits for the block being received, and sends it on unless it `is_last`. Returns the slot to read it from.
    fn next(&mut self, run: &Run<'_>, blocks: &mut [Buffer; 3], is_last: bool) -> Result<usize, CommError> {
        self.neighbours.wait(self.received.take())?;
        if is_last {
            return Ok(self.coming);
        }
        self.neighbours.wait(self.sent.take())?;
        std::mem::swap(&mut self.going, &mut self.coming);
        let view = |slot: usize| blocks[slot].view(DType::U8, 0, [self.bytes]);
        run.replay.queue.cast(view(self.going), view(COPY));
        self.sent = Some(self.neighbours.send(&mut blocks[self.going], self.bytes)?);
        self.received = Some(self.neighbours.receive(&mut blocks[self.coming], self.bytes)?);
        Ok(COPY)
    }

    /// Waits until the last block has been sent.
    fn end(self) -> Result<(), CommError> {
        self.neighbours.wait(self.sent)
    }
}

/// Keys and values of one rank, or their gradients, in one buffer.
#[derive(Clone, Copy)]
struct Pair<'a> {
    keys: View<'a>,
    values: View<'a>,
}

impl<'a> Pair<'a> {
    fn in_buffer(buffer: &'a Buffer, dtype: DType, [keys, values]: [View<'_>; 2]) -> Self {
        Self {
            keys: buffer.view(dtype, 0, keys.shape()),
            values: buffer.view(dtype, keys.elements() * dtype.size_bytes(), values.shape()),
        }
    }
}

impl AttentionOperation {
    /// Runs the forward of ring attention.
    pub(crate) fn ring_attention(&self, run: &Run<'_>, sums: Option<Value>) -> Result<(), CommError> {
        let (q, y) = (run.value(self.q), run.value(self.y));
        let out = sums.map_or(y, |sums| run.value(sums));
        self.around(run, |_, keys_of, Pair { keys, values }| {
            self.for_each_call(run, keys_of, |spans, write| {
                self.attend(run, spans, [q, keys, values], out, write);
                run.peers_of_context().progress()
            })
        })?;
        if sums.is_some() {
            run.replay.queue.cast(out, y);
        }
        Ok(())
    }

    /// Runs the backward of ring attention; the gradients of keys and values travel after them.
    pub(crate) fn ring_attention_backward(
        &self,
        run: &Run<'_>,
        sums: Option<Value>,
        dy: View<'_>,
        gradients: AttentionGradients<'_>,
    ) -> Result<(), CommError> {
        let queue = run.replay.queue;
        let AttentionGradients { dq, dk, dv } = gradients;
        let sum = sums.map_or(dq, |sums| run.value(sums));
        let neighbours = Neighbours::new(run.peers_of_context());
        let bytes = (dk.elements() + dv.elements()) * DType::F32.size_bytes();
        let mut slots = ring(run).gradients.borrow_mut();
        let (mut received, mut sent) = (None, [None, None]);
        self.around(run, |step, keys_of, block| {
            let turn = step % 2;
            neighbours.wait(sent[turn].take())?;
            let own = Pair::in_buffer(&slots[turn], DType::F32, [dk, dv]);
            queue.zero(own.keys);
            queue.zero(own.values);
            self.for_each_call(run, keys_of, |spans, write| {
                let write = AttentionWrite { queries: write, keys: Write::Accumulate };
                let gradients = AttentionGradients { dq: sum, dk: own.keys, dv: own.values };
                self.attend_backward(run, spans, [block.keys, block.values], dy, gradients, write);
                neighbours.peers.progress()
            })?;
            // Add the gradients that the previous ranks of the ring have summed for these keys and values.
            neighbours.wait(received.take())?;
            if step > 0 {
                let before = Pair::in_buffer(&slots[COMING], DType::F32, [dk, dv]);
                queue.add(own.keys, before.keys, own.keys);
                queue.add(own.values, before.values, own.values);
            }
            sent[turn] = Some(neighbours.send(&mut slots[turn], bytes)?);
            received = Some(neighbours.receive(&mut slots[COMING], bytes)?);
            Ok(())
        })?;
        [received].into_iter().chain(sent).try_for_each(|pending| neighbours.wait(pending))?;
        let whole = Pair::in_buffer(&slots[COMING], DType::F32, [dk, dv]);
        queue.cast(whole.keys, dk);
        queue.cast(whole.values, dv);
        if sums.is_some() {
            queue.cast(sum, dq);
        }
        Ok(())
    }

    /// Calls `visit` with (step, rank, keys and values of that rank): first with this rank's block, then with the
    /// previous rank's, and so on.
    fn around(
        &self,
        run: &Run<'_>,
        mut visit: impl FnMut(usize, usize, Pair<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let ContextPlace { ranks, rank, .. } = run.shapes.context;
        let own = Pair { keys: run.value(self.k), values: run.value(self.v) };
        let (dtype, like) = (own.keys.dtype(), [own.keys, own.values]);
        let mut slots = ring(run).blocks.borrow_mut();
        let first = Pair::in_buffer(&slots[0], dtype, like);
        run.replay.queue.cast(own.keys, first.keys);
        run.replay.queue.cast(own.values, first.values);
        let bytes = (own.keys.elements() + own.values.elements()) * dtype.size_bytes();
        let mut blocks = Blocks::start(Neighbours::new(run.peers_of_context()), &mut slots, bytes)?;
        visit(0, rank, own)?;
        for step in 1..ranks {
            let slot = blocks.next(run, &mut slots, step + 1 == ranks)?;
            let block = Pair::in_buffer(&slots[slot], dtype, like);
            visit(step, (rank + ranks - step) % ranks, block)?;
        }
        blocks.end()
    }

    /// Calls `visit` with spans of the local queries and of the keys of rank `keys_of`, and with the write mode of
    /// the result. Each range of queries meets its own range of keys first, because every query sees at least one of
    /// them.
    fn for_each_call(
        &self,
        run: &Run<'_>,
        keys_of: usize,
        mut visit: impl FnMut([TokenSpan; 2], Write) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let (place, held) = (run.shapes.context, run.shapes.block.seq_len);
        let keys = spans(place, keys_of, held);
        for (half, queries) in spans(place, place.rank, held).into_iter().enumerate() {
            let is_own = |index: usize| keys_of == place.rank && index == half;
            if is_own(half) {
                visit([queries, keys[half]], Write::Overwrite)?;
            }
            for (index, keys) in keys.into_iter().enumerate() {
                if !is_own(index) && may_see(queries, keys, self.shape.window, self.shape.direction) {
                    visit([queries, keys], Write::Accumulate)?;
                }
            }
        }
        Ok(())
    }
}

fn ring<'a>(run: &Run<'a>) -> &'a Ring {
    let ring = run.replay.context.and_then(|context| context.ring);
    ring.expect("a program whose keys go round is given memory for them")
}

//! Data-movement operations in shared memory. Each rank pulls its pieces from the other ranks' streams: directly if a stream
//! is in shared memory, chunk by chunk otherwise.

use lockstep_tensor::Workers;

use super::{
    buffer_location::BufferLocation,
    copy::{copy, copy_past_cache},
    layout::CHUNK_BYTES,
    members::{Counter, Members},
    operation::{Chunks, Running, Step},
    reduction::take_turn,
};
use crate::{
    blocks::{intersection, window},
    exchange::Exchange,
    task::Flow,
};

impl Running {
    /// Advances the operation as far as the other ranks permit.
    pub(crate) fn advance_exchange(
        &mut self,
        members: &Members,
        chunks: &mut Chunks,
        workers: Option<&Workers>,
    ) {
        let Flow::Exchange(exchange) = &self.task.flow else { return };
        loop {
            let next = match self.step {
                Step::Meet => {
                    self.pull_at_once(exchange, members, workers);
                    Step::Fill
                }
                Step::Fill if self.window == self.windows(exchange, members) => Step::Done,
                Step::Fill => {
                    self.expose(members, chunks, workers);
                    take_turn(members, chunks);
                    Step::Filled
                }
                Step::Filled if members.behind(Counter::Turn, chunks.turn).is_some() => return,
                Step::Filled | Step::Combined => {
                    self.pull_window(exchange, members, chunks, workers);
                    self.window += 1;
                    chunks.window = chunks.window.wrapping_add(1);
                    Step::Fill
                }
                Step::Done => return,
            };
            self.step = next;
        }
    }

    /// Pulls all pieces that are in shared memory, and this rank's own piece.
    fn pull_at_once(&self, exchange: &Exchange, members: &Members, workers: Option<&Workers>) {
        for member in 0..members.len() {
            let piece = exchange.piece(members.own, member);
            if piece.bytes == 0 {
                continue;
            }
            let to = self.task.target.pointer.wrapping_add(piece.to);
            let from = match members.source_location(member, self.sequence) {
                _ if member == members.own => self.task.source.pointer.cast_const(),
                BufferLocation::Small => members
                    .at(member, members.segments.layout.small_slot(members.index, self.sequence))
                    .cast_const(),
                BufferLocation::Shared(offset) => members.at(member, offset).cast_const(),
                BufferLocation::Private => continue,
            };
            let from = from.wrapping_add(piece.from);
            if from != to.cast_const() {
                // SAFETY: the piece is within the other rank's stream, which does not change until this rank has
                // finished, and within the target. The own source is identical to its place in the target, or does not
                // overlap the target.
                unsafe { copy_past_cache(workers, from, to, piece.bytes) };
            }
        }
    }

    /// Returns the number of chunks that the longest stream outside shared memory takes.
    fn windows(&self, exchange: &Exchange, members: &Members) -> usize {
        let is_private =
            |member: &usize| members.source_location(*member, self.sequence) == BufferLocation::Private;
        let streams = (0..members.len()).filter(is_private).map(|member| exchange.stream(member));
        streams.max().unwrap_or(0).div_ceil(CHUNK_BYTES)
    }

    /// Copies the current window of this rank's stream to its chunk.
    fn expose(&self, members: &Members, chunks: &Chunks, workers: Option<&Workers>) {
        if members.source_location(members.own, self.sequence) != BufferLocation::Private {
            return;
        }
        let part = window(&(0..self.task.source.bytes()), CHUNK_BYTES, self.window);
        let chunk = members.segments.layout.chunk(members.index, chunks.window);
        let from = self.task.source.pointer.wrapping_add(part.start);
        // SAFETY: the source is the caller's. The chunk is this rank's; it was last read two windows ago, and all ranks
        // have taken a turn since.
        unsafe { copy(workers, from, members.at(members.own, chunk), part.len()) };
    }

    /// Pulls the parts of pieces that are in the other ranks' current chunks.
    fn pull_window(
        &self,
        exchange: &Exchange,
        members: &Members,
        chunks: &Chunks,
        workers: Option<&Workers>,
    ) {
        let chunk = members.segments.layout.chunk(members.index, chunks.window);
        for member in (0..members.len()).filter(|member| *member != members.own) {
            if members.source_location(member, self.sequence) != BufferLocation::Private {
                continue;
            }
            let piece = exchange.piece(members.own, member);
            let shown = window(&(0..exchange.stream(member)), CHUNK_BYTES, self.window);
            let part = intersection(&(piece.from..piece.from + piece.bytes), &shown);
            if part.is_empty() {
                continue;
            }
            let from = members.at(member, chunk + part.start - shown.start);
            let to = self.task.target.pointer.wrapping_add(piece.to + part.start - piece.from);
            // SAFETY: the chunk does not change until all ranks have taken the next two turns; the piece is within the target.
            unsafe { copy(workers, from, to, part.len()) };
        }
    }
}

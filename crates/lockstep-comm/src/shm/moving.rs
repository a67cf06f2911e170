//! Operations that only move data, in shared memory: each rank pulls its pieces from the others' streams, from where they
//! lie if that is shared, else chunk by chunk.

use lockstep_tensor::Workers;

use super::{
    copy::{copy, copy_past_cache},
    layout::CHUNK_BYTES,
    members::{Counter, Members},
    place::Place,
    queue::{Chunks, Running, Step},
    reduction::take_turn,
};
use crate::{
    blocks::{intersection, window},
    exchange::Exchange,
    task::Flow,
};

impl Running {
    /// Goes on as far as the other ranks permit.
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

    /// Pulls what lies in shared memory, and the own piece.
    fn pull_at_once(&self, exchange: &Exchange, members: &Members, workers: Option<&Workers>) {
        for member in 0..members.len() {
            let piece = exchange.piece(members.own, member);
            if piece.bytes == 0 {
                continue;
            }
            let to = self.task.target.pointer.wrapping_add(piece.to);
            let from = match members.source_place(member, self.sequence) {
                _ if member == members.own => self.task.source.pointer.cast_const(),
                Place::Small => members
                    .at(member, members.segments.layout.small_slot(members.index, self.sequence))
                    .cast_const(),
                Place::Shared(offset) => members.at(member, offset).cast_const(),
                Place::Private => continue,
            };
            let from = from.wrapping_add(piece.from);
            if from != to.cast_const() {
                // SAFETY: the piece lies in the other's stream, which stays as it is until this rank has finished, and in
                // the target; the own source is the target's own place, or overlaps it nowhere.
                unsafe { copy_past_cache(workers, from, to, piece.bytes) };
            }
        }
    }

    /// How many chunks the longest stream takes that is not in shared memory.
    fn windows(&self, exchange: &Exchange, members: &Members) -> usize {
        let is_private = |member: &usize| members.source_place(*member, self.sequence) == Place::Private;
        let streams = (0..members.len()).filter(is_private).map(|member| exchange.stream(member));
        streams.max().unwrap_or(0).div_ceil(CHUNK_BYTES)
    }

    /// Copies the window at hand of the own stream to the own chunk.
    fn expose(&self, members: &Members, chunks: &Chunks, workers: Option<&Workers>) {
        if members.source_place(members.own, self.sequence) != Place::Private {
            return;
        }
        let part = window(&(0..self.task.source.bytes()), CHUNK_BYTES, self.window);
        let chunk = members.segments.layout.chunk(members.index, chunks.window);
        let from = self.task.source.pointer.wrapping_add(part.start);
        // SAFETY: the source is the caller's; the chunk is this rank's, and everybody has taken a turn since it was read
        // last, two windows ago.
        unsafe { copy(workers, from, members.at(members.own, chunk), part.len()) };
    }

    /// Pulls the parts of pieces that lie in the others' chunks.
    fn pull_window(
        &self,
        exchange: &Exchange,
        members: &Members,
        chunks: &Chunks,
        workers: Option<&Workers>,
    ) {
        let chunk = members.segments.layout.chunk(members.index, chunks.window);
        for member in (0..members.len()).filter(|member| *member != members.own) {
            if members.source_place(member, self.sequence) != Place::Private {
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
            // SAFETY: the chunk stays as it is until everybody has taken the next two turns; the piece lies in the target.
            unsafe { copy(workers, from, to, part.len()) };
        }
    }
}

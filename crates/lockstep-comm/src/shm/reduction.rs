//! Reductions in shared memory. Each rank reduces its own block of the elements over all ranks' data, in the order of the
//! tree, and writes the result to all ranks that want it.
//!
//! Small messages are the exception: they are in all ranks' small slots, and each receiver reduces all of the elements itself.

use lockstep_tensor::Workers;

use super::{
    buffer_location::BufferLocation,
    copy::{copy, in_parts},
    layout::CHUNK_BYTES,
    members::{Counter, Members},
    operation::{Chunks, Running, Step},
};
use crate::{
    MAX_LOCAL_RANKS, ReduceOp,
    blocks::{Blocks, window},
    memory::MemoryRange,
    reduce::reduce,
    task::Receiver,
};

/// Alignment, in elements, of each rank's part of a chunk.
const ALIGNMENT_ELEMENTS: usize = 64;

impl Running {
    /// Advances the operation as far as the other ranks permit.
    pub(crate) fn advance_reduction(
        &mut self,
        members: &Members,
        chunks: &mut Chunks,
        workers: Option<&Workers>,
        op: ReduceOp,
        blocks: &Blocks,
        receiver: Receiver,
    ) {
        let reduction = Reduction::new(self, members, workers, op, blocks, receiver);
        loop {
            let next = match self.step {
                Step::Meet if members.len() == 1 && receiver != Receiver::Owner => Step::Done,
                Step::Meet if reduction.is_small() => {
                    reduction.combine_small();
                    Step::Done
                }
                Step::Meet if reduction.is_in_place() => {
                    reduction.combine(blocks.range(members.own), 0, chunks);
                    Step::Done
                }
                Step::Meet => Step::Fill,
                Step::Fill if self.window == reduction.windows() => Step::Done,
                Step::Fill => {
                    reduction.fill(self.window, chunks);
                    take_turn(members, chunks);
                    Step::Filled
                }
                Step::Filled | Step::Combined if members.behind(Counter::Turn, chunks.turn).is_some() => {
                    return;
                }
                Step::Filled => {
                    let part = window(&blocks.range(members.own), reduction.width(), self.window);
                    reduction.combine(part, self.window, chunks);
                    if receiver == Receiver::Owner {
                        self.end_window(chunks)
                    } else {
                        take_turn(members, chunks);
                        Step::Combined
                    }
                }
                Step::Combined => {
                    reduction.collect(self.window);
                    self.end_window(chunks)
                }
                Step::Done => return,
            };
            self.step = next;
        }
    }

    pub(crate) fn end_window(&mut self, chunks: &mut Chunks) -> Step {
        self.window += 1;
        chunks.window = chunks.window.wrapping_add(1);
        Step::Fill
    }
}

/// Publishes that this rank has completed one more step within an operation.
pub(crate) fn take_turn(members: &Members, chunks: &mut Chunks) {
    chunks.turn = chunks.turn.wrapping_add(1);
    members.publish(Counter::Turn, chunks.turn);
}

/// A reduction with everything that its steps need.
struct Reduction<'a> {
    members: &'a Members,
    workers: Option<&'a Workers>,
    op: ReduceOp,
    blocks: &'a Blocks,
    receiver: Receiver,
    source: MemoryRange,
    target: MemoryRange,
    sequence: u32,
}

impl<'a> Reduction<'a> {
    fn new(
        running: &Running,
        members: &'a Members,
        workers: Option<&'a Workers>,
        op: ReduceOp,
        blocks: &'a Blocks,
        receiver: Receiver,
    ) -> Self {
        let (source, target) = (running.task.source, running.task.target);
        Self { members, workers, op, blocks, receiver, source, target, sequence: running.sequence }
    }

    fn size(&self) -> usize {
        self.source.number.size_bytes()
    }

    fn source_location(&self, member: usize) -> BufferLocation {
        self.members.source_location(member, self.sequence)
    }

    /// Returns true if the data is in small slots. It has the same length on all ranks, so this holds for all or for none.
    fn is_small(&self) -> bool {
        self.source_location(self.members.own) == BufferLocation::Small
    }

    /// Returns true if all ranks' data is in shared memory.
    fn is_in_place(&self) -> bool {
        (0..self.members.len())
            .all(|member| matches!(self.source_location(member), BufferLocation::Shared(_)))
    }

    fn wants_result(&self, member: usize) -> bool {
        match self.receiver {
            Receiver::All | Receiver::Owner => true,
            Receiver::One(root) => member == root,
        }
    }

    /// Returns the number of elements of each rank's block that are processed at a time.
    fn width(&self) -> usize {
        let even = CHUNK_BYTES / self.size() / self.members.len();
        (even / ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS).max(1)
    }

    fn windows(&self) -> usize {
        self.blocks.longest(self.members.len()).div_ceil(self.width())
    }

    /// Reduces the data in the small slots.
    fn combine_small(&self) {
        let members = self.members;
        if !self.wants_result(members.own) {
            return;
        }
        let (part, target) = match self.receiver {
            Receiver::Owner => (self.blocks.range(members.own), self.target.pointer),
            _ => (0..self.source.elements, self.target.pointer),
        };
        let slot =
            members.segments.layout.small_slot(members.index, self.sequence) + part.start * self.size();
        let mut sources = [std::ptr::null(); MAX_LOCAL_RANKS];
        for (member, source) in sources[..members.len()].iter_mut().enumerate() {
            *source = members.at(member, slot).cast_const();
        }
        // SAFETY: the slots hold the ranks' data of this operation, of this length, until this rank finishes the operation. The
        // target is the caller's own for the duration of the operation, and is no slot.
        unsafe { reduce(self.source.number, self.op, &sources[..members.len()], &[target], part.len()) };
    }

    /// Copies the other ranks' parts of window `index` of this rank's data to its chunk.
    fn fill(&self, index: usize, chunks: &Chunks) {
        let members = self.members;
        if matches!(self.source_location(members.own), BufferLocation::Shared(_)) {
            return;
        }
        let chunk = members.segments.layout.chunk(members.index, chunks.window);
        for member in (0..members.len()).filter(|member| *member != members.own) {
            let part = window(&self.blocks.range(member), self.width(), index);
            let from = self.source.slice(part.start, part.len());
            let to = members.at(members.own, chunk + member * self.width() * self.size());
            // SAFETY: the source is the caller's. The part of the chunk is this rank's; it was last read two windows
            // ago, and all ranks have taken a turn since.
            unsafe { copy(self.workers, from.pointer, to, from.bytes()) };
        }
    }

    /// Reduces elements `part` of this rank's block, which are window `index` of it if there are several.
    fn combine(&self, part: std::ops::Range<usize>, index: usize, chunks: &Chunks) {
        let (members, size) = (self.members, self.size());
        let own = members.own;
        let chunk = members.segments.layout.chunk(members.index, chunks.window);
        let mut sources = [0; MAX_LOCAL_RANKS];
        for (member, source) in sources[..members.len()].iter_mut().enumerate() {
            *source = match self.source_location(member) {
                _ if member == own => self.source.pointer as usize + part.start * size,
                BufferLocation::Shared(offset) => members.at(member, offset) as usize + part.start * size,
                _ => members.at(member, chunk + own * self.width() * size) as usize,
            };
        }
        let mut targets = [0; MAX_LOCAL_RANKS + 1];
        let mut count = 0;
        let mut add = |target: usize| {
            targets[count] = target;
            count += 1;
        };
        if self.receiver == Receiver::Owner {
            let start = part.start - self.blocks.range(own).start;
            add(self.target.pointer as usize + start * size);
        } else {
            let mut is_collected = false;
            for member in (0..members.len()).filter(|member| self.wants_result(*member)) {
                match members.target_location(member, self.sequence) {
                    _ if member == own => add(self.target.pointer as usize + part.start * size),
                    BufferLocation::Shared(offset) => {
                        add(members.at(member, offset) as usize + part.start * size)
                    }
                    _ => is_collected = true,
                }
            }
            if is_collected {
                add(members.at(own, members.segments.layout.result(members.index)) as usize);
            }
        }
        debug_assert!(part.len() <= self.width() || self.is_in_place(), "window {index}");
        let (sources, targets) = (&sources[..members.len()], &targets[..count]);
        let (number, op) = (self.source.number, self.op);
        in_parts(self.workers, part.len(), size * sources.len(), |range| {
            let mut from = [std::ptr::null(); MAX_LOCAL_RANKS];
            let mut to = [std::ptr::null_mut(); MAX_LOCAL_RANKS + 1];
            for (from, source) in from.iter_mut().zip(sources) {
                *from = (source + range.start * size) as *const u8;
            }
            for (to, target) in to.iter_mut().zip(targets) {
                *to = (target + range.start * size) as *mut u8;
            }
            // SAFETY: these are elements of this rank's block, which no other rank accesses between the turns. Sources
            // have the length in the call, on which all ranks agree. A target that overlaps a source is identical to
            // it.
            unsafe { reduce(number, op, &from[..sources.len()], &to[..targets.len()], range.len()) };
        });
    }

    /// Copies the other ranks' results of window `index` to this rank's target.
    fn collect(&self, index: usize) {
        let members = self.members;
        let is_here =
            matches!(members.target_location(members.own, self.sequence), BufferLocation::Shared(_));
        if is_here || !self.wants_result(members.own) {
            return;
        }
        for member in (0..members.len()).filter(|member| *member != members.own) {
            let part = window(&self.blocks.range(member), self.width(), index);
            let to = self.target.slice(part.start, part.len());
            let from = members.at(member, members.segments.layout.result(members.index));
            // SAFETY: the result is complete, and does not change until all ranks have taken the next turn. The target
            // is the caller's.
            unsafe { copy(self.workers, from, to.pointer, to.bytes()) };
        }
    }
}

//! A group as seen by one of its ranks: the shared words and the memory of all members.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{
    buffer_location::BufferLocation,
    layout::{Line, Posted, RING},
    segments::Segments,
};
use crate::{GroupName, memory::MemoryRange, transport};

/// Ranks of a group and their segments. A member is a rank's index in the group.
#[derive(Debug, Clone)]
pub(crate) struct Members {
    pub(crate) segments: Segments,
    /// Index of the partition that created the group.
    pub(crate) index: usize,
    /// World ranks of the members, in group order.
    pub(crate) ranks: Vec<usize>,
    /// Index of this rank in `ranks`.
    pub(crate) own: usize,
}

/// A counter in a rank's [`Line`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counter {
    Arrived,
    Finished,
    Turn,
}

/// Returns true if a counter that wraps around has reached `goal`.
pub(crate) fn has_reached(count: u32, goal: u32) -> bool {
    count.wrapping_sub(goal) as i32 >= 0
}

impl Members {
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn name(&self) -> GroupName {
        transport::name(self.index, &self.ranks)
    }

    pub(crate) fn line(&self, member: usize) -> &Line {
        self.segments.layout.line(self.segments.memory(self.ranks[member]), self.index)
    }

    pub(crate) fn posted(&self, member: usize, sequence: u32) -> &Posted {
        &self.line(member).posted[(sequence % RING) as usize]
    }

    fn counter(&self, member: usize, counter: Counter) -> &AtomicU32 {
        let line = self.line(member);
        match counter {
            Counter::Arrived => &line.arrived,
            Counter::Finished => &line.finished,
            Counter::Turn => &line.turn,
        }
    }

    pub(crate) fn count(&self, member: usize, counter: Counter) -> u32 {
        // Sequentially consistent, as `Segments::wake` requires.
        self.counter(member, counter).load(Ordering::SeqCst)
    }

    /// Returns the first member whose counter has not reached `goal`.
    pub(crate) fn behind(&self, counter: Counter, goal: u32) -> Option<usize> {
        (0..self.len()).find(|member| !has_reached(self.count(*member, counter), goal))
    }

    /// Sets a counter of this rank and wakes the other members. Earlier writes are visible to every reader of the new value.
    pub(crate) fn publish(&self, counter: Counter, count: u32) {
        self.counter(self.own, counter).store(count, Ordering::SeqCst);
        for (member, rank) in self.ranks.iter().enumerate() {
            if member != self.own {
                self.segments.wake(*rank);
            }
        }
    }

    /// Returns the location of a member's source in operation `sequence`, which the member has started.
    pub(crate) fn source_location(&self, member: usize, sequence: u32) -> BufferLocation {
        BufferLocation::from_word(self.posted(member, sequence).source.load(Ordering::Relaxed))
    }

    /// Returns the location of a member's target in operation `sequence`, which the member has started.
    pub(crate) fn target_location(&self, member: usize, sequence: u32) -> BufferLocation {
        BufferLocation::from_word(self.posted(member, sequence).target.load(Ordering::Relaxed))
    }

    /// Returns the local address of byte `offset` of a member's segment.
    pub(crate) fn at(&self, member: usize, offset: usize) -> *mut u8 {
        self.segments.memory(self.ranks[member]).at(offset)
    }

    /// Returns the location of this rank's memory for the other ranks: an offset of its segment's heap, or private.
    pub(crate) fn location_of(&self, memory: &MemoryRange) -> BufferLocation {
        let own = self.segments.memory(self.ranks[self.own]);
        let heap = self.segments.layout.heap_at();
        let offset = own.offset_of(memory.pointer).filter(|offset| *offset >= heap);
        match offset {
            Some(offset) if offset + memory.bytes() <= own.len_bytes() => BufferLocation::Shared(offset),
            _ => BufferLocation::Private,
        }
    }
}

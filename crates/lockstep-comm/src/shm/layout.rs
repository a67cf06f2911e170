//! Where everything lies in the ranks' shared memory, and the words in it.
//!
//! Each rank has a segment, which all ranks map. A rank writes the words of its own segment only, but for its peers' bells and
//! the one record of why the run ended:
//!
//! ```text
//!     header     who is here, bell, heartbeat; in rank 0's also why the run ended
//!     recorder   the last operations, readable after death
//!     per partition: line | table | mailboxes | small slots | chunks | result | mail slots
//!     heap       buffers of the rank's arena: reduced where they are
//! ```
//!
//! All of it starts as zeros, which is a sound state of every word.

use std::sync::atomic::{AtomicU32, AtomicU64};

use lockstep_tensor::SharedMemory;

use crate::{MAX_PARTITIONS, error::ERROR_WORDS};

/// `LOCKSTEP` in the order of bytes.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"LOCKSTEP");
/// Changes with every change of what is below or of the hand-shake.
pub(crate) const VERSION: u32 = 2;

/// Operations of a group that a rank may have begun before the slowest one has ended the first of them.
pub(crate) const RING: u32 = 32;
/// As [`RING`], of messages that travel through small slots.
pub(crate) const SMALL_SLOTS: u32 = 4;
/// Messages up to this size are copied when their operation begins, and read from there by everybody.
pub(crate) const SMALL_BYTES: usize = 32 << 10;
/// Larger ones that do not lie in shared memory go through chunks of this size.
pub(crate) const CHUNK_BYTES: usize = 512 << 10;
/// Between two ranks, through parts of this size.
pub(crate) const MAIL_BYTES: usize = 256 << 10;
/// Of which so many are there.
pub(crate) const MAIL_SLOTS: u32 = 2;
/// Parts that a rank may have been told of before it fetches the first, if they lie in shared memory. A multiple of the former.
pub(crate) const MAIL_PARTS: u32 = 16;
/// Operations that the flight recorder remembers.
pub(crate) const RECORDS: usize = 1024;

/// The first words of a segment.
#[repr(C, align(128))]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) pid: AtomicU32,
    /// Inode of the process's PID namespace: outside of it the number means another process.
    pub(crate) pid_namespace: AtomicU64,
    /// A [`Status`].
    pub(crate) status: AtomicU32,
    /// Counts up while the process moves.
    pub(crate) beat: AtomicU32,
    /// How many threads of the rank sleep, or are about to.
    pub(crate) asleep: SeparateLine<AtomicU32>,
    /// What they sleep on. Rung by others.
    pub(crate) bell: SeparateLine<AtomicU32>,
    /// In the segment of rank 0: why the run ended. 0 not at all, 1 being written, 2 written.
    pub(crate) ending: SeparateLine<AtomicU32>,
    pub(crate) ending_words: [AtomicU64; ERROR_WORDS],
    /// Operations recorded so far.
    pub(crate) recorded: AtomicU64,
}

/// What is written by others than its neighbours, or as often, has a cache line of its own.
#[repr(C, align(128))]
pub(crate) struct SeparateLine<T>(pub(crate) T);

/// Values of [`Header::status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Status {
    Absent = 0,
    Here = 1,
    Left = 2,
    Panicked = 3,
}

/// A rank's words in a group.
#[repr(C, align(128))]
pub(crate) struct Line {
    /// Operations begun: their descriptions are in `posted`.
    pub(crate) arrived: AtomicU32,
    /// Operations ended: the rank neither reads nor writes other ranks' memory for them any more.
    pub(crate) finished: AtomicU32,
    /// Turns taken within operations that go through chunks.
    pub(crate) turn: AtomicU32,
    pub(crate) posted: [Posted; RING as usize],
}

/// What a rank says of an operation when it begins it.
#[repr(C, align(64))]
pub(crate) struct Posted {
    pub(crate) call: [AtomicU64; 3],
    /// Where its stream lies: a [`Place`](super::place::Place).
    pub(crate) source: AtomicU64,
    /// Where its result goes.
    pub(crate) target: AtomicU64,
    /// Bytes of this part, between two ranks.
    pub(crate) bytes: AtomicU64,
}

/// A rank's words for one other rank.
#[repr(C, align(128))]
pub(crate) struct Mailbox {
    /// Parts sent to it.
    pub(crate) sent: AtomicU32,
    /// Parts received from it.
    pub(crate) received: AtomicU32,
    pub(crate) parts: [Posted; MAIL_PARTS as usize],
}

/// Offsets in every segment of a world.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    ranks: usize,
    group_bytes: usize,
    groups_at: usize,
}

/// Parts are aligned to pages.
const PAGE_BYTES: usize = 4096;

impl Layout {
    pub(crate) fn new(ranks: usize) -> Self {
        let groups_at = Self::RECORDER_AT + (RECORDS * size_of::<Record>()).next_multiple_of(PAGE_BYTES);
        let mut layout = Self { ranks, group_bytes: 0, groups_at };
        layout.group_bytes = layout.mail_slot_in_group(ranks, 0);
        layout
    }

    const RECORDER_AT: usize = size_of::<Header>().next_multiple_of(PAGE_BYTES);

    /// Where the rank's arena begins.
    pub(crate) fn heap_at(&self) -> usize {
        self.group_at(MAX_PARTITIONS)
    }

    pub(crate) fn header<'a>(&self, memory: &'a SharedMemory) -> &'a Header {
        at(memory, 0)
    }

    pub(crate) fn record<'a>(&self, memory: &'a SharedMemory, index: usize) -> &'a Record {
        at(memory, Self::RECORDER_AT + index % RECORDS * size_of::<Record>())
    }

    pub(crate) fn line<'a>(&self, memory: &'a SharedMemory, group: usize) -> &'a Line {
        at(memory, self.group_at(group))
    }

    /// Word `index` of the table that describes operation `sequence`: what it sends to each rank, then what it receives.
    pub(crate) fn table<'a>(
        &self,
        memory: &'a SharedMemory,
        group: usize,
        sequence: u32,
        index: usize,
    ) -> &'a AtomicU64 {
        debug_assert!(index < 2 * self.ranks);
        let row = (sequence % RING) as usize * 2 * self.ranks;
        at(memory, self.group_at(group) + Self::TABLE_IN_GROUP + (row + index) * size_of::<AtomicU64>())
    }

    pub(crate) fn mailbox<'a>(&self, memory: &'a SharedMemory, group: usize, peer: usize) -> &'a Mailbox {
        debug_assert!(peer < self.ranks);
        at(memory, self.group_at(group) + self.mailboxes_in_group() + peer * size_of::<Mailbox>())
    }

    pub(crate) fn small_slot(&self, group: usize, sequence: u32) -> usize {
        self.group_at(group) + self.small_in_group() + (sequence % SMALL_SLOTS) as usize * SMALL_BYTES
    }

    /// Two chunks take turns.
    pub(crate) fn chunk(&self, group: usize, window: u32) -> usize {
        self.group_at(group) + self.chunks_in_group() + (window % 2) as usize * CHUNK_BYTES
    }

    pub(crate) fn result(&self, group: usize) -> usize {
        self.group_at(group) + self.chunks_in_group() + 2 * CHUNK_BYTES
    }

    pub(crate) fn mail_slot(&self, group: usize, peer: usize, part: u32) -> usize {
        self.group_at(group) + self.mail_slot_in_group(peer, part)
    }

    fn group_at(&self, group: usize) -> usize {
        self.groups_at + group * self.group_bytes
    }

    const TABLE_IN_GROUP: usize = size_of::<Line>().next_multiple_of(PAGE_BYTES);

    fn mailboxes_in_group(&self) -> usize {
        let table_bytes = RING as usize * 2 * self.ranks * size_of::<AtomicU64>();
        Self::TABLE_IN_GROUP + table_bytes.next_multiple_of(PAGE_BYTES)
    }

    fn small_in_group(&self) -> usize {
        self.mailboxes_in_group() + (self.ranks * size_of::<Mailbox>()).next_multiple_of(PAGE_BYTES)
    }

    fn chunks_in_group(&self) -> usize {
        self.small_in_group() + SMALL_SLOTS as usize * SMALL_BYTES
    }

    fn mail_slot_in_group(&self, peer: usize, part: u32) -> usize {
        let slot = peer * MAIL_SLOTS as usize + (part % MAIL_SLOTS) as usize;
        self.chunks_in_group() + 3 * CHUNK_BYTES + slot * MAIL_BYTES
    }
}

/// One operation in the flight recorder.
#[derive(Default)]
#[repr(C, align(64))]
pub(crate) struct Record {
    /// 1 more than the number of the operation of the rank; 0 while it is being written.
    pub(crate) number: AtomicU64,
    pub(crate) call: [AtomicU64; 3],
    /// Index of the group, its first rank and its size, 16 bits each.
    pub(crate) group: AtomicU64,
    pub(crate) sequence: AtomicU64,
    /// Microseconds of the machine's clock at which it was begun, everybody had come, and it ended; 0 for not yet.
    pub(crate) times_us: [AtomicU64; 3],
    /// Line and name (its end) of the source file that called it.
    pub(crate) line: AtomicU64,
    pub(crate) file: [AtomicU64; 6],
}

/// A part of a segment as what lies there.
fn at<T: Words>(memory: &SharedMemory, offset: usize) -> &T {
    assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= memory.len_bytes());
    // SAFETY: the range lies in the mapping, which lives as long as the reference; it is aligned, and consists of atomic
    // words, for which every content is sound and which everybody accesses as such.
    unsafe { &*memory.at(offset).cast::<T>() }
}

/// What consists of atomic words alone.
///
/// # Safety
/// It does, and has no padding that is read.
unsafe trait Words {}

// SAFETY: atomics only.
unsafe impl Words for Header {}
// SAFETY: as above.
unsafe impl Words for Line {}
// SAFETY: as above.
unsafe impl Words for Mailbox {}
// SAFETY: as above.
unsafe impl Words for Record {}
// SAFETY: as above.
unsafe impl Words for AtomicU64 {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_parts_of_a_segment_share_a_byte() {
        for ranks in [1, 3, 64] {
            let layout = Layout::new(ranks);
            let mut parts =
                vec![(0, size_of::<Header>()), (Layout::RECORDER_AT, RECORDS * size_of::<Record>())];
            for group in [0, 1, MAX_PARTITIONS - 1] {
                let start = layout.group_at(group);
                parts.push((start, size_of::<Line>()));
                parts.push((start + Layout::TABLE_IN_GROUP, RING as usize * 16 * ranks));
                parts.push((start + layout.mailboxes_in_group(), ranks * size_of::<Mailbox>()));
                parts.extend((0..SMALL_SLOTS).map(|slot| (layout.small_slot(group, slot), SMALL_BYTES)));
                parts.extend((0..2).map(|window| (layout.chunk(group, window), CHUNK_BYTES)));
                parts.push((layout.result(group), CHUNK_BYTES));
                for peer in 0..ranks {
                    parts.extend(
                        (0..MAIL_SLOTS).map(|part| (layout.mail_slot(group, peer, part), MAIL_BYTES)),
                    );
                }
            }
            parts.push((layout.heap_at(), 1));
            parts.sort_unstable();
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{ranks} ranks: {pair:?}");
                assert!(pair[1].0.is_multiple_of(64), "{ranks} ranks: {pair:?}");
            }
        }
    }
}

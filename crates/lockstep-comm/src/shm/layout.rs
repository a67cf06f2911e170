//! Offsets of all structures in the ranks' shared memory, and their words.
//!
//! Each rank has a segment, which all ranks map. A rank writes only to the words of its own segment, except for its peers'
//! bells and the single record of the error that ended the run:
//!
//! ```text
//!     header     presence, wake-ups, heartbeat; in rank 0's also the error that ended the run
//!     recorder   the last operations, readable after death
//!     per partition: line | table | mailboxes | small slots | chunks | result | message slots
//!     heap       buffers of the rank's arena, reduced in place
//! ```
//!
//! All of it starts as zeros, a valid state of every word.

use std::sync::atomic::{AtomicU32, AtomicU64};

use lockstep_tensor::SharedMemory;

use crate::{
    MAX_PARTITIONS,
    error::ERROR_WORDS,
    record::{RECORDS, Record},
};

/// `LOCKSTEP` in byte order; the first word of every segment.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"LOCKSTEP");
/// Version of the structures below and of the handshake with the launcher.
pub(crate) const VERSION: u32 = 2;

/// Maximum number of a group's operations in flight on a rank: one may start once all ranks have finished the one
/// `RING` before.
pub(crate) const RING: u32 = 32;
/// Counterpart of [`RING`] for operations whose data goes through small slots.
pub(crate) const SMALL_SLOTS: u32 = 4;
/// Maximum size in bytes of data that is copied to a small slot when its operation starts, and read from there by all ranks.
pub(crate) const SMALL_BYTES: usize = 32 << 10;
/// Size in bytes of a chunk, for larger data outside shared memory.
pub(crate) const CHUNK_BYTES: usize = 512 << 10;
/// Size in bytes of a part of a point-to-point message outside shared memory.
pub(crate) const MAIL_BYTES: usize = 256 << 10;
/// Number of slots for such parts, per pair of ranks and direction.
pub(crate) const MAIL_SLOTS: u32 = 2;
/// Maximum number of announced parts that are not yet received, if they are in shared memory. A multiple of [`MAIL_SLOTS`].
pub(crate) const MAIL_PARTS: u32 = 16;
/// First structure of a segment.
#[repr(C, align(128))]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) pid: AtomicU32,
    /// Inode of the process's PID namespace; in another namespace, `pid` means another process.
    pub(crate) pid_namespace: AtomicU64,
    /// Presence of the rank: a [`Status`].
    pub(crate) status: AtomicU32,
    /// Heartbeat counter, which increases while the process runs.
    pub(crate) beat: AtomicU32,
    /// Number of threads of the rank that sleep, or are about to.
    pub(crate) asleep: SeparateLine<AtomicU32>,
    /// Futex word that these threads sleep on; other ranks increment it.
    pub(crate) wakeups: SeparateLine<AtomicU32>,
    /// State of `ending_words` in the segment of rank 0: 0 while the run goes on, 1 while they are written, 2 once they are.
    pub(crate) ending: SeparateLine<AtomicU32>,
    pub(crate) ending_words: [AtomicU64; ERROR_WORDS],
    /// Number of operations recorded so far.
    pub(crate) recorded: AtomicU64,
}

/// Word on a cache line of its own, because other ranks write it, or because it changes more often than its neighbours.
#[repr(C, align(128))]
pub(crate) struct SeparateLine<T>(pub(crate) T);

/// Presence of a rank: the values of [`Header::status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Status {
    Absent = 0,
    Here = 1,
    Left = 2,
    Panicked = 3,
}

/// A rank's counters and descriptions of operations in a group.
#[repr(C, align(128))]
pub(crate) struct Line {
    /// Number of operations started; their descriptions are in `posted`.
    pub(crate) arrived: AtomicU32,
    /// Number of operations finished, for which the rank no longer accesses other ranks' memory.
    pub(crate) finished: AtomicU32,
    /// Number of turns taken within operations that go through chunks.
    pub(crate) turn: AtomicU32,
    pub(crate) posted: [Posted; RING as usize],
}

/// Description of an operation, which a rank publishes when it starts it.
#[repr(C, align(64))]
pub(crate) struct Posted {
    pub(crate) call: [AtomicU64; 3],
    /// Location of the rank's source: a [`BufferLocation`](super::buffer_location::BufferLocation).
    pub(crate) source: AtomicU64,
    /// Location of the rank's target.
    pub(crate) target: AtomicU64,
    /// Length in bytes of this part of a point-to-point message.
    pub(crate) bytes: AtomicU64,
}

/// A rank's words for one peer.
#[repr(C, align(128))]
pub(crate) struct Mailbox {
    /// Number of parts sent to the peer.
    pub(crate) sent: AtomicU32,
    /// Number of parts received from the peer.
    pub(crate) received: AtomicU32,
    pub(crate) parts: [Posted; MAIL_PARTS as usize],
}

/// Offsets of the structures in every segment of a world.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    ranks: usize,
    group_bytes: usize,
    groups_at: usize,
}

/// Alignment of structures in bytes.
const PAGE_BYTES: usize = 4096;

impl Layout {
    pub(crate) fn new(ranks: usize) -> Self {
        let groups_at = Self::RECORDER_AT + (RECORDS * size_of::<Record>()).next_multiple_of(PAGE_BYTES);
        let mut layout = Self { ranks, group_bytes: 0, groups_at };
        layout.group_bytes = layout.mail_slot_in_group(ranks, 0);
        layout
    }

    const RECORDER_AT: usize = size_of::<Header>().next_multiple_of(PAGE_BYTES);

    /// Returns the offset of the rank's arena.
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

    /// Returns word `index` of the table of operation `sequence`: the bytes sent to each rank, then those received from each.
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

    /// Returns the offset of a chunk. Two chunks alternate.
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

/// Returns the structure at `offset` of a segment.
fn at<T: Words>(memory: &SharedMemory, offset: usize) -> &T {
    assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= memory.len_bytes());
    // SAFETY: the range is within the mapping, which outlives the reference. It is aligned, and consists of atomic words, for
    // which every bit pattern is valid and which all processes access as such.
    unsafe { &*memory.at(offset).cast::<T>() }
}

/// A type that consists of atomic words alone.
///
/// # Safety
/// The type consists of atomic words, and no padding of it is read.
unsafe trait Words {}

// SAFETY: all fields are atomics.
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

//! Staging buffers between a file and kernels: slots of memory that each hold one extent of the file, prefetched and
//! written in the background.
//!
//! Both windows of model state and frames of activations are staged this way. The owner of a [`Staging`] chooses which
//! slot to reuse, and when extents are read and written.

use std::ops::Range;

use lockstep_plan::DType;
use lockstep_tensor::{Buffer, DiskQueue, DiskTraffic, Loan, ScratchFile, View};

use crate::transfers::{Job, Transfers};
use crate::{EngineError, Offload};

/// Byte range of a file.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FileExtent {
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

/// State of a slot of staging memory.
#[derive(Debug)]
pub(crate) struct Slot<Key> {
    /// Key of the slot's contents; `None` if they will not be looked up.
    pub(crate) key: Option<Key>,
    /// True if the contents are not yet in the file.
    pub(crate) is_changed: bool,
    extent: FileExtent,
    last_turn: u64,
}

/// Memory that a transfer reads from or writes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Slot(usize),
    /// Memory of a caller, under a number that the caller chose.
    Elsewhere(usize),
}

/// Slots of staging memory and their file. Methods fail if the disk fails or does not answer in time.
#[derive(Debug)]
pub(crate) struct Staging<Key> {
    transfers: Transfers<Target>,
    /// One buffer for all slots, or one for each.
    memory: Vec<Buffer>,
    slot_bytes: usize,
    slots: Vec<Slot<Key>>,
    /// Counter of slot uses, for the least-recently-used order.
    turns: u64,
}

impl<Key: Copy + PartialEq> Staging<Key> {
    /// Creates a file of `file_bytes` with `slots` staging slots of `slot_bytes` in `memory`, which is one buffer for
    /// all slots or one for each. `jobs_elsewhere` is the number of jobs in flight into other memory for which room is
    /// reserved.
    ///
    /// # Errors
    /// If the disk has no room.
    pub(crate) fn new(
        offload: &Offload,
        file_bytes: u64,
        (memory, slot_bytes, slots): (Vec<Buffer>, usize, usize),
        jobs_elsewhere: usize,
    ) -> Result<Self, EngineError> {
        let file = ScratchFile::create(&offload.directory, file_bytes)?;
        let disk = DiskQueue::new(file, offload.method)?;
        let transfers = Transfers::new(offload.limit, slots + jobs_elsewhere).with_disk(disk);
        let slot = |_| Slot { key: None, is_changed: false, extent: FileExtent::default(), last_turn: 0 };
        Ok(Self { transfers, memory, slot_bytes, slots: (0..slots).map(slot).collect(), turns: 0 })
    }

    /// Returns the bytes of the file.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.transfers.disk_bytes()
    }

    /// Returns the disk traffic since the last call.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.transfers.take_disk_traffic()
    }

    /// Returns the slot that holds `key`, if one does.
    pub(crate) fn slot_of(&self, key: Key) -> Option<usize> {
        self.slots.iter().position(|slot| slot.key == Some(key))
    }

    /// Returns true if a slot's contents are not yet in the file.
    pub(crate) fn is_changed(&self, slot: usize) -> bool {
        self.slots[slot].is_changed
    }

    /// Returns the state of the slot that holds `key`, for change.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut Slot<Key>> {
        self.slots.iter_mut().find(|slot| slot.key == Some(key))
    }

    /// Returns the buffer of a slot, and the slot's byte offset there.
    pub(crate) fn buffer(&self, slot: usize) -> (&Buffer, usize) {
        match &self.memory[..] {
            [all] => (all, slot * self.slot_bytes),
            each => (&each[slot], 0),
        }
    }

    /// Returns `count` elements of a slot from byte `start` on.
    pub(crate) fn view(&self, slot: usize, dtype: DType, start: usize, count: usize) -> View<'_> {
        let (buffer, first) = self.buffer(slot);
        buffer.view(dtype, first + start, [count])
    }

    /// Reuses the slot with the lowest `rank`, the least recently used of equals, for `extent`; writes its old contents
    /// first if they are changed. Slots for which `rank` returns `None` are in use.
    pub(crate) fn take<Rank: Ord>(
        &mut self,
        key: Option<Key>,
        extent: FileExtent,
        rank: impl Fn(&Slot<Key>) -> Option<Rank>,
    ) -> Result<usize, EngineError> {
        let ranked = self.slots.iter().enumerate();
        let ranked = ranked.filter_map(|(number, slot)| Some((rank(slot)?, slot.last_turn, number)));
        let (.., slot) = ranked.min().expect("more slots than are in use");
        if self.slots[slot].is_changed {
            self.begin_to_write(slot)?;
        }
        self.wait_for_slot(slot)?;
        self.turn_to(slot);
        let taken = &mut self.slots[slot];
        (taken.key, taken.extent) = (key, extent);
        Ok(slot)
    }

    /// Marks a slot as the most recently used.
    pub(crate) fn turn_to(&mut self, slot: usize) {
        self.turns += 1;
        self.slots[slot].last_turn = self.turns;
    }

    /// Begins to read the extent of a slot.
    pub(crate) fn begin_to_read(&mut self, slot: usize) -> Result<(), EngineError> {
        self.begin_to_read_part(slot, 0..self.slots[slot].extent.bytes)
    }

    /// Begins to read a byte range of a slot's extent to the same place in the slot.
    pub(crate) fn begin_to_read_part(&mut self, slot: usize, bytes: Range<usize>) -> Result<(), EngineError> {
        let offset = self.slots[slot].extent.offset + bytes.start as u64;
        let loan = self.lend(slot, bytes);
        self.transfers.begin(Target::Slot(slot), Job::Read(offset, loan))
    }

    /// Begins to write the extent of a slot.
    pub(crate) fn begin_to_write(&mut self, slot: usize) -> Result<(), EngineError> {
        self.slots[slot].is_changed = false;
        let FileExtent { offset, bytes } = self.slots[slot].extent;
        let loan = self.lend(slot, 0..bytes);
        self.transfers.begin(Target::Slot(slot), Job::Write(offset, loan))
    }

    /// Begins to write every changed slot except the one that holds `but`.
    pub(crate) fn write_behind(&mut self, but: Option<Key>) -> Result<(), EngineError> {
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_changed && (but.is_none() || self.slots[slot].key != but) {
                self.begin_to_write(slot)?;
            }
        }
        Ok(())
    }

    /// Waits for all transfers of a slot.
    pub(crate) fn wait_for_slot(&mut self, slot: usize) -> Result<(), EngineError> {
        self.transfers.finish(|target| *target == Target::Slot(slot))
    }

    /// Begins to read from `offset` of the file into memory of the caller, under a number that the caller chooses.
    pub(crate) fn begin_to_fill(
        &mut self,
        number: usize,
        offset: u64,
        memory: &mut Buffer,
        bytes: Range<usize>,
    ) -> Result<(), EngineError> {
        self.transfers.begin(Target::Elsewhere(number), Job::Read(offset, memory.lend(bytes)))
    }

    /// Waits for the reads that were begun under a number.
    pub(crate) fn finish_filling(&mut self, number: usize) -> Result<(), EngineError> {
        self.transfers.finish(|target| *target == Target::Elsewhere(number))
    }

    /// Returns the same staging buffers with a faulty disk.
    #[cfg(test)]
    pub(crate) fn faulty_disk(self, trouble: crate::faulty_disk::DiskFaults) -> Self {
        Self { transfers: self.transfers.faulty_disk(trouble), ..self }
    }

    fn lend(&mut self, slot: usize, bytes: Range<usize>) -> Loan {
        let start = slot * self.slot_bytes;
        match &mut self.memory[..] {
            [all] => all.lend(start + bytes.start..start + bytes.end),
            each => each[slot].lend(bytes),
        }
    }
}

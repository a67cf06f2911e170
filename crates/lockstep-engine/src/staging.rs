//! Staging buffers between a file and kernels: slots of memory, each with one extent of the file, read ahead and written behind.
//!
//! Windows of model state and frames of activations use the same slots. Their owners choose which slot is emptied next, and when
//! extents are read and written.

use std::ops::Range;

use lockstep_plan::DType;
use lockstep_tensor::{Buffer, DiskQueue, DiskTraffic, Loan, ScratchFile, View};

use crate::transfers::{Job, Transfers};
use crate::{EngineError, Offload};

/// Part of a file.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FileExtent {
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

/// A slot of staging memory.
#[derive(Debug)]
pub(crate) struct Slot<Key> {
    /// What it has; `None` if nothing that will be asked for.
    pub(crate) key: Option<Key>,
    /// True if memory has contents that the file has not.
    pub(crate) is_changed: bool,
    extent: FileExtent,
    last_turn: u64,
}

/// The memory that a transfer fills or empties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Slot(usize),
    /// Memory of a caller, which chose the number.
    Elsewhere(usize),
}

/// Slots of staging memory, and the file behind them. Methods fail if the disk does, or does not answer in time.
#[derive(Debug)]
pub(crate) struct Staging<Key> {
    transfers: Transfers<Target>,
    /// One buffer of all slots, or one for each.
    memory: Vec<Buffer>,
    slot_bytes: usize,
    slots: Vec<Slot<Key>>,
    /// How often any slot was turned to.
    turns: u64,
}

impl<Key: Copy + PartialEq> Staging<Key> {
    /// `slots` of `slot_bytes` in `memory`, one buffer of all or one for each, before a file of `file_bytes`; at most so many jobs besides
    /// those of the slots are in flight at once.
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

    /// Bytes of the file.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.transfers.disk_bytes()
    }

    /// The cost of reads and writes since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.transfers.take_disk_traffic()
    }

    /// The slot that has this contents, if one does.
    pub(crate) fn slot_of(&self, key: Key) -> Option<usize> {
        self.slots.iter().position(|slot| slot.key == Some(key))
    }

    /// True if a slot has contents that the file has not.
    pub(crate) fn is_changed(&self, slot: usize) -> bool {
        self.slots[slot].is_changed
    }

    /// The slot that has this contents, for a change of its state.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut Slot<Key>> {
        self.slots.iter_mut().find(|slot| slot.key == Some(key))
    }

    /// The buffer of a slot, and the slot's first byte there.
    pub(crate) fn buffer(&self, slot: usize) -> (&Buffer, usize) {
        match &self.memory[..] {
            [all] => (all, slot * self.slot_bytes),
            each => (&each[slot], 0),
        }
    }

    /// Elements of a slot, from a byte on.
    pub(crate) fn view(&self, slot: usize, dtype: DType, start: usize, count: usize) -> View<'_> {
        let (buffer, first) = self.buffer(slot);
        buffer.view(dtype, first + start, [count])
    }

    /// Empties the slot that `rank` puts first, or, of several, the one that was turned to least recently, and gives it to an extent of the
    /// file. Slots without a rank are in use.
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
        self.settle(slot)?;
        self.turn_to(slot);
        let taken = &mut self.slots[slot];
        (taken.key, taken.extent) = (key, extent);
        Ok(slot)
    }

    /// Notes that a slot is in use now.
    pub(crate) fn turn_to(&mut self, slot: usize) {
        self.turns += 1;
        self.slots[slot].last_turn = self.turns;
    }

    /// Begins to read the extent of a slot.
    pub(crate) fn begin_to_read(&mut self, slot: usize) -> Result<(), EngineError> {
        self.begin_to_read_part(slot, 0..self.slots[slot].extent.bytes)
    }

    /// Begins to read bytes of the extent of a slot to where they belong there.
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

    /// Begins to write every changed slot but the one of `but`.
    pub(crate) fn write_behind(&mut self, but: Option<Key>) -> Result<(), EngineError> {
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_changed && (but.is_none() || self.slots[slot].key != but) {
                self.begin_to_write(slot)?;
            }
        }
        Ok(())
    }

    /// Waits until a slot is neither read nor written.
    pub(crate) fn settle(&mut self, slot: usize) -> Result<(), EngineError> {
        self.transfers.finish(|target| *target == Target::Slot(slot))
    }

    /// Begins to read an extent of the file into memory of the caller, under a number that the caller chooses.
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

    /// The same buffers before a disk that has this trouble.
    #[cfg(test)]
    pub(crate) fn troubled(self, trouble: crate::troubled::Trouble) -> Self {
        Self { transfers: self.transfers.troubled(trouble), ..self }
    }

    fn lend(&mut self, slot: usize, bytes: Range<usize>) -> Loan {
        let start = slot * self.slot_bytes;
        match &mut self.memory[..] {
            [all] => all.lend(start + bytes.start..start + bytes.end),
            each => each[slot].lend(bytes),
        }
    }
}

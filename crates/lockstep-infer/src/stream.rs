//! Streaming of units that are not resident: they pass through a few buffers, read ahead of use.
//!
//! A forward uses the units in one order, again and again. While one buffer is in use, the others are filled with the units
//! that come next, across the end of a forward too, so the disk never waits for a token.
//!
//! ```text
//! buffer 0   in use: unit 4        reading: unit 7
//! buffer 1   read:   unit 5   ->   in use:  unit 5        resident units between them need no buffer
//! buffer 2   reading: unit 6       reading: unit 6
//! ```

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use lockstep_checkpoint::gguf::StoredElements;
use lockstep_engine::EngineError;
use lockstep_plan::{DISK_ALIGNMENT_BYTES, DType, MemoryCategory, ParameterId, aligned_buffer_bytes};
use lockstep_tensor::{
    Arena, BlockLayout, Buffer, DiskError, DiskIo, DiskQueue, DiskTraffic, Kernels, Matrix, Shape,
    StoredFile, Ticket,
};

use crate::{
    device_map::ModelParts,
    extent::Extent,
    unit_layout::{HeldWeight, UnitLayout},
    weight_form::{copy_rows, matrix_of},
};

/// Longest wait for a read.
const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of a read; a unit is read in several, so that the disk has a full queue.
pub(crate) const READ_BYTES: usize = 4 << 20;
/// Reads of all buffers together; the queue keeps so many in flight without anyone polling it.
const MOST_READS: usize = 60;

/// Files of weights, and the queue that reads them.
#[derive(Debug)]
pub(crate) struct WeightFiles {
    files: Vec<StoredFile>,
    queue: DiskQueue,
}

impl WeightFiles {
    /// Opens the files for reads by `method`.
    ///
    /// # Errors
    /// If a file cannot be opened, or no reads can be made.
    pub(crate) fn open(paths: &[PathBuf], method: DiskIo) -> Result<Self, DiskError> {
        let files = paths.iter().map(|path| StoredFile::open(path)).collect::<Result<_, _>>()?;
        let queue = DiskQueue::for_stored(method)
            .map_err(|source| DiskError::Open { path: paths.first().cloned().unwrap_or_default(), source })?;
        Ok(Self { files, queue })
    }

    /// Starts to read extents into `memory` from byte `start` on, in reads of `read_bytes`.
    pub(crate) fn start(
        &mut self,
        extents: &[Extent],
        memory: &mut Buffer,
        start: usize,
        read_bytes: usize,
    ) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        for extent in extents {
            for done in (0..extent.bytes).step_by(read_bytes) {
                let first = start + extent.start + done;
                let loan = memory.lend(first..first + read_bytes.min(extent.bytes - done));
                let offset = extent.offset + done as u64;
                tickets.push(self.queue.read_stored(&self.files[extent.file], offset, loan));
            }
        }
        tickets
    }

    /// Waits for all of the reads.
    ///
    /// # Errors
    /// If a read fails, or the disk does not answer.
    pub(crate) fn finish(&mut self, tickets: &mut Vec<Ticket>) -> Result<(), DiskError> {
        let mut all = Ok(());
        for ticket in tickets.drain(..) {
            let read = self.queue.wait(ticket, PATIENCE);
            all = all.and(read);
        }
        all
    }

    /// Returns the traffic of the disk since the last call.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.queue.take_traffic()
    }

    /// Measures the bandwidth of reads of the longest file: up to `bytes` of it, in reads as a stream makes them. In bytes per
    /// second; `None` if there is no file.
    ///
    /// # Errors
    /// If memory runs out or a read fails.
    pub(crate) fn measure(&mut self, bytes: usize) -> Result<Option<f64>, EngineError> {
        const IN_FLIGHT: usize = 48;
        let Some(file) = self.files.iter().max_by_key(|file| file.len_bytes()) else { return Ok(None) };
        let reads = (file.len_bytes() as usize).min(bytes) / READ_BYTES;
        let mut memory = Arena::new().allocate(IN_FLIGHT * READ_BYTES, MemoryCategory::Workspace)?;
        // Pages come into being at their first use, which is not the disk's time.
        memory.bytes_mut().fill(0);
        let mut pending: Vec<Option<Ticket>> = (0..IN_FLIGHT).map(|_| None).collect();
        let begin = Instant::now();
        for read in 0..reads + IN_FLIGHT {
            let place = read % IN_FLIGHT;
            if let Some(ticket) = pending[place].take() {
                self.queue.wait(ticket, PATIENCE)?;
            }
            if read < reads {
                let loan = memory.lend(place * READ_BYTES..(place + 1) * READ_BYTES);
                pending[place] = Some(self.queue.read_stored(file, (read * READ_BYTES) as u64, loan));
            }
        }
        Ok((reads > 0).then(|| (reads * READ_BYTES) as f64 / begin.elapsed().as_secs_f64()))
    }
}

/// A buffer, and the unit that it holds or is being filled with.
#[derive(Debug, Default)]
struct Slot {
    /// Index among the streamed units.
    unit: Option<usize>,
    reads: Vec<Ticket>,
}

/// Units on disk and the buffers that they pass through.
#[derive(Debug)]
pub(crate) struct Stream {
    files: WeightFiles,
    /// Layouts of the streamed units, in the order of their use.
    layouts: Vec<UnitLayout>,
    /// Index among the streamed units of each unit of the model.
    of_unit: Vec<Option<usize>>,
    memory: Buffer,
    slot_bytes: usize,
    slots: Vec<Slot>,
    /// Converted weights of the unit in use.
    converted: Buffer,
    /// Slot of the unit in use.
    current: Option<usize>,
    /// Index among the streamed units of the one that comes next.
    next: usize,
}

impl Stream {
    /// Allocates `buffers` buffers, and starts to read the first units. `layouts` has the streamed units with their numbers in
    /// the model, in ascending order.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn new(
        files: WeightFiles,
        (layouts, units): (Vec<(usize, UnitLayout)>, usize),
        buffers: usize,
        arena: &Arena,
    ) -> Result<Self, EngineError> {
        let mut of_unit = vec![None; units];
        layouts.iter().enumerate().for_each(|(index, (unit, _))| of_unit[*unit] = Some(index));
        let layouts: Vec<UnitLayout> = layouts.into_iter().map(|(_, layout)| layout).collect();
        let most = |bytes: fn(&UnitLayout) -> usize| layouts.iter().map(bytes).max().unwrap_or(0);
        let (slot_bytes, converted_bytes) =
            (most(|layout| layout.bytes), most(|layout| layout.converted_bytes));
        let memory = aligned_buffer_bytes(buffers * slot_bytes);
        let mut stream = Self {
            memory: arena.allocate(memory, MemoryCategory::Parameters)?,
            converted: arena.allocate(converted_bytes, MemoryCategory::Parameters)?,
            slots: (0..buffers).map(|_| Slot::default()).collect(),
            files,
            layouts,
            of_unit,
            slot_bytes,
            current: None,
            next: 0,
        };
        stream.read_ahead()?;
        Ok(stream)
    }

    /// Waits for the weights of a unit, if it is streamed, and reads ahead into the buffers that are free by now.
    ///
    /// # Errors
    /// If a read fails, or the disk does not answer.
    pub(crate) fn begin(
        &mut self,
        kernels: &dyn Kernels,
        parts: &ModelParts,
        unit: usize,
    ) -> Result<(), EngineError> {
        self.current = None;
        let Some(index) = self.of_unit[unit] else { return self.read_ahead() };
        let slot = match self.slot_of(index) {
            Some(slot) => slot,
            None => {
                // Not the next unit of a forward: a forward was left, or two take turns.
                self.fill(0, index)?;
                0
            }
        };
        self.finish(slot)?;
        self.current = Some(slot);
        self.next = (index + 1) % self.layouts.len();
        self.read_ahead()?;
        for weight in &self.layouts[index].weights {
            self.convert(kernels, parts, slot, weight);
        }
        Ok(())
    }

    /// Returns the weights of a parameter of the unit in use, as a matrix of `shape`.
    pub(crate) fn matrix(&self, parts: &ModelParts, owner: ParameterId, shape: Shape) -> Option<Matrix<'_>> {
        let slot = self.current?;
        let weight = self.layouts[self.slots[slot].unit?].weights.iter().find(|weight| weight.id == owner)?;
        let (buffer, start) = match weight.converted {
            Some(start) => (&self.converted, start),
            None => (&self.memory, self.start_of(slot, weight)),
        };
        let form = (parts.elements(owner), BlockLayout::Rows);
        matrix_of(form, shape, |dtype, shape| Some(buffer.view(dtype, start, shape)))
    }

    /// Returns the traffic of the disk since the last call.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.files.take_traffic()
    }

    /// Converts a weight of the unit in a slot, if it is not used as it is stored.
    fn convert(&self, kernels: &dyn Kernels, parts: &ModelParts, slot: usize, weight: &HeldWeight) {
        let Some(target) = weight.converted else { return };
        let start = self.start_of(slot, weight);
        match (weight.stored, parts.elements(weight.id)) {
            (StoredElements::Dense(stored), StoredElements::Dense(dtype)) if stored != dtype => {
                let elements = [parts.shape(weight.id).elements()];
                let from = self.memory.view(stored, start, elements);
                kernels.cast(from, self.converted.view(dtype, target, elements));
            }
            (stored, _) => {
                let bytes = [parts.bytes_in(weight.id, stored) as usize];
                let rows = parts.shape(weight.id).as_matrix().0;
                let from = self.memory.view(DType::U8, start, bytes);
                let to = self.converted.view(DType::U8, target, bytes);
                copy_rows(from, weight.order, bytes[0] / rows.max(1), to);
            }
        }
    }

    /// Returns the byte of the buffers at which a weight of the unit in a slot begins.
    fn start_of(&self, slot: usize, weight: &HeldWeight) -> usize {
        slot * self.slot_bytes + weight.start
    }

    fn slot_of(&self, index: usize) -> Option<usize> {
        self.slots.iter().position(|slot| slot.unit == Some(index))
    }

    /// Starts to read the next units into the slots that are not in use.
    fn read_ahead(&mut self) -> Result<(), EngineError> {
        let free = self.slots.len() - usize::from(self.current.is_some());
        let count = self.layouts.len();
        let wanted: Vec<usize> = (0..free.min(count)).map(|ahead| (self.next + ahead) % count).collect();
        for &index in &wanted {
            if self.slot_of(index).is_none() {
                let is_free = |number: &usize| {
                    self.current != Some(*number)
                        && self.slots[*number].unit.is_none_or(|unit| !wanted.contains(&unit))
                };
                let Some(slot) = (0..self.slots.len()).find(is_free) else { break };
                self.fill(slot, index)?;
            }
        }
        Ok(())
    }

    /// Waits for the reads of a slot, which is empty if one fails.
    fn finish(&mut self, slot: usize) -> Result<(), EngineError> {
        let slot = &mut self.slots[slot];
        Ok(self.files.finish(&mut slot.reads).inspect_err(|_| slot.unit = None)?)
    }

    /// Starts to read a unit into a slot, once reads into it have ended.
    fn fill(&mut self, slot: usize, index: usize) -> Result<(), EngineError> {
        self.finish(slot)?;
        let whole = (self.slots.len() * self.slot_bytes).div_ceil(MOST_READS);
        let read_bytes = READ_BYTES.max(whole).next_multiple_of(DISK_ALIGNMENT_BYTES);
        let start = slot * self.slot_bytes;
        let reads = self.files.start(&self.layouts[index].extents, &mut self.memory, start, read_bytes);
        self.slots[slot] = Slot { unit: Some(index), reads };
        Ok(())
    }
}

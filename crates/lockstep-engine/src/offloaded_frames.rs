//! Offloaded activations: frames of units are on disk between their forward and their backward (ZeRO-Infinity:
//! Rajbhandari et al. 2021, section 5.1.2; DeepSpeed's `cpu_checkpointing`, but to disk).
//!
//! A frame is one contiguous range of memory, moved by one transfer: the saved activations of a unit, followed by its
//! output, which is the input of the next unit. It is written once the next unit's forward has read that output, and
//! prefetched during the backward of later units. Staging slots hold a few frames. If a backward directly follows its
//! forward, the last frames stay in their slots and are never written.
//!
//! ```text
//! forward     unit 5 writes its frame    reads the end of 4    3 is being written
//! backward    unit 5 reads its frame     and the end of 4      3 is being read
//! ```

use lockstep_plan::{MemoryCategory, ModelProfile, StageMemory};
use lockstep_tensor::{Arena, Buffer, TensorError};

use crate::staging::{FileExtent, Staging};
use crate::{EngineError, Offload, passes::PassLocation};

/// Identifies a frame: stage of this rank, slot of the micro-batch, and unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameId {
    stage: usize,
    slot: usize,
    unit: usize,
}

impl FrameId {
    pub(crate) const fn new(PassLocation { stage, slot, .. }: PassLocation, unit: usize) -> Self {
        Self { stage, slot, unit }
    }

    /// Returns the frame of the unit before; `None` for the first unit.
    fn before(self) -> Option<Self> {
        Some(Self { unit: self.unit.checked_sub(1)?, ..self })
    }
}

/// Frames on disk, a few of them in staging slots. Methods fail if the disk fails or does not answer in time.
#[derive(Debug)]
pub(crate) struct OffloadedFrames {
    stages: Vec<StageFile>,
    pub(crate) staging: Staging<FrameId>,
}

/// Position of a stage's frames in the file, slot after slot.
#[derive(Debug)]
struct StageFile {
    first_unit: usize,
    /// Extent of each unit's frame, relative to the start of its slot in the file; `None` if the frame stays in memory.
    frames: Vec<Option<FileExtent>>,
    start: u64,
    slot_bytes: u64,
    /// First unit whose frame stays in its staging slot until its backward.
    first_kept: usize,
}

impl OffloadedFrames {
    /// Allocates staging slots and a file for the frames of a rank's `stages`; returns `None` without `offload`, or if
    /// no frame can be offloaded.
    ///
    /// # Errors
    /// If the disk or memory has no room.
    pub(crate) fn new(
        offload: Option<&Offload>,
        model: &ModelProfile,
        stages: &[StageMemory],
        arena: &Arena,
    ) -> Result<Option<Self>, EngineError> {
        let (slots, slot_bytes) = model.frame_places(stages);
        let Some(offload) = offload.filter(|_| slots > 0) else { return Ok(None) };
        let mut end = 0;
        let is_alone = stages.len() == 1;
        let files = stages.iter().map(|stage| {
            let start = end;
            let mut slot_bytes = 0;
            let frames = stage.units.clone().map(|unit| {
                let bytes = model.frame_on_disk_bytes(stage, unit)?;
                let offset = slot_bytes;
                slot_bytes += bytes as u64;
                Some(FileExtent { offset, bytes })
            });
            let frames: Vec<_> = frames.collect();
            end += stage.slots as u64 * slot_bytes;
            // With one stage and one slot, the backward directly follows its forward, so no other frame needs the
            // staging slots in between.
            let kept = if is_alone && stage.slots == 1 { slots } else { 0 };
            let on_disk = frames.iter().enumerate().filter(|(_, frame)| frame.is_some());
            let first_kept = on_disk.rev().take(kept).last().map_or(frames.len(), |(index, _)| index);
            let (first_unit, first_kept) = (stage.units.start, stage.units.start + first_kept);
            StageFile { first_unit, frames, start, slot_bytes, first_kept }
        });
        let stages = files.collect();
        let buffer = |_| arena.allocate_zeroed(slot_bytes, MemoryCategory::Activations);
        let memory = (0..slots).map(buffer).collect::<Result<Vec<_>, TensorError>>()?;
        let staging = Staging::new(offload, end, (memory, slot_bytes, slots), 0)?;
        Ok(Some(Self { stages, staging }))
    }

    /// Returns the memory of the frame that was [begun](Self::begin) or [brought back](Self::bring_back) last, or of
    /// the one before it.
    ///
    /// # Panics
    /// If the frame is not in memory.
    pub(crate) fn get(&self, frame: FrameId) -> &Buffer {
        let slot = self.staging.slot_of(frame).expect("a frame is brought back before it is looked at");
        self.staging.buffer(slot).0
    }

    /// Provides a staging slot for a frame that a forward will write; the frame of the unit before keeps its slot.
    pub(crate) fn begin(&mut self, frame: FrameId) -> Result<(), EngineError> {
        let Some(extent) = self.in_file(frame) else { return Ok(()) };
        let slot = match self.staging.slot_of(frame) {
            Some(slot) => slot,
            None => self.make_room(frame, extent, frame)?,
        };
        self.set_changed(frame, false);
        self.staging.wait_for_slot(slot)?;
        self.staging.turn_to(slot);
        Ok(())
    }

    /// Marks a frame as written by its unit's forward, and begins to write the frame before to disk, which that forward
    /// was the last to read. With `is_last`, the last unit of a stage, the frame itself is written as well.
    pub(crate) fn end(&mut self, frame: FrameId, is_last: bool) -> Result<(), EngineError> {
        self.set_changed(frame, true);
        let mut read_by_now = frame.before().into_iter().chain(Some(frame).filter(|_| is_last));
        read_by_now.try_for_each(|frame| self.write_behind(frame))
    }

    /// Begins to write a frame that nothing reads before its backward, unless it stays in its slot.
    fn write_behind(&mut self, frame: FrameId) -> Result<(), EngineError> {
        let is_kept = self.stages[frame.stage].first_kept <= frame.unit;
        match self.staging.slot_of(frame).filter(|slot| !is_kept && self.staging.is_changed(*slot)) {
            Some(slot) => self.staging.begin_to_write(slot),
            None => Ok(()),
        }
    }

    /// Waits until the frames of a unit and of the unit before are in memory for a backward, and prefetches the one
    /// before these. The backward ends at the unit `first` or at the start of the stage.
    pub(crate) fn bring_back(&mut self, frame: FrameId, first: usize) -> Result<(), EngineError> {
        let before = frame.before();
        for wanted in [Some(frame), before].into_iter().flatten() {
            self.begin_to_read(wanted, frame)?;
        }
        for wanted in [Some(frame), before].into_iter().flatten() {
            if let Some(slot) = self.staging.slot_of(wanted) {
                self.staging.wait_for_slot(slot)?;
                self.staging.turn_to(slot);
            }
        }
        match before.and_then(FrameId::before).filter(|next| next.unit + 1 >= first) {
            Some(next) => self.begin_to_read(next, frame),
            None => Ok(()),
        }
    }

    /// Releases a frame's slot after its last backward. After the backward of the unit `first`, the slot of the frame
    /// before is released too.
    pub(crate) fn forget(&mut self, frame: FrameId, first: usize) {
        let before = frame.before().filter(|_| frame.unit == first);
        for read in [Some(frame), before].into_iter().flatten() {
            if let Some(slot) = self.staging.get_mut(read) {
                (slot.key, slot.is_changed) = (None, false);
            }
        }
    }

    fn set_changed(&mut self, frame: FrameId, is_changed: bool) {
        if let Some(slot) = self.staging.get_mut(frame) {
            slot.is_changed = is_changed;
        }
    }

    /// Returns the extent of a frame; `None` if it stays in memory or belongs to another stage.
    fn in_file(&self, frame: FrameId) -> Option<FileExtent> {
        let stage = &self.stages[frame.stage];
        let index = frame.unit.checked_sub(stage.first_unit)?;
        let in_slot = (*stage.frames.get(index)?)?;
        let offset = stage.start + frame.slot as u64 * stage.slot_bytes + in_slot.offset;
        Some(FileExtent { offset, ..in_slot })
    }

    /// Begins to read a frame that is on disk and not in memory; does nothing otherwise.
    fn begin_to_read(&mut self, frame: FrameId, in_use: FrameId) -> Result<(), EngineError> {
        let Some(extent) = self.in_file(frame) else { return Ok(()) };
        if self.staging.slot_of(frame).is_some() {
            return Ok(());
        }
        let slot = self.make_room(frame, extent, in_use)?;
        self.staging.begin_to_read(slot)
    }

    /// Assigns a slot to a frame: a free one if possible, else one whose frame is already on disk. The frame in use and
    /// the one before it keep theirs.
    fn make_room(
        &mut self,
        frame: FrameId,
        extent: FileExtent,
        in_use: FrameId,
    ) -> Result<usize, EngineError> {
        let is_in_use = |held: FrameId| held == in_use || Some(held) == in_use.before();
        self.staging.take(Some(frame), extent, |slot| {
            (!slot.key.is_some_and(is_in_use)).then_some((slot.key.is_some(), slot.is_changed))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::{Duration, Instant};

    use lockstep_plan::{DISK_ALIGNMENT_BYTES, DType, FRAME_PLACES, UnitProfile};
    use lockstep_tensor::{Action, DiskError};

    use super::*;
    use crate::faulty_disk::DiskFaults;

    const UNITS: usize = 9;
    const SLOTS: usize = 3;

    /// Frames of a model whose units save 4 KiB each, in one stage with `slots` slots.
    fn offloaded(directory: &std::path::Path, slots: usize) -> OffloadedFrames {
        let unit = UnitProfile { frame_bytes: 4096, saved_bytes: 4096, ..UnitProfile::default() };
        let model = ModelProfile {
            units: vec![unit; UNITS],
            records: Vec::new(),
            largest_elements: Vec::new(),
            dtype: DType::F32,
            sequences: 1,
            tokens: 1,
            data_bytes: Vec::new(),
            boundary_bytes: 64,
            slice_bytes: 64,
            gathered_bytes: 64,
            constants: Vec::new(),
            context: lockstep_plan::ContextPlace::default(),
        };
        let stage = StageMemory { units: 0..UNITS, slots, splits_backward: false };
        let offload = Offload {
            directory: directory.to_owned(),
            limit: Duration::from_millis(300),
            ..Offload::default()
        };
        OffloadedFrames::new(Some(&offload), &model, &[stage], &Arena::new()).unwrap().unwrap()
    }

    fn frame(slot: usize, unit: usize) -> FrameId {
        FrameId { stage: 0, slot, unit }
    }

    fn forward(frames: &mut OffloadedFrames, slot: usize, seed: u32) -> Result<(), EngineError> {
        // The frame of the head stays in memory.
        for unit in 0..UNITS - 1 {
            frames.begin(frame(slot, unit))?;
            if unit > 0 {
                check(frames, frame(slot, unit - 1), seed);
            }
            let words = (DISK_ALIGNMENT_BYTES / 4) as u32;
            let values: Vec<u32> = (0..words).map(|i| i ^ seed ^ ((unit as u32) << 16)).collect();
            frames.get(frame(slot, unit)).view(DType::U32, 0, [values.len()]).copy_from(&values);
            frames.end(frame(slot, unit), false)?;
        }
        frames.end(frame(slot, UNITS - 1), true)
    }

    fn backward(
        frames: &mut OffloadedFrames,
        slot: usize,
        seed: u32,
        first: usize,
    ) -> Result<(), EngineError> {
        for unit in (first..UNITS).rev() {
            frames.bring_back(frame(slot, unit), first)?;
            let read = [Some(unit), unit.checked_sub(1)].into_iter().flatten();
            read.filter(|unit| *unit + 1 < UNITS).for_each(|unit| check(frames, frame(slot, unit), seed));
            frames.forget(frame(slot, unit), first);
        }
        Ok(())
    }

    fn check(frames: &OffloadedFrames, frame: FrameId, seed: u32) {
        let found = frames.get(frame).view(DType::U32, 0, [DISK_ALIGNMENT_BYTES / 4]).to_vec::<u32>();
        let is_right = |(i, value): (usize, &u32)| *value == i as u32 ^ seed ^ ((frame.unit as u32) << 16);
        assert!(found.iter().enumerate().all(is_right), "{frame:?} of {seed}: {:?}", &found[..4]);
    }

    fn faulty_disk(mut frames: OffloadedFrames, trouble: DiskFaults) -> OffloadedFrames {
        frames.staging = frames.staging.faulty_disk(trouble);
        frames
    }

    #[test]
    fn frames_come_back_as_they_were_whichever_slots_are_in_flight_and_however_slow_the_disk() {
        let directory = tempfile::tempdir().unwrap();
        for delay in [Duration::ZERO, Duration::from_millis(2)] {
            let mut frames = faulty_disk(
                offloaded(directory.path(), SLOTS),
                DiskFaults { delay, ..DiskFaults::default() },
            );
            for step in 0..3 {
                let seed = |slot: usize| 1000 * step + slot as u32;
                forward(&mut frames, 0, seed(0)).unwrap();
                forward(&mut frames, 1, seed(1)).unwrap();
                backward(&mut frames, 0, seed(0), 0).unwrap();
                forward(&mut frames, 2, seed(2)).unwrap();
                forward(&mut frames, 0, seed(7)).unwrap();
                // The first units are frozen.
                backward(&mut frames, 1, seed(1), 3).unwrap();
                backward(&mut frames, 2, seed(2), 0).unwrap();
                backward(&mut frames, 0, seed(7), 0).unwrap();
            }
            let traffic = frames.staging.take_traffic();
            assert_eq!(traffic.written_bytes, 3 * 4 * 8 * 4096, "every frame is written once");
            assert!(traffic.read_bytes <= traffic.written_bytes, "{traffic:?}");
        }
    }

    #[test]
    fn the_last_frames_are_never_written_where_the_backward_follows() {
        let directory = tempfile::tempdir().unwrap();
        let mut frames = offloaded(directory.path(), 1);
        for step in 0..3 {
            forward(&mut frames, 0, step).unwrap();
            backward(&mut frames, 0, step, 0).unwrap();
        }
        let traffic = frames.staging.take_traffic();
        let moved = 3 * (UNITS as u64 - 1 - FRAME_PLACES as u64) * 4096;
        assert_eq!((traffic.written_bytes, traffic.read_bytes), (moved, moved));
        assert_eq!(frames.staging.disk_bytes(), (UNITS as u64 - 1) * 4096);
    }

    #[test]
    fn a_transfer_that_fails_is_an_error_of_the_step_or_of_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        for fails_at in 0..10 {
            let mut frames = faulty_disk(
                offloaded(directory.path(), 1),
                DiskFaults { fails_at: Some((fails_at, None)), ..DiskFaults::default() },
            );
            let mut step = || forward(&mut frames, 0, 1).and_then(|()| backward(&mut frames, 0, 1, 0));
            let error = step().and_then(|()| step()).unwrap_err();
            let expected = if fails_at < 5 { Action::Write } else { Action::Read };
            assert!(
                matches!(&error, EngineError::Disk(DiskError::Transfer { action, source, .. })
                    if *action == expected && source.kind() == io::ErrorKind::StorageFull),
                "transfer {fails_at}: {error}"
            );
        }
    }

    #[test]
    fn a_disk_that_says_nothing_is_an_error_in_time() {
        let directory = tempfile::tempdir().unwrap();
        let mut frames = faulty_disk(
            offloaded(directory.path(), 1),
            DiskFaults { is_silent: true, ..DiskFaults::default() },
        );
        let begin = Instant::now();
        let error = forward(&mut frames, 0, 1).unwrap_err();
        assert!(matches!(error, EngineError::Disk(DiskError::Silent { .. })), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        assert!(frames.staging.take_traffic().exposed > Duration::ZERO, "the wait is exposed");
    }
}

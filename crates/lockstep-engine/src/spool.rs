//! What units keep for their backward, on disk (ZeRO-Infinity: Rajbhandari et al. 2021, section 5.1.2; DeepSpeed's `cpu_checkpointing`, one
//! step further down).
//!
//! A unit's frame is one stretch of memory: what it saves, and then its output, which is the next unit's input. So one transfer moves
//! all of it. It is written behind the forward of the next unit, which reads its end, and read ahead of the backward of the unit behind:
//! the order of units is known. A few frames have a place in memory. Where a forward is followed by its own backward, the last
//! ones stay there and are never written.
//!
//! ```text
//! forward     unit 5 writes its frame    reads the end of 4    3 is on its way out
//! backward    unit 5 reads its frame     and the end of 4      3 is on its way in
//! ```

use std::time::Duration;

use lockstep_plan::{MemoryCategory, ModelProfile, StageMemory};
use lockstep_tensor::{Arena, Buffer, DiskError, DiskQueue, DiskTraffic, ScratchFile, Ticket};

use crate::{EngineError, Offload, passes::Place};

/// A frame: of a unit of one of the own stages, in one of its slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameId {
    stage: usize,
    slot: usize,
    unit: usize,
}

impl FrameId {
    pub(crate) const fn new(Place { stage, slot, .. }: Place, unit: usize) -> Self {
        Self { stage, slot, unit }
    }

    /// That of the unit before.
    fn before(self) -> Option<Self> {
        Some(Self { unit: self.unit.checked_sub(1)?, ..self })
    }
}

/// Frames on disk, and those of them that are in memory.
#[derive(Debug)]
pub(crate) struct Spool {
    queue: DiskQueue,
    /// Where the frames of each stage are in the file.
    stages: Vec<StageFile>,
    places: Vec<FramePlace>,
    /// How often a place was turned to.
    turns: u64,
    limit: Duration,
}

/// The frames of a stage in the file, slot after slot.
#[derive(Debug)]
struct StageFile {
    first_unit: usize,
    /// Of each unit, where its frame begins in that of a slot, and its bytes; none if it stays in memory.
    frames: Vec<Option<(u64, usize)>>,
    start: u64,
    slot_bytes: u64,
    /// The first unit whose frame need not be written, for it is in memory until its backward.
    first_kept: usize,
}

/// Room for one frame.
#[derive(Debug)]
struct FramePlace {
    memory: Buffer,
    frame: Option<FrameId>,
    /// Whether it has what the file has not, and will be asked for again.
    is_unwritten: bool,
    /// It is on its way in or out.
    pending: Option<Ticket>,
    last_turn: u64,
}

impl Spool {
    /// Places in memory and a file for the frames of `stages` of a rank; `None` if no frame is offloaded.
    ///
    /// # Errors
    /// No room on the disk or in memory.
    pub(crate) fn new(
        offload: &Offload,
        model: &ModelProfile,
        stages: &[StageMemory],
        arena: &Arena,
    ) -> Result<Option<Self>, EngineError> {
        let (places, place_bytes) = model.frame_places(stages);
        if places == 0 {
            return Ok(None);
        }
        let mut end = 0;
        let is_alone = stages.len() == 1;
        let files = stages.iter().map(|stage| {
            let start = end;
            let mut slot_bytes = 0;
            let frames = stage.units.clone().map(|unit| {
                let bytes = model.frame_on_disk_bytes(stage, unit)?;
                let offset = slot_bytes;
                slot_bytes += bytes as u64;
                Some((offset, bytes))
            });
            let frames: Vec<_> = frames.collect();
            end += stage.slots as u64 * slot_bytes;
            // The backward follows at once, so that nothing else comes to the places meanwhile.
            let kept = if is_alone && stage.slots == 1 { places } else { 0 };
            let on_disk = frames.iter().enumerate().filter(|(_, frame)| frame.is_some());
            let first_kept = on_disk.rev().take(kept).last().map_or(frames.len(), |(index, _)| index);
            let (first_unit, first_kept) = (stage.units.start, stage.units.start + first_kept);
            StageFile { first_unit, frames, start, slot_bytes, first_kept }
        });
        let stages = files.collect();
        let place = |_| {
            let memory = arena.allocate_zeroed(place_bytes, MemoryCategory::Activations)?;
            Ok(FramePlace { memory, frame: None, is_unwritten: false, pending: None, last_turn: 0 })
        };
        let file = ScratchFile::create(&offload.directory, end)?;
        Ok(Some(Self {
            queue: DiskQueue::new(file, offload.method)?,
            stages,
            places: (0..places).map(place).collect::<Result<_, EngineError>>()?,
            turns: 0,
            limit: offload.limit,
        }))
    }

    /// Bytes of the file.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.queue.file().len_bytes()
    }

    /// What has been read and written since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.queue.take_traffic()
    }

    /// The memory of a frame that was [begun](Self::begin) or [brought back](Self::bring_back) last, or of the one before it.
    ///
    /// # Panics
    /// If it is not in memory.
    pub(crate) fn get(&self, frame: FrameId) -> &Buffer {
        let place = self.place_of(frame).expect("a frame is brought back before it is looked at");
        &self.places[place].memory
    }

    /// Has memory for a frame that a forward writes, beside that of the unit before.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn begin(&mut self, frame: FrameId) -> Result<(), DiskError> {
        if self.in_file(frame).is_none() {
            return Ok(());
        }
        let place = match self.place_of(frame) {
            Some(place) => place,
            None => self.make_room(frame, frame)?,
        };
        self.places[place].is_unwritten = false;
        self.settle(place)?;
        self.turn_to(place);
        Ok(())
    }

    /// The forward of a unit, the last of its stage or not, has written a frame, which a backward will read, and has read the frame before,
    /// which begins to be written. What goes wrong with that is told to whoever needs its place.
    pub(crate) fn end(&mut self, frame: FrameId, is_last: bool) {
        if let Some(place) = self.place_of(frame) {
            self.places[place].is_unwritten = true;
        }
        let read_by_now = frame.before().into_iter().chain(Some(frame).filter(|_| is_last));
        read_by_now.for_each(|frame| self.write_behind(frame));
    }

    /// Begins to write a frame that nothing reads before its backward.
    fn write_behind(&mut self, frame: FrameId) {
        let is_kept = self.stages[frame.stage].first_kept <= frame.unit;
        if let Some(place) = self.place_of(frame).filter(|place| self.places[*place].is_unwritten && !is_kept)
        {
            self.begin_to_write(place);
        }
    }

    /// Has the frame of a unit and that of the unit before in memory, for a backward, and begins to read the one that is needed next.
    /// The backward ends with the unit `first`, if not at the border of the stage.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn bring_back(&mut self, frame: FrameId, first: usize) -> Result<(), DiskError> {
        let before = frame.before();
        for wanted in [Some(frame), before].into_iter().flatten() {
            if self.in_file(wanted).is_some() && self.place_of(wanted).is_none() {
                self.begin_to_read(wanted, frame)?;
            }
        }
        for wanted in [Some(frame), before].into_iter().flatten() {
            if let Some(place) = self.place_of(wanted) {
                self.settle(place)?;
                self.turn_to(place);
            }
        }
        let next = before.and_then(FrameId::before).filter(|next| next.unit + 1 >= first);
        match next.filter(|next| self.in_file(*next).is_some() && self.place_of(*next).is_none()) {
            Some(next) => self.begin_to_read(next, frame),
            None => Ok(()),
        }
    }

    /// The last backward that reads a frame is over; after that of the unit `first` nothing reads the frame before either.
    pub(crate) fn forget(&mut self, frame: FrameId, first: usize) {
        let before = frame.before().filter(|_| frame.unit == first);
        for read in [Some(frame), before].into_iter().flatten() {
            if let Some(place) = self.place_of(read) {
                self.places[place].frame = None;
                self.places[place].is_unwritten = false;
            }
        }
    }

    fn turn_to(&mut self, place: usize) {
        self.turns += 1;
        self.places[place].last_turn = self.turns;
    }

    fn place_of(&self, frame: FrameId) -> Option<usize> {
        self.places.iter().position(|place| place.frame == Some(frame))
    }

    /// Where a frame is in the file; none if it stays in memory, or is of another stage.
    fn in_file(&self, frame: FrameId) -> Option<(u64, usize)> {
        let stage = &self.stages[frame.stage];
        let index = frame.unit.checked_sub(stage.first_unit)?;
        let (offset, bytes) = (*stage.frames.get(index)?)?;
        Some((stage.start + frame.slot as u64 * stage.slot_bytes + offset, bytes))
    }

    fn begin_to_read(&mut self, frame: FrameId, in_use: FrameId) -> Result<(), DiskError> {
        let Some((offset, bytes)) = self.in_file(frame) else { return Ok(()) };
        let place = self.make_room(frame, in_use)?;
        let ticket = self.queue.read(offset, self.places[place].memory.lend(0..bytes));
        self.places[place].pending = Some(ticket);
        Ok(())
    }

    /// Gives a frame a place: a free one, else the one that was turned to least recently, and rather one that is written. Not that of the
    /// frame in use, nor of the one before it.
    fn make_room(&mut self, frame: FrameId, in_use: FrameId) -> Result<usize, DiskError> {
        let is_in_use = |place: &FramePlace| {
            place.frame.is_some_and(|held| held == in_use || Some(held) == in_use.before())
        };
        let others = self.places.iter().enumerate().filter(|(_, place)| !is_in_use(place));
        let rank =
            |(_, place): &(usize, &FramePlace)| (place.frame.is_some(), place.is_unwritten, place.last_turn);
        let (place, _) = others.min_by_key(rank).expect("more places than frames in use");
        if self.places[place].is_unwritten {
            self.begin_to_write(place);
        }
        self.settle(place)?;
        self.turn_to(place);
        let taken = &mut self.places[place];
        (taken.frame, taken.is_unwritten) = (Some(frame), false);
        Ok(place)
    }

    fn begin_to_write(&mut self, place: usize) {
        let Some((offset, bytes)) = self.places[place].frame.and_then(|frame| self.in_file(frame)) else {
            return;
        };
        self.places[place].is_unwritten = false;
        let ticket = self.queue.write(offset, self.places[place].memory.lend(0..bytes));
        self.places[place].pending = Some(ticket);
    }

    /// Waits until a place is neither read nor written.
    fn settle(&mut self, place: usize) -> Result<(), DiskError> {
        match self.places[place].pending.take() {
            Some(ticket) => self.queue.wait(ticket, self.limit),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Instant;

    use lockstep_plan::{DISK_ALIGNMENT_BYTES, DType, FRAME_PLACES, UnitProfile};
    use lockstep_tensor::Action;

    use super::*;
    use crate::troubled::Trouble;

    const UNITS: usize = 9;
    const SLOTS: usize = 3;

    /// A model whose units keep a page each, in a stage with several slots or with one.
    fn spool(directory: &std::path::Path, slots: usize) -> Spool {
        let unit = UnitProfile { frame_bytes: 4096, saved_bytes: 4096, ..UnitProfile::default() };
        let model = ModelProfile {
            units: vec![unit; UNITS],
            records: Vec::new(),
            largest_elements: Vec::new(),
            dtype: DType::F32,
            sequences: 1,
            tokens: 1,
            boundary_bytes: 64,
            slice_bytes: 64,
            gathered_bytes: 64,
            frequencies: 0,
            context: lockstep_plan::ContextPlace::default(),
        };
        let stage = StageMemory { units: 0..UNITS, slots, splits_backward: false };
        let offload = Offload {
            directory: directory.to_owned(),
            limit: Duration::from_millis(300),
            ..Offload::default()
        };
        Spool::new(&offload, &model, &[stage], &Arena::new()).unwrap().unwrap()
    }

    fn frame(slot: usize, unit: usize) -> FrameId {
        FrameId { stage: 0, slot, unit }
    }

    fn forward(spool: &mut Spool, slot: usize, seed: u32) -> Result<(), DiskError> {
        // The head is in memory.
        for unit in 0..UNITS - 1 {
            spool.begin(frame(slot, unit))?;
            if unit > 0 {
                check(spool, frame(slot, unit - 1), seed);
            }
            let words = (DISK_ALIGNMENT_BYTES / 4) as u32;
            let values: Vec<u32> = (0..words).map(|i| i ^ seed ^ ((unit as u32) << 16)).collect();
            spool.get(frame(slot, unit)).view(DType::U32, 0, [values.len()]).copy_from(&values);
            spool.end(frame(slot, unit), false);
        }
        spool.end(frame(slot, UNITS - 1), true);
        Ok(())
    }

    fn backward(spool: &mut Spool, slot: usize, seed: u32, first: usize) -> Result<(), DiskError> {
        for unit in (first..UNITS).rev() {
            spool.bring_back(frame(slot, unit), first)?;
            let read = [Some(unit), unit.checked_sub(1)].into_iter().flatten();
            read.filter(|unit| *unit + 1 < UNITS).for_each(|unit| check(spool, frame(slot, unit), seed));
            spool.forget(frame(slot, unit), first);
        }
        Ok(())
    }

    fn check(spool: &Spool, frame: FrameId, seed: u32) {
        let found = spool.get(frame).view(DType::U32, 0, [DISK_ALIGNMENT_BYTES / 4]).to_vec::<u32>();
        let is_right = |(i, value): (usize, &u32)| *value == i as u32 ^ seed ^ ((frame.unit as u32) << 16);
        assert!(found.iter().enumerate().all(is_right), "{frame:?} of {seed}: {:?}", &found[..4]);
    }

    fn troubled(mut spool: Spool, trouble: Trouble) -> Spool {
        spool.queue = trouble.of(spool.queue);
        spool
    }

    #[test]
    fn frames_come_back_as_they_were_whichever_slots_are_in_flight_and_however_slow_the_disk() {
        let directory = tempfile::tempdir().unwrap();
        for delay in [Duration::ZERO, Duration::from_millis(2)] {
            let mut spool = troubled(spool(directory.path(), SLOTS), Trouble { delay, ..Trouble::default() });
            for step in 0..3 {
                let seed = |slot: usize| 1000 * step + slot as u32;
                forward(&mut spool, 0, seed(0)).unwrap();
                forward(&mut spool, 1, seed(1)).unwrap();
                backward(&mut spool, 0, seed(0), 0).unwrap();
                forward(&mut spool, 2, seed(2)).unwrap();
                forward(&mut spool, 0, seed(7)).unwrap();
                // A model of which the beginning is frozen.
                backward(&mut spool, 1, seed(1), 3).unwrap();
                backward(&mut spool, 2, seed(2), 0).unwrap();
                backward(&mut spool, 0, seed(7), 0).unwrap();
            }
            let traffic = spool.take_traffic();
            assert_eq!(traffic.written_bytes, 3 * 4 * 8 * 4096, "every frame is written once");
            assert!(traffic.read_bytes <= traffic.written_bytes, "{traffic:?}");
        }
    }

    #[test]
    fn the_last_frames_are_never_written_where_the_backward_follows() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = spool(directory.path(), 1);
        for step in 0..3 {
            forward(&mut spool, 0, step).unwrap();
            backward(&mut spool, 0, step, 0).unwrap();
        }
        let traffic = spool.take_traffic();
        let moved = 3 * (UNITS as u64 - 1 - FRAME_PLACES as u64) * 4096;
        assert_eq!((traffic.written_bytes, traffic.read_bytes), (moved, moved));
        assert_eq!(spool.len_bytes(), (UNITS as u64 - 1) * 4096);
    }

    #[test]
    fn a_transfer_that_fails_is_an_error_of_the_step_or_of_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        for fails_at in 0..10 {
            let mut spool = troubled(
                spool(directory.path(), 1),
                Trouble { fails_at: Some((fails_at, None)), ..Trouble::default() },
            );
            let mut step = || forward(&mut spool, 0, 1).and_then(|()| backward(&mut spool, 0, 1, 0));
            let error = step().and_then(|()| step()).unwrap_err();
            let expected = if fails_at < 5 { Action::Write } else { Action::Read };
            assert!(
                matches!(&error, DiskError::Transfer { action, source, .. }
                    if *action == expected && source.kind() == io::ErrorKind::StorageFull),
                "transfer {fails_at}: {error}"
            );
        }
    }

    #[test]
    fn a_disk_that_says_nothing_is_an_error_in_time() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool =
            troubled(spool(directory.path(), 1), Trouble { is_silent: true, ..Trouble::default() });
        let begin = Instant::now();
        let error = forward(&mut spool, 0, 1).unwrap_err();
        assert!(matches!(error, DiskError::Silent { .. }), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}

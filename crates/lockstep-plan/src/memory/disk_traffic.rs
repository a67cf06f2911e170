//! What a rank reads from its disk and writes to it in a step, where model state or activations are there: known before it runs, as its
//! memory is.
//!
//! ```text
//! forward of a unit    reads its weights, writes the frame that its backward will read
//! backward             reads weights and frame, writes gradients; from the second micro-batch on reads them first, to add to them
//! update               reads gradients and the optimizer's state window by window, writes the state and with it the weights
//! ```
//!
//! What is in memory anyway is not read: windows that the last pass over them has left there, weights for which the pool has room, and the
//! last frames of a forward that its own backward follows.

use super::prediction::Rank;
use super::{DiskPlan, FRAME_PLACES, StatePlan, StoreLayout, WINDOW_SLOTS, window_bytes};
use crate::gathering::{Kept, RankPasses, Sequence, TooFewLive};
use crate::schedule::PassKind;
use crate::{DType, ModelProfile, StageMemory, Summing};

/// Bytes that are moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskBytes {
    /// From the disk.
    pub read: u64,
    /// To it.
    pub written: u64,
    /// Of both, what nothing is computed beside: weights that no earlier pass has room for, gradients that are added to, and what is written
    /// when all places in memory are on their way out.
    pub waited: u64,
}

impl DiskBytes {
    /// Both ways.
    pub const fn total(&self) -> u64 {
        self.read + self.written
    }
}

impl std::ops::Add for DiskBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            read: self.read + other.read,
            written: self.written + other.written,
            waited: self.waited + other.waited,
        }
    }
}

/// What a rank moves in a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepDiskTraffic {
    /// In all forwards of each unit of the model.
    pub forward: Vec<DiskBytes>,
    /// In all their backwards.
    pub backward: Vec<DiskBytes>,
    /// In the update.
    pub update: DiskBytes,
}

impl StepDiskTraffic {
    /// All of it.
    pub fn total(&self) -> DiskBytes {
        let passes = self.forward.iter().chain(&self.backward).copied();
        passes.fold(self.update, |sum, bytes| sum + bytes)
    }
}

/// What a rank with these passes of `model` moves to and from its disk in a step; arguments are those of [`predicted`](super::predicted).
///
/// # Errors
/// [`TooFewLive`].
pub fn disk_traffic(
    model: &ModelProfile,
    passes: RankPasses<'_>,
    shard_ranks: impl Fn(Summing) -> usize,
    state: &StatePlan,
) -> Result<StepDiskTraffic, TooFewLive> {
    let units = vec![DiskBytes::default(); model.units.len()];
    let mut traffic =
        StepDiskTraffic { forward: units.clone(), backward: units, update: DiskBytes::default() };
    if let Some(disk) = state.on_disk {
        let rank = Rank::new(model, passes.stages, shard_ranks, state);
        rank.move_weights(disk, passes, &mut traffic)?;
        rank.move_gradients_and_state(disk, passes.micro_batches, &mut traffic);
    }
    if state.has_activations_on_disk {
        model.move_frames(passes, &mut traffic);
    }
    Ok(traffic)
}

/// A file of windows, and which of them are in memory.
struct Windows {
    /// The bytes of each.
    bytes: Vec<u64>,
    /// The first window of each stretch, and the number of all.
    first: Vec<usize>,
    slots: [Option<usize>; WINDOW_SLOTS],
    turn: usize,
}

impl Windows {
    /// Those of what a store has on disk, with tensors of these types beside each other.
    fn new(layout: &StoreLayout, dtypes: &[DType], window_elements: usize) -> Self {
        let (mut bytes, mut first) = (Vec::new(), vec![0]);
        for stretch in &layout.stretches {
            let own = if stretch.is_on_disk { stretch.own.clone() } else { 0..0 };
            for start in own.clone().step_by(window_elements) {
                let elements = window_elements.min(own.end - start);
                bytes.push(window_bytes(dtypes.iter().copied(), elements) as u64);
            }
            first.push(bytes.len());
        }
        Self { bytes, first, slots: [None; WINDOW_SLOTS], turn: 0 }
    }

    /// Has a window in memory: the bytes that have to be read for it, 0 if it was there.
    fn load(&mut self, window: usize) -> u64 {
        if self.slots.contains(&Some(window)) {
            return 0;
        }
        self.slots[self.turn] = Some(window);
        self.turn = (self.turn + 1) % WINDOW_SLOTS;
        self.bytes[window]
    }

    /// Has all windows in memory, one after the other: the bytes that are read for that.
    fn pass(&mut self) -> u64 {
        (0..self.bytes.len()).map(|window| self.load(window)).sum()
    }

    fn of_stretch(&self, stretch: usize) -> std::ops::Range<usize> {
        self.first[stretch]..self.first[stretch + 1]
    }

    fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl<S: Fn(Summing) -> usize> Rank<'_, S> {
    /// Weights, before each use for which they are not there.
    fn move_weights(
        &self,
        disk: DiskPlan,
        passes: RankPasses<'_>,
        traffic: &mut StepDiskTraffic,
    ) -> Result<(), TooFewLive> {
        let Some(gathers) = self.gathers(passes)? else { return Ok(()) };
        let first_trained = self.model.units.iter().position(|unit| unit.has_backward);
        let uses = passes.uses_by_pass(Sequence::Step, first_trained);
        let stores = [self.weights(), self.frozen()]
            .map(|store| Windows::new(&store, &[self.model.dtype], disk.window_elements));
        let own_bytes = |kept: Kept, stretch: usize| -> u64 {
            let store = &stores[kept as usize];
            store.bytes[store.of_stretch(stretch)].iter().sum()
        };
        for stay in gathers.plans[Sequence::Step as usize].stays() {
            let parts = gathers.bundles[stay.bundle].iter().filter(|part| part.is_on_disk);
            let read: u64 = parts.map(|part| own_bytes(part.kept, part.stretch)).sum();
            let (kind, unit) = uses[stay.first_use];
            let of_pass =
                if kind == PassKind::Forward { &mut traffic.forward } else { &mut traffic.backward };
            of_pass[unit].read += read;
            of_pass[unit].waited += if stay.from == stay.first_use { read } else { 0 };
        }
        Ok(())
    }

    /// Gradients, which each micro-batch writes and the next one reads to add to them, and the update's way through them and the state.
    fn move_gradients_and_state(&self, disk: DiskPlan, micro_batches: usize, traffic: &mut StepDiskTraffic) {
        let layout = self.gradients();
        let mut gradients = Windows::new(&layout, &[DType::F32], disk.window_elements);
        // Stretches in the order in which backwards complete them.
        let mut completed: Vec<usize> = (0..layout.stretches.len()).collect();
        completed.sort_by_key(|stretch| std::cmp::Reverse(layout.stretches[*stretch].completed_by));
        for micro_batch in 0..micro_batches.max(1) {
            for &stretch in &completed {
                let of_unit = &mut traffic.backward[layout.stretches[stretch].completed_by];
                let windows = gradients.of_stretch(stretch);
                let adds = micro_batch > 0;
                // What is written last goes beside the next unit: all places where none is read into, else half of them.
                let beside = if adds { WINDOW_SLOTS / 2 } else { WINDOW_SLOTS };
                for window in windows.clone() {
                    let missing = gradients.load(window);
                    let (read, written) = (if adds { missing } else { 0 }, gradients.bytes[window]);
                    of_unit.read += read;
                    of_unit.written += written;
                    of_unit.waited += read + if window + beside < windows.end { written } else { 0 };
                }
            }
        }
        traffic.update.read += gradients.pass();
        let (state, dtypes) = self.state_on_disk();
        if let Some(layout) = state {
            let mut windows = Windows::new(&layout, &dtypes, disk.window_elements);
            // As in all steps but the first.
            windows.pass();
            traffic.update.read += windows.pass();
            traffic.update.written += windows.total();
        }
    }
}

impl ModelProfile {
    /// What units keep, from their forward to their backward.
    fn move_frames(&self, passes: RankPasses<'_>, traffic: &mut StepDiskTraffic) {
        let micro_batches = passes.micro_batches as u64;
        let is_alone = |stage: &StageMemory| passes.stages.len() == 1 && stage.slots == 1;
        for (index, stage) in passes.stages.iter().enumerate() {
            let frame = |unit: usize| Some((unit, self.frame_on_disk_bytes(stage, unit)? as u64));
            let frames: Vec<(usize, u64)> = stage.units.clone().filter_map(frame).collect();
            let first_of_last = frames.len().saturating_sub(FRAME_PLACES);
            for (number, (unit, bytes)) in frames.into_iter().enumerate() {
                let is_last = number >= first_of_last;
                // A backward that follows its own forward finds the last frames where they are, and where none but it can follow they
                // need not be written.
                let (written, found) = match is_last {
                    true if is_alone(stage) => (0, micro_batches),
                    true => (micro_batches, passes.turns_at_once(index) as u64),
                    false => (micro_batches, 0),
                };
                traffic.forward[unit].written += bytes * written;
                traffic.backward[unit].read += bytes * (micro_batches - found);
            }
        }
    }
}

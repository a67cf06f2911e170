//! The bytes that a rank moves in a step between its device and host memory or a disk, where model state or activations are offloaded: known
//! before the step runs, as its memory is.
//!
//! ```text
//! forward of a unit    reads its weights, writes the frame that its backward will read
//! backward             reads weights and frame, writes gradients; from the second micro-batch on reads them first, to add to them
//! update               reads gradients and the optimizer's state window by window, writes the state and with it the weights
//! ```
//!
//! Windows that the last pass has left on the device, weights for which the pool has room, and the last frames of a forward that its own
//! backward follows are not read again.

use super::{
    DiskPlan, FRAME_PLACES, StateLayout, StatePlan, StoreKind, StoreLayout, WINDOW_SLOTS, window_bytes,
};
use crate::gathering::{Gathers, Kept, RankPasses, Sequence, TooFewLive};
use crate::schedule::PassKind;
use crate::{DType, ModelProfile, StageMemory, Summing};

/// Bytes of offloaded state that a rank moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OffloadBytes {
    /// From host memory or disk.
    pub read: u64,
    /// To it.
    pub written: u64,
    /// The part of both that overlaps with no computation: weights that no earlier pass has room for, gradients that are added to, and writes
    /// while all staging buffers are being written out.
    pub waited: u64,
}

impl OffloadBytes {
    /// Both ways.
    pub const fn total(&self) -> u64 {
        self.read + self.written
    }
}

impl std::ops::Mul<u64> for OffloadBytes {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self { read: self.read * times, written: self.written * times, waited: self.waited * times }
    }
}

impl std::ops::Add for OffloadBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            read: self.read + other.read,
            written: self.written + other.written,
            waited: self.waited + other.waited,
        }
    }
}

/// Bytes that a rank moves in a step, by pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OffloadTraffic {
    /// In all forwards of each unit of the model; empty if nothing is moved.
    pub forward: Vec<OffloadBytes>,
    /// In all backwards of each unit of the model.
    pub backward: Vec<OffloadBytes>,
    /// In the optimizer step.
    pub update: OffloadBytes,
}

impl OffloadTraffic {
    const fn nothing() -> Self {
        let update = OffloadBytes { read: 0, written: 0, waited: 0 };
        Self { forward: Vec::new(), backward: Vec::new(), update }
    }

    fn of_units(units: usize) -> Self {
        let units = vec![OffloadBytes::default(); units];
        Self { forward: units.clone(), backward: units, update: OffloadBytes::default() }
    }

    /// Whether nothing is moved.
    pub fn is_nothing(&self) -> bool {
        self.forward.is_empty()
    }

    /// Sum over the passes and the optimizer step.
    pub fn total(&self) -> OffloadBytes {
        let passes = self.forward.iter().chain(&self.backward).copied();
        passes.fold(self.update, |sum, bytes| sum + bytes)
    }
}

impl RankTraffic {
    /// The same with a share of the bytes of all passes, for a share of the micro-batches.
    #[must_use]
    pub fn of_passes(&self, share: f64) -> Self {
        let part = |bytes: u64| (bytes as f64 * share) as u64;
        let of_unit = |bytes: &OffloadBytes| OffloadBytes {
            read: part(bytes.read),
            written: part(bytes.written),
            waited: part(bytes.waited),
        };
        let of = |traffic: &OffloadTraffic| OffloadTraffic {
            forward: traffic.forward.iter().map(of_unit).collect(),
            backward: traffic.backward.iter().map(of_unit).collect(),
            update: traffic.update,
        };
        Self { host: of(&self.host), disk: of(&self.disk) }
    }
}

impl std::ops::Add for OffloadTraffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let sum = |a: &[OffloadBytes], b: &[OffloadBytes]| a.iter().zip(b).map(|(a, b)| *a + *b).collect();
        match (self.is_nothing(), other.is_nothing()) {
            (true, _) => other,
            (_, true) => self,
            _ => Self {
                forward: sum(&self.forward, &other.forward),
                backward: sum(&self.backward, &other.backward),
                update: self.update + other.update,
            },
        }
    }
}

/// What a rank moves in a step over the link to its host and to and from its disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankTraffic {
    /// To and from host memory.
    pub host: OffloadTraffic,
    /// To and from the disk.
    pub disk: OffloadTraffic,
}

/// Traffic of a rank with these passes of `model` for its offloaded model state and for its offloaded activations; arguments are those of
/// [`predicted`](super::predicted).
///
/// # Errors
/// If the limit on live parameters leaves no room for a unit's weights.
pub fn offload_traffic_by_kind(
    model: &ModelProfile,
    passes: &RankPasses,
    shard_ranks: impl Fn(Summing) -> usize,
    state: &StatePlan,
) -> Result<[OffloadTraffic; 2], TooFewLive> {
    let layout = StateLayout::of_first_ranks(model, &passes.stages, shard_ranks, state);
    let gathers = if state.on_disk.is_some() { layout.gathers(model, passes)? } else { None };
    Ok(layout.offload_traffic(model, passes, gathers.as_ref()))
}

/// Bytes of host memory or disk that the offloaded model state and activations of a rank take: `[state, activations]`.
pub fn offloaded_bytes(
    model: &ModelProfile,
    stages: &[StageMemory],
    shard_ranks: impl Fn(Summing) -> usize,
    state: &StatePlan,
) -> [u64; 2] {
    let of_state = state.on_disk.map_or(0, |disk| {
        let layout = StateLayout::of_first_ranks(model, stages, shard_ranks, state);
        let windows = layout.files().into_iter().flatten();
        windows.map(|(layout, dtypes)| Windows::new(layout, &dtypes, disk.window_elements).total()).sum()
    });
    let frames = |stage: &StageMemory| {
        let frame = |unit: usize| model.frame_on_disk_bytes(stage, unit).unwrap_or(0) as u64;
        stage.units.clone().map(frame).sum::<u64>() * stage.slots as u64
    };
    let of_activations = if state.has_activations_on_disk { stages.iter().map(frames).sum() } else { 0 };
    [of_state, of_activations]
}

/// Offloaded state as windows, and which of them are in memory.
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

    /// The windows in memory, the next to be replaced first: what later loads depend on.
    fn in_order_of_replacement(&self) -> [Option<usize>; WINDOW_SLOTS] {
        let mut slots = self.slots;
        slots.rotate_left(self.turn);
        slots
    }

    fn of_stretch(&self, stretch: usize) -> std::ops::Range<usize> {
        self.first[stretch]..self.first[stretch + 1]
    }

    fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl StateLayout {
    /// Traffic of the rank in a step for its offloaded model state and for its offloaded activations. The arguments are those that the state
    /// was laid out for, and its [`gathers`](StateLayout::gathers).
    pub fn offload_traffic(
        &self,
        model: &ModelProfile,
        passes: &RankPasses,
        gathers: Option<&Gathers>,
    ) -> [OffloadTraffic; 2] {
        let [mut of_state, mut of_activations] = [const { OffloadTraffic::nothing() }; 2];
        if let Some(disk) = self.plan.on_disk {
            of_state = OffloadTraffic::of_units(model.units.len());
            if let Some(gathers) = gathers {
                self.move_weights(disk, model, passes, gathers, &mut of_state);
            }
            self.move_gradients_and_state(disk, passes.micro_batches, &mut of_state);
        }
        if self.plan.has_activations_on_disk {
            of_activations = OffloadTraffic::of_units(model.units.len());
            model.move_frames(passes, &mut of_activations);
        }
        [of_state, of_activations]
    }

    /// Weights, before each use for which they are not there.
    fn move_weights(
        &self,
        disk: DiskPlan,
        model: &ModelProfile,
        passes: &RankPasses,
        gathers: &Gathers,
        traffic: &mut OffloadTraffic,
    ) {
        let first_trained = model.units.iter().position(|unit| unit.has_backward);
        let uses = passes.uses_by_pass(Sequence::Step, first_trained);
        let stores = [StoreKind::Weights, StoreKind::FrozenWeights].map(|kind| {
            self.item(kind).map(|item| Windows::new(&item.layout, &[model.dtype], disk.window_elements))
        });
        let own_bytes = |kept: Kept, stretch: usize| -> u64 {
            let of = |store: &Windows| store.bytes[store.of_stretch(stretch)].iter().sum();
            stores[kept as usize].as_ref().map_or(0, of)
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
    }

    /// Gradients, which each micro-batch writes and the next one reads to add to them, and the update's way through them and the state.
    fn move_gradients_and_state(&self, disk: DiskPlan, micro_batches: usize, traffic: &mut OffloadTraffic) {
        let [state, gradients, _] = self.files();
        let Some((layout, dtypes)) = gradients else { return };
        let mut gradients = Windows::new(layout, &dtypes, disk.window_elements);
        // Stretches in the order in which backwards complete them.
        let mut completed: Vec<usize> = (0..layout.stretches.len()).collect();
        completed.sort_by_key(|stretch| std::cmp::Reverse(layout.stretches[*stretch].completed_by));
        let of_micro_batch = |gradients: &mut Windows, adds: bool| {
            // What is written last goes beside the next unit: all places where none is read into, else half of them.
            let beside = if adds { WINDOW_SLOTS / 2 } else { WINDOW_SLOTS };
            let mut of_units: Vec<(usize, OffloadBytes)> = Vec::new();
            for &stretch in &completed {
                let windows = gradients.of_stretch(stretch);
                let mut moved = OffloadBytes::default();
                for window in windows.clone() {
                    let missing = gradients.load(window);
                    let (read, written) = (if adds { missing } else { 0 }, gradients.bytes[window]);
                    moved.read += read;
                    moved.written += written;
                    moved.waited += read + if window + beside < windows.end { written } else { 0 };
                }
                of_units.push((layout.stretches[stretch].completed_by, moved));
            }
            of_units
        };
        let mut add = |moved: Vec<(usize, OffloadBytes)>, times: usize| {
            for (unit, bytes) in moved {
                traffic.backward[unit] = traffic.backward[unit] + bytes * times as u64;
            }
        };
        add(of_micro_batch(&mut gradients, false), 1);
        let mut left = micro_batches.max(1) - 1;
        while left > 0 {
            let before = gradients.in_order_of_replacement();
            let moved = of_micro_batch(&mut gradients, true);
            // Every further micro-batch moves the same once it leaves the windows as it found them.
            let times = if gradients.in_order_of_replacement() == before { left } else { 1 };
            add(moved, times);
            left -= times;
        }
        traffic.update.read += gradients.pass();
        if let Some((layout, dtypes)) = state {
            let mut windows = Windows::new(layout, &dtypes, disk.window_elements);
            // As in all steps but the first.
            windows.pass();
            traffic.update.read += windows.pass();
            traffic.update.written += windows.total();
        }
    }
}

impl ModelProfile {
    /// What units keep, from their forward to their backward.
    fn move_frames(&self, passes: &RankPasses, traffic: &mut OffloadTraffic) {
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

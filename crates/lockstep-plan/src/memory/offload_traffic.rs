//! Offload traffic of a step: bytes that a rank moves between its device and host memory or disk for offloaded model state and
//! activations. It is known before the step runs.
//!
//! ```text
//! forward of a unit    reads its weights, writes the frame that its backward will read
//! backward             reads weights and frame, writes gradients; from the second micro-batch on reads them first, to add to them
//! optimizer step       reads gradients and optimizer state window by window, writes the state and with it the weights
//! ```
//!
//! Three things are not read again: windows that the last pass left on the device, weights that stay in the pool, and the last frames of
//! a forward whose backward follows directly.

use super::{
    FRAME_PLACES, OffloadPlan, StateLayout, StatePlan, StoreKind, StoreLayout, WINDOW_SLOTS, window_bytes,
};
use crate::gathering::{Gathers, Kept, LiveLimitTooLow, RankPasses, Sequence};
use crate::schedule::PassKind;
use crate::{DType, ModelProfile, ReductionGroup, StageMemory};

/// Offload traffic in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OffloadBytes {
    /// Bytes read from host memory or disk.
    pub read: u64,
    /// Bytes written to host memory or disk.
    pub written: u64,
    /// Part of both that overlaps with no computation: weights that cannot be prefetched, gradients that are accumulated into, and writes
    /// while all staging buffers are in use.
    pub waited: u64,
}

impl OffloadBytes {
    /// Returns the bytes read and written.
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

/// Offload traffic of a rank in a step, by pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OffloadTraffic {
    /// All forwards of each unit of the model; empty if nothing is moved.
    pub forward: Vec<OffloadBytes>,
    /// All backwards of each unit of the model; empty if nothing is moved.
    pub backward: Vec<OffloadBytes>,
    /// Traffic of the optimizer step.
    pub update: OffloadBytes,
}

impl OffloadTraffic {
    fn of_units(units: usize) -> Self {
        let units = vec![OffloadBytes::default(); units];
        Self { forward: units.clone(), backward: units, update: OffloadBytes::default() }
    }

    /// Returns true if nothing is moved.
    pub fn is_nothing(&self) -> bool {
        self.forward.is_empty()
    }

    /// Returns the sum over all passes and the optimizer step.
    pub fn total(&self) -> OffloadBytes {
        let passes = self.forward.iter().chain(&self.backward).copied();
        passes.fold(self.update, |sum, bytes| sum + bytes)
    }
}

impl RankTraffic {
    /// Returns the traffic with a fraction `share` of all passes' bytes, for that fraction of the micro-batches.
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

/// Offload traffic of a rank in a step, over its link to the host and to its disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankTraffic {
    /// Traffic to and from host memory.
    pub host: OffloadTraffic,
    /// Traffic to and from the disk.
    pub disk: OffloadTraffic,
}

/// Returns the traffic of offloaded model state and of offloaded activations, `[state, activations]`. The arguments are those of
/// [`predicted`](super::predicted).
///
/// # Errors
/// If the limit on live parameters leaves no room for a unit's weights.
pub fn offload_traffic_by_kind(
    model: &ModelProfile,
    passes: &RankPasses,
    shard_ranks: impl Fn(ReductionGroup) -> usize,
    state: &StatePlan,
) -> Result<[OffloadTraffic; 2], LiveLimitTooLow> {
    let layout = StateLayout::of_first_ranks(model, &passes.stages, shard_ranks, state);
    let gathers = if state.on_disk.is_some() { layout.gathers(model, passes)? } else { None };
    Ok(layout.offload_traffic(model, passes, gathers.as_ref()))
}

/// Returns the bytes that a rank's offloaded model state and activations take in host memory or on disk: `[state, activations]`.
pub fn offloaded_bytes(
    model: &ModelProfile,
    stages: &[StageMemory],
    shard_ranks: impl Fn(ReductionGroup) -> usize,
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

/// Windows of an offload file, and the ones in memory.
struct Windows {
    /// Bytes of each window.
    bytes: Vec<u64>,
    /// Index of the first window of each flat parameter; the last entry is the number of windows.
    first: Vec<usize>,
    slots: [Option<usize>; WINDOW_SLOTS],
    turn: usize,
}

impl Windows {
    /// Cuts the offloaded part of a store into windows, each with tensors of these dtypes.
    fn new(layout: &StoreLayout, dtypes: &[DType], window_elements: usize) -> Self {
        let (mut bytes, mut first) = (Vec::new(), vec![0]);
        for flat in &layout.flat_parameters {
            let own = if flat.is_on_disk { flat.own.clone() } else { 0..0 };
            for start in own.clone().step_by(window_elements) {
                let elements = window_elements.min(own.end - start);
                bytes.push(window_bytes(dtypes.iter().copied(), elements) as u64);
            }
            first.push(bytes.len());
        }
        Self { bytes, first, slots: [None; WINDOW_SLOTS], turn: 0 }
    }

    /// Loads a window and returns the bytes read: 0 if it was in memory.
    fn load(&mut self, window: usize) -> u64 {
        if self.slots.contains(&Some(window)) {
            return 0;
        }
        self.slots[self.turn] = Some(window);
        self.turn = (self.turn + 1) % WINDOW_SLOTS;
        self.bytes[window]
    }

    /// Loads all windows in order and returns the bytes read.
    fn pass(&mut self) -> u64 {
        (0..self.bytes.len()).map(|window| self.load(window)).sum()
    }

    /// Returns the windows in memory, next to be replaced first; later loads depend on nothing else.
    fn in_order_of_replacement(&self) -> [Option<usize>; WINDOW_SLOTS] {
        let mut slots = self.slots;
        slots.rotate_left(self.turn);
        slots
    }

    fn of_stretch(&self, flat: usize) -> std::ops::Range<usize> {
        self.first[flat]..self.first[flat + 1]
    }

    fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl StateLayout {
    /// Returns the traffic of a step for offloaded model state and for offloaded activations, `[state, activations]`. The arguments must
    /// be those of the state layout, and its [`gathers`](StateLayout::gathers).
    pub fn offload_traffic(
        &self,
        model: &ModelProfile,
        passes: &RankPasses,
        gathers: Option<&Gathers>,
    ) -> [OffloadTraffic; 2] {
        let [mut of_state, mut of_activations] = <[OffloadTraffic; 2]>::default();
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

    /// Adds the reads of weights before each use for which they are not in the pool.
    fn move_weights(
        &self,
        disk: OffloadPlan,
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
        let own_bytes = |kept: Kept, flat: usize| -> u64 {
            let of = |store: &Windows| store.bytes[store.of_stretch(flat)].iter().sum();
            stores[kept as usize].as_ref().map_or(0, of)
        };
        for stay in gathers.plans[Sequence::Step as usize].stays() {
            let parts = gathers.bundles[stay.bundle].iter().filter(|part| part.is_on_disk);
            let read: u64 = parts.map(|part| own_bytes(part.kept, part.flat)).sum();
            let (kind, unit) = uses[stay.first_use];
            let of_pass =
                if kind == PassKind::Forward { &mut traffic.forward } else { &mut traffic.backward };
            of_pass[unit].read += read;
            of_pass[unit].waited += if stay.from == stay.first_use { read } else { 0 };
        }
    }

    /// Adds the traffic of gradients, which every micro-batch after the first reads and accumulates into, and that of the optimizer step.
    fn move_gradients_and_state(
        &self,
        disk: OffloadPlan,
        micro_batches: usize,
        traffic: &mut OffloadTraffic,
    ) {
        let [state, gradients, _] = self.files();
        let Some((layout, dtypes)) = gradients else { return };
        let mut gradients = Windows::new(layout, &dtypes, disk.window_elements);
        // Flat parameters in the order in which backwards complete them.
        let mut completed: Vec<usize> = (0..layout.flat_parameters.len()).collect();
        completed.sort_by_key(|flat| std::cmp::Reverse(layout.flat_parameters[*flat].completed_by));
        let of_micro_batch = |gradients: &mut Windows, adds: bool| {
            // Writes of the last windows overlap with the next unit: all slots if none is needed for reads, otherwise half of them.
            let beside = if adds { WINDOW_SLOTS / 2 } else { WINDOW_SLOTS };
            let mut of_units: Vec<(usize, OffloadBytes)> = Vec::new();
            for &flat in &completed {
                let windows = gradients.of_stretch(flat);
                let mut moved = OffloadBytes::default();
                for window in windows.clone() {
                    let missing = gradients.load(window);
                    let (read, written) = (if adds { missing } else { 0 }, gradients.bytes[window]);
                    moved.read += read;
                    moved.written += written;
                    moved.waited += read + if window + beside < windows.end { written } else { 0 };
                }
                of_units.push((layout.flat_parameters[flat].completed_by, moved));
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
            // Once a micro-batch leaves the windows as it found them, every further one moves the same bytes.
            let times = if gradients.in_order_of_replacement() == before { left } else { 1 };
            add(moved, times);
            left -= times;
        }
        traffic.update.read += gradients.pass();
        if let Some((layout, dtypes)) = state {
            let mut windows = Windows::new(layout, &dtypes, disk.window_elements);
            // Steady state: the previous step left its last windows in memory.
            windows.pass();
            traffic.update.read += windows.pass();
            traffic.update.written += windows.total();
        }
    }
}

impl ModelProfile {
    /// Adds the traffic of frames, written by the forward and read by the backward.
    fn move_frames(&self, passes: &RankPasses, traffic: &mut OffloadTraffic) {
        let micro_batches = passes.micro_batches as u64;
        let is_alone = |stage: &StageMemory| passes.stages.len() == 1 && stage.slots == 1;
        for (index, stage) in passes.stages.iter().enumerate() {
            let frame = |unit: usize| Some((unit, self.frame_on_disk_bytes(stage, unit)? as u64));
            let frames: Vec<(usize, u64)> = stage.units.clone().filter_map(frame).collect();
            let first_of_last = frames.len().saturating_sub(FRAME_PLACES);
            for (number, (unit, bytes)) in frames.into_iter().enumerate() {
                let is_last = number >= first_of_last;
                // A backward that follows its own forward finds the last frames in memory. If every backward does, they need not be
                // written.
                let (written, found) = match is_last {
                    true if is_alone(stage) => (0, micro_batches),
                    true => (micro_batches, passes.immediate_backwards(index) as u64),
                    false => (micro_batches, 0),
                };
                traffic.forward[unit].written += bytes * written;
                traffic.backward[unit].read += bytes * (micro_batches - found);
            }
        }
    }
}

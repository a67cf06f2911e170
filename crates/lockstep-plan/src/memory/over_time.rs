//! Activation memory in use over the time of a simulated step, unit by unit of each pass.
//!
//! The ledger books memory for the maximum number of micro-batches in flight, for the whole step. This module computes how much of it is
//! in use. A micro-batch is in a stage from the receive of its input, but its frames fill during the forward. Moreover, the chunks of a
//! rank do not peak at the same time. So the peak in use is at most what is booked, and close to it.

use crate::schedule::{Action, Message, PassKind, Span};
use crate::{ModelProfile, StageMemory, booked_bytes};

/// Activation memory of one micro-batch in a stage.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StageActivationUse {
    /// Index of the stage.
    pub stage: usize,
    /// Saved activations of each unit, from its forward to the end of its backward.
    pub saved_bytes: Vec<usize>,
    /// Values of each unit that are saved between the halves of a split backward.
    pub deferred_bytes: Vec<usize>,
    /// Input of the stage with its token ids, from the receive (or the forward) until the last pass.
    pub input_bytes: usize,
    /// Gradient of the stage's output, from its receive until the input gradient is complete.
    pub gradient_bytes: usize,
}

/// Activation memory of a rank's stages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ActivationUse {
    /// Bytes that are in use during the whole step.
    pub constant_bytes: usize,
    /// Memory of each stage of the rank.
    pub stages: Vec<StageActivationUse>,
}

impl ModelProfile {
    /// Returns the activation memory of these stages, whose indices in the pipeline are `numbers`. Frames are on disk if `are_on_disk`.
    pub fn activation_use(
        &self,
        stages: &[StageMemory],
        numbers: impl IntoIterator<Item = usize>,
        are_on_disk: bool,
    ) -> ActivationUse {
        let boundary = booked_bytes(self.boundary_bytes);
        let given = |unit: usize| self.input_bytes(unit).map_or(0, booked_bytes);
        let of_stage = |(stage, number): (&StageMemory, usize)| {
            let kept = |unit| self.frame_in_memory_bytes(stage, unit, are_on_disk).map_or(0, booked_bytes);
            let deferred = |unit: usize| booked_bytes(self.units[unit].deferred_bytes);
            let has_after = stage.units.end < self.units.len();
            let handed_on = if are_on_disk && has_after { given(stage.units.end) } else { 0 };
            let splits = stage.splits_backward;
            StageActivationUse {
                stage: number,
                saved_bytes: stage.units.clone().map(kept).collect(),
                deferred_bytes: stage
                    .units
                    .clone()
                    .map(|unit| if splits { deferred(unit) } else { 0 })
                    .collect(),
                input_bytes: self.micro_batch_bytes() + given(stage.units.start) + handed_on,
                gradient_bytes: if has_after { boundary } else { 0 },
            }
        };
        let send_buffers: usize = stages.iter().map(StageMemory::send_buffers).sum();
        let offload_staging = if are_on_disk {
            let (places, bytes) = self.frame_places(stages);
            places * booked_bytes(bytes)
        } else {
            0
        };
        ActivationUse {
            constant_bytes: (2 + send_buffers) * boundary + offload_staging,
            stages: stages.iter().zip(numbers).map(of_stage).collect(),
        }
    }
}

/// Change of the memory in use.
#[derive(Debug, Clone, Copy)]
struct Change {
    at_ms: f64,
    bytes: i64,
}

impl ActivationUse {
    /// Returns the bytes in use over time, as (milliseconds, bytes) at each change, for a rank that runs `spans`. `seconds(stage)` are
    /// the relative durations of the forward and backward of each unit, in which a pass is divided.
    pub fn over_time(&self, spans: &[Span], seconds: impl Fn(usize) -> Vec<[f64; 2]>) -> Vec<(f64, usize)> {
        let mut changes = Vec::new();
        for held in &self.stages {
            let of_stage = StageChanges::new(held, spans, &seconds(held.stage));
            spans.iter().for_each(|span| of_stage.add(span, &mut changes));
        }
        // Memory that is freed at a moment is available to what starts then.
        changes.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms).then(a.bytes.cmp(&b.bytes)));
        let mut now = self.constant_bytes as i64;
        let mut curve = vec![(0.0, self.constant_bytes)];
        for change in changes.chunk_by(|a, b| a.at_ms == b.at_ms) {
            now += change.iter().map(|change| change.bytes).sum::<i64>();
            let point = (change[0].at_ms, now.max(0) as usize);
            match curve.last_mut() {
                Some(last) if last.0 == point.0 => *last = point,
                _ => curve.push(point),
            }
        }
        curve
    }
}

/// Effect of a stage's passes on the memory in use.
struct StageChanges<'h> {
    held: &'h StageActivationUse,
    /// For each unit, the start in the forward and the end in the backward, as fractions of the pass.
    begins: Vec<f64>,
    ends: Vec<f64>,
    /// True if activations, and true if gradients, are received from other ranks.
    receives: [bool; 2],
}

impl<'h> StageChanges<'h> {
    fn new(held: &'h StageActivationUse, spans: &[Span], seconds: &[[f64; 2]]) -> Self {
        let is_to_here = |span: &Span, is_activation: bool| {
            matches!(span.action, Action::Receive(message)
                if message.to == held.stage && message.is_activation() == is_activation)
        };
        let receives = [true, false].map(|values| spans.iter().any(|span| is_to_here(span, values)));
        let shares = |pass: usize| -> Vec<f64> {
            let all: f64 = seconds.iter().map(|seconds| seconds[pass]).sum();
            let even = 1.0 / seconds.len().max(1) as f64;
            seconds.iter().map(|seconds| if all > 0.0 { seconds[pass] / all } else { even }).collect()
        };
        let begin = |done: &mut f64, share: f64| {
            let begin = *done;
            *done += share;
            Some(begin)
        };
        // A backward runs the units from the last to the first.
        let end = |left: &mut f64, share: f64| {
            let end = *left;
            *left -= share;
            Some(end)
        };
        let begins = shares(0).into_iter().scan(0.0, begin).collect();
        let ends = shares(1).into_iter().scan(1.0, end).collect();
        Self { held, begins, ends, receives }
    }

    fn add(&self, span: &Span, changes: &mut Vec<Change>) {
        let StageActivationUse { stage, input_bytes, gradient_bytes, .. } = *self.held;
        let Span { action, start_ms, end_ms } = *span;
        let mut change = |at_ms: f64, bytes: usize, sign: i64| {
            if bytes > 0 {
                changes.push(Change { at_ms, bytes: sign * bytes as i64 });
            }
        };
        let [receives_values, receives_gradients] = self.receives;
        match action {
            Action::Receive(Message { to, .. }) if to != stage => {}
            Action::Receive(message) if message.is_activation() => change(start_ms, input_bytes, 1),
            Action::Receive(_) => change(start_ms, gradient_bytes, 1),
            Action::Compute(pass) if pass.stage == stage => {
                let at = |share: f64| start_ms + share * (end_ms - start_ms);
                if pass.kind == PassKind::Forward {
                    if !receives_values {
                        change(start_ms, input_bytes, 1);
                    }
                    for (begin, bytes) in self.begins.iter().zip(&self.held.saved_bytes) {
                        change(at(*begin), *bytes, 1);
                    }
                }
                if pass.kind.makes_input_gradient() {
                    if !receives_gradients {
                        change(start_ms, gradient_bytes, 1);
                    }
                    change(end_ms, gradient_bytes, -1);
                }
                for (index, end) in self.ends.iter().enumerate() {
                    let (kept, deferred) = (self.held.saved_bytes[index], self.held.deferred_bytes[index]);
                    match pass.kind {
                        PassKind::Forward => {}
                        PassKind::Backward => change(at(*end), kept, -1),
                        PassKind::BackwardInput => change(start_ms, deferred, 1),
                        PassKind::BackwardWeight => change(at(*end), kept + deferred, -1),
                    }
                }
                if pass.kind.makes_weight_gradient() {
                    change(end_ms, input_bytes, -1);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Costs, Kind, Schedule, StageCost};
    use crate::{ContextPlace, DType, UnitProfile};

    /// Stages of two units of 100 and 200 bytes, with 30 bytes of input and 7 of gradient.
    fn held(schedule: &Schedule, rank: usize) -> ActivationUse {
        let of_stage = |stage: usize| StageActivationUse {
            stage,
            saved_bytes: vec![100, 200],
            deferred_bytes: vec![if schedule.splits_backward(stage) { 11 } else { 0 }; 2],
            input_bytes: 30,
            gradient_bytes: 7,
        };
        ActivationUse { constant_bytes: 1000, stages: schedule.stages_of(rank).map(of_stage).collect() }
    }

    /// Returns the bytes of all slots of the rank's stages.
    fn booked(held: &ActivationUse, schedule: &Schedule) -> usize {
        let of_stage = |held: &StageActivationUse| {
            let of_units = held.saved_bytes.iter().chain(&held.deferred_bytes).sum::<usize>();
            schedule.slots(held.stage) * (of_units + held.input_bytes + held.gradient_bytes)
        };
        held.constant_bytes + held.stages.iter().map(of_stage).sum::<usize>()
    }

    #[test]
    fn one_rank_fills_its_frames_unit_by_unit_and_empties_them_from_the_last() {
        let schedule = Schedule::new(Kind::OneForwardOneBackward, 1, 2, 1).unwrap();
        let cost = StageCost { forward_ms: 4.0, backward_input_ms: 6.0, ..StageCost::default() };
        let simulation = schedule.simulate(&Costs::uniform(1, cost)).unwrap();
        let curve = held(&schedule, 0).over_time(&simulation.spans[0], |_| vec![[1.0, 1.0], [3.0, 2.0]]);
        let of_first = [(0.0, 1130), (1.0, 1330), (4.0, 1337), (8.0, 1137), (10.0, 1130), (11.0, 1330)];
        assert_eq!(curve[..6], of_first);
        assert_eq!(curve.last(), Some(&(20.0, 1000)));
    }

    #[test]
    fn the_most_in_use_is_what_the_pairs_in_flight_keep_and_no_more_than_is_booked() {
        for kind in Kind::ALL {
            let chunks = kind.chunks().0;
            let schedule = Schedule::new(kind, 4, 8, chunks).unwrap();
            let cost = StageCost {
                forward_ms: 1.0,
                backward_input_ms: 1.1,
                backward_weight_ms: 0.9,
                ..StageCost::default()
            };
            let costs = Costs { transfer_ms: 0.1, ..Costs::uniform(schedule.stages(), cost) };
            let simulation = schedule.simulate(&costs).unwrap();
            for rank in 0..4 {
                let held = held(&schedule, rank);
                let curve = held.over_time(&simulation.spans[rank], |_| vec![[1.0, 2.0]; 2]);
                let most = curve.iter().map(|(_, bytes)| *bytes).max().unwrap() - held.constant_bytes;
                let booked = booked(&held, &schedule) - held.constant_bytes;
                // Pairs of micro-batch and chunk, each with its input and its saved activations.
                let least = simulation.peak_activations[rank] * (300 + 30);
                let what = format!("{kind:?}, rank {rank}: {most} of {booked} booked, at least {least}");
                assert!((least..=booked).contains(&most), "{what}");
                // Receives are posted one pass early, and chunks do not peak at once.
                assert!(most as f64 >= 0.5 * booked as f64, "{what}");
                assert!(curve.is_sorted_by(|a, b| a.0 < b.0), "{what}: {curve:?}");
                assert_eq!(curve.last().map(|(_, bytes)| *bytes), Some(held.constant_bytes), "{what}");
            }
        }
    }

    #[test]
    fn what_all_slots_hold_is_what_the_ledger_books() {
        let unit = |index: usize| UnitProfile {
            frame_bytes: 1000 * (index + 1),
            saved_bytes: 700 * (index + 1),
            deferred_bytes: 300 * index,
            slices_output: index == 3,
            ..UnitProfile::default()
        };
        let profile = ModelProfile {
            units: (0..8).map(unit).collect(),
            records: Vec::new(),
            largest_elements: Vec::new(),
            dtype: DType::BF16,
            sequences: 2,
            tokens: 64,
            data_bytes: Vec::new(),
            boundary_bytes: 4096,
            slice_bytes: 2048,
            gathered_bytes: 4096,
            constants: Vec::new(),
            context: ContextPlace::default(),
        };
        for kind in Kind::ALL {
            let chunks = kind.chunks().0;
            let schedule = Schedule::new(kind, 8 / chunks / 2, 8, chunks).unwrap();
            let of_stage = 8 / schedule.stages();
            let units: Vec<_> =
                (0..schedule.stages()).map(|stage| stage * of_stage..(stage + 1) * of_stage).collect();
            for (rank, are_on_disk) in (0..schedule.ranks()).flat_map(|rank| [(rank, false), (rank, true)]) {
                let stages = StageMemory::of_rank(&schedule, &units, rank);
                let held = profile.activation_use(&stages, schedule.stages_of(rank), are_on_disk);
                let ledger = profile.activation_bytes(&stages, are_on_disk);
                // A unit without saved activations is booked one cache line, like any buffer.
                assert_eq!(booked(&held, &schedule), ledger, "{kind:?}, rank {rank}, disk {are_on_disk}");
            }
        }
    }
}

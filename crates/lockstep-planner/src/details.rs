//! The parts of a plan's step beyond its totals: traffic between ranks, work against the limits of the devices, and memory over
//! time of each pipeline rank.

use std::borrow::Cow;

use lockstep_plan::schedule::{Action, Pass, PassKind, Span};
use lockstep_plan::{ActivationUse, MemoryCategory, StageActivationUse, StepLayout};

use crate::predict::{StepTraffic, TimedModel, slowest_kind, traffic};
use crate::recordings::Recording;
use crate::roofline::Roofline;
use crate::{Error, Evaluated, Planner};

/// Traffic, rooflines and memory over time of a plan's step.
#[derive(Debug, Clone, PartialEq)]
pub struct Details {
    /// Traffic of the busiest pipeline rank.
    pub traffic: StepTraffic,
    /// The roofline of each kind of node.
    pub rooflines: Vec<Roofline>,
    /// Memory over time of each pipeline rank, from the first stage on.
    pub memory: Vec<MemoryCurve>,
}

/// Memory in use on a rank over a step.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryCurve {
    /// Predicted bytes of everything except activations; constant over the step.
    pub standing_bytes: usize,
    /// Predicted bytes in all, `standing_bytes` and activations.
    pub booked_bytes: usize,
    /// Bytes in use from a time on, as pairs (milliseconds, bytes).
    pub points: Vec<(f64, usize)>,
}

impl MemoryCurve {
    /// Returns the peak, as (milliseconds at which it begins, bytes).
    pub fn peak(&self) -> (f64, usize) {
        let highest = self.points.iter().rev().max_by_key(|(_, bytes)| *bytes);
        highest.copied().unwrap_or((0.0, self.standing_bytes))
    }
}

impl Evaluated {
    /// Returns the actions of a pipeline rank with their times. Without a pipeline every rank runs one micro-batch after the other.
    pub fn spans(&self, pipeline_rank: usize) -> Cow<'_, [Span]> {
        if let Some(simulation) = &self.step.simulation {
            return Cow::Borrowed(&simulation.spans[pipeline_rank]);
        }
        let Some(stage) = self.step.stages.first() else { return Cow::Owned(Vec::new()) };
        let (forward_ms, backward_ms) = (stage.forward.seconds() * 1e3, stage.backward.seconds() * 1e3);
        let of_micro_batch = |micro_batch: usize| {
            let start_ms = micro_batch as f64 * (forward_ms + backward_ms);
            let span = |kind, start_ms, end_ms| {
                let action = Action::Compute(Pass { kind, stage: 0, micro_batch });
                Span { action, start_ms, end_ms }
            };
            let middle_ms = start_ms + forward_ms;
            [
                span(PassKind::Forward, start_ms, middle_ms),
                span(PassKind::Backward, middle_ms, middle_ms + backward_ms),
            ]
        };
        (0..self.config.accumulation_steps()).flat_map(of_micro_batch).collect()
    }
}

impl Planner {
    /// Computes the parts of the step of a plan.
    ///
    /// # Errors
    /// If the configuration does not fit its model.
    pub fn details(&mut self, found: &Evaluated) -> Result<Details, Error> {
        let config = &found.config;
        let checked = self.described(config)?;
        let layout = checked.layout();
        let recording = self.recording_of(checked.plan(), &layout.mesh);
        let on_disk = self.traffic_of(checked.plan(), layout, &recording).unwrap_or_default();
        let shape = self.shape(config.zero_stage(), layout, &on_disk);
        // Stages and schedule come from the same valid plan.
        let traffic =
            traffic(&self.cluster, &recording.work, shape).expect("costs of every stage of the schedule");
        Ok(Details {
            traffic,
            rooflines: self.rooflines(found, layout, &recording),
            memory: self.curves(found, layout, &recording),
        })
    }

    fn curves(&self, found: &Evaluated, layout: &StepLayout, recording: &Recording) -> Vec<MemoryCurve> {
        let times = TimedModel::new(&self.cluster, &recording.work, &layout.mesh);
        let kinds = 0..self.cluster.nodes.len();
        let seconds: Vec<Vec<[f64; 2]>> = kinds.map(|kind| times.unit_seconds(kind)).collect();
        let curve = |(rank, memory): (usize, &lockstep_plan::MemoryBytes)| {
            let standing_bytes = memory.total() - memory[MemoryCategory::Activations];
            let kind = slowest_kind(&self.cluster, &layout.mesh, times.dtype(), rank);
            let of_stage = |stage: usize| seconds[kind][layout.stages[stage].clone()].to_vec();
            let held = self.held(found, layout, recording, rank);
            let mut points = held.over_time(&found.spans(rank), of_stage);
            points.iter_mut().for_each(|(_, bytes)| *bytes += standing_bytes);
            MemoryCurve { standing_bytes, booked_bytes: memory.total(), points }
        };
        found.memory.iter().enumerate().map(curve).collect()
    }

    /// Returns the saved activations of a pipeline rank; for systems other than Lockstep by the formulas of their papers.
    fn held(
        &self,
        found: &Evaluated,
        layout: &StepLayout,
        recording: &Recording,
        rank: usize,
    ) -> ActivationUse {
        let numbers = layout.stages_of(rank);
        if self.traits().has_ledger {
            let stages = layout.stages_on(rank);
            let are_on_disk = found.config.plan.residence.have_activations_on_disk();
            return recording.profile.activation_use(&stages, numbers, are_on_disk);
        }
        let kept = |unit: usize| {
            let recompute = found.config.plan.recompute.of(unit.saturating_sub(1));
            self.traits().saved_bytes(&recording.work, unit, recompute) as usize
        };
        let of_stage = |stage: usize| {
            let saved_bytes: Vec<usize> = layout.stages[stage].clone().map(kept).collect();
            StageActivationUse {
                stage,
                deferred_bytes: vec![0; saved_bytes.len()],
                saved_bytes,
                ..StageActivationUse::default()
            }
        };
        ActivationUse { constant_bytes: 0, stages: numbers.into_iter().map(of_stage).collect() }
    }
}

//! The order in which a rank uses the units of its model. It is known before the run, so that weights can be gathered ahead of their use.

use std::ops::Range;
use std::sync::Arc;

use crate::StageMemory;
use crate::schedule::{PassKind, Schedule};

/// A sequence of uses that is planned as a whole; no gathered weight is kept from one sequence to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequence {
    /// All micro-batches of a step.
    Step,
    /// Forward and backward of one micro-batch.
    MicroBatch,
    /// Forward of one micro-batch, for evaluation.
    Evaluation,
}

impl Sequence {
    /// All sequences, in the order of [`Gathers::plans`](super::Gathers).
    pub const ALL: [Self; 3] = [Self::Step, Self::MicroBatch, Self::Evaluation];
}

/// Stages of a rank, and its forward and backward passes.
#[derive(Debug, Clone, PartialEq)]
pub struct RankPasses {
    /// Stages of the rank, first layer first.
    pub stages: Vec<StageMemory>,
    /// Schedule of the pipeline, and this rank's index in it; `None` without pipeline parallelism.
    pub pipeline: Option<(Arc<Schedule>, usize)>,
    /// Micro-batches of a step on this rank. With a pipeline, the order of uses follows the schedule instead.
    pub micro_batches: usize,
}

impl RankPasses {
    /// Returns the number of micro-batches of a step whose backward directly follows their forward. `stage` is an index into the rank's
    /// own stages.
    pub fn immediate_backwards(&self, stage: usize) -> usize {
        let Some((schedule, rank)) = &self.pipeline else { return self.micro_batches };
        let Some(stage) = schedule.stages_of(*rank).nth(stage) else { return 0 };
        let passes: Vec<_> = schedule.passes(*rank).collect();
        let turns = passes.windows(2).filter(|pair| {
            let [forward, backward] = [pair[0], pair[1]];
            let is_turn = forward.kind == PassKind::Forward && backward.kind == PassKind::Backward;
            is_turn
                && forward.stage == stage
                && backward.stage == stage
                && forward.micro_batch == backward.micro_batch
        });
        turns.count()
    }

    /// Returns the units that a sequence uses, in order; `first_trained` is the first unit with a backward, if any has one.
    pub fn uses(&self, sequence: Sequence, first_trained: Option<usize>) -> Vec<usize> {
        self.uses_by_pass(sequence, first_trained).into_iter().map(|(_, unit)| unit).collect()
    }

    /// Returns the units that a sequence uses, each with the kind of its pass.
    pub fn uses_by_pass(&self, sequence: Sequence, first_trained: Option<usize>) -> Vec<(PassKind, usize)> {
        let mut uses = Vec::new();
        let mut add = |kind: PassKind, units: Range<usize>| {
            let of_pass = |unit: usize| (kind, unit);
            if kind == PassKind::Forward {
                uses.extend(units.map(of_pass));
            } else if let Some(first) = first_trained {
                uses.extend((first.max(units.start)..units.end).rev().map(of_pass));
            }
        };
        match (sequence, &self.pipeline) {
            (Sequence::Step, Some((schedule, rank))) => {
                let stages: Vec<usize> = schedule.stages_of(*rank).collect();
                for pass in schedule.passes(*rank) {
                    let stage = stages.iter().position(|stage| *stage == pass.stage);
                    let stage = stage.expect("a rank's passes are of its stages");
                    add(pass.kind, self.stages[stage].units.clone());
                }
            }
            (Sequence::Evaluation, _) => {
                self.stages.iter().for_each(|stage| add(PassKind::Forward, stage.units.clone()));
            }
            // A pipeline never runs a single micro-batch.
            (Sequence::MicroBatch, Some(_)) => {}
            (Sequence::Step | Sequence::MicroBatch, None) => {
                let times = if sequence == Sequence::Step { self.micro_batches } else { 1 };
                for _ in 0..times {
                    for stage in &self.stages {
                        add(PassKind::Forward, stage.units.clone());
                        add(PassKind::Backward, stage.units.clone());
                    }
                }
            }
        }
        uses
    }
}

//! In which order a rank's passes use the units of its model: what is known of it before it runs, so that weights are where they are read.

use std::ops::Range;
use std::sync::Arc;

use crate::StageMemory;
use crate::schedule::{PassKind, Schedule};

/// A sequence of uses that is planned as a whole: nothing is kept from one to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequence {
    /// All micro-batches of a step, as many as the rank was built for.
    Step,
    /// One micro-batch.
    MicroBatch,
    /// A forward alone.
    Evaluation,
}

impl Sequence {
    /// All of them, in their order.
    pub const ALL: [Self; 3] = [Self::Step, Self::MicroBatch, Self::Evaluation];
}

/// The stages of a rank, and its passes through them.
#[derive(Debug, Clone, PartialEq)]
pub struct RankPasses {
    /// The stages, from the model's first layer on.
    pub stages: Vec<StageMemory>,
    /// The actions of all ranks of a pipeline, and the rank among them; `None` without a pipeline.
    pub pipeline: Option<(Arc<Schedule>, usize)>,
    /// Micro-batches of a step on this rank; of effect without a pipeline.
    pub micro_batches: usize,
}

impl RankPasses {
    /// Micro-batches of a step whose backward through one of the rank's stages, given by its place among them, is the pass after their forward.
    pub fn turns_at_once(&self, stage: usize) -> usize {
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

    /// The units that a sequence uses, in its order; `first_trained` is the first that has a backward, if any has one.
    pub fn uses(&self, sequence: Sequence, first_trained: Option<usize>) -> Vec<usize> {
        self.uses_by_pass(sequence, first_trained).into_iter().map(|(_, unit)| unit).collect()
    }

    /// The same, each with its pass.
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
            // Micro-batches of a pipeline are never alone.
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

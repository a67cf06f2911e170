//! In which order a rank's passes use the units of its model: what is known of it before it runs, so that weights are where they are read.

use std::ops::Range;

use lockstep_plan::schedule::PassKind;

use crate::{PipelinePlan, runner::StageMemory};

/// A sequence of uses that is planned as a whole: nothing is kept from one to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sequence {
    /// All micro-batches of a step, as many as the engine was built for.
    Step,
    /// One micro-batch.
    MicroBatch,
    /// A forward alone.
    Evaluation,
}

impl Sequence {
    pub(crate) const ALL: [Self; 3] = [Self::Step, Self::MicroBatch, Self::Evaluation];
}

/// The passes of a rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankPasses<'a> {
    /// The units of each of its stages.
    pub(crate) stages: &'a [StageMemory],
    /// The first unit that has a backward, if any has one.
    pub(crate) first_trained: Option<usize>,
    /// What it does in a pipeline.
    pub(crate) pipeline: Option<(&'a PipelinePlan, usize)>,
    /// Micro-batches of a step.
    pub(crate) micro_batches: usize,
}

impl RankPasses<'_> {
    /// The units that a sequence uses, in its order.
    pub(crate) fn uses(&self, sequence: Sequence) -> Vec<usize> {
        let mut uses = Vec::new();
        match (sequence, self.pipeline) {
            (Sequence::Step, Some((plan, rank))) => {
                for pass in plan.schedule.passes(rank) {
                    self.add(&mut uses, pass.kind, plan.units_of(pass.stage));
                }
            }
            (Sequence::Evaluation, _) => {
                self.stages.iter().for_each(|stage| uses.extend(stage.units.clone()));
            }
            // Micro-batches of a pipeline are never alone.
            (Sequence::MicroBatch, Some(_)) => {}
            (Sequence::Step | Sequence::MicroBatch, None) => {
                let times = if sequence == Sequence::Step { self.micro_batches } else { 1 };
                for _ in 0..times {
                    for stage in self.stages {
                        self.add(&mut uses, PassKind::Forward, stage.units.clone());
                        self.add(&mut uses, PassKind::Backward, stage.units.clone());
                    }
                }
            }
        }
        uses
    }

    fn add(&self, uses: &mut Vec<usize>, kind: PassKind, units: Range<usize>) {
        if kind == PassKind::Forward {
            uses.extend(units);
        } else if let Some(first) = self.first_trained {
            uses.extend((first.max(units.start)..units.end).rev());
        }
    }
}

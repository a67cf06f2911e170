//! The layout of a plan's step: for a configuration as its keys say, for a candidate with balanced stages.

use std::ops::Range;
use std::sync::Arc;

use lockstep_config::{RunConfig, plan};
use lockstep_plan::schedule::{Kind, Schedule};
use lockstep_plan::{CheckedPlan, Mesh, Plan, Recompute, StepLayout, split_minmax};

use crate::predict::{TimedModel, slowest_kind};
use crate::search::Candidate;
use crate::trial::shortened;
use crate::{Error, Planner};

impl Planner {
    /// Returns the checked plan that a configuration's keys describe.
    pub(crate) fn described(&self, config: &RunConfig) -> Result<CheckedPlan, Error> {
        Ok(plan::checked_plan(config, &self.model.config, &self.model.tuning)?)
    }

    /// Returns the run with `plan` in place of its own.
    pub fn run_under(&self, plan: Plan) -> RunConfig {
        let mut config = self.config.clone();
        config.plan = plan;
        config
    }

    /// Returns the layout of a candidate with balanced stages, where the first `count` blocks recompute. A long schedule is
    /// shortened to the micro-batches that show its steady state. `None` if there is no such mesh, schedule or split.
    pub(crate) fn laid_out(
        &mut self,
        candidate: &Candidate,
        count: usize,
        times: &TimedModel,
    ) -> Option<StepLayout> {
        let mesh = Mesh::new(candidate.degrees).ok()?;
        let micro_batches = candidate.micro_batches(self.config.train.global_batch);
        let (kind, chunks) = candidate.schedule;
        let ranks = candidate.degrees.pipeline;
        if ranks == 1 {
            let stages = std::iter::once(0..times.units()).collect();
            return Some(StepLayout { mesh, schedule: None, stages, micro_batches });
        }
        let micro_batches = shortened(kind, ranks, micro_batches);
        let schedule = self.schedule(kind, ranks, micro_batches, chunks)?;
        let stages = self.stages(candidate, &mesh, count, times, &schedule)?;
        Some(StepLayout { mesh, schedule: Some(schedule), stages, micro_batches })
    }

    /// Splits the units into balanced stages, each timed on the slowest node that runs it, where the first `count` blocks recompute
    /// by the candidate's mode.
    fn stages(
        &mut self,
        candidate: &Candidate,
        mesh: &Mesh,
        count: usize,
        times: &TimedModel,
        schedule: &Schedule,
    ) -> Option<Vec<Range<usize>>> {
        let stages = schedule.stages();
        let forgotten = if count == 0 { Recompute::None } else { candidate.recompute };
        // If all nodes are alike, the order of ranks in a V makes no difference.
        let is_v = self.cluster.nodes.len() > 1 && candidate.schedule.0.is_v_shaped();
        let key = (self.pass_key(candidate), forgotten, count, stages, is_v);
        if let Some(known) = self.caches.cuts.get(&key) {
            return known.clone();
        }
        let of_kind = |kind: usize| -> Vec<f64> {
            let seconds = times.unit_seconds(kind);
            seconds.iter().map(|[forward, backward]| forward + backward).collect()
        };
        let costs: Vec<Vec<f64>> = (0..self.cluster.nodes.len()).map(of_kind).collect();
        let kind = |rank: usize| slowest_kind(&self.cluster, mesh, times.dtype(), rank);
        let kinds: Vec<usize> = (0..candidate.degrees.pipeline).map(kind).collect();
        let of_stage = |stage: usize| costs[kinds[schedule.rank_of(stage)]].as_slice();
        let cut = split_minmax(of_stage, times.units(), stages).map(|units| {
            let stage = |end: &mut usize, units: usize| {
                let start = *end;
                *end += units;
                Some(start..*end)
            };
            units.into_iter().scan(0, stage).collect::<Vec<_>>()
        });
        self.caches.cuts.insert(key, cut.clone());
        cut
    }

    pub(crate) fn schedule(
        &mut self,
        kind: Kind,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Option<Arc<Schedule>> {
        let key = (kind, ranks, micro_batches, chunks);
        if let Some(known) = self.schedules.get(&key) {
            return known.clone();
        }
        let schedule = Schedule::published(kind, ranks, micro_batches, chunks).ok().map(Arc::new);
        self.schedules.insert(key, schedule.clone());
        schedule
    }
}

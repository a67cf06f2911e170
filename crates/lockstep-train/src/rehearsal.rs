//! Pipeline schedules, measured and simulated: the real executor with real messages runs passes that only sleep.
//!
//! A rank's part of the model takes the same total time under every schedule; with several stages on a rank, each takes its
//! fraction of that.

use std::time::{Duration, Instant};

use lockstep_comm::Group;
use lockstep_engine::{Groups, PassTime, Ranks, Rehearsal, StepTimes};
use lockstep_plan::schedule::{Costs, Schedule, StageCost};
use lockstep_plan::{CheckedPlan, MemoryCategory};
use serde::Serialize;

use crate::Error;

/// Longest wait for another rank, in addition to the simulated step.
const PATIENCE: Duration = Duration::from_secs(60);

/// A benchmark of pipeline schedules.
#[derive(Debug, Clone, Copy)]
pub struct PipelineBenchmark {
    /// Cost of a micro-batch in all stages of a rank together; its memory is ignored.
    pub rank_cost: StageCost,
    /// Bytes of a message between consecutive stages.
    pub message_bytes: usize,
    /// Timed steps, after one warm-up step; at least one.
    pub steps: usize,
}

/// Step time and bubble of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepShare {
    /// Milliseconds from the common start of all ranks to the end.
    pub step_ms: f64,
    /// Fraction of all ranks' time in which no pass ran.
    pub bubble: f64,
}

/// A schedule, measured and simulated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rehearsed {
    /// The median of the measured steps.
    pub measured: StepShare,
    /// The simulation of the schedule's action lists.
    pub simulated: StepShare,
    /// Microseconds by which a pass took longer than planned: the mean over the median step.
    pub late_us: f64,
}

impl PipelineBenchmark {
    /// Runs `schedule`, which has as many ranks as `group`. Collective: every rank calls it.
    ///
    /// # Errors
    /// If a rank does not answer ([`Error::Comm`]), or there is no memory for the messages.
    ///
    /// # Panics
    /// If there is only one rank.
    pub fn run(&self, group: &Group, schedule: &Schedule) -> Result<Rehearsed, Error> {
        let cost = self.stage_cost(schedule);
        let costs = Costs::uniform(schedule.stages(), cost);
        let Ok(simulation) = schedule.simulate(&costs) else {
            unreachable!("there is a cost for each stage");
        };
        let simulated = StepShare { step_ms: simulation.step_ms, bubble: simulation.bubble };
        let limit = PATIENCE + Duration::from_secs_f64(simulated.step_ms / 1e3);
        let plan = CheckedPlan::of_schedule(schedule.clone()).rank(group.rank());
        let groups = Groups::new(group.clone(), plan, limit)?;
        let arena = group.arena(&[MemoryCategory::Activations]);
        let mut rehearsal = Rehearsal::new(&groups, &costs.stages, self.message_bytes, &arena)?;
        let ranks = Ranks::new(groups);
        rehearsal.step()?;
        let mut steps = Vec::with_capacity(self.steps.max(1));
        for _ in 0..self.steps.max(1) {
            let all = ranks.numbers(OwnStep::of(rehearsal.step()?, cost).to_words())?;
            steps.push(step_of_all(&all.into_iter().map(OwnStep::from_words).collect::<Vec<_>>()));
        }
        steps.sort_by(|(a, _), (b, _)| a.step_ms.total_cmp(&b.step_ms));
        let (measured, late_us) = steps.swap_remove(steps.len() / 2);
        Ok(Rehearsed { measured, simulated, late_us })
    }

    /// Returns the cost of each stage, as a fraction of the cost of a rank.
    fn stage_cost(&self, schedule: &Schedule) -> StageCost {
        let part = schedule.ranks() as f64 / schedule.stages() as f64;
        let StageCost { forward_ms, backward_input_ms, backward_weight_ms, .. } = self.rank_cost;
        StageCost {
            forward_ms: forward_ms * part,
            backward_input_ms: backward_input_ms * part,
            backward_weight_ms: backward_weight_ms * part,
            ..self.rank_cost
        }
    }
}

/// A rank's own part of a step.
#[derive(Debug, Clone, Copy)]
struct OwnStep {
    step_ms: f64,
    /// Milliseconds of its passes.
    worked_ms: f64,
    late_us: f64,
}

impl OwnStep {
    fn of(times: &StepTimes, cost: StageCost) -> Self {
        let StepTimes { begin, passes, end, .. } = times;
        let lasted = |PassTime { begin, end, .. }: &PassTime| ms(*begin, *end);
        let worked_ms = passes.iter().map(lasted).sum();
        let planned_ms: f64 = passes.iter().map(|time| cost.duration_ms(time.pass.kind)).sum();
        let late_us = 1e3 * (worked_ms - planned_ms) / passes.len() as f64;
        Self { step_ms: ms(*begin, *end), worked_ms, late_us }
    }

    fn to_words(self) -> [u64; 3] {
        [self.step_ms, self.worked_ms, self.late_us].map(f64::to_bits)
    }

    fn from_words(words: [u64; 3]) -> Self {
        let [step_ms, worked_ms, late_us] = words.map(f64::from_bits);
        Self { step_ms, worked_ms, late_us }
    }
}

/// Combines the ranks' steps. All begin and end together, but for the time in which they are woken.
fn step_of_all(ranks: &[OwnStep]) -> (StepShare, f64) {
    let step_ms = ranks.iter().map(|rank| rank.step_ms).fold(0.0, f64::max);
    let worked_ms: f64 = ranks.iter().map(|rank| rank.worked_ms).sum();
    let late_us = ranks.iter().map(|rank| rank.late_us).sum::<f64>() / ranks.len() as f64;
    (StepShare { step_ms, bubble: 1.0 - worked_ms / (step_ms * ranks.len() as f64) }, late_us)
}

fn ms(begin: Instant, end: Instant) -> f64 {
    end.saturating_duration_since(begin).as_secs_f64() * 1e3
}

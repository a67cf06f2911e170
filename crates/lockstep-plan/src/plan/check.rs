//! Checks of a plan against a model, a batch and a world: all problems at once.

use std::sync::Arc;

use super::{
    CheckedPlan, Facts, Plan, PlanProblem, PlanProblems, StepFacts, StepLayout,
    rules::{ALONE, ON_RANKS, Rule, SCHEDULE, WITH_MODEL},
};
use crate::{
    mesh::Mesh,
    schedule::{Schedule, ScheduleError, ScheduleProblem},
};

impl Plan {
    /// Checks the plan against every rule.
    ///
    /// # Errors
    /// All problems, if the plan breaks a rule.
    pub fn check(&self, facts: &Facts) -> Result<CheckedPlan, PlanProblems> {
        let mut problems = self.check_alone(&facts.step);
        problems.extend(Rule::all_problems(WITH_MODEL, self, facts));
        problems.extend(self.mesh.problems().into_iter().map(PlanProblem::from));
        let mut schedule = None;
        if self.mesh.world_size().is_some_and(|ranks| ranks > 0) {
            problems.extend(Rule::all_problems(ON_RANKS, self, facts));
            schedule = self.schedule_of(facts, &mut problems);
        }
        match (Mesh::new(self.mesh), schedule) {
            (Ok(mesh), Some(schedule)) if problems.is_empty() => {
                let (micro_batches, stages) = (schedule.micro_batches(), self.unit_ranges());
                let schedule = (schedule.ranks() > 1).then(|| Arc::new(schedule));
                let layout = StepLayout { mesh, schedule, stages, micro_batches };
                Ok(CheckedPlan::new(self.clone(), layout, [facts.step.global_batch, facts.step.seq_len]))
            }
            _ => Err(PlanProblems(problems)),
        }
    }

    /// Returns the problems that need no model. Unlike [`Plan::check`] it takes plans that leave their stages open.
    pub fn check_alone(&self, step: &StepFacts) -> Vec<PlanProblem> {
        Rule::all_problems(ALONE, self, step)
    }

    /// The schedule of a step, on ranks that can be counted.
    fn schedule_of(&self, facts: &Facts, problems: &mut Vec<PlanProblem>) -> Option<Schedule> {
        let (ranks, batch) = (self.mesh.pipeline, facts.step.global_batch);
        let parts = self.mesh.replicate * self.mesh.shard;
        let factor = parts.checked_mul(self.micro_batch_of(batch)).filter(|&factor| factor > 0)?;
        // Rounded up if the batch does not come out even, so that the rest of the schedule is checked as well.
        let micro_batches = batch.div_ceil(factor).max(1);
        // More ranks than there are have been told of already, and the lists of a million of them would take minutes.
        let is_countable = ranks <= facts.world_size;
        let schedule = is_countable.then(|| self.schedule.for_ranks(ranks, micro_batches))?;
        let problem = |problem: ScheduleProblem| {
            let what = format!("schedule of {micro_batches} micro-batches: {problem}");
            PlanProblem { fields: SCHEDULE, what }
        };
        schedule.map_err(|ScheduleError(found)| problems.extend(found.into_iter().map(problem))).ok()
    }
}

//! Checks a plan against the model, the batch and the world size, and reports all problems at once.

use std::sync::Arc;

use super::{
    CheckedPlan, Facts, Plan, PlanProblem, PlanProblems, StepFacts, StepLayout,
    problem::{DEGREES, SCHEDULE},
    rules::{ALONE, ON_RANKS, Rule, WITH_MODEL},
};
use crate::{
    mesh::Mesh,
    schedule::{Schedule, ScheduleError, ScheduleProblem},
};

impl Plan {
    /// Checks the plan against every rule.
    ///
    /// # Errors
    /// If the plan breaks a rule; the error lists every problem.
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

    /// Returns the problems of rules that need no model. Unlike [`Plan::check`], it accepts plans without `stages`.
    pub fn check_alone(&self, step: &StepFacts) -> Vec<PlanProblem> {
        Rule::all_problems(ALONE, self, step)
    }

    /// Builds the schedule of a step and adds its problems; `None` if it has any, or if the mesh has too many ranks.
    fn schedule_of(&self, facts: &Facts, problems: &mut Vec<PlanProblem>) -> Option<Schedule> {
        let (ranks, batch) = (self.mesh.pipeline, facts.step.global_batch);
        let parts = self.mesh.replicate * self.mesh.shard;
        let factor = parts.checked_mul(self.micro_batch_of(batch)).filter(|&factor| factor > 0)?;
        // Rounded up if the batch is not a multiple, so that the rest of the schedule is checked as well.
        let micro_batches = batch.div_ceil(factor).max(1);
        // Other rules already report that the mesh is too large, and a schedule of a million ranks would take minutes.
        let is_countable = ranks <= facts.world_size;
        let schedule = is_countable.then(|| self.schedule.for_ranks(ranks, micro_batches))?;
        let problem = |problem: ScheduleProblem| {
            let what = format!("schedule of {micro_batches} micro-batches: {problem}");
            PlanProblem { fields: SCHEDULE, what }
        };
        schedule.map_err(|ScheduleError(found)| problems.extend(found.into_iter().map(problem))).ok()
    }
}

impl PlanProblem {
    /// Returns the fields of all rules, for callers that have other names for them.
    pub fn all_fields() -> impl Iterator<Item = &'static str> {
        let alone = ALONE.iter().map(|rule| rule.0);
        let with_model = WITH_MODEL.iter().chain(ON_RANKS).map(|rule| rule.0);
        alone.chain(with_model).chain([DEGREES, SCHEDULE]).flatten().copied()
    }
}

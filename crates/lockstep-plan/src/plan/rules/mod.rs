//! Rules of plans: each is a function that reports violations, next to the fields that it is about.

mod alone;
mod with_model;

use super::{Plan, PlanProblem};

pub(super) use alone::{ALONE, version};
pub(super) use with_model::{ON_RANKS, WITH_MODEL};

/// A rule: its fields, most likely at fault first, and a function that adds a message for each violation. Messages name other settings as
/// `` `field` = value ``.
pub(super) struct Rule<T: 'static>(pub(super) &'static [&'static str], fn(&Plan, &T, &mut Vec<String>));

impl<T> Rule<T> {
    /// Returns the problems of all `rules` that the plan breaks.
    pub(super) fn all_problems(rules: &[Self], plan: &Plan, facts: &T) -> Vec<PlanProblem> {
        let problems = rules.iter().flat_map(|Self(fields, check)| {
            let mut found = Vec::new();
            check(plan, facts, &mut found);
            found.into_iter().map(|what| PlanProblem { fields, what })
        });
        problems.collect()
    }
}

/// Fields of the rules that [`Schedule`](crate::schedule::Schedule) itself checks.
pub(super) const SCHEDULE: &[&str] = &["schedule.passes", "schedule.chunks", "mesh.pipeline"];

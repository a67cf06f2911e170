//! The rules of plans: each a function that tells what does not fit, beside the fields that it is about.

mod alone;
mod with_model;

use super::{Plan, PlanProblem};

pub(super) use alone::{ALONE, version};
pub(super) use with_model::{ON_RANKS, WITH_MODEL};

/// A rule: its fields, in the order in which they are to blame if somebody set them, and the function that adds a text for everything that
/// breaks it. A text names other settings as `` `field` = value ``.
pub(super) struct Rule<T: 'static>(pub(super) &'static [&'static str], fn(&Plan, &T, &mut Vec<String>));

impl<T> Rule<T> {
    /// Returns the problems of a plan that breaks one of `rules`.
    pub(super) fn all_problems(rules: &[Self], plan: &Plan, facts: &T) -> Vec<PlanProblem> {
        let problems = rules.iter().flat_map(|Self(fields, check)| {
            let mut found = Vec::new();
            check(plan, facts, &mut found);
            found.into_iter().map(|what| PlanProblem { fields, what })
        });
        problems.collect()
    }
}

/// The fields that a schedule is about, whose own rules are those of [`Schedule`](crate::schedule::Schedule).
pub(super) const SCHEDULE: &[&str] = &["schedule.passes", "schedule.chunks", "mesh.pipeline"];

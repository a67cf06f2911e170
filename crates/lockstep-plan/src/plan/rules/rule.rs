//! A rule of plans: a function that reports violations, and the fields that it is about.

use crate::plan::{Plan, PlanProblem};

/// A rule: its fields, most likely at fault first, and a function that adds a message for each violation. Messages name other settings as
/// `` `field` = value ``.
pub(in crate::plan) struct Rule<T: 'static>(
    pub(in crate::plan) &'static [&'static str],
    pub(super) fn(&Plan, &T, &mut Vec<String>),
);

impl<T> Rule<T> {
    /// Returns the problems of all `rules` that the plan breaks.
    pub(in crate::plan) fn all_problems(rules: &[Self], plan: &Plan, facts: &T) -> Vec<PlanProblem> {
        let problems = rules.iter().flat_map(|Self(fields, check)| {
            let mut found = Vec::new();
            check(plan, facts, &mut found);
            found.into_iter().map(|what| PlanProblem { fields, what })
        });
        problems.collect()
    }
}

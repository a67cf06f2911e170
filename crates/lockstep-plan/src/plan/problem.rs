//! Errors of reading and checking plans.

use std::fmt;

use crate::{mesh::MeshProblem, nearest::lines};

/// Error of a plan that cannot be read or executed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The text is not JSON, or not that of a plan.
    #[error("this is no plan: {0}")]
    Syntax(#[from] serde_json::Error),
    /// The plan breaks a rule.
    #[error(transparent)]
    Invalid(#[from] PlanProblems),
}

/// All problems of a plan, as one error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.0))]
pub struct PlanProblems(pub Vec<PlanProblem>);

/// A rule that a plan breaks, with the fields at fault and a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanProblem {
    pub(super) fields: &'static [&'static str],
    pub(super) what: String,
}

impl PlanProblem {
    /// Returns the paths of the fields that the rule is about, such as `mesh.tensor`. The first one that the user set is at fault.
    /// Settings outside the plan have the name of their field in [`StepFacts`](super::StepFacts), or are `optimizer` or `precision`.
    pub const fn fields(&self) -> &'static [&'static str] {
        self.fields
    }

    /// Returns the message with plan fields renamed by `name`; fields for which it returns `None` keep their names.
    pub fn in_terms_of<'n>(&self, name: impl Fn(&str) -> Option<&'n str>) -> String {
        let parts = self.what.split('`').enumerate();
        parts.map(|(at, part)| if at % 2 == 1 { name(part).unwrap_or(part) } else { part }).collect()
    }
}

/// Fields at fault if the degrees do not form a mesh.
pub(super) const DEGREES: &[&str] =
    &["mesh.tensor", "mesh.pipeline", "mesh.replicate", "mesh.shard", "mesh.context"];

/// Fields of the rules that [`Schedule`](crate::schedule::Schedule) itself checks.
pub(super) const SCHEDULE: &[&str] = &["schedule.passes", "schedule.chunks", "mesh.pipeline"];

impl From<MeshProblem> for PlanProblem {
    fn from(problem: MeshProblem) -> Self {
        let fields: &[&str] = match problem {
            MeshProblem::Zero { .. } | MeshProblem::TooManyRanks => DEGREES,
            MeshProblem::ExpertTensor { .. } => &["mesh.expert_tensor"],
            MeshProblem::Expert { .. } => &["mesh.expert"],
        };
        Self { fields, what: problem.to_string() }
    }
}

/// Writes the problem and the allowed values. Fields other than the rule's own stand in backticks.
impl fmt::Display for PlanProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

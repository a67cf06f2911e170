//! What can be wrong with a plan.

use std::fmt;

use super::rules::{ALONE, ON_RANKS, SCHEDULE, WITH_MODEL};
use crate::{mesh::MeshProblem, nearest::lines};

/// Why a plan cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The text is no plan.
    #[error("this is no plan: {0}")]
    Syntax(#[from] serde_json::Error),
    /// The plan cannot be executed.
    #[error(transparent)]
    Invalid(#[from] PlanProblems),
}

/// All problems of a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.0))]
pub struct PlanProblems(pub Vec<PlanProblem>);

/// A problem of a plan: a rule that it breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanProblem {
    pub(super) fields: &'static [&'static str],
    pub(super) what: String,
}

impl PlanProblem {
    /// Paths within the plan of the fields that the rule is about, such as `mesh.tensor`: the first that somebody set is to blame. What a rule
    /// asks of the run has the name of its field in [`StepFacts`](super::StepFacts), or is the `optimizer` or its `precision`.
    pub const fn fields(&self) -> &'static [&'static str] {
        self.fields
    }

    /// Returns the text with other names for the plan's fields; fields without another keep theirs.
    pub fn in_terms_of<'n>(&self, name: impl Fn(&str) -> Option<&'n str>) -> String {
        let parts = self.what.split('`').enumerate();
        parts.map(|(at, part)| if at % 2 == 1 { name(part).unwrap_or(part) } else { part }).collect()
    }

    /// The fields of all rules, for whoever has other names for them.
    pub fn all_fields() -> impl Iterator<Item = &'static str> {
        let alone = ALONE.iter().map(|rule| rule.0);
        let with_model = WITH_MODEL.iter().chain(ON_RANKS).map(|rule| rule.0);
        alone.chain(with_model).chain([DEGREES, SCHEDULE]).flatten().copied()
    }
}

/// The fields of a mesh that is none.
const DEGREES: &[&str] = &["mesh.tensor", "mesh.pipeline", "mesh.replicate", "mesh.shard", "mesh.context"];

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

/// Writes what is wrong and what is allowed. Fields other than the rule's own stand in backticks.
impl fmt::Display for PlanProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

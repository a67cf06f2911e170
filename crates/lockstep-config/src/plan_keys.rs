//! Problems of a run's plan, reported under the keys that set its fields.

use lockstep_plan::{PlanProblem, StepFacts};

use crate::choices::{OptimizerKind, Precision};
use crate::keys::{KEYS, RunConfig};
use crate::problem::{Origin, Problem};

/// Fields of [`StepFacts`] that plan problems name, with the keys that set them.
const FACTS: [(&str, &str); 4] = [
    ("global_batch", "train.global_batch"),
    ("seq_len", "train.seq_len"),
    ("optimizer", "optimizer.kind"),
    ("precision", "train.precision"),
];

/// Returns the key that sets a field of a plan or a fact of the step.
pub(crate) fn key_of(field: &str) -> Option<&'static str> {
    let of_run = FACTS.iter().find(|(fact, _)| *fact == field).map(|(_, key)| *key);
    of_run.or_else(|| KEYS.iter().find(|key| key.field == Some(field)).map(|key| key.name))
}

/// Returns the keys of some fields; fields without a key are left out.
pub(crate) fn keys_of(fields: &[&str]) -> Vec<&'static str> {
    fields.iter().filter_map(|field| key_of(field)).collect()
}

impl RunConfig {
    /// Returns the facts of the step that the rules of plans need.
    pub(crate) fn step_facts(&self) -> StepFacts {
        StepFacts {
            global_batch: self.train.global_batch,
            seq_len: self.train.seq_len,
            updates_whole_matrices: self.optimizer.kind == OptimizerKind::Muon,
            scales_loss: self.train.precision == Precision::F16,
        }
    }

    /// Returns the problems of the run's plan that can be found without the model. A secondary shard is checked once the number of
    /// shards is known.
    pub(crate) fn problems_of_plan_alone(&self) -> Vec<PlanProblem> {
        let mut plan = self.plan.clone();
        if self.leaves_shards_open() {
            plan.sharding.secondary_shard = None;
        }
        plan.check_alone(&self.step_facts())
    }

    /// Returns a problem of the run's plan, at the key to blame.
    pub(crate) fn problem_of_plan(&self, problem: &PlanProblem) -> Problem {
        self.problem_at(&keys_of(problem.fields()), problem.in_terms_of(key_of), "")
    }

    /// Returns a problem at the first of `keys` that was set, else at the first.
    pub(crate) fn problem_at(
        &self,
        keys: &[&str],
        what: impl Into<String>,
        allowed: impl Into<String>,
    ) -> Problem {
        let is_given = |key: &&&str| self.origin(key) != Origin::Default;
        let at = keys.iter().find(is_given).or(keys.first()).copied().unwrap_or_default();
        self.problem(at, what, allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_that_a_rule_of_plans_blames_has_a_key() {
        // Fields that only a plan file has and that no key sets.
        let of_files = ["version", "predicted.memory", "model"];
        let without: Vec<&str> = PlanProblem::all_fields().filter(|field| key_of(field).is_none()).collect();
        assert_eq!(without, of_files);
    }

    #[test]
    fn fields_are_paths_of_plans() {
        assert_eq!(key_of("mesh.tensor"), Some("parallel.tensor_parallel"));
        assert_eq!(key_of("residence.optimizer"), Some("parallel.offload.optimizer"));
        assert_eq!(key_of("global_batch"), Some("train.global_batch"));
    }
}

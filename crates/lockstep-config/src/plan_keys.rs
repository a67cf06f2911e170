//! The plan that a run's keys describe, and its problems, reported under the keys that set its fields.

use lockstep_model::{ModelConfig, Tuning};
use lockstep_plan::{DType, Facts, Plan, PlanProblem, PlanProblems, StepFacts};

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

/// Returns everything in the run's keys that does not fit its model and its tuning, as far as that is known, each at the key that was set.
pub(crate) fn plan_problems(
    config: &RunConfig,
    model: &ModelConfig,
    tuning: Option<&Tuning>,
) -> Vec<Problem> {
    let default = Tuning::default();
    let facts = facts_of_tuning(facts_of(config, model), tuning.unwrap_or(&default));
    // The split into stages does not matter here, and the units' costs are known only after recording.
    match plan_of(config, &facts, || vec![1.0; facts.units]) {
        Ok(plan) => plan.check(&facts).map_or_else(|problems| problems_of(config, &problems), |_| Vec::new()),
        Err(problem) => vec![problem],
    }
}

pub(crate) fn problems_of(config: &RunConfig, problems: &PlanProblems) -> Vec<Problem> {
    problems.0.iter().map(|problem| config.problem_of_plan(problem)).collect()
}

/// Returns the facts of a model of which `tuning` says what is trained.
pub fn facts_of_tuning(facts: Facts, tuning: &Tuning) -> Facts {
    Facts {
        adapter_rank: tuning.adapter.as_ref().map(|adapter| adapter.config().rank),
        has_quantized_weights: !tuning.quantized.is_empty(),
        ..facts
    }
}

/// Returns the plan that the run's keys describe, unchecked.
pub(crate) fn plan_of(
    config: &RunConfig,
    facts: &Facts,
    costs: impl FnOnce() -> Vec<f64>,
) -> Result<Plan, Problem> {
    config.plan.resolved(facts, costs).map_err(|error| {
        config.problem(
            "parallel.pipeline_parallel",
            format!("{error}: {}", facts.units_in_words()),
            format!("at most {} stages", facts.units),
        )
    })
}

/// Returns the facts that a plan of the run is checked against.
pub fn facts_of(config: &RunConfig, model: &ModelConfig) -> Facts {
    Facts { model: digest_of(model), ..model.facts(config.step_facts(), config.ranks()) }
}

/// Returns a digest that identifies a model in a plan: of its `config.json` as Lockstep writes it, without dropout, on which no
/// plan depends.
fn digest_of(model: &ModelConfig) -> String {
    let text = model.clone().with_dropout(0.0).to_json(DType::F32).to_string();
    blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
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

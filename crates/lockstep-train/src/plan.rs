//! How a run is split over its ranks, held against its model before any of them starts.
//!
//! The keys of `[parallel]` and a plan file are read into the same [`Plan`]; [`Plan::resolved`] fills in what they leave open, and
//! [`Plan::check`] finds what does not fit.

use lockstep_graph::{BlockShape, RecomputeRules};
use lockstep_model::{ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::{
    CheckedPlan, DType, Facts, MeshProblem, Places, Plan, PlanError, PlanProblem, TensorDimensions,
};

use crate::config::{Origin, Problem, Problems};
use crate::setup::shape_of;
use crate::{Error, ResolvedModel, RunConfig, resolve_model};

/// The run's plan, if its ranks can share its model so, and the model.
///
/// # Errors
/// As [`resolve_model`].
pub fn check(config: &RunConfig) -> Result<(Plan, ResolvedModel), Error> {
    let model = resolve_model(config)?;
    let plan = checked_plan(config, &model.config, &model.tuning)?.plan().clone();
    Ok((plan, model))
}

/// The run's plan, checked.
///
/// # Errors
/// [`Error::Configuration`], with everything that does not fit.
pub fn checked_plan(config: &RunConfig, model: &ModelConfig, tuning: &Tuning) -> Result<CheckedPlan, Error> {
    let costs = || unit_costs(config, model, tuning);
    let facts = facts_of(config, model);
    let plan = plan_of(config, &facts, costs).map_err(Problems::from)?;
    plan.check(&facts).map_err(|error| Problems::all_of(problems_of(config, error)).into())
}

/// Everything in the run's keys that does not fit its model, each where it was set.
pub(crate) fn misfits(config: &RunConfig, model: &ModelConfig) -> Vec<Problem> {
    let facts = facts_of(config, model);
    // Which units make a stage does not matter here, and what they cost is known only when they are recorded.
    match plan_of(config, &facts, || vec![1.0; facts.units()]) {
        Ok(plan) => match plan.check(&facts) {
            Ok(_) => Vec::new(),
            Err(error) => problems_of(config, error),
        },
        Err(problem) => vec![problem],
    }
}

/// Whether ranks that share linear layers as a square can share what is added to these.
///
/// # Errors
/// If its side does not divide the rank of the adapter.
pub(crate) fn fits_adapter(config: &RunConfig, tuning: &Tuning) -> Result<(), Problems> {
    let tensor = config.plan.mesh.tensor;
    let is_square = tensor > 1 && config.plan.tensor_layout == TensorDimensions::Two;
    let rank = tuning.adapter.as_ref().map(|adapter| adapter.config().rank);
    let side = tensor.isqrt();
    match rank.filter(|rank| is_square && !rank.is_multiple_of(side)) {
        None => Ok(()),
        Some(rank) => {
            let what = format!("tensor's side {side} does not divide the {rank} columns of the adapter");
            let allowed = format!("\"1d\", or a rank that is a multiple of {side}");
            Err(config.problem("parallel.tensor_layout", what, allowed).into())
        }
    }
}

/// The plan that the run's keys describe, whether it fits or not.
fn plan_of(config: &RunConfig, facts: &Facts, costs: impl FnOnce() -> Vec<f64>) -> Result<Plan, Problem> {
    config.plan.resolved(facts, costs).map_err(|error| {
        config.problem(
            "parallel.pipeline_parallel",
            format!("{error}: the embedding, {} blocks and the head", facts.layers),
            format!("at most {} stages", facts.units()),
        )
    })
}

/// The operations of a forward and a backward of each unit's products. An embedding has none and costs nothing to speak of.
fn unit_costs(config: &RunConfig, model: &ModelConfig, tuning: &Tuning) -> Vec<f64> {
    let shape = BlockShape { dtype: DType::F32, ..shape_of(config) };
    let options = RecordingOptions::training(shape, RecomputeRules::default(), Places::default());
    let recorded = RecordedModel::tuned(model, tuning, options);
    let cost = |unit: usize| {
        let profile = recorded.program(unit).profile();
        (profile.forward_flops + profile.backward_flops) as f64
    };
    (0..recorded.units()).map(cost).collect()
}

/// What a plan for the run is compared with.
pub(crate) fn facts_of(config: &RunConfig, model: &ModelConfig) -> Facts {
    let batch = [config.train.global_batch, config.train.seq_len];
    Facts { model: digest_of(model), ..model.facts(batch, config.ranks()) }
}

/// What tells a model from others in a plan: a digest of its `config.json` as this program writes it. Dropout, which no plan
/// depends on, is not in it.
fn digest_of(model: &ModelConfig) -> String {
    let text = model.clone().with_dropout(0.0).to_json(DType::F32).to_string();
    blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
}

/// What is wrong with a plan of the run's keys, each where it was set.
fn problems_of(config: &RunConfig, error: PlanError) -> Vec<Problem> {
    let problems = match error {
        PlanError::Invalid(problems) => problems,
        error => return vec![config.problem("parallel.tensor_parallel", error.to_string(), "")],
    };
    let problem = |problem: PlanProblem| {
        let keys: &[&str] = match &problem {
            PlanProblem::NotMultiple { name: "seq_len", .. } => &[
                "train.seq_len",
                "parallel.context_parallel",
                "parallel.sequence_parallel",
                "parallel.tensor_layout",
            ],
            PlanProblem::Chunks { .. } => &["parallel.tensor_chunks"],
            PlanProblem::Degree { degree: "context x tensor", .. }
            | PlanProblem::KeyValueHeads { degree: "context x tensor", .. } => {
                &["parallel.context_parallel", "parallel.context_parallel_method"]
            }
            PlanProblem::NoSquare { .. } | PlanProblem::TwoDimensions { .. } => {
                &["parallel.tensor_layout", "parallel.tensor_parallel"]
            }
            PlanProblem::NotMultiple { name: "micro_batch", .. } => {
                &["train.micro_batch", "parallel.tensor_layout"]
            }
            PlanProblem::NotMultiple { .. } | PlanProblem::World { .. } => {
                &["train.global_batch", "parallel.data_parallel_replicate"]
            }
            PlanProblem::Schedule { .. } => &["parallel.pipeline_schedule", "parallel.pipeline_parallel"],
            PlanProblem::StageCount { .. } | PlanProblem::EmptyStage { .. } | PlanProblem::Units { .. } => {
                &["parallel.pipeline_stages", "parallel.pipeline_parallel"]
            }
            PlanProblem::RecomputeLayer { .. } => &["parallel.recompute"],
            PlanProblem::TooManyStages { .. } => &["parallel.pipeline_parallel"],
            PlanProblem::Mesh(MeshProblem::ExpertTensor { .. })
            | PlanProblem::Degree { degree: "expert_tensor", .. }
            | PlanProblem::NoExperts { degree: "expert_tensor", .. } => &["parallel.expert_tensor_parallel"],
            PlanProblem::Mesh(MeshProblem::Expert { .. })
            | PlanProblem::Degree { degree: "expert", .. }
            | PlanProblem::NoExperts { .. } => &["parallel.expert_parallel"],
            _ => &["parallel.tensor_parallel"],
        };
        let is_given = |key: &&&str| config.origin(key) != Origin::Default;
        let key = keys.iter().find(is_given).or(keys.first()).copied().unwrap_or_default();
        config.problem(key, problem.to_string(), "")
    };
    problems.into_iter().map(problem).collect()
}

#[cfg(test)]
mod tests {
    use lockstep_model::{ALL_LINEAR, Adapter, LoraConfig, LoraScaling};

    use super::*;

    fn config(settings: &[&str]) -> RunConfig {
        let model = [
            "model.preset=baby-gpt",
            "model.n_layer=4",
            "train.global_batch=8",
            "train.micro_batch=2",
            "data.train=[\"a.txt\"]",
        ];
        let settings: Vec<&str> = model.iter().chain(settings).copied().collect();
        RunConfig::parse("", "RUN.toml", &settings).unwrap_or_else(|problems| panic!("{problems}"))
    }

    #[test]
    fn a_plan_is_for_its_model_with_whatever_dropout() {
        let (plan, _) = check(&config(&["train.dropout=0.1"])).unwrap();
        let (other, _) = check(&config(&["model.n_layer=5"])).unwrap();
        assert_eq!(plan.model, check(&config(&[])).unwrap().0.model);
        assert_ne!(plan.model, other.model);
        assert_eq!(plan.model.len(), 32);
    }

    #[test]
    fn stages_are_those_of_the_user_or_as_even_as_can_be() {
        let pipeline = "parallel.pipeline_parallel=2";
        let (plan, _) = check(&config(&[pipeline, "parallel.pipeline_stages=[1, 5]"])).unwrap();
        assert_eq!(plan.stages, [1, 5]);
        // The head costs as much as a part of a block, the embedding nothing.
        assert_eq!(check(&config(&[pipeline])).unwrap().0.stages, [3, 3]);
    }

    #[test]
    fn a_micro_batch_that_is_not_said_is_one_that_the_rows_of_a_square_can_share() {
        let square = ["parallel.tensor_parallel=9", "parallel.tensor_layout=2d"];
        let of = |global_batch: &str| {
            let settings = [&square[..], &[global_batch]].concat();
            let config = RunConfig::parse("", "RUN.toml", &settings);
            config.unwrap_or_else(|problems| panic!("{problems}")).micro_batch()
        };
        assert_eq!(
            ["train.global_batch=12", "train.global_batch=24", "train.global_batch=8"].map(of),
            [6, 6, 8]
        );
    }

    #[test]
    fn a_square_shares_an_adapter_whose_rank_its_side_divides() {
        let square = config(&["parallel.tensor_parallel=4", "parallel.tensor_layout=2d"]);
        let model = ModelConfig::preset("baby-gpt").unwrap();
        let fits = |config: &RunConfig, rank| {
            let mut tuning = Tuning::default();
            let (scaling, targets) = (LoraScaling::Standard, vec![ALL_LINEAR.to_owned()]);
            let lora = LoraConfig { rank, alpha: 1.0, dropout: 0.0, scaling, targets };
            tuning.adapter = Some(Adapter::new(lora, &model).unwrap());
            fits_adapter(config, &tuning).map_err(|problems| problems.to_string())
        };
        assert_eq!(fits(&square, 6), Ok(()));
        let message = fits(&square, 3).unwrap_err();
        assert!(
            message.contains("tensor's side 2 does not divide the 3 columns of the adapter"),
            "{message}"
        );
        assert_eq!(fits(&config(&["parallel.tensor_parallel=4"]), 3), Ok(()));
    }

    #[test]
    fn everything_that_does_not_fit_is_told_at_once() {
        let settings = [
            "parallel.tensor_parallel=5",
            "parallel.pipeline_parallel=2",
            "parallel.pipeline_stages=[2, 3]",
            "parallel.pipeline_schedule=\"F0,B0\\nF0,F0\"",
        ];
        let message = check(&config(&settings)).unwrap_err().to_string();
        for part in [
            "tensor 5 does not divide the 6 attention heads",
            "the stages have 5 units and the model 6",
            "micro-batch",
        ] {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
    }
}

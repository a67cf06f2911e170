//! The plan of a run, checked against its model before any rank starts.
//!
//! The keys of `[parallel]` and a plan file are read into the same [`Plan`]. [`Plan::resolved`] fills in what they leave open, and
//! [`Plan::check`] finds inconsistencies.

use lockstep_graph::{BlockShape, RecomputeRules};
use lockstep_model::{ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::{CheckedPlan, DType, Places, Plan};

pub use crate::plan_keys::{facts_of, facts_of_tuning};
use crate::plan_keys::{plan_of, problems_of};
use crate::{Error, Problems, ResolvedModel, RunConfig, resolve_model, shape_of};

/// Returns the run's checked plan and its model.
///
/// # Errors
/// As [`resolve_model`].
pub fn check(config: &RunConfig) -> Result<(Plan, ResolvedModel), Error> {
    let model = resolve_model(config)?;
    let plan = checked_plan(config, &model.config, &model.tuning)?.plan().clone();
    Ok((plan, model))
}

/// Returns the run's plan, checked.
///
/// # Errors
/// [`Error::Configuration`] with everything that is inconsistent.
pub fn checked_plan(config: &RunConfig, model: &ModelConfig, tuning: &Tuning) -> Result<CheckedPlan, Error> {
    let costs = || unit_costs(config, model, tuning);
    let facts = facts_of_tuning(facts_of(config, model), tuning);
    let plan = plan_of(config, &facts, costs).map_err(Problems::from)?;
    plan.check(&facts).map_err(|problems| Problems::all_of(problems_of(config, &problems)).into())
}

/// Returns the FLOPs of forward and backward of each unit's products, which balance the stages. The embedding has none; its cost is
/// negligible.
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

#[cfg(test)]
mod tests {
    use lockstep_model::{ALL_LINEAR, Adapter, LoraConfig, LoraScaling};

    use super::*;
    use crate::Problem;
    use crate::plan_keys::plan_problems;

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
        // The head costs as much as a fraction of a block, the embedding nothing.
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
            plan_problems(config, &model, Some(&tuning)).iter().map(Problem::to_string).collect::<Vec<_>>()
        };
        let nothing: [&str; 0] = [];
        assert_eq!(fits(&square, 6), nothing);
        assert_eq!(
            fits(&square, 3),
            [
                "--set parallel.tensor_layout=2d: parallel.tensor_layout: tensor's side 2 does not divide the 3 columns of \
                 the adapter; allowed: \"1d\", or a rank that is a multiple of 2"
            ]
        );
        assert_eq!(fits(&config(&["parallel.tensor_parallel=2"]), 3), nothing);
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

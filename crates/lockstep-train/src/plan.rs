//! How a run is split over its ranks, held against its model before any of them starts.
//!
//! The keys of `[parallel]` and a plan file say the same thing: [`plan_of`] makes a [`Plan`] of the keys, and
//! [`settings_of`] makes keys of a plan. What does not fit is found by [`Plan::validate`] in either case.

use lockstep_model::ModelConfig;
use lockstep_plan::{
    ContextMethod, Degrees, Facts, PLAN_VERSION, PipelineSchedule, Plan, PlanError, PlanProblem,
};

use crate::RunConfig;
use crate::config::{Origin, Problem, Recompute};

/// The plan that the keys of a run make.
pub fn plan_of(config: &RunConfig, model: &ModelConfig) -> Plan {
    let facts = facts_of(config, model);
    Plan {
        version: PLAN_VERSION,
        stages: vec![facts.units()],
        model: facts.model,
        mesh: config.degrees(),
        micro_batch: config.micro_batch(),
        schedule: PipelineSchedule::default(),
        recompute: match config.parallel.recompute {
            Recompute::None => lockstep_plan::Recompute::None,
            Recompute::Selective => lockstep_plan::Recompute::Selective,
            Recompute::Full => lockstep_plan::Recompute::Full,
        },
        sequence_parallel: config.parallel.sequence_parallel,
        context_method: ContextMethod::default(),
        zero_stage: 0,
    }
}

/// What a plan for the run is compared with. Models have no digest yet, so that a plan fits whatever model it names.
pub fn facts_of(config: &RunConfig, model: &ModelConfig) -> Facts {
    Facts {
        model: String::new(),
        layers: model.num_hidden_layers(),
        heads: model.num_attention_heads(),
        key_value_heads: model.num_key_value_heads(),
        intermediate: model.intermediate_size(),
        vocab: model.vocab_size(),
        experts: 0,
        expert_intermediate: 0,
        seq_len: config.train.seq_len,
        global_batch: config.train.global_batch,
        world_size: config.ranks(),
    }
}

/// Everything in the run's keys that does not fit its model, each where it was set.
pub(crate) fn misfits(config: &RunConfig, model: &ModelConfig) -> Vec<Problem> {
    // The batch is checked with the keys, so that one micro-batch of each replica stands for all.
    let micro_batches = config.parallel.data_parallel_replicate * config.micro_batch();
    let facts = Facts { global_batch: micro_batches, ..facts_of(config, model) };
    let Err(PlanError::Invalid(problems)) = plan_of(config, model).validate(&facts) else {
        return Vec::new();
    };
    let problem = |problem: PlanProblem| {
        let keys: &[&str] = match &problem {
            PlanProblem::NotMultiple { name: "seq_len", .. } => {
                &["train.seq_len", "parallel.sequence_parallel"]
            }
            PlanProblem::NotMultiple { .. } | PlanProblem::World { .. } => {
                &["train.global_batch", "parallel.data_parallel_replicate"]
            }
            _ => &["parallel.tensor_parallel"],
        };
        let is_given = |key: &&&str| config.origin(key) != Origin::Default;
        let key = keys.iter().find(is_given).or(keys.first()).copied().unwrap_or_default();
        config.problem(key, problem.to_string(), "")
    };
    problems.into_iter().map(problem).collect()
}

/// The keys of a run that a plan sets, as `--set` takes them.
///
/// # Errors
/// Everything in the plan that this program cannot do yet, a line each.
pub fn settings_of(plan: &Plan) -> Result<Vec<String>, Vec<String>> {
    let Degrees { pipeline, replicate, shard, context, tensor, expert, expert_tensor } = plan.mesh;
    let later = [
        ("pipeline", pipeline),
        ("shard", shard),
        ("context", context),
        ("expert", expert),
        ("expert_tensor", expert_tensor),
    ];
    let mut missing: Vec<String> = later
        .into_iter()
        .filter(|(_, degree)| *degree > 1)
        .map(|(axis, degree)| format!("mesh.{axis} {degree}: not supported yet; allowed: 1"))
        .collect();
    if plan.zero_stage > 0 {
        missing.push(format!("zero_stage {}: not supported yet; allowed: 0", plan.zero_stage));
    }
    if plan.stages.len() > 1 && pipeline == 1 {
        let stages = plan.stages.len();
        missing.push(format!("stages {stages}: not supported yet; allowed: 1, with all units"));
    }
    if !missing.is_empty() {
        return Err(missing);
    }
    let recompute = match plan.recompute {
        lockstep_plan::Recompute::None => Recompute::None,
        lockstep_plan::Recompute::Selective => Recompute::Selective,
        lockstep_plan::Recompute::Full => Recompute::Full,
    };
    Ok(vec![
        format!("parallel.data_parallel_replicate={replicate}"),
        format!("parallel.tensor_parallel={tensor}"),
        // Without tensor ranks it is of no effect, which a plan may say and keys may not.
        format!("parallel.sequence_parallel={}", plan.sequence_parallel && tensor > 1),
        format!("parallel.recompute={}", recompute.word()),
        format!("train.micro_batch={}", plan.micro_batch),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelConfig {
        ModelConfig::preset("llama-15m").unwrap()
    }

    fn config(settings: &[String]) -> RunConfig {
        RunConfig::parse("", "RUN.toml", settings).unwrap_or_else(|problems| panic!("{problems}"))
    }

    #[test]
    fn keys_and_plans_say_the_same() {
        let settings = [
            "parallel.data_parallel_replicate=2",
            "parallel.tensor_parallel=2",
            "parallel.sequence_parallel=true",
            "parallel.recompute=full",
            "train.micro_batch=4",
        ];
        let settings = settings.map(str::to_owned);
        let plan = plan_of(&config(&settings), &model());
        assert_eq!(settings_of(&plan).unwrap(), settings);
        assert_eq!(plan.mesh.world_size(), Some(4));
    }

    #[test]
    fn what_cannot_be_done_yet_is_told_at_once() {
        let plan = Plan {
            mesh: Degrees { pipeline: 2, shard: 2, context: 2, ..Degrees::default() },
            zero_stage: 1,
            ..plan_of(&config(&[]), &model())
        };
        let missing = settings_of(&plan).unwrap_err();
        let names: Vec<&str> = missing.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(names, ["mesh.pipeline", "mesh.shard", "mesh.context", "zero_stage"], "{missing:?}");
    }
}

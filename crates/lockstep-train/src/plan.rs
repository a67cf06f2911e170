//! How a run is split over its ranks, held against its model before any of them starts.
//!
//! The keys of `[parallel]` and a plan file say the same thing. [`Plan::validate`] finds what does not fit in either;
//! [`settings_of`] makes keys of a plan.

use lockstep_model::ModelConfig;
use lockstep_plan::{Degrees, Facts, PLAN_VERSION, PipelineSchedule, Plan, PlanError, PlanProblem};

use crate::config::{ContextMethod, Origin, Problem, Recompute};
use crate::layout::pipeline_plan;
use crate::{Error, ResolvedModel, RunConfig, resolve_model};

/// The model of a run, if its ranks can share it as the run says.
///
/// # Errors
/// As [`resolve_model`], and a pipeline that the model or the batch does not permit.
pub fn check(config: &RunConfig) -> Result<ResolvedModel, Error> {
    let model = resolve_model(config)?;
    pipeline_plan(config, &model.config, &model.tuning)?;
    Ok(model)
}

/// How many of the model's units each stage of the run's pipeline has; all in one without a pipeline.
///
/// # Errors
/// As [`check`].
pub fn stages_of(config: &RunConfig, model: &ResolvedModel) -> Result<Vec<usize>, Error> {
    let pipeline = pipeline_plan(config, &model.config, &model.tuning)?;
    Ok(pipeline.map_or_else(|| vec![facts_of(config, &model.config).units()], |pipeline| pipeline.stages))
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

/// Everything in the run's keys that does not fit its model, each where it was set. What a pipeline asks for is checked where
/// its schedule is made.
pub(crate) fn misfits(config: &RunConfig, model: &ModelConfig) -> Vec<Problem> {
    // The batch is checked with the keys, so that one micro-batch of each replica stands for all.
    let global_batch = config.parallel.data_parallel_replicate * config.micro_batch();
    let world_size = config.ranks() / config.parallel.pipeline_parallel;
    let facts = Facts { global_batch, world_size, ..facts_of(config, model) };
    let plan = Plan {
        version: PLAN_VERSION,
        stages: vec![facts.units()],
        model: facts.model.clone(),
        mesh: Degrees { pipeline: 1, ..config.degrees() },
        micro_batch: config.micro_batch(),
        schedule: PipelineSchedule::default(),
        recompute: lockstep_plan::Recompute::None,
        sequence_parallel: config.parallel.sequence_parallel,
        context_method: config.parallel.context_parallel_method.into(),
        zero_stage: 0,
    };
    let Err(PlanError::Invalid(problems)) = plan.validate(&facts) else { return Vec::new() };
    let problem = |problem: PlanProblem| {
        let keys: &[&str] = match &problem {
            PlanProblem::NotMultiple { name: "seq_len", .. } => {
                &["train.seq_len", "parallel.context_parallel", "parallel.sequence_parallel"]
            }
            PlanProblem::Degree { degree: "context x tensor", .. }
            | PlanProblem::KeyValueHeads { degree: "context x tensor", .. } => {
                &["parallel.context_parallel", "parallel.context_parallel_method"]
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
    let later = [("shard", shard), ("expert", expert), ("expert_tensor", expert_tensor)];
    let mut missing: Vec<String> = later
        .into_iter()
        .filter(|(_, degree)| *degree > 1)
        .map(|(axis, degree)| format!("mesh.{axis} {degree}: not supported yet; allowed: 1"))
        .collect();
    if plan.zero_stage > 0 {
        missing.push(format!("zero_stage {}: not supported yet; allowed: 0", plan.zero_stage));
    }
    let published = match &plan.schedule {
        PipelineSchedule::Published { kind, chunks } => Some((kind, chunks)),
        PipelineSchedule::Rows(_) => {
            missing.push("schedule.rows: not supported yet; allowed: schedule.kind".to_owned());
            None
        }
    };
    if plan.stages.len() > 1 && pipeline == 1 {
        let stages = plan.stages.len();
        missing.push(format!("stages: {stages} without a pipeline; allowed: 1, with all units"));
    }
    if !missing.is_empty() {
        return Err(missing);
    }
    let recompute = match plan.recompute {
        lockstep_plan::Recompute::None => Recompute::None,
        lockstep_plan::Recompute::Selective => Recompute::Selective,
        lockstep_plan::Recompute::Full => Recompute::Full,
    };
    let mut settings = vec![
        format!("parallel.data_parallel_replicate={replicate}"),
        format!("parallel.tensor_parallel={tensor}"),
        // Without tensor ranks it is of no effect, which a plan may say and keys may not.
        format!("parallel.sequence_parallel={}", plan.sequence_parallel && tensor > 1),
        format!("parallel.context_parallel={context}"),
        format!("parallel.recompute={}", recompute.word()),
        format!("train.micro_batch={}", plan.micro_batch),
        format!("parallel.pipeline_parallel={pipeline}"),
    ];
    // As sequence parallelism.
    if context > 1 {
        let method = ContextMethod::from(plan.context_method);
        settings.push(format!("parallel.context_parallel_method={}", method.word()));
    }
    if let Some((kind, chunks)) = published.filter(|_| pipeline > 1) {
        settings.push(format!("parallel.pipeline_schedule={}", kind.name()));
        settings.push(format!("parallel.virtual_stages={chunks}"));
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use lockstep_plan::schedule::Kind;

    use super::*;

    fn plan() -> Plan {
        Plan {
            version: PLAN_VERSION,
            model: String::new(),
            mesh: Degrees { pipeline: 2, replicate: 2, context: 4, tensor: 2, ..Degrees::default() },
            micro_batch: 2,
            schedule: PipelineSchedule::Published { kind: Kind::ZeroBubbleV, chunks: 2 },
            stages: vec![2, 2, 2, 2],
            recompute: lockstep_plan::Recompute::Full,
            sequence_parallel: true,
            context_method: lockstep_plan::ContextMethod::AllToAll,
            zero_stage: 0,
        }
    }

    #[test]
    fn keys_say_what_a_plan_says() {
        let settings = settings_of(&plan()).unwrap();
        let config =
            RunConfig::parse("", "RUN.toml", &settings).unwrap_or_else(|problems| panic!("{problems}"));
        assert_eq!(config.degrees(), plan().mesh);
        assert_eq!((config.micro_batch(), config.parallel.recompute), (2, Recompute::Full));
        assert!(config.parallel.sequence_parallel);
        assert_eq!(config.parallel.context_parallel_method, ContextMethod::AllToAll);
        assert_eq!(
            (&config.parallel.pipeline_schedule[..], config.parallel.virtual_stages),
            ("zb_v", Some(2))
        );
    }

    #[test]
    fn what_cannot_be_done_yet_is_told_at_once() {
        let mesh = Degrees { shard: 2, expert: 2, ..Degrees::default() };
        let schedule = PipelineSchedule::Rows(vec!["F0,B0".to_owned()]);
        let missing =
            settings_of(&Plan { mesh, schedule, zero_stage: 1, stages: vec![8], ..plan() }).unwrap_err();
        let names: Vec<&str> = missing.iter().filter_map(|line| line.split([' ', ':']).next()).collect();
        let expected = ["mesh.shard", "mesh.expert", "zero_stage", "schedule.rows"];
        assert_eq!(names, expected, "{missing:?}");
    }
}

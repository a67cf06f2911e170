//! Plans of an inference over several ranks. They are the plans of training ([`Plan`]); what they say of gradients, optimizers,
//! schedules and saved activations has no meaning here, and what inference cannot do is refused.
//!
//! ```text
//! data             replicas of the model: windows of an evaluation and requests are split over them
//! tensor           heads, columns and the vocabulary are sharded; all ranks have the same logits
//! pipeline         each rank has consecutive units; the last one sends the logits to all
//! expert           experts, or their columns, are sharded over the tensor-parallel ranks; every rank routes all tokens
//! context          windows of an evaluation are sharded by tokens; in generation the rows of each pass and the pages of the cache
//! ```
//!
//! All ranks of a replica run the same scheduler on the same requests, and the logits have the same bits on all of them, so they draw
//! the same tokens without a message about them. Replicas exchange nothing before they have finished.

use lockstep_config::{RunConfig, plan::facts_of};
use lockstep_model::{ModelConfig, parameter_records};
use lockstep_plan::{
    CheckedPlan, ContextMethod, Degrees, Facts, Plan, PlanProblem, Residence, StepFacts, TensorDimensions,
};

use crate::InferError;

/// Use of a model that a plan is checked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedWork {
    /// Generation, with passes of any number of tokens.
    Generation,
    /// Evaluation of windows of `seq_len` tokens.
    Evaluation {
        /// Tokens of a window.
        seq_len: usize,
    },
}

/// Returns `plan` for `ranks` ranks. Ranks that its degrees leave over are tensor-parallel. Experts that it says nothing about are
/// sharded over the tensor-parallel ranks: by columns, or by expert if they have biases or columns that the ranks do not divide.
pub fn plan_over(config: &ModelConfig, plan: &Plan, ranks: usize) -> Plan {
    let facts = config.facts(StepFacts::default(), ranks);
    let mut mesh = plan.mesh;
    let own = mesh.world_size().filter(|own| *own > 0 && ranks.is_multiple_of(*own));
    if let Some(own) = own.filter(|_| mesh.tensor == 1) {
        mesh.tensor = ranks / own;
    }
    let says_nothing = mesh.expert == 1 && mesh.expert_tensor == 1;
    if facts.experts > 0 && says_nothing {
        let by_columns = !facts.experts_have_biases && facts.expert_intermediate.is_multiple_of(mesh.tensor);
        let degree = if by_columns { &mut mesh.expert_tensor } else { &mut mesh.expert };
        *degree = mesh.tensor;
    }
    Plan { mesh, ..plan.clone() }
}

/// Checks a plan for an inference. Pipeline stages that it leaves open get about equally many weights.
///
/// # Errors
/// If the plan breaks a rule; the error lists every problem.
pub fn check_plan(config: &ModelConfig, plan: &Plan, work: PlannedWork) -> Result<CheckedPlan, InferError> {
    let mut problems = unsupported(plan);
    let Degrees { tensor, context, .. } = plan.mesh;
    // Passes of any number of tokens fit, so the rules about it are checked for one that suits all degrees.
    let seq_len = match work {
        PlannedWork::Generation => 2 * context.max(1) * tensor.max(1),
        PlannedWork::Evaluation { seq_len } => seq_len,
    };
    let mesh = inference_mesh(plan.mesh);
    let step = StepFacts { global_batch: mesh.replicate, seq_len, ..StepFacts::default() };
    let model = facts_of(&RunConfig::default(), config).model;
    // A plan file names its model, and settings do not.
    if !plan.model.is_empty() && plan.model != model {
        problems.push(format!("the plan is for the model {}, and this one is {model}", plan.model));
    }
    let facts = Facts { model, ..config.facts(step, plan.mesh.world_size().unwrap_or(0)) };
    let plan = Plan {
        mesh,
        // Schedules with several stages on a rank balance them for training; inference has one on each.
        stages: Some(plan.stages.clone()).filter(|stages| stages.len() == mesh.pipeline).unwrap_or_default(),
        // Collectives of a pass are small, so chunks of them would hide nothing.
        tensor_chunks: Some(1),
        tensor_layout: plan.tensor_layout,
        // Generation shards the cache by pages, whatever the method.
        context_method: match work {
            PlannedWork::Generation => ContextMethod::default(),
            PlannedWork::Evaluation { .. } => plan.context_method,
        },
        ..Plan::default()
    };
    let resolved = plan.resolved(&facts, || unit_elements(config)).unwrap_or(plan);
    match resolved.check(&facts) {
        Ok(checked) if problems.is_empty() => Ok(checked),
        Ok(_) => Err(InferError::Plan { problems }),
        Err(found) => {
            problems.extend(found.0.iter().map(PlanProblem::to_string));
            Err(InferError::Plan { problems })
        }
    }
}

/// Checks that the ranks of a plan can place their weights under limits on memory.
///
/// # Errors
/// If ranks have shards of weights, or parts of the windows or the layers of an evaluation.
pub fn check_placed(plan: &CheckedPlan, work: PlannedWork) -> Result<(), InferError> {
    let Degrees { tensor, pipeline, context, .. } = plan.plan().mesh;
    let mut problems = Vec::new();
    if tensor > 1 {
        problems.push(format!(
            "tensor_parallel {tensor} shards layers, and shards stay in memory; with --max-memory and --device-map set \
             parallel.pipeline_parallel, parallel.context_parallel or parallel.data_parallel_replicate"
        ));
    }
    if let PlannedWork::Evaluation { .. } = work {
        let degrees = [("pipeline_parallel", pipeline), ("context_parallel", context)];
        problems.extend(degrees.into_iter().filter(|(_, degree)| *degree > 1).map(|(name, degree)| {
            format!("{name} {degree}: eval places weights on one rank or on replicas; allowed: data_parallel_replicate")
        }));
    }
    if problems.is_empty() { Ok(()) } else { Err(InferError::Plan { problems }) }
}

/// Returns the mesh with all data-parallel ranks as replicas: without gradients and optimizer there is no state to shard over them.
fn inference_mesh(mesh: Degrees) -> Degrees {
    Degrees { replicate: mesh.replicate.saturating_mul(mesh.shard), shard: 1, ..mesh }
}

/// Returns the settings of a plan that inference does not support.
fn unsupported(plan: &Plan) -> Vec<String> {
    let Degrees { tensor, expert, expert_tensor, .. } = plan.mesh;
    let of_experts = expert.saturating_mul(expert_tensor);
    let rules = [
        (
            of_experts > 1 && of_experts != tensor,
            format!(
                "expert_parallel {expert} x expert_tensor_parallel {expert_tensor} is not tensor_parallel {tensor}, over whose ranks experts are sharded; allowed: a product of {tensor}, or 1"
            ),
        ),
        (
            plan.tensor_layout == TensorDimensions::Two,
            "tensor_layout 2d shards whole sequences of a batch; allowed: \"1d\"".to_owned(),
        ),
        (
            plan.residence.parameters == Residence::Disk,
            "parameters on disk: in inference --max-memory chooses the weights on disk; allowed: \"none\""
                .to_owned(),
        ),
    ];
    rules.into_iter().filter(|(is_broken, _)| *is_broken).map(|(_, what)| what).collect()
}

/// Returns the elements of each unit's parameters, which balance the stages of a pipeline. The embedding has none: a pass reads a few
/// of its rows.
fn unit_elements(config: &ModelConfig) -> Vec<f64> {
    let mut elements = vec![0.0; config.model().units().len()];
    for record in parameter_records(config).iter().filter(|record| record.unit > 0) {
        elements[record.unit] += record.elements() as f64;
    }
    elements
}

#[cfg(test)]
mod tests {
    use lockstep_plan::{PipelineSchedule, Recompute, RecomputeRules, Residences, schedule::Kind};

    use super::*;

    fn problems(model: &str, plan: &Plan, work: PlannedWork) -> Vec<String> {
        let config = ModelConfig::preset(model).expect("a preset");
        match check_plan(&config, plan, work) {
            Ok(_) => Vec::new(),
            Err(InferError::Plan { problems }) => problems,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn ranks_of_which_nothing_else_is_said_are_tensor_parallel() {
        let config = ModelConfig::preset("llama3-8b").expect("a preset");
        let plan = plan_over(&config, &Plan::default(), 4);
        assert_eq!(plan.mesh, Degrees { tensor: 4, ..Degrees::default() });
        let checked = check_plan(&config, &plan, PlannedWork::Generation).expect("a plan");
        assert_eq!(checked.rank(3).places.tensor.rank, 3);
        assert_eq!(checked.rank(3).places.tensor.chunks, 1);
        let mesh = Degrees { pipeline: 2, ..Degrees::default() };
        let plan = plan_over(&config, &Plan { mesh, ..Plan::default() }, 4);
        assert_eq!(plan.mesh, Degrees { pipeline: 2, tensor: 2, ..Degrees::default() });
        let experts = ModelConfig::preset("mixtral-8x7b").expect("a preset");
        let mesh = plan_over(&experts, &Plan::default(), 4).mesh;
        assert_eq!((mesh.tensor, mesh.expert, mesh.expert_tensor), (4, 1, 4));
    }

    #[test]
    fn a_plan_of_training_is_one_of_inference() {
        let config = ModelConfig::preset("llama3-8b").expect("a preset");
        let mesh = Degrees { pipeline: 2, replicate: 2, shard: 2, tensor: 2, ..Degrees::default() };
        let plan = Plan {
            mesh,
            micro_batch: Some(4),
            schedule: PipelineSchedule::published(Kind::Interleaved, 2),
            stages: vec![9, 8, 9, 8],
            recompute: RecomputeRules::from(Recompute::Full),
            sequence_parallel: true,
            zero_stage: 1,
            ..Plan::default()
        };
        let checked = check_plan(&config, &plan, PlannedWork::Generation).expect("a plan");
        let mesh = Degrees { replicate: 4, shard: 1, ..mesh };
        assert_eq!((checked.plan().mesh, checked.layout().stages.len()), (mesh, 2));
    }

    #[test]
    fn the_method_of_context_parallelism_is_one_of_evaluation() {
        let config = ModelConfig::preset("llama3-8b").expect("a preset");
        let mesh = Degrees { context: 3, ..Degrees::default() };
        let plan = Plan { mesh, context_method: ContextMethod::AllToAll, ..Plan::default() };
        check_plan(&config, &plan, PlannedWork::Generation).expect("a cache is sharded by pages");
        let error =
            check_plan(&config, &plan, PlannedWork::Evaluation { seq_len: 12 }).expect_err("32 heads");
        assert!(error.to_string().contains("attention heads"), "{error}");
    }

    #[test]
    fn stages_have_about_equally_many_weights() {
        let config = ModelConfig::preset("llama3-8b").expect("a preset");
        let plan = Plan { mesh: Degrees { pipeline: 2, ..Degrees::default() }, ..Plan::default() };
        let checked = check_plan(&config, &plan, PlannedWork::Generation).expect("a plan");
        // The head weighs as much as 2.4 blocks.
        assert_eq!(checked.layout().stages, [0..18, 18..34]);
    }

    #[test]
    fn settings_without_meaning_for_inference_are_refused_all_at_once() {
        let mesh = Degrees { tensor: 2, expert: 4, ..Degrees::default() };
        let residence = Residences { parameters: Residence::Disk, ..Residences::default() };
        let plan = Plan { mesh, residence, ..Plan::default() };
        let found = problems("mixtral-8x7b", &plan, PlannedWork::Generation).join("; ");
        for part in ["expert_parallel 4", "parameters on disk"] {
            assert!(found.contains(part), "{part} is not in {found}");
        }
        let mesh = Degrees { tensor: 5, ..Degrees::default() };
        let plan = Plan { mesh, model: "another".to_owned(), ..Plan::default() };
        let found = problems("llama3-8b", &plan, PlannedWork::Generation).join("; ");
        assert!(found.contains("tensor 5 does not divide the 32 attention heads"), "{found}");
        assert!(found.contains("the plan is for the model another"), "{found}");
    }
}

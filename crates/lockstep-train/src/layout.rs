//! How a model is laid out over the ranks of a pipeline: which units each stage has, and what the ranks do in which order.

use lockstep_engine::PipelinePlan;
use lockstep_graph::{BlockShape, Mode};
use lockstep_model::{HeadOutput, ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::{ContextPlace, DType, ExpertPlace, TensorPlace};

use crate::config::RunConfig;
use crate::plan::checked_plan;
use crate::{Error, engine_options};

/// What the ranks of the run's pipeline do, if it has one.
///
/// # Errors
/// [`Error::Configuration`], with everything that does not fit.
pub(crate) fn pipeline_plan(
    config: &RunConfig,
    model: &ModelConfig,
    tuning: &Tuning,
) -> Result<Option<PipelinePlan>, Error> {
    if config.plan.mesh.pipeline == 1 {
        return Ok(None);
    }
    let checked = checked_plan(config, model, tuning)?;
    Ok(Some(PipelinePlan { schedule: checked.schedule, stages: checked.plan.stages }))
}

/// What a forward and a backward of each unit cost: the operations of their products. An embedding has none and costs nothing to
/// speak of.
pub(crate) fn unit_costs(config: &RunConfig, model: &ModelConfig, tuning: &Tuning) -> Vec<f64> {
    let options = RecordingOptions {
        mode: Mode::Training,
        shape: BlockShape { dtype: DType::F32, ..engine_options(config).shape },
        recompute: lockstep_graph::RecomputeRules::default(),
        head_output: HeadOutput::Losses,
        tensor: TensorPlace::default(),
        experts: ExpertPlace::default(),
        context: ContextPlace::default(),
    };
    let recorded = RecordedModel::tuned(model, tuning, options);
    let cost = |unit: usize| {
        let profile = recorded.program(unit).profile();
        (profile.forward_flops + profile.backward_flops) as f64
    };
    (0..recorded.units()).map(cost).collect()
}

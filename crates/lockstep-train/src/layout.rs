//! How a model is laid out over the ranks of a pipeline: which units each stage has, and what the ranks do in which order.

use std::{fs, io};

use lockstep_engine::PipelinePlan;
use lockstep_graph::{BlockShape, Mode};
use lockstep_model::{HeadOutput, ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::schedule::{Kind, passes_from_csv};
use lockstep_plan::{
    ContextPlace, DType, ExpertPlace, PipelineSchedule, SplitError, TensorPlace, split_units,
};

use crate::config::{Problem, RunConfig};
use crate::plan::valid_plan;
use crate::{Error, engine_options};

/// The schedule that the run's keys name.
///
/// # Errors
/// A word that is neither a schedule nor a file that can be read.
pub(crate) fn schedule_of(config: &RunConfig) -> Result<PipelineSchedule, Problem> {
    let parallel = &config.parallel;
    if parallel.pipeline_parallel == 1 {
        return Ok(PipelineSchedule::default());
    }
    let name = parallel.pipeline_schedule.as_str();
    let chunks = |kind: Kind| parallel.virtual_stages.unwrap_or(kind.chunks().0);
    named_schedule(name, chunks).map_err(|error| {
        let what = format!("\"{name}\" is no schedule, and as a file it cannot be read: {error}");
        let names: Vec<&str> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        config.problem("parallel.pipeline_schedule", what, format!("{}, or a CSV file", names.join(", ")))
    })
}

/// The schedule that a word names, with `chunks` stages on each rank; else that of the CSV file of this name, or of the rows that it
/// is itself, each with a line break.
///
/// # Errors
/// The file cannot be read.
pub fn named_schedule(name: &str, chunks: impl FnOnce(Kind) -> usize) -> io::Result<PipelineSchedule> {
    if let Some(kind) = Kind::from_name(name) {
        return Ok(PipelineSchedule::Published { kind, chunks: chunks(kind) });
    }
    let rows = |text: &str| PipelineSchedule::Rows(text.lines().map(str::to_owned).collect());
    if name.contains('\n') { Ok(rows(name)) } else { fs::read_to_string(name).map(|text| rows(&text)) }
}

/// How many units each stage has: as the run says, else so that stages cost as much as each other. Without a pipeline one
/// stage has all.
///
/// # Errors
/// More stages than units.
pub(crate) fn stages_of(
    config: &RunConfig,
    schedule: &PipelineSchedule,
    costs: &[f64],
) -> Result<Vec<usize>, SplitError> {
    let ranks = config.parallel.pipeline_parallel;
    if let Some(stages) = &config.parallel.pipeline_stages {
        return Ok(stages.clone());
    }
    match schedule {
        PipelineSchedule::Published { kind, chunks } => split_units(*kind, costs, ranks, *chunks),
        PipelineSchedule::Rows(rows) => {
            // What is wrong with the rows is told when the plan is validated.
            let passes = passes_from_csv(&rows.join("\n"), ranks).unwrap_or_default();
            let stages = passes.iter().flatten().map(|pass| pass.stage.saturating_add(1)).max();
            split_units(Kind::OneForwardOneBackward, costs, stages.unwrap_or(ranks), 1)
        }
    }
}

/// What the ranks of the run's pipeline do, if it has one.
///
/// # Errors
/// [`Error::Configuration`], with everything that does not fit.
pub(crate) fn pipeline_plan(
    config: &RunConfig,
    model: &ModelConfig,
    tuning: &Tuning,
) -> Result<Option<PipelinePlan>, Error> {
    if config.parallel.pipeline_parallel == 1 {
        return Ok(None);
    }
    let (plan, valid) = valid_plan(config, model, tuning)?;
    Ok(Some(PipelinePlan { schedule: valid.schedule, stages: plan.stages }))
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

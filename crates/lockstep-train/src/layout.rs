//! How a model is laid out over the ranks of a pipeline: which units each stage has, and what the ranks do in which order.

use std::path::Path;

use lockstep_engine::PipelinePlan;
use lockstep_graph::{BlockShape, Mode};
use lockstep_model::{HeadOutput, ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::schedule::{Kind, Schedule, passes_from_csv};
use lockstep_plan::{ContextPlace, DType, TensorPlace, split_units};

use crate::config::RunConfig;
use crate::{Error, engine_options};

/// What the ranks of the run's pipeline do, if it has one.
///
/// # Errors
/// [`Error::Configuration`], with everything that is wrong with the schedule; a CSV file that cannot be read.
pub(crate) fn pipeline_plan(
    config: &RunConfig,
    model: &ModelConfig,
    tuning: &Tuning,
) -> Result<Option<PipelinePlan>, Error> {
    let parallel = &config.parallel;
    let ranks = parallel.pipeline_parallel;
    if ranks == 1 {
        return Ok(None);
    }
    let refuse = |key: &str, what: String, allowed: &str| -> Error {
        Error::Configuration(config.problem(key, what, allowed.to_owned()).into())
    };
    let name = parallel.pipeline_schedule.as_str();
    let micro_batches = config.accumulation_steps();
    let key = "parallel.pipeline_schedule";
    let (kind, schedule) = match Kind::from_name(name) {
        Some(kind) => {
            let chunks = parallel.virtual_stages.unwrap_or(kind.chunks().0);
            let schedule = Schedule::new(kind, ranks, micro_batches, chunks)
                .map_err(|error| refuse(key, error.to_string(), "a schedule that the numbers permit"))?;
            (kind, schedule)
        }
        None => {
            let text = std::fs::read_to_string(Path::new(name)).map_err(|error| {
                let what = format!("\"{name}\" is no schedule, and as a file it cannot be read: {error}");
                refuse(
                    key,
                    what,
                    "gpipe, 1f1b, interleaved_1f1b, looped_bfs, zb_h1, zb_v, dualpipe_v, or a CSV file",
                )
            })?;
            let schedule = passes_from_csv(&text, ranks)
                .and_then(|passes| Schedule::from_passes(micro_batches, &passes));
            let schedule = schedule.map_err(|error| {
                refuse(key, error.to_string(), "a file in which each rank's passes are complete")
            })?;
            (Kind::OneForwardOneBackward, schedule)
        }
    };
    let costs = unit_costs(config, model, tuning);
    let chunks = schedule.stages() / ranks;
    let stages = split_units(kind, &costs, ranks, chunks).map_err(|error| {
        refuse("parallel.pipeline_parallel", error.to_string(), "at most one stage for each unit")
    })?;
    Ok(Some(PipelinePlan { schedule, stages }))
}

/// What a forward and a backward of each unit cost: the operations of their products. An embedding has none and costs nothing to
/// speak of.
fn unit_costs(config: &RunConfig, model: &ModelConfig, tuning: &Tuning) -> Vec<f64> {
    let options = RecordingOptions {
        mode: Mode::Training,
        shape: BlockShape { dtype: DType::F32, ..engine_options(config).shape },
        recompute: lockstep_graph::Recompute::None,
        head_output: HeadOutput::Losses,
        tensor: TensorPlace::default(),
        context: ContextPlace::default(),
    };
    let recorded = RecordedModel::tuned(model, tuning, options);
    let cost = |unit: usize| {
        let profile = recorded.program(unit).profile();
        (profile.forward_flops + profile.backward_flops) as f64
    };
    (0..recorded.units()).map(cost).collect()
}

//! Errors of this crate, each with the path or the value at fault.

use std::path::PathBuf;

use lockstep_config::Problems;
use lockstep_engine::EngineError;
use lockstep_launch::LaunchError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration, or the model or plan that it names.
    #[error(transparent)]
    Config(#[from] lockstep_config::Error),
    /// The search for a plan, or the forecast of its memory.
    #[error(transparent)]
    Planner(Box<lockstep_planner::Error>),
    /// A record of the run: metrics, a report, a trace, records of the flight recorder.
    #[error(transparent)]
    Observe(Box<lockstep_observe::Error>),
    /// Error in the model's configuration.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// Error of the corpus or the tokenizer.
    #[error(transparent)]
    Data(#[from] lockstep_data::DataError),
    /// Error of the engine: memory, threads, or state that does not fit the model.
    #[error(transparent)]
    Engine(EngineError),
    /// Error in the plan for these ranks.
    #[error(transparent)]
    Layout(#[from] lockstep_plan::PlanProblems),
    /// Error in the communication with other ranks.
    #[error(transparent)]
    Comm(#[from] lockstep_comm::CommError),
    /// Error in joining the ranks that this process was started with, before they communicate.
    #[error(transparent)]
    Launch(LaunchError),
    /// Error while saving or loading a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] lockstep_checkpoint::CheckpointError),
    /// A step could not be saved in any directory.
    #[error(
        "step {step} is not saved:\n  {}\nearlier checkpoints are untouched; free space, mend the file system, or set checkpoint.fallback to \
         a directory on another one",
        reasons.replace('\n', "\n  ")
    )]
    NotSaved {
        /// Step that is not saved.
        step: u64,
        /// Each directory with its last failure, one per line.
        reasons: String,
    },
    /// The checkpoint belongs to a run with other settings.
    #[error(
        "{} belongs to a run with other settings:\n{}\nuse --resume never to begin anew, {}",
        path.display(),
        differences.iter().map(|difference| format!("  {difference}")).collect::<Vec<_>>().join("\n"),
        match can_go_on {
            true => format!("another checkpoint.dir, or --resume {} to go on with the new settings", path.display()),
            false => "or another checkpoint.dir: its tensors are those of another model or optimizer".to_owned(),
        }
    )]
    OtherRun {
        /// Path of the checkpoint.
        path: PathBuf,
        /// Settings that differ.
        differences: Vec<lockstep_config::Difference>,
        /// True if its tensors fit the run, so that the user may resume from it explicitly.
        can_go_on: bool,
    },
    /// An optimizer step has moved a weight out of the range of f32. Nothing is saved.
    #[error(
        "{name} is not finite after step {step}; nothing is saved; go on from an earlier checkpoint with a lower optimizer.lr"
    )]
    WeightsNotFinite {
        /// Number of completed steps.
        step: u64,
        /// Name of the first such parameter.
        name: String,
    },
    /// The transformed samples lack an input of the model.
    #[error(
        "the model reads {input}, and the transformed samples have {found}; add a transform, such as ToFloat, or another data set"
    )]
    Input {
        /// Name, dtype and shape of the input.
        input: String,
        /// The tensors of the samples.
        found: String,
    },
    /// No label of the validation set counts.
    #[error(
        "the evaluation has no label to count in the {samples} samples of the validation set; without integer labels only \
         full micro-batches of {micro_batch} count; lower train.micro_batch or add samples"
    )]
    NothingToEvaluate {
        /// Samples that the evaluation reads.
        samples: u64,
        /// Samples of a micro-batch.
        micro_batch: u64,
    },
    /// The keys of `[model]` describe other parameters than the pretrained weights have.
    #[error(
        "model.path has not the parameters that the keys of [model] ask for (missing: {}; left over: {}); leave \
         out the keys that change them, or set model.from_pretrained = false",
        list(missing),
        list(left_over)
    )]
    OtherParameters {
        /// Parameters of the model that the directory lacks.
        missing: Vec<String>,
        /// Parameters of the directory that the model lacks.
        left_over: Vec<String>,
    },
    /// The checkpoint holds weights only, as `checkpoint import` writes them.
    #[error(
        "{} holds weights only, no state of a run to resume; to start from these weights, export them with \
         `lockstep checkpoint export` and set model.path and model.from_pretrained",
        path.display()
    )]
    NoRunToResume {
        /// Path of the checkpoint.
        path: PathBuf,
    },
    /// Every checkpoint in the directory is damaged.
    #[error("no checkpoint in {} is whole:\n{reasons}\nuse --resume never to begin anew", dir.display())]
    NoGoodCheckpoint {
        /// Path of the directory.
        dir: PathBuf,
        /// Each checkpoint with its damage.
        reasons: String,
    },
    /// Too many steps in a row were skipped.
    #[error(
        "step {step}: {consecutive} steps in a row were skipped; of this one, {reason}. The weights are those of step {last_good}: begin anew, \
         or go on from an earlier checkpoint if there is one, and {advice}"
    )]
    TooManySkipped {
        /// Step at which the run gives up.
        step: u64,
        /// Number of consecutive skipped steps.
        consecutive: u64,
        /// Last step that changed the weights.
        last_good: u64,
        /// The value of the last step that was not finite or too large.
        reason: String,
        /// The keys to change.
        advice: &'static str,
    },
    /// All labels of a global batch are masked.
    #[error("step {step}: every label of the global batch is masked, so there is no loss to train on")]
    NothingToPredict {
        /// Step with this batch.
        step: u64,
    },
}

impl From<lockstep_planner::Error> for Error {
    fn from(error: lockstep_planner::Error) -> Self {
        match error {
            lockstep_planner::Error::Config(error) => Self::Config(error),
            lockstep_planner::Error::Observe(error) => (*error).into(),
            error => Self::Planner(Box::new(error)),
        }
    }
}

/// Errors that other ranks are to blame for stay [`Error::Comm`], wherever they were noticed.
impl From<lockstep_observe::Error> for Error {
    fn from(error: lockstep_observe::Error) -> Self {
        match error {
            lockstep_observe::Error::Comm(error) => Self::Comm(error),
            error => Self::Observe(Box::new(error)),
        }
    }
}

/// Communication errors become [`Error::Comm`] even if the engine reports them.
impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Comm(error) => Self::Comm(error),
            error => Self::Engine(error),
        }
    }
}

/// Communication errors become [`Error::Comm`] even if they end the joining of ranks.
impl From<LaunchError> for Error {
    fn from(error: LaunchError) -> Self {
        match error {
            LaunchError::Comm(error) => Self::Comm(error),
            error => Self::Launch(error),
        }
    }
}

impl From<Problems> for Error {
    fn from(problems: Problems) -> Self {
        Self::Config(problems.into())
    }
}

/// Joins the first few names.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 3;
    match names.len() {
        0 => "none".to_owned(),
        all if all <= SHOWN => names.join(", "),
        all => format!("{} and {} more", names[..SHOWN].join(", "), all - SHOWN),
    }
}

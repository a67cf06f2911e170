//! What can go wrong around a run, each with the path or the value at fault.

use std::io;
use std::path::PathBuf;

use lockstep_config::Problems;
use lockstep_engine::EngineError;

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
    /// The handlers of SIGINT and SIGTERM cannot be installed.
    #[error("cannot watch for Ctrl-C and SIGTERM: {0}")]
    Signals(#[source] io::Error),
    /// The model's configuration.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// The corpus or the tokenizer.
    #[error(transparent)]
    Data(#[from] lockstep_data::DataError),
    /// Memory, threads, or state that does not fit the model.
    #[error(transparent)]
    Engine(EngineError),
    /// The program itself is not to be found, to start ranks of it.
    #[error("cannot find the program to start its ranks: {0}")]
    Program(#[source] io::Error),
    /// The layout of the ranks.
    #[error(transparent)]
    Layout(#[from] lockstep_plan::PlanProblems),
    /// The other ranks of the run.
    #[error(transparent)]
    Comm(#[from] lockstep_comm::CommError),
    /// Saving or loading.
    #[error(transparent)]
    Checkpoint(#[from] lockstep_checkpoint::CheckpointError),
    /// A step that could not be saved in any place.
    #[error(
        "step {step} is not saved:\n  {}\nearlier checkpoints are untouched; free space, mend the file system, or set checkpoint.fallback to \
         a directory on another one",
        reasons.replace('\n', "\n  ")
    )]
    NotSaved {
        /// The step.
        step: u64,
        /// Each directory with the last reason, a line each.
        reasons: String,
    },
    /// A checkpoint of another run is in the way.
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
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        differences: Vec<lockstep_config::Difference>,
        /// True if its tensors fit the run, so that it can go on if its user says so.
        can_go_on: bool,
    },
    /// An update has left the range of f32. Nothing of it is saved.
    #[error(
        "{name} is not finite after step {step}; nothing is saved; go on from an earlier checkpoint with a lower optimizer.lr"
    )]
    WeightsNotFinite {
        /// Steps made.
        step: u64,
        /// The first parameter at fault.
        name: String,
    },
    /// The keys of `[model]` ask for other parameters than the pretrained weights have.
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
    /// A checkpoint that holds weights and nothing else, as `checkpoint import` makes them.
    #[error(
        "{} holds weights only, no state of a run to resume; to start from these weights, export them with \
         `lockstep checkpoint export` and set model.path and model.from_pretrained",
        path.display()
    )]
    NoRunToResume {
        /// The checkpoint.
        path: PathBuf,
    },
    /// Every checkpoint in the directory is damaged.
    #[error("no checkpoint in {} is whole:\n{reasons}\nuse --resume never to begin anew", dir.display())]
    NoGoodCheckpoint {
        /// The directory.
        dir: PathBuf,
        /// Each checkpoint with what is wrong with it.
        reasons: String,
    },
    /// Step after step is refused.
    #[error(
        "step {step}: {consecutive} steps in a row were skipped; of this one, {reason}. The weights are those of step {last_good}: begin anew, \
         or go on from an earlier checkpoint if there is one, and {advice}"
    )]
    TooManySkipped {
        /// The step that gave up.
        step: u64,
        /// Steps skipped in a row.
        consecutive: u64,
        /// The last step that changed the weights.
        last_good: u64,
        /// The figure of the last step that was not finite, or too large.
        reason: String,
        /// The keys to change.
        advice: &'static str,
    },
    /// No label of a global batch counts.
    #[error("step {step}: every label of the global batch is masked, so there is no loss to train on")]
    NothingToPredict {
        /// The step.
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

/// What other ranks are to blame for is told as such, wherever it was noticed.
impl From<lockstep_observe::Error> for Error {
    fn from(error: lockstep_observe::Error) -> Self {
        match error {
            lockstep_observe::Error::Comm(error) => Self::Comm(error),
            error => Self::Observe(Box::new(error)),
        }
    }
}

/// What other ranks are to blame for is told as such, wherever it was noticed.
impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Comm(error) => Self::Comm(error),
            error => Self::Engine(error),
        }
    }
}

impl From<Problems> for Error {
    fn from(problems: Problems) -> Self {
        Self::Config(problems.into())
    }
}

/// The first few names.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 3;
    match names.len() {
        0 => "none".to_owned(),
        all if all <= SHOWN => names.join(", "),
        all => format!("{} and {} more", names[..SHOWN].join(", "), all - SHOWN),
    }
}

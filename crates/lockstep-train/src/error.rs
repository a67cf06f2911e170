//! Errors of this crate, each with the path or the value at fault.

use std::io;
use std::path::PathBuf;

use lockstep_engine::EngineError;
use lockstep_plan::cluster::ClusterError;

use crate::config::Problems;
use crate::fit::Misfit;
use crate::human::plural;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration has at least one mistake; all of them are in the list.
    #[error("{0}")]
    Configuration(#[from] Problems),
    /// The model's name is unknown, or names a model that cannot be used here.
    #[error("{0}")]
    NoModel(String),
    /// The ranks of this machine need more memory than it has.
    #[error("{0}")]
    DoesNotFit(Box<Misfit>),
    /// The configuration file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    ReadConfiguration {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The cluster description has mistakes; all of them are in the list.
    #[error("{0}")]
    Cluster(#[from] ClusterError),
    /// The cluster file cannot be read.
    #[error("cannot read the cluster {}: {source}", path.display())]
    ReadCluster {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The plan has more ranks than its cluster has devices.
    #[error(
        "the plan has {ranks} ranks, and the cluster has {devices} devices ({name}): {larger}, or smaller degrees in [parallel]"
    )]
    TooManyRanks {
        /// Number of ranks of the plan.
        ranks: usize,
        /// Number of devices of the cluster.
        devices: usize,
        /// Name of the cluster.
        name: String,
        /// Suggestion of a cluster with enough devices.
        larger: String,
    },
    /// The plan file cannot be used for the run.
    #[error("the plan {} cannot be used:\n  {}", path.display(), problems.replace('\n', "\n  "))]
    Plan {
        /// Path of the plan file.
        path: PathBuf,
        /// All problems, one per line.
        problems: String,
    },
    /// Rows of metrics cannot be written. They wait in memory and are written with the next row that succeeds.
    #[error(
        "cannot append to {}: {}{} wait in memory{}",
        path.display(),
        if is_full(source) { "no space left, free some; ".to_owned() } else { format!("{source}; ") },
        plural(*waiting_rows, "row"),
        if *lost_rows == 0 { String::new() } else { format!(", {} lost", plural(*lost_rows, "row")) },
    )]
    RowsWait {
        /// Path of the metrics file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
        /// Number of rows that wait in memory.
        waiting_rows: usize,
        /// Number of rows dropped because 64 MiB of them already waited.
        lost_rows: usize,
    },
    /// The metrics file was deleted while the run wrote to it. It has been recreated with all of its rows.
    #[error("{} was deleted while the run wrote to it; it is there again, with all of its rows", path.display())]
    MetricsDeleted {
        /// Path of the metrics file.
        path: PathBuf,
    },
    /// Another run writes to the metrics file.
    #[error(
        "another run writes its metrics to {}: give this one a directory of its own (--set metrics.dir=DIR)",
        dir.display()
    )]
    MetricsInUse {
        /// Directory of the metrics file.
        dir: PathBuf,
    },
    /// The metrics file cannot be opened, read or written for another reason.
    #[error("cannot {action} {}: {source}", path.display())]
    Metrics {
        /// Path of the file or directory.
        path: PathBuf,
        /// Action that failed: "create", "append to", ...
        action: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// The address for Prometheus cannot be listened on.
    #[error(
        "cannot listen on metrics.prometheus = \"{address}\": {source}; give HOST:PORT of this machine with a free port"
    )]
    Prometheus {
        /// The address as given.
        address: String,
        /// Error of the system.
        source: io::Error,
    },
    /// The directory holds no metrics of a run.
    #[error("no metrics.jsonl in {}; give the metrics.dir of a run that writes it", dir.display())]
    NoRun {
        /// Path of the directory.
        dir: PathBuf,
    },
    /// No line of the metrics can be read.
    #[error("no row of {} can be read ({damaged_lines} damaged line(s))", path.display())]
    NoRows {
        /// Path of the metrics file.
        path: PathBuf,
        /// Number of lines that are not rows.
        damaged_lines: usize,
    },
    /// The run cannot be used for calibration.
    #[error("nothing can be learned from the run in {}: {why}", dir.display())]
    TeachesNothing {
        /// Directory of the run's metrics.
        dir: PathBuf,
        /// Reason why it cannot be used.
        why: String,
    },
    /// A flight record cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    ReadRecords {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A flight record is damaged or implausible.
    #[error("{} holds no records of ranks that can be used: {problem}", path.display())]
    BadRecords {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// The handlers of SIGINT and SIGTERM cannot be installed.
    #[error("cannot watch for Ctrl-C and SIGTERM: {0}")]
    Signals(#[source] io::Error),
    /// Error in the model's configuration.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// Error of the corpus or the tokenizer.
    #[error(transparent)]
    Data(#[from] lockstep_data::DataError),
    /// Error of the engine: memory, threads, or state that does not fit the model.
    #[error(transparent)]
    Engine(EngineError),
    /// The path of this program, from which ranks are started, is unknown.
    #[error("cannot find the program to start its ranks: {0}")]
    Program(#[source] io::Error),
    /// Error in the plan for these ranks.
    #[error(transparent)]
    Layout(#[from] lockstep_plan::PlanProblems),
    /// Error in the communication with other ranks.
    #[error(transparent)]
    Comm(#[from] lockstep_comm::CommError),
    /// The weights of a rank differ from those of other ranks.
    #[error(
        "the weights of rank {rank} differ from those of rank {reference} after step {step}: a fault of its memory or its \
         arithmetic, or another build; go on from the last checkpoint without the machine it ran on"
    )]
    WeightsDiffer {
        /// Number of completed steps.
        step: u64,
        /// Rank whose weights differ.
        rank: usize,
        /// A rank with the weights of the majority.
        reference: usize,
    },
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
        differences: Vec<crate::config::Difference>,
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

/// Communication errors become [`Error::Comm`] even if the engine reports them.
impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Comm(error) => Self::Comm(error),
            error => Self::Engine(error),
        }
    }
}

/// Returns true if the disk or the quota is full.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
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

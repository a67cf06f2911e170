//! What can go wrong around a run, each with the path or the value at fault.

use std::io;
use std::path::PathBuf;

use lockstep_config::Problems;
use lockstep_config::human::plural;
use lockstep_engine::EngineError;
use lockstep_planner::cluster::ClusterError;

use crate::fit::Misfit;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration, or the model or plan that it names.
    #[error(transparent)]
    Config(#[from] lockstep_config::Error),
    /// The ranks of this machine need more memory than it has.
    #[error("{0}")]
    DoesNotFit(Box<Misfit>),
    /// The machines that a plan is for are described wrongly; everything that is wrong is in it.
    #[error("{0}")]
    Cluster(#[from] ClusterError),
    /// The file that describes them cannot be read.
    #[error("cannot read the cluster {}: {source}", path.display())]
    ReadCluster {
        /// The file asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A plan has more ranks than its cluster has devices.
    #[error(
        "the plan has {ranks} ranks, and the cluster has {devices} devices ({name}): {larger}, or smaller degrees in [parallel]"
    )]
    TooManyRanks {
        /// Ranks of the plan.
        ranks: usize,
        /// Devices of the cluster.
        devices: usize,
        /// Name of the cluster.
        name: String,
        /// A cluster that has enough devices, in words.
        larger: String,
    },
    /// Rows of metrics that could not be written. They wait in memory and are written with the next row that can be.
    #[error(
        "cannot append to {}: {}{} wait in memory{}",
        path.display(),
        if is_full(source) { "no space left, free some; ".to_owned() } else { format!("{source}; ") },
        plural(*waiting_rows, "row"),
        if *lost_rows == 0 { String::new() } else { format!(", {} lost", plural(*lost_rows, "row")) },
    )]
    RowsWait {
        /// The metrics file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
        /// Rows that are not in the file yet.
        waiting_rows: usize,
        /// Rows given up because 64 MiB of them waited already.
        lost_rows: usize,
    },
    /// A metrics file that was deleted while the run wrote to it. It has been made anew, with all of its rows.
    #[error("{} was deleted while the run wrote to it; it is there again, with all of its rows", path.display())]
    MetricsDeleted {
        /// The metrics file.
        path: PathBuf,
    },
    /// A metrics file that another run writes to.
    #[error(
        "another run writes its metrics to {}: give this one a directory of its own (--set metrics.dir=DIR)",
        dir.display()
    )]
    MetricsInUse {
        /// The directory.
        dir: PathBuf,
    },
    /// The metrics file cannot be opened, read or written for another reason.
    #[error("cannot {action} {}: {source}", path.display())]
    Metrics {
        /// The file or directory at fault.
        path: PathBuf,
        /// What was tried: "create", "append to", ...
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The address for Prometheus cannot be listened on.
    #[error(
        "cannot listen on metrics.prometheus = \"{address}\": {source}; give HOST:PORT of this machine with a free port"
    )]
    Prometheus {
        /// As it was given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// A directory without the records of a run.
    #[error("no metrics.jsonl in {}; give the metrics.dir of a run that writes it", dir.display())]
    NoRun {
        /// The directory.
        dir: PathBuf,
    },
    /// Metrics of which no line can be read.
    #[error("no row of {} can be read ({damaged_lines} damaged line(s))", path.display())]
    NoRows {
        /// The metrics file.
        path: PathBuf,
        /// Lines that are no rows.
        damaged_lines: usize,
    },
    /// A run whose steps say nothing of the machine.
    #[error("nothing can be learned from the run in {}: {why}", dir.display())]
    TeachesNothing {
        /// The directory of its records.
        dir: PathBuf,
        /// What keeps it from that.
        why: String,
    },
    /// A file of the flight recorder cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    ReadRecords {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of the flight recorder that cannot be believed.
    #[error("{} holds no records of ranks that can be used: {problem}", path.display())]
    BadRecords {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
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
    /// A rank whose weights are not those of the others.
    #[error(
        "the weights of rank {rank} differ from those of rank {reference} after step {step}: a fault of its memory or its \
         arithmetic, or another build; go on from the last checkpoint without the machine it ran on"
    )]
    WeightsDiffer {
        /// Steps made.
        step: u64,
        /// The odd one.
        rank: usize,
        /// A rank with what most have.
        reference: usize,
    },
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

/// Returns true if the system had no room.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
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

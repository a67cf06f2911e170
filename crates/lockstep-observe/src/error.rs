//! Errors of a run's records, each with the path or the value at fault.

use std::io;
use std::path::{Path, PathBuf};

use lockstep_config::human::plural;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Rows of metrics cannot be written. They wait in memory and are written with the next row that succeeds.
    #[error(
        "cannot append to {path}: {}{} wait in memory{}",
        if is_full(source) { "no space left, free some; ".to_owned() } else { format!("{source}; ") },
        plural(*waiting_rows, "row"),
        if *lost_rows == 0 { String::new() } else { format!(", {} lost", plural(*lost_rows, "row")) }
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
    #[error("{path} was deleted while the run wrote to it; it is there again, with all of its rows")]
    MetricsDeleted {
        /// Path of the metrics file.
        path: PathBuf,
    },
    /// Another run writes to the metrics file.
    #[error(
        "another run writes its metrics to {dir}: give this one a directory of its own (--set metrics.dir=DIR)"
    )]
    MetricsInUse {
        /// Path of the directory.
        dir: PathBuf,
    },
    /// The metrics file cannot be opened, read or written for another reason.
    #[error("cannot {action} {path}: {source}")]
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
    #[error("no metrics.jsonl in {dir}; give the metrics.dir of a run that writes it")]
    NoRun {
        /// Path of the directory.
        dir: PathBuf,
    },
    /// No line of the metrics can be read.
    #[error("no row of {path} can be read ({damaged_lines} damaged line(s))")]
    NoRows {
        /// Path of the metrics file.
        path: PathBuf,
        /// Number of lines that are not rows.
        damaged_lines: usize,
    },
    /// A flight record cannot be read.
    #[error("cannot read {path}: {source}")]
    ReadRecords {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A flight record is damaged or implausible.
    #[error("{path} holds no records of ranks that can be used: {problem}")]
    BadRecords {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// The configuration that a run was recorded with.
    #[error(transparent)]
    Config(#[from] lockstep_config::Error),
    /// Error in the communication with other ranks.
    #[error(transparent)]
    Comm(#[from] lockstep_comm::CommError),
}

impl Error {
    /// Returns a function for `map_err` that attaches the action that failed and its path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::Metrics { path: path.to_owned(), action, source }
    }
}

/// Returns true if the disk or the quota is full.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

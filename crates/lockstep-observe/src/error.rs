//! Errors of a run's records, each with the path or the value at fault.

use std::io;
use std::path::PathBuf;

use lockstep_config::human::plural;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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
    /// The configuration that a run was recorded with.
    #[error(transparent)]
    Config(#[from] lockstep_config::Error),
    /// The other ranks of the run.
    #[error(transparent)]
    Comm(#[from] lockstep_comm::CommError),
}

/// Returns true if the system had no room.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

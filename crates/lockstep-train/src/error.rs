//! What can go wrong around a run, each with the path or the value at fault.

use std::io;
use std::path::PathBuf;

use crate::config::Problems;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration has at least one mistake; all of them are in the list.
    #[error("{0}")]
    Configuration(#[from] Problems),
    /// The configuration file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    ReadConfiguration {
        /// The file asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file system that holds the metrics is full. Rows wait in memory and are written as soon as there
    /// is room.
    #[error(
        "no space left for {}: {waiting_rows} row(s) wait in memory, {lost_rows} lost; free some space",
        path.display()
    )]
    MetricsDiskFull {
        /// The metrics file.
        path: PathBuf,
        /// Rows that are not on disk yet.
        waiting_rows: usize,
        /// Rows given up because too many waited already.
        lost_rows: usize,
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
    /// The handlers of SIGINT and SIGTERM cannot be installed.
    #[error("cannot watch for Ctrl-C and SIGTERM: {0}")]
    Signals(#[source] io::Error),
}

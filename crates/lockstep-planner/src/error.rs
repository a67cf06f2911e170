//! Errors of the planner, each with the file or the value at fault.

use std::io;
use std::path::PathBuf;

use crate::cluster::ClusterError;
use crate::shortage::MemoryShortage;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration of the run, or the model or plan that it names.
    #[error(transparent)]
    Config(#[from] lockstep_config::Error),
    /// The records of a run that the machine is calibrated by.
    #[error(transparent)]
    Observe(Box<lockstep_observe::Error>),
    /// The ranks of this machine need more memory than it has.
    #[error("{0}")]
    DoesNotFit(Box<MemoryShortage>),
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
    /// The run cannot be used for calibration.
    #[error("nothing can be learned from the run in {}: {why}", dir.display())]
    UnusableForCalibration {
        /// Directory of the run's metrics.
        dir: PathBuf,
        /// Reason why it cannot be used.
        why: String,
    },
}

impl From<lockstep_observe::Error> for Error {
    fn from(error: lockstep_observe::Error) -> Self {
        Self::Observe(Box::new(error))
    }
}

impl From<lockstep_config::Problems> for Error {
    fn from(problems: lockstep_config::Problems) -> Self {
        Self::Config(problems.into())
    }
}

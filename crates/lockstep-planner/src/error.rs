//! Errors of the planner, each with the file or the value at fault.

use std::io;
use std::path::PathBuf;

use crate::cluster::ClusterError;
use crate::fit::Misfit;

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
    /// A run whose steps say nothing of the machine.
    #[error("nothing can be learned from the run in {}: {why}", dir.display())]
    TeachesNothing {
        /// The directory of its records.
        dir: PathBuf,
        /// What keeps it from that.
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

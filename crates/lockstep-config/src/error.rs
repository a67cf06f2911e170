//! Errors of a run's configuration, each with the file, key or name at fault.

use std::io;
use std::path::PathBuf;

use crate::Problems;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration has at least one mistake; all of them are in the list.
    #[error("{0}")]
    Configuration(#[from] Problems),
    /// No model has the given name, or the model cannot be used this way.
    #[error("{0}")]
    NoModel(String),
    /// A repository cannot be found or downloaded.
    #[error("{prefix}{source}")]
    Hub {
        /// Words before the message, for a name that might be a path.
        prefix: String,
        /// Error of the search.
        source: Box<lockstep_hub::HubError>,
    },
    /// The configuration file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    ReadConfiguration {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The plan file cannot be used for the run.
    #[error("the plan {} cannot be used:\n  {}", path.display(), problems.replace('\n', "\n  "))]
    Plan {
        /// Path of the file.
        path: PathBuf,
        /// All problems of the plan, a line each.
        problems: String,
    },
    /// Error in the model's configuration.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// A directory of weights, an adapter or a checkpoint.
    #[error(transparent)]
    Checkpoint(Box<lockstep_checkpoint::CheckpointError>),
}

impl From<lockstep_checkpoint::CheckpointError> for Error {
    fn from(error: lockstep_checkpoint::CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

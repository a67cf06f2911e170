//! Errors of the library.

use lockstep_comm::CommError;
use lockstep_data::DataError;
use lockstep_engine::EngineError;
use lockstep_model::ModelError;
use lockstep_plan::{PlanError, PlanProblems};

/// An error of the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model's configuration is invalid.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The plan does not fit the model or the ranks.
    #[error("{0}")]
    Plan(#[from] PlanProblems),
    /// A plan file cannot be read or written.
    #[error(transparent)]
    PlanFile(#[from] PlanError),
    /// The plan is for another number of ranks.
    #[error("the plan is for {plan} ranks, and the program has {world} (--nproc-per-node)")]
    WorldSize {
        /// Ranks of the plan.
        plan: usize,
        /// Ranks of the program.
        world: usize,
    },
    /// A sample cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A step has failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A rank is lost, or did not answer in time.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A setting of the run is invalid.
    #[error(transparent)]
    Config(#[from] lockstep_config::Error),
    /// The training loop has failed.
    #[error(transparent)]
    Train(#[from] lockstep_train::Error),
    /// The planner cannot choose a plan.
    #[error(transparent)]
    Planner(#[from] lockstep_planner::Error),
    /// Rank 0 has failed and says why.
    #[error("rank 0 has failed; its message says why")]
    FirstRank,
    /// A file of the program cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Path of the file or directory.
        path: std::path::PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A trainer has no data set.
    #[error("the trainer has no data: call Trainer::data")]
    NoData,
    /// All targets of a global batch are masked.
    #[error("every label of the global batch is -100, so that there is no loss")]
    NoTargets,
}

impl Error {
    /// Returns true if every rank finds this error alike, so that one reports it.
    pub(crate) fn is_of_all_ranks(&self) -> bool {
        matches!(
            self,
            Self::Model(_)
                | Self::Plan(_)
                | Self::PlanFile(_)
                | Self::WorldSize { .. }
                | Self::Config(_)
                | Self::NoData
                | Self::NoTargets
                | Self::Train(
                    lockstep_train::Error::Config(_)
                        | lockstep_train::Error::Layout(_)
                        | lockstep_train::Error::Input { .. }
                )
        )
    }

    /// Returns the error of the training loop that this is, or itself.
    pub(crate) fn into_train(self) -> Result<lockstep_train::Error, Self> {
        match self {
            Self::Model(error) => Ok(error.into()),
            Self::Plan(error) => Ok(error.into()),
            Self::Data(error) => Ok(error.into()),
            Self::Engine(error) => Ok(error.into()),
            Self::Comm(error) => Ok(error.into()),
            Self::Config(error) => Ok(error.into()),
            Self::Train(error) => Ok(error),
            error @ (Self::WorldSize { .. }
            | Self::PlanFile(_)
            | Self::Planner(_)
            | Self::FirstRank
            | Self::Io { .. }
            | Self::NoData
            | Self::NoTargets) => Err(error),
        }
    }
}

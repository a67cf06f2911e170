//! Exit codes and their mapping from errors.

use std::io;

use lockstep_checkpoint::CheckpointError;
use lockstep_comm::CommError;
use lockstep_data::{DataError, ErrorKind};
use lockstep_engine::EngineError;
use lockstep_infer::InferError;
use lockstep_launch::{LaunchError, is_launched, place};
use lockstep_model::ModelError;

/// The run failed.
pub(crate) const FAILED: u8 = 1;
/// Bad arguments or configuration.
pub(crate) const CONFIGURATION: u8 = 2;
/// A device or a library is missing.
pub(crate) const MISSING: u8 = 3;
/// The input is corrupt.
pub(crate) const CORRUPT_INPUT: u8 = 4;
/// Another rank was lost.
pub(crate) const PEER_LOST: u8 = 5;
/// Interrupted; resume to go on.
pub(crate) const INTERRUPTED: u8 = 75;

/// A failure of the command: the message for the user and the exit code for scripts.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) code: u8,
}

impl Failure {
    /// Returns true if another attempt may succeed: not after a wrong configuration or a missing resource.
    pub(crate) fn may_restart(&self) -> bool {
        !matches!(self.code, CONFIGURATION | MISSING | CORRUPT_INPUT | INTERRUPTED)
    }

    /// Returns the message, or words for a failure that a rank has reported itself.
    pub(crate) fn cause(&self) -> &str {
        if self.message.is_empty() { "a rank failed" } else { &self.message }
    }

    pub(crate) fn configuration(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: CONFIGURATION }
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        let code = match error.kind() {
            ErrorKind::Configuration => CONFIGURATION,
            ErrorKind::CorruptInput => CORRUPT_INPUT,
            ErrorKind::Failed => FAILED,
            ErrorKind::Interrupted => INTERRUPTED,
        };
        Self { message: error.to_string(), code }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        let code = match &error {
            ModelError::Checkpoint { .. } | ModelError::NotZero { .. } | ModelError::Json { .. } => {
                CORRUPT_INPUT
            }
            ModelError::Read { source, .. } => code_of_io(source),
            _ => CONFIGURATION,
        };
        Self { message: error.to_string(), code }
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        let code = match error {
            CheckpointError::Model(error) => return error.into(),
            CheckpointError::BaseModel { ref source, .. } => match source.as_ref() {
                source if source.is_corrupt() => CORRUPT_INPUT,
                _ => CONFIGURATION,
            },
            _ if error.is_corrupt() => CORRUPT_INPUT,
            CheckpointError::NoWeights { .. }
            | CheckpointError::NoAdapter { .. }
            | CheckpointError::ParentDirectory { .. }
            | CheckpointError::NoSuchCheckpoint { .. }
            | CheckpointError::OutputExists { .. }
            | CheckpointError::FileExists { .. }
            | CheckpointError::Quantization { .. }
            | CheckpointError::NothingToQuantize { .. }
            | CheckpointError::GgufExport { .. } => CONFIGURATION,
            CheckpointError::Io { ref source, .. } => code_of_io(source),
            _ => FAILED,
        };
        Self { message: error.to_string(), code }
    }
}

/// Returns the exit code of an I/O error. A wrong path is a mistake in the configuration, invalid text is corrupt input, and
/// everything else is a failure of the system.
fn code_of_io(error: &io::Error) -> u8 {
    match error.kind() {
        io::ErrorKind::NotFound
        | io::ErrorKind::AlreadyExists
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory => CONFIGURATION,
        io::ErrorKind::InvalidData => CORRUPT_INPUT,
        _ => FAILED,
    }
}

/// Returns the exit code of a communication error.
pub(crate) fn code_of(error: &CommError) -> u8 {
    match error {
        CommError::PeerLost { .. } => PEER_LOST,
        CommError::Join(_) => CONFIGURATION,
        _ => FAILED,
    }
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Self {
        Self { message: error.to_string(), code: code_of(&error) }
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        let code = match &error {
            LaunchError::Comm(error) => code_of(error),
            LaunchError::Environment(_)
            | LaunchError::NoLeader { .. }
            | LaunchError::NoSharedMemory { .. }
            | LaunchError::NotBuilt
            | LaunchError::Ssh { .. }
            | LaunchError::Unreachable { .. }
            | LaunchError::NotInstalled { .. } => CONFIGURATION,
            LaunchError::Interrupted => INTERRUPTED,
            LaunchError::Log { source, .. } => code_of_io(source),
            _ => FAILED,
        };
        Self { message: error.to_string(), code }
    }
}

impl From<InferError> for Failure {
    fn from(error: InferError) -> Self {
        match error {
            InferError::Checkpoint(error) => error.into(),
            InferError::Data(error) => error.into(),
            InferError::Tensor(error) => Self { message: error.to_string(), code: FAILED },
            error @ InferError::GenerationConfig { .. } => {
                Self { message: error.to_string(), code: CORRUPT_INPUT }
            }
            // Our launcher, or one rank, reports what all ranks know.
            InferError::Comm(error) | InferError::Engine(EngineError::Comm(error)) => {
                let rank = place().ok().flatten().map(|place| place.rank);
                let is_told = error.is_known_to_all() && (is_launched() || error.teller() != rank);
                let message = if is_told { String::new() } else { error.to_string() };
                Self { message, code: code_of(&error) }
            }
            InferError::Engine(error) => Self { message: error.to_string(), code: FAILED },
            error => Self::configuration(error.to_string()),
        }
    }
}

impl From<lockstep_config::Error> for Failure {
    fn from(error: lockstep_config::Error) -> Self {
        use lockstep_config::Error;
        match error {
            Error::Model(error) => error.into(),
            Error::Checkpoint(error) => (*error).into(),
            Error::Hub { ref source, .. } => {
                let code = match source.kind() {
                    lockstep_hub::ErrorKind::Configuration => CONFIGURATION,
                    lockstep_hub::ErrorKind::CorruptInput => CORRUPT_INPUT,
                    lockstep_hub::ErrorKind::Missing => MISSING,
                    lockstep_hub::ErrorKind::Failed => FAILED,
                };
                Self { message: error.to_string(), code }
            }
            error => Self::configuration(error.to_string()),
        }
    }
}

impl From<lockstep_planner::Error> for Failure {
    fn from(error: lockstep_planner::Error) -> Self {
        use lockstep_planner::Error;
        match error {
            Error::Config(error) => error.into(),
            Error::Observe(error) => (*error).into(),
            error => Self::configuration(error.to_string()),
        }
    }
}

impl From<lockstep_observe::Error> for Failure {
    fn from(error: lockstep_observe::Error) -> Self {
        use lockstep_observe::Error;
        let code = match &error {
            Error::Config(_)
            | Error::Prometheus { .. }
            | Error::MetricsInUse { .. }
            | Error::NoRun { .. } => CONFIGURATION,
            Error::ReadRecords { source, .. } => code_of_io(source),
            Error::NoRows { .. } | Error::BadRecords { .. } => CORRUPT_INPUT,
            Error::Comm(error) => code_of(error),
            _ => FAILED,
        };
        Self { message: error.to_string(), code }
    }
}

impl From<crate::Error> for Failure {
    fn from(error: crate::Error) -> Self {
        match error.into_train() {
            Ok(error) => error.into(),
            Err(error @ crate::Error::Io { .. }) => Self { message: error.to_string(), code: FAILED },
            Err(error) => Self::configuration(error.to_string()),
        }
    }
}

impl From<lockstep_train::Error> for Failure {
    fn from(error: lockstep_train::Error) -> Self {
        use lockstep_train::Error;
        match error {
            Error::Config(error) => error.into(),
            Error::Planner(error) => (*error).into(),
            Error::Observe(error) => (*error).into(),
            Error::Data(error) => error.into(),
            Error::Model(error) => error.into(),
            Error::Checkpoint(error) => error.into(),
            error @ (Error::OtherRun { .. }
            | Error::OtherParameters { .. }
            | Error::NoRunToResume { .. }
            | Error::Input { .. }) => Self::configuration(error.to_string()),
            error @ Error::NoGoodCheckpoint { .. } => {
                Self { message: error.to_string(), code: CORRUPT_INPUT }
            }
            Error::Comm(error) => error.into(),
            Error::Launch(error) => error.into(),
            error => Self { message: error.to_string(), code: FAILED },
        }
    }
}

//! Errors of finding and downloading models. Each message says what happened and what to do next.

use std::io;
use std::path::{Path, PathBuf};

/// The class of an error, from which the command line takes its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// A wrong name, a missing permission, or a wrong setting.
    Configuration,
    /// Contents that are not what the hub announced.
    CorruptInput,
    /// The machine lacks something that is needed.
    Missing,
    /// The network, the server or the disk failed.
    Failed,
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The text is no name of a model.
    #[error(
        "{name} is no name of a model: {reason}; write org/name, hf://org/name@revision, or hf://org/name/file.gguf"
    )]
    Name {
        /// The text.
        name: String,
        /// The rule that it breaks.
        reason: String,
    },
    /// An environment variable has an unusable value.
    #[error("{variable}: {reason}")]
    Setting {
        /// Name of the variable.
        variable: &'static str,
        /// The mistake and the allowed values.
        reason: String,
    },
    /// Traffic is forbidden, and the cache lacks files.
    #[error(
        "{model} is not complete in the cache {} (missing: {missing}), and HF_HUB_OFFLINE forbids downloads; unset it, or run \
         `lockstep fetch {model}` where there is a network", cache.display()
    )]
    Offline {
        /// Name of the model.
        model: String,
        /// Files that are missing.
        missing: String,
        /// Directory of the cache.
        cache: PathBuf,
    },
    /// The hub has no such repository, revision or file.
    #[error("{model}: {endpoint} has no such {what}{hint}")]
    NotFound {
        /// Name of the model.
        model: String,
        /// The part that is missing: repository, revision or file.
        what: String,
        /// Address of the hub.
        endpoint: String,
        /// The next step.
        hint: &'static str,
    },
    /// The hub refuses access.
    #[error("{model}: {endpoint} refuses access ({status}): {next}")]
    Refused {
        /// Name of the model.
        model: String,
        /// Address of the hub.
        endpoint: String,
        /// Status of HTTP.
        status: u16,
        /// The cause and the next step.
        next: String,
    },
    /// The repository lacks the files that are needed.
    #[error("{model} {reason}")]
    NoWeights {
        /// Name of the model.
        model: String,
        /// Contents of the repository, and the next step.
        reason: String,
    },
    /// The server cannot be reached, or its answers break off.
    #[error(
        "{url}: {reason}; after {attempts} attempts. Check the network, HTTPS_PROXY and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use the cache alone"
    )]
    Unreachable {
        /// Address of the last request, without its query.
        url: String,
        /// Reason of the last failure.
        reason: String,
        /// Number of attempts.
        attempts: u32,
    },
    /// The server answers what it should not.
    #[error("{url}: {reason}")]
    Answer {
        /// Address of the request, without its query.
        url: String,
        /// The deviation.
        reason: String,
    },
    /// The contents of a file do not have the announced hash.
    #[error(
        "{file} of {model} arrived damaged twice: its SHA-256 is {found}, and the hub announced {announced}; nothing was kept"
    )]
    Damaged {
        /// Name of the model.
        model: String,
        /// File of the repository.
        file: String,
        /// Announced hash in hexadecimal.
        announced: String,
        /// Hash of the received bytes.
        found: String,
    },
    /// The disk has too little space.
    #[error(
        "{}: the disk is full: {needed} bytes are needed and {free} are free; free some space, or set HF_HUB_CACHE to another disk",
        path.display()
    )]
    DiskFull {
        /// Directory on the disk.
        path: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// TLS is not available on this machine.
    #[error("{0}; use a hub at an http:// address (HF_ENDPOINT), or download the model on another machine")]
    NoTls(&'static str),
    /// An error of the file system.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The failed action.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

impl HubError {
    /// Returns the class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Name { .. }
            | Self::Setting { .. }
            | Self::Offline { .. }
            | Self::NotFound { .. }
            | Self::Refused { .. }
            | Self::NoWeights { .. } => ErrorKind::Configuration,
            Self::Answer { .. } | Self::Damaged { .. } => ErrorKind::CorruptInput,
            Self::NoTls(_) => ErrorKind::Missing,
            Self::Unreachable { .. } | Self::DiskFull { .. } | Self::Io { .. } => ErrorKind::Failed,
        }
    }

    /// Returns a function that adds the action and the path to an error of the system.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

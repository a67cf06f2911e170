//! Errors of the files that queues read and write.

use std::{io, path::PathBuf, time::Duration};

use super::Action;

/// Bytes that stay free for other users of the file system.
pub(super) const RESERVE_BYTES: u64 = 64 << 20;

/// An error of a file that a queue reads or writes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The file cannot be created in the directory.
    #[error("cannot make a file for offloaded state in {}: {source}", directory.display())]
    Create {
        /// Directory of the file.
        directory: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file system does not have enough free space.
    #[error(
        "{needed_bytes} bytes of offloaded state do not fit in {}, which has {available_bytes} left; {} of them stay free for others",
        directory.display(),
        RESERVE_BYTES
    )]
    Full {
        /// Directory of the file.
        directory: PathBuf,
        /// Size of the file that was requested, in bytes.
        needed_bytes: u64,
        /// Free space of the file system, in bytes.
        available_bytes: u64,
    },
    /// A stored file cannot be opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A read of a stored file failed; the file may be shorter than when it was opened.
    #[error("cannot read {bytes} bytes at {offset} of {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Offset of the read in the file, in bytes.
        offset: u64,
        /// Length of the read, in bytes.
        bytes: usize,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A read or a write of offloaded state failed.
    #[error("cannot {action} {bytes} bytes at {offset} of the offloaded state in {}: {source}", directory.display())]
    Transfer {
        /// The failed operation.
        action: Action,
        /// Offset of the transfer in the file, in bytes.
        offset: u64,
        /// Length of the transfer, in bytes.
        bytes: usize,
        /// Directory of the file.
        directory: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The disk has not completed a transfer in time.
    #[error("the disk of {} has not answered for {:.0} s", directory.display(), waited.as_secs_f64())]
    Silent {
        /// Directory of the file.
        directory: PathBuf,
        /// Time spent waiting.
        waited: Duration,
    },
}

//! An open file, which a transfer holds until it has ended.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

/// An open file that transfers read or write.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) file: File,
    pub(super) place: Place,
    /// Offset of the first byte after the last one.
    pub(super) end_bytes: u64,
}

/// Place of an open file, for messages.
#[derive(Debug)]
pub(super) enum Place {
    /// Directory of a scratch file.
    Scratch(PathBuf),
    /// Path of a stored file.
    Stored(PathBuf),
}

impl Place {
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Scratch(path) | Self::Stored(path) => path,
        }
    }
}

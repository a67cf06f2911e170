//! The checkpoint that a run goes on from.

use std::path::PathBuf;

/// Where a run begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// From the newest good checkpoint in `checkpoint.dir`, if there is one.
    Auto,
    /// From the start.
    Never,
    /// From this checkpoint.
    From(PathBuf),
}

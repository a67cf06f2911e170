//! The starting point of a run: step 0, the newest checkpoint, or a given one.

use std::path::PathBuf;

/// Starting point of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest intact checkpoint in `checkpoint.dir`; step 0 if there is none.
    Auto,
    /// Step 0, whatever checkpoints exist.
    Never,
    /// The checkpoint at this path.
    From(PathBuf),
}

//! The commit from which the program was built.
//!
//! Only the binary is rebuilt when the commit changes; it passes the commit to this crate at its start.

use std::sync::OnceLock;

static COMMIT: OnceLock<&'static str> = OnceLock::new();

/// Sets the commit from which the program was built; effective once.
pub fn set_commit(commit: &'static str) {
    // The first call wins.
    let _ = COMMIT.set(commit);
}

/// Returns the commit from which the program was built; `None` if unknown.
pub fn commit() -> Option<&'static str> {
    COMMIT.get().copied().filter(|commit| !commit.is_empty())
}

//! The commit that the program was built from, as its binary knows it.
//!
//! Only the binary is built again when the commit changes; it tells this crate at its start.

use std::sync::OnceLock;

static COMMIT: OnceLock<&'static str> = OnceLock::new();

/// Tells the commit that the program was built from, once.
pub fn set_commit(commit: &'static str) {
    // The first one counts.
    let _ = COMMIT.set(commit);
}

/// The commit that the program was built from; none where it is not known.
pub fn commit() -> Option<&'static str> {
    COMMIT.get().copied().filter(|commit| !commit.is_empty())
}

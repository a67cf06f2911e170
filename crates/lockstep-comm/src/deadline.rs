//! The moment at which waiting ends. Every call that can wait takes one; there is none that is never.

use std::time::{Duration, Instant};

/// A moment at which a wait becomes an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline {
    set: Instant,
    at: Instant,
}

impl Deadline {
    /// The longest that anybody may wait: a day.
    const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

    /// After `limit` from now, at most a day.
    pub fn after(limit: Duration) -> Self {
        let set = Instant::now();
        Self { set, at: set + limit.min(Self::LONGEST) }
    }

    /// Whether it has come.
    pub fn has_passed(&self) -> bool {
        Instant::now() >= self.at
    }

    /// The time until it comes.
    pub fn remaining(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// How long it gave, when it was set.
    pub fn limit(&self) -> Duration {
        self.at - self.set
    }
}

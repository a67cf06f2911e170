//! The point in time at which waiting ends. Every call that can wait takes one, and none is infinite.

use std::time::{Duration, Instant};

/// Point in time at which a wait becomes an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline {
    set: Instant,
    at: Instant,
}

impl Deadline {
    /// Maximum waiting time: one day.
    const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

    /// Returns the deadline `limit` from now, or one day from now if that is earlier.
    pub fn after(limit: Duration) -> Self {
        let set = Instant::now();
        Self { set, at: set + limit.min(Self::LONGEST) }
    }

    /// Returns true if the deadline has passed.
    pub fn has_passed(&self) -> bool {
        Instant::now() >= self.at
    }

    /// Returns the time left until the deadline; zero after it.
    pub fn remaining(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Returns the time between the deadline's creation and the deadline.
    pub fn limit(&self) -> Duration {
        self.at - self.set
    }
}

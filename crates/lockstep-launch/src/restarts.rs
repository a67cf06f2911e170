//! Restart policy: when failed ranks are restarted and when a run gives up, as a function of past failures and durations.
//!
//! Every restart takes one of `max_restarts`; time without a failure gives them back. Restarts without a new checkpoint back off
//! exponentially and have a limit of their own.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Pause before the first restart after a new checkpoint.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Maximum pause before a restart.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Limits on restarts.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Maximum number of outstanding restarts.
    pub max_restarts: usize,
    /// Time without a failure that gives one restart back.
    pub stable_after: Duration,
    /// Maximum number of consecutive restarts without a new checkpoint.
    pub max_futile: usize,
}

/// Action after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Restart after this pause.
    Again(Duration),
    /// Give up: no restarts are left.
    UsedUp,
    /// Give up: this many consecutive restarts have brought no new checkpoint.
    Futile(usize),
}

/// Restarts of a run so far.
#[derive(Debug)]
pub struct Restarts {
    policy: Policy,
    /// Number of restarts that time has not given back.
    outstanding: usize,
    /// Number of consecutive restarts without a new checkpoint.
    futile: usize,
    /// Step of the newest checkpoint before the last attempt.
    newest: Option<u64>,
}

impl Restarts {
    /// Returns a record without restarts, for a run whose newest checkpoint is of step `newest`.
    pub fn new(policy: Policy, newest: Option<u64>) -> Self {
        Self { policy, outstanding: 0, futile: 0, newest }
    }

    /// Number of restarts that time has not given back.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Records an attempt that failed after `ran` and returns the next action. `newest` is the step of the newest checkpoint;
    /// `jitter` in [0, 1) spreads the pauses of machines that failed together.
    pub fn after_failure(&mut self, ran: Duration, newest: Option<u64>, jitter: f64) -> Verdict {
        let given_back = (ran.as_secs_f64() / self.policy.stable_after.as_secs_f64()) as usize;
        self.outstanding = self.outstanding.saturating_sub(given_back);
        if newest > self.newest {
            self.futile = 0;
        }
        self.newest = newest;
        if self.outstanding >= self.policy.max_restarts {
            return Verdict::UsedUp;
        }
        if self.futile >= self.policy.max_futile {
            return Verdict::Futile(self.futile);
        }
        // The first failure after a checkpoint does not indicate a loop.
        let longest = LONGEST_PAUSE.min(FIRST_PAUSE * (1 << self.futile.min(16)));
        self.futile += 1;
        self.outstanding += 1;
        Verdict::Again(longest.mul_f64(0.5 + jitter / 2.0))
    }
}

/// Returns a number in [0, 1) that differs between processes and calls.
pub fn jitter() -> f64 {
    RandomState::new().hash_one(std::process::id()) as f64 / (u64::MAX as f64 * (1.0 + f64::EPSILON))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn restarts(max_restarts: usize, max_futile: usize) -> Restarts {
        Restarts::new(Policy { max_restarts, stable_after: 10 * SECOND, max_futile }, None)
    }

    #[test]
    fn restarts_are_used_up_unless_time_gives_them_back() {
        let mut quick = restarts(2, 100);
        let verdicts = [1, 2, 3].map(|step| quick.after_failure(SECOND, Some(step), 0.0));
        assert!(matches!(verdicts, [Verdict::Again(_), Verdict::Again(_), Verdict::UsedUp]), "{verdicts:?}");
        let mut stable = restarts(2, 100);
        for step in 0..50 {
            let verdict = stable.after_failure(10 * SECOND, Some(step), 0.0);
            assert!(matches!(verdict, Verdict::Again(_)), "failure {step}: {verdict:?}");
        }
        assert_eq!(stable.outstanding(), 1);
        // Many stable hours give back no more than was taken.
        stable.after_failure(10_000 * SECOND, Some(50), 0.0);
        assert_eq!(stable.outstanding(), 1);
    }

    #[test]
    fn no_restarts_are_none() {
        assert_eq!(restarts(0, 5).after_failure(SECOND, None, 0.0), Verdict::UsedUp);
    }

    #[test]
    fn restarts_without_a_new_checkpoint_slow_down_and_end() {
        let mut loops = restarts(100, 3);
        let mut pauses = Vec::new();
        let end = loop {
            match loops.after_failure(SECOND, Some(7), 0.0) {
                Verdict::Again(pause) => pauses.push(pause.as_millis()),
                end => break end,
            }
        };
        // The first checkpoint was new.
        assert_eq!((pauses, end), (vec![25, 50, 100], Verdict::Futile(3)));
        let mut moves = restarts(100, 3);
        for step in 1..20 {
            assert_eq!(moves.after_failure(SECOND, Some(step), 0.0), Verdict::Again(FIRST_PAUSE / 2));
        }
    }

    #[test]
    fn pauses_end_at_their_limit_and_are_spread() {
        let mut loops = restarts(1000, 1000);
        let last = (0..40).map(|_| loops.after_failure(SECOND, None, 0.999)).last();
        let Some(Verdict::Again(pause)) = last else { panic!("{last:?}") };
        assert!(pause > LONGEST_PAUSE.mul_f64(0.99) && pause <= LONGEST_PAUSE, "{pause:?}");
        let all: Vec<f64> = (0..100).map(|_| jitter()).collect();
        assert!(all.iter().all(|number| (0.0..1.0).contains(number)), "{all:?}");
        assert!(all.iter().any(|number| *number != all[0]), "{all:?}");
    }
}

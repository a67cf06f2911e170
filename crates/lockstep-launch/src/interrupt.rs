//! Requests to stop (Ctrl-C, SIGTERM, SIGUSR1, a closed terminal) as a flag that the training loop reads between steps.
//!
//! The first signal is a request: the loop finishes its step, saves and exits with code 75. A later Ctrl-C is final: the process
//! exits at once with code 130. Signals within a second of the first have the same cause and are not final: a terminal sends
//! SIGINT to all of its processes while a launcher passes SIGTERM on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};

use crate::LaunchError;

/// Exit code of a process that a second Ctrl-C ends, as shells report it (128 + SIGINT).
pub const SECOND_INTERRUPT_EXIT_CODE: i32 = 130;
/// Time after the first signal within which further ones have the same cause.
const SAME_CAUSE: Duration = Duration::from_secs(1);

/// Interval at which a pause looks for a stop request.
const LOOK: Duration = Duration::from_millis(10);

/// Flag of a stop request; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    /// Time of the first request, as recorded by a thread.
    since: Arc<OnceLock<Instant>>,
}

impl Interrupt {
    /// Handles the stop signals from now on until the process ends. The flag is set in the handler, and a thread decides which
    /// signal is final. SIGUSR1 is a common choice for SLURM's `--signal`. SIGHUP and SIGUSR1 stay ignored if the process was
    /// started so (`nohup`).
    ///
    /// # Errors
    /// [`LaunchError::Signals`] if the system refuses the handlers or the thread.
    pub fn on_signals() -> Result<Self, LaunchError> {
        let interrupt = Self::default();
        let ignored = ignored_signals();
        let is_ignored = |signal: i32| ignored >> (signal - 1) & 1 == 1;
        let mut asking = vec![SIGINT, SIGTERM];
        asking.extend([SIGHUP, SIGUSR1].into_iter().filter(|signal| !is_ignored(*signal)));
        for signal in asking.iter().copied() {
            flag::register(signal, Arc::clone(&interrupt.requested)).map_err(LaunchError::Signals)?;
        }
        let mut signals = Signals::new(asking).map_err(LaunchError::Signals)?;
        let since = Arc::clone(&interrupt.since);
        let watch = move || {
            for signal in signals.forever() {
                if insists(signal, *since.get_or_init(Instant::now), Instant::now()) {
                    low_level::exit(SECOND_INTERRUPT_EXIT_CODE);
                }
            }
        };
        Builder::new().name("lockstep-signals".to_owned()).spawn(watch).map_err(LaunchError::Signals)?;
        Ok(interrupt)
    }

    /// Requests a stop, as a signal does.
    pub fn request(&self) {
        self.since.get_or_init(Instant::now);
        self.requested.store(true, Ordering::SeqCst);
    }

    /// Returns the time of the first request; `None` if there was none.
    pub fn requested_since(&self) -> Option<Instant> {
        self.is_requested().then(|| *self.since.get_or_init(Instant::now))
    }

    /// Waits for `pause`; returns false as soon as a stop is requested.
    pub fn sleeps(&self, pause: Duration) -> bool {
        let end = Instant::now() + pause;
        while !self.is_requested() {
            let rest = end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return true;
            }
            std::thread::sleep(rest.min(LOOK));
        }
        false
    }

    /// Returns true if a stop has been requested.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }
}

/// Returns the signals that this process was started to ignore, signal N at bit N - 1; 0 if unknown.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Returns true if a signal at `now` ends the process at once, given that the first one came at `first`.
fn insists(signal: i32, first: Instant, now: Instant) -> bool {
    signal == SIGINT && now.duration_since(first) >= SAME_CAUSE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_later_ctrl_c_insists() {
        let first = Instant::now();
        for (signal, after_ms, ends) in [
            (SIGINT, 0, false),
            (SIGINT, 999, false),
            (SIGTERM, 999, false),
            (SIGTERM, 60_000, false),
            (SIGINT, 1000, true),
            (SIGINT, 60_000, true),
        ] {
            let now = first + Duration::from_millis(after_ms);
            assert_eq!(insists(signal, first, now), ends, "signal {signal} after {after_ms} ms");
        }
    }
}

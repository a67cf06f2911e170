//! Observation of silent ranks from outside: out-of-memory kills by the kernel, and missing heartbeats of all ranks.

use std::{
    fs,
    time::{Duration, Instant},
};

/// Pause between two readings of the kernel's counter.
const READING: Duration = Duration::from_secs(1);

/// Counter of processes that the kernel's out-of-memory killer has ended, in any cgroup.
///
/// The counter covers the whole machine. A rank killed by SIGKILL within two seconds of a rise is attributed to it.
#[derive(Debug)]
pub(crate) struct OomKills {
    /// Counts of the last reading but one, and of the last reading.
    earlier: Option<u64>,
    last: Option<u64>,
    read_at: Instant,
}

impl OomKills {
    /// Creates the observation with the current count.
    pub(crate) fn now() -> Self {
        let count = oom_kills();
        Self { earlier: count, last: count, read_at: Instant::now() }
    }

    /// Reads the counter again, if the last reading is old.
    pub(crate) fn look(&mut self) {
        if self.read_at.elapsed() >= READING {
            (self.earlier, self.last, self.read_at) = (self.last, oom_kills(), Instant::now());
        }
    }

    /// Returns true if the killer has been at work within the last seconds; `None` where the system does not show it.
    pub(crate) fn have_risen(&self) -> Option<bool> {
        Some(oom_kills()? > self.earlier?)
    }
}

/// Returns the kernel's count, which includes kills within cgroups; `None` if the system does not report it.
fn oom_kills() -> Option<u64> {
    count_of(&fs::read_to_string("/proc/vmstat").ok()?)
}

/// Returns the value of `oom_kill` in the text of `/proc/vmstat`.
fn count_of(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Detector of silence: no rank shows a sign of life any more. It also detects the end of the silence.
#[derive(Debug)]
pub(crate) struct Stillness {
    limit: Duration,
    beats: Vec<Option<u32>>,
    moved_at: Option<Instant>,
    is_still: bool,
}

impl Stillness {
    /// Creates a detector that reports a silence of at least `limit`.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, beats: Vec::new(), moved_at: None, is_still: false }
    }

    /// Takes the heartbeats of the surviving ranks at `now`; `None` for a rank without one. Returns a change: the length of a
    /// silence, or `Some(None)` at its end.
    pub(crate) fn look(&mut self, beats: &[Option<u32>], now: Instant) -> Option<Option<Duration>> {
        let moved_at = self.moved_at.get_or_insert(now);
        // Silence counts only once all ranks have joined.
        if self.beats != beats || beats.is_empty() || beats.iter().any(Option::is_none) {
            self.beats = beats.to_vec();
            *moved_at = now;
            return std::mem::take(&mut self.is_still).then_some(None);
        }
        let silence = now.duration_since(*moved_at);
        if self.is_still || silence < self.limit {
            return None;
        }
        self.is_still = true;
        Some(Some(silence))
    }
}

/// Returns true if a signal or a debugger has stopped a process.
pub(crate) fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The process name before it may contain anything, including a parenthesis.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_of_oom_kills_is_that_of_vmstat() {
        assert_eq!(count_of("pgfault 7\noom_kill 3\nnuma_hit 1\n"), Some(3));
        assert_eq!(count_of("pgfault 7\noom_kill_x 3\n"), None);
    }

    #[test]
    fn a_silence_of_all_ranks_is_told_once_and_so_is_its_end() {
        let limit = Duration::from_millis(500);
        let begin = Instant::now();
        let mut stillness = Stillness::new(limit);
        let mut told = Vec::new();
        for (at_ms, beats) in [
            (0, [None, Some(1)]),
            (700, [None, Some(1)]),
            (800, [Some(1), Some(2)]),
            (1200, [Some(1), Some(2)]),
            (1300, [Some(1), Some(2)]),
            (1500, [Some(1), Some(2)]),
            (1600, [Some(2), Some(2)]),
            (1700, [Some(2), Some(2)]),
        ] {
            if let Some(change) = stillness.look(&beats, begin + Duration::from_millis(at_ms)) {
                told.push((at_ms, change.is_some()));
            }
        }
        assert_eq!(told, [(1300, true), (1600, false)]);
    }

    #[test]
    fn a_process_that_runs_is_not_stopped() {
        assert!(!is_stopped(std::process::id()));
        assert!(!is_stopped(u32::MAX), "there is none of this number");
    }
}

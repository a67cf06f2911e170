//! Evidence about processes that say nothing themselves: whether the kernel has killed for want of memory, and whether ranks have all stopped.

use std::{
    fs,
    time::{Duration, Instant},
};

/// Pause between two readings of the kernel's counter.
const READING: Duration = Duration::from_secs(1);

/// The kernel's count of processes that its out-of-memory killer has ended, of any cgroup.
///
/// The counter is of the whole machine. A rank that SIGKILL ends within two seconds of a rise counts as one of those.
#[derive(Debug)]
pub(crate) struct OomKills {
    /// The count at least one reading ago, and the last one read.
    earlier: Option<u64>,
    last: Option<u64>,
    read_at: Instant,
}

impl OomKills {
    /// The count as it is now.
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

/// The kernel's own count, which includes kills within cgroups.
fn oom_kills() -> Option<u64> {
    count_of(&fs::read_to_string("/proc/vmstat").ok()?)
}

/// The value of `oom_kill` in the text of `/proc/vmstat`.
fn count_of(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Notices when none of the ranks shows a sign of life any more, and when one does again.
#[derive(Debug)]
pub(crate) struct Stillness {
    limit: Duration,
    beats: Vec<Option<u32>>,
    moved_at: Option<Instant>,
    is_still: bool,
}

impl Stillness {
    /// A watch that tells of a silence of `limit`.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, beats: Vec::new(), moved_at: None, is_still: false }
    }

    /// Takes the heartbeats of the ranks that are left at `now`, `None` for one that has none. Returns a change: the length of the
    /// silence, or `Some(None)` at its end.
    pub(crate) fn look(&mut self, beats: &[Option<u32>], now: Instant) -> Option<Option<Duration>> {
        let moved_at = self.moved_at.get_or_insert(now);
        // Nobody is watched before all have come.
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
    // The name before it may hold anything, a parenthesis included.
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

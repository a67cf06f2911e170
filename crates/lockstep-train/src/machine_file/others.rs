//! CPU time of other processes during a measurement: rates of a busy machine do not predict a run.

use std::fs;

/// CPU ticks of all cores since the machine was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticks {
    all: u64,
    busy: u64,
    /// Busy ticks of this process.
    own: u64,
}

impl Ticks {
    /// Returns the current ticks; `None` if the system does not report them.
    pub(super) fn now() -> Option<Self> {
        read(&fs::read_to_string("/proc/stat").ok()?, &fs::read_to_string("/proc/self/stat").ok()?)
    }

    /// Returns the fraction of the cores that other processes used since `begin`; `None` if no time has passed.
    pub(super) fn others_since(self, begin: Self) -> Option<f64> {
        let passed = |of: fn(&Self) -> u64| of(&self).saturating_sub(of(&begin)) as f64;
        let all = passed(|ticks| ticks.all);
        (all > 0.0).then(|| f64::max(passed(|ticks| ticks.busy) - passed(|ticks| ticks.own), 0.0) / all)
    }
}

/// Parses the texts of `/proc/stat` and `/proc/self/stat`.
fn read(of_all: &str, of_self: &str) -> Option<Ticks> {
    let line = of_all.lines().next()?.strip_prefix("cpu ")?;
    // Fields: user nice system idle iowait irq softirq steal; guest time is part of user.
    let ticks: Vec<u64> =
        line.split_whitespace().take(8).map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let all: u64 = ticks.iter().sum();
    let idle = ticks.get(3)? + ticks.get(4)?;
    // The name of the program is in brackets and may have any characters; utime and stime are the 12th and 13th field after it.
    let after = of_self.rsplit_once(')')?.1;
    let mut times = after.split_whitespace().skip(11);
    let own = times.next()?.parse::<u64>().ok()? + times.next()?.parse::<u64>().ok()?;
    Some(Ticks { all, busy: all - idle, own })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_neither_idle_nor_ours_is_of_others() {
        let of_self = |user: u64| format!("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 {user} 5 0 0 20 0 1 0 99");
        let begin = read("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1", &of_self(20)).unwrap();
        let end = read("cpu  160 0 70 900 70 0 0 0 0 0\ncpu0 1", &of_self(60)).unwrap();
        // 200 ticks, of which 120 were idle and 40 this process's.
        assert_eq!(end.others_since(begin), Some(0.2));
        assert_eq!(begin.others_since(begin), None);
        for (all, own) in [("", "7 (a) S"), ("cpu  1 2 3", &of_self(1)), ("cpu  1 2 3 4 5 x", &of_self(1))] {
            assert_eq!(read(all, own), None, "{all:?} {own:?}");
        }
        assert!(Ticks::now().is_some());
    }
}

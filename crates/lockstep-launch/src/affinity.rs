//! Core affinity of the ranks of one machine: each gets an equal share of the cores that its launcher may use.
//!
//! Our own launcher pins its ranks before they start; a rank of another launcher pins itself when it joins.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Core affinity of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
    /// No affinity: all cores that the launcher may use.
    Free,
    /// An equal share of the launcher's cores for each rank; ranks share cores only if there are too few.
    Share,
}

/// Pins this process to its share of the cores, as one of `ranks` on this machine, unless it is already bound to fewer cores.
pub(crate) fn pin_to_share(rank: usize, ranks: usize) {
    let allowed = cores();
    if allowed.len() >= online_cores() && ranks > 1 {
        // A rank that may not set its affinity runs all the same.
        let _ = sched_setaffinity(None, &share_of_cores(&allowed, rank, ranks));
    }
}

/// Returns the cores that this thread may use.
pub(crate) fn cores() -> Vec<usize> {
    let allowed = sched_getaffinity(None).ok();
    allowed.map_or(Vec::new(), |allowed| (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect())
}

/// Returns the number of online cores that the system reports.
fn online_cores() -> usize {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    list.trim().split(',').filter_map(count).sum()
}

/// Returns consecutive cores, nearly equally many for each rank; a single core if there are more ranks than cores.
pub(crate) fn share_of_cores(cores: &[usize], rank: usize, ranks: usize) -> CpuSet {
    let mut share = CpuSet::new();
    if ranks <= cores.len() {
        let border = |rank: usize| rank * cores.len() / ranks;
        cores[border(rank)..border(rank + 1)].iter().for_each(|core| share.set(*core));
    } else if !cores.is_empty() {
        share.set(cores[rank % cores.len()]);
    }
    share
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_shared_out_whole_and_without_a_rest() {
        let of = |cores: &[usize], rank, ranks| -> Vec<usize> {
            let share = share_of_cores(cores, rank, ranks);
            (0..100).filter(|core| share.is_set(*core)).collect()
        };
        assert_eq!([0, 1].map(|rank| of(&[0, 1], rank, 2)), [vec![0], vec![1]]);
        assert_eq!([0, 1].map(|rank| of(&[2, 3, 9, 10, 11], rank, 2)), [vec![2, 3], vec![9, 10, 11]]);
        assert_eq!([0, 1, 2, 3].map(|rank| of(&[4, 7], rank, 4)), [vec![4], vec![7], vec![4], vec![7]]);
        assert_eq!(of(&[5, 6], 0, 1), [5, 6]);
    }
}

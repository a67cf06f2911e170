//! Core affinity of the ranks of one machine: each gets an equal share of the cores that its launcher may use, on as few memory
//! nodes as possible.
//!
//! Our own launcher pins its ranks before they start; a rank of another launcher pins itself when it joins.

use lockstep_tensor::topology::{Topology, allowed_cpus, online_cpus};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Core affinity of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
    /// No affinity: all cores that the launcher may use.
    Free,
    /// A share of the launcher's cores for each rank, as of [`Topology::cpus_of_rank`].
    Share,
}

/// Returns the number of ranks for a machine that the user leaves open: one for each memory node (NUMA) if it has several, because
/// the threads of a rank then share its memory; otherwise one for each core.
pub fn automatic_ranks() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    ranks_for(&Topology::current(), cores)
}

/// Returns the number of ranks for a machine of whose CPUs this process may use as many as `cores` at a time.
fn ranks_for(topology: &Topology, cores: usize) -> usize {
    // A control group may allow less time than the CPUs have.
    topology.ranks_by_node().map_or(cores, |ranks| ranks.min(cores))
}

/// Pins this process to its share of the cores, as one of `ranks` on this machine, unless it is already bound to fewer cores.
pub(crate) fn pin_to_share(rank: usize, ranks: usize) {
    if allowed_cpus().len() >= online_cpus().len() && ranks > 1 {
        // A rank that may not set its affinity runs all the same.
        let _ = sched_setaffinity(None, &cpus_of_rank(&Topology::current(), rank, ranks));
    }
}

/// Returns the CPUs of a rank as a set for the system.
pub(crate) fn cpus_of_rank(topology: &Topology, rank: usize, ranks: usize) -> CpuSet {
    let mut set = CpuSet::new();
    let cpus = topology.cpus_of_rank(rank, ranks).into_iter().filter(|cpu| *cpu < CpuSet::MAX_CPU);
    cpus.for_each(|cpu| set.set(cpu));
    set
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn ranks_are_as_many_as_memory_nodes_or_else_as_cores() {
        let dir = tempfile::tempdir().unwrap();
        let node = |number: usize, cpus: &str| {
            let node = dir.path().join(format!("node/node{number}"));
            std::fs::create_dir_all(&node).unwrap();
            std::fs::write(node.join("cpulist"), cpus).unwrap();
        };
        node(0, "0-31\n");
        node(1, "32-63\n");
        std::fs::write(dir.path().join("node/online"), "0-1\n").unwrap();
        let of = |cpus: std::ops::Range<usize>, cores| {
            ranks_for(&Topology::read(dir.path(), &cpus.collect::<Vec<_>>()), cores)
        };
        assert_eq!([of(0..64, 64), of(0..64, 1), of(32..64, 32), of(0..6, 6)], [2, 1, 32, 6]);
    }

    #[test]
    fn ranks_divide_the_cores_of_a_machine_that_describes_none() {
        let of = |cores: &[usize], rank, ranks| -> Vec<usize> {
            let topology = Topology::read(Path::new("/nonexistent"), cores);
            let set = cpus_of_rank(&topology, rank, ranks);
            (0..100).filter(|core| set.is_set(*core)).collect()
        };
        assert_eq!([0, 1].map(|rank| of(&[0, 1], rank, 2)), [vec![0], vec![1]]);
        assert_eq!([0, 1].map(|rank| of(&[2, 3, 9, 10, 11], rank, 2)), [vec![2, 3], vec![9, 10, 11]]);
        assert_eq!([0, 1, 2, 3].map(|rank| of(&[4, 7], rank, 4)), [vec![4], vec![7], vec![4], vec![7]]);
        assert_eq!(of(&[5, 6], 0, 1), [5, 6]);
    }
}

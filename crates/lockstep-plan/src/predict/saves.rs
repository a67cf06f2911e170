//! What steps wait for that none of them is made of: saves of the state, and sequences that come later than they are wanted.
//!
//! A save in the background is made of a copy of what the ranks write, for which steps wait. The copy is written while they go on; the next
//! save waits for that, if it is not done by then. A save in the foreground is written while everybody waits. Of replicas one writes; its
//! ranks do so at the same time and share the disks of their nodes.

use crate::cluster::{Cluster, NodeKind};
use crate::predict::timed::device;
use crate::{Axis, DType, Mesh};

/// What a save takes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Saves {
    /// Bytes that the rank writes which writes most.
    pub bytes: f64,
    /// Seconds until it has copied them; none where it writes in the foreground.
    pub copy_s: Option<f64>,
    /// Seconds until they are written.
    pub write_s: f64,
}

impl Saves {
    /// Those of ranks laid out so, of which one writes so many bytes at most; from a copy, or as they are.
    pub fn of(cluster: &Cluster, mesh: &Mesh, bytes: f64, from_copy: bool) -> Self {
        let of_a_replica = mesh.world_size() / mesh.ranks().degree(Axis::Replicate).max(1);
        // The first replica fills node after node.
        let write_s = |node: &NodeKind| disk_s(node, of_a_replica.min(node.devices), bytes);
        let copy_s = |kind: usize| {
            // Read and written where the state is.
            let device = device(cluster, mesh, kind);
            2.0 * bytes / (device.memory_gb_per_s * 1e9 * device.efficiency.stream)
        };
        Self {
            bytes,
            copy_s: from_copy.then(|| (0..cluster.nodes.len()).map(copy_s).fold(0.0, f64::max)),
            write_s: cluster.nodes.iter().map(write_s).fold(0.0, f64::max),
        }
    }

    /// Seconds that steps wait for a save, if so many seconds of steps lie between two.
    pub fn stall_s(&self, between_s: f64) -> f64 {
        match self.copy_s {
            Some(copy_s) => copy_s + f64::max(self.write_s - between_s, 0.0),
            None => self.write_s,
        }
    }

    /// The shortest time between two saves of which none waits for the other.
    pub fn least_interval_s(&self) -> f64 {
        if self.copy_s.is_some() { self.write_s } else { 0.0 }
    }
}

/// Seconds that a step of so many seconds waits for its sequences: each rank reads its own part of them, so many tokens, while the step
/// before goes on.
pub fn data_stall_s(cluster: &Cluster, mesh: &Mesh, tokens: f64, step_s: f64) -> f64 {
    let bytes = tokens * DType::U32.size_bytes() as f64;
    let read_s = |node: &NodeKind| disk_s(node, cluster.ranks_of_a_node(node, mesh.world_size()), bytes);
    let longest = cluster.nodes.iter().map(read_s).fold(0.0, f64::max);
    f64::max(longest - step_s, 0.0)
}

/// Seconds in which each of so many ranks of a node moves so many bytes to or from its disk.
fn disk_s(node: &NodeKind, ranks: usize, bytes: f64) -> f64 {
    bytes * ranks as f64 / (node.disk_gb_per_s * 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Degrees;

    const GB: f64 = 1e9;

    fn mesh(replicate: usize, shard: usize) -> Mesh {
        Mesh::new(Degrees { replicate, shard, ..Degrees::default() }).unwrap()
    }

    #[test]
    fn a_save_from_a_copy_holds_steps_up_until_the_copy_is_made_and_no_longer_if_the_last_one_is_through() {
        let cluster = Cluster::preset("dgx-h100").unwrap();
        let node = &cluster.nodes[0];
        let saves = Saves::of(&cluster, &mesh(1, 8), 40.0 * GB, true);
        // Eight ranks share a disk, and each copies in its own memory.
        let memory = node.device.memory_gb_per_s * node.device.efficiency.stream;
        let (copy_s, write_s) = (2.0 * 40.0 / memory, 8.0 * 40.0 / node.disk_gb_per_s);
        assert_eq!((saves.copy_s, saves.write_s), (Some(copy_s), write_s));
        assert_eq!(saves.stall_s(write_s + 1.0), copy_s);
        assert!((saves.stall_s(write_s - 1.5) - copy_s - 1.5).abs() < 1e-9);
        assert_eq!(saves.least_interval_s(), write_s);
        let waiting = Saves::of(&cluster, &mesh(1, 8), 40.0 * GB, false);
        assert_eq!((waiting.stall_s(1e9), waiting.least_interval_s()), (write_s, 0.0));
    }

    #[test]
    fn of_replicas_one_writes() {
        let cluster = Cluster::preset("dgx-h100x2").unwrap();
        let write_s = |mesh| Saves::of(&cluster, &mesh, GB, true).write_s;
        assert_eq!(write_s(mesh(2, 8)), write_s(mesh(1, 16)));
        assert_eq!(write_s(mesh(16, 1)), write_s(mesh(1, 16)) / 8.0);
    }

    #[test]
    fn sequences_are_waited_for_only_where_the_disk_is_slower_than_the_steps() {
        let mut cluster = Cluster::preset("dgx-h100").unwrap();
        assert_eq!(data_stall_s(&cluster, &mesh(8, 1), 65_536.0, 0.5), 0.0);
        cluster.nodes[0].disk_gb_per_s = 1e-3;
        let stall_s = data_stall_s(&cluster, &mesh(8, 1), 65_536.0, 0.5);
        assert!((stall_s - (8.0 * 4.0 * 65_536.0 / 1e6 - 0.5)).abs() < 1e-9, "{stall_s}");
    }
}

//! Stalls of steps by checkpoints and by data loading.
//!
//! An asynchronous save copies the state, and steps wait only for the copy: accelerators copy to host memory, CPUs within their own. The
//! copy is written while the steps continue; the next save waits if it is not done by then. A synchronous save is written while all ranks
//! wait. One data-parallel replica writes, all its ranks at once. Accelerators write to shared storage, since a node's disk is lost with
//! the node. CPUs write to the disks of their nodes, unless the cluster names shared storage.

use crate::cluster::{Cluster, NodeKind};
use crate::predict::timed::device;
use lockstep_plan::{Axis, DType, Mesh};

/// Cost of a save.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Saves {
    /// Bytes of the rank that writes most.
    pub bytes: f64,
    /// Seconds of the copy; `None` for a synchronous save.
    pub copy_s: Option<f64>,
    /// Seconds until everything is written.
    pub write_s: f64,
    /// True if saves go to shared storage.
    is_shared: bool,
}

/// Maximum fraction of the time for which a run may occupy shared storage.
const SHARE_OF_STORAGE: f64 = 0.05;

impl Saves {
    /// Predicts the saves of ranks on `mesh`, each of which writes at most `bytes`; asynchronous if `from_copy`.
    pub fn of(cluster: &Cluster, mesh: &Mesh, bytes: f64, from_copy: bool) -> Self {
        let of_a_replica = mesh.world_size() / mesh.ranks().degree(Axis::Replicate).max(1);
        // The first replica fills node after node.
        let on_disks = |node: &NodeKind| disk_s(node, of_a_replica.min(node.devices), bytes);
        let write_s = match cluster.checkpoint_gb_per_s() {
            Some(rate) => bytes * of_a_replica as f64 / (rate * 1e9),
            None => cluster.nodes.iter().map(on_disks).fold(0.0, f64::max),
        };
        let copy_s = |kind: usize| {
            let device = device(cluster, mesh, kind);
            match device.is_host {
                // Read and written in the same memory.
                true => 2.0 * bytes / (device.memory_gb_per_s * 1e9 * device.efficiency.stream),
                false => bytes / (cluster.nodes[kind].host_gb_per_s * 1e9),
            }
        };
        Self {
            bytes,
            copy_s: from_copy.then(|| (0..cluster.nodes.len()).map(copy_s).fold(0.0, f64::max)),
            write_s,
            is_shared: cluster.checkpoint_gb_per_s().is_some(),
        }
    }

    /// Returns the seconds that steps wait for a save, if `between_s` seconds of steps lie between two saves.
    pub fn stall_s(&self, between_s: f64) -> f64 {
        match self.copy_s {
            Some(copy_s) => copy_s + f64::max(self.write_s - between_s, 0.0),
            None => self.write_s,
        }
    }

    /// Returns the minimum sensible time between two saves: no save waits for the previous one, and shared storage stays free for most of
    /// the time.
    pub fn least_interval_s(&self) -> f64 {
        match self.copy_s {
            _ if self.is_shared => self.write_s / SHARE_OF_STORAGE,
            Some(_) => self.write_s,
            None => 0.0,
        }
    }
}

/// Returns the seconds that a step waits for its data. Each rank reads its own `tokens` while the previous step runs.
pub fn data_stall_s(cluster: &Cluster, mesh: &Mesh, tokens: f64, step_s: f64) -> f64 {
    let bytes = tokens * DType::U32.size_bytes() as f64;
    let read_s = |node: &NodeKind| disk_s(node, cluster.ranks_of_a_node(node, mesh.world_size()), bytes);
    let longest = cluster.nodes.iter().map(read_s).fold(0.0, f64::max);
    f64::max(longest - step_s, 0.0)
}

/// Returns the seconds in which each of `ranks` ranks of a node moves `bytes` to or from its disk.
fn disk_s(node: &NodeKind, ranks: usize, bytes: f64) -> f64 {
    bytes * ranks as f64 / (node.disk_gb_per_s * 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_plan::Degrees;

    const GB: f64 = 1e9;

    fn mesh(replicate: usize, shard: usize) -> Mesh {
        Mesh::new(Degrees { replicate, shard, ..Degrees::default() }).unwrap()
    }

    #[test]
    fn a_save_from_a_copy_holds_steps_up_until_the_copy_is_made_and_no_longer_if_the_last_one_is_through() {
        let cluster = Cluster::local(8, 64 << 30);
        let node = &cluster.nodes[0];
        let saves = Saves::of(&cluster, &mesh(1, 8), 40.0 * GB, true);
        // Eight ranks share a disk, and each copies within its own memory.
        let memory = node.device.memory_gb_per_s * node.device.efficiency.stream;
        let (copy_s, write_s) = (2.0 * 40.0 / memory, 8.0 * 40.0 / node.disk_gb_per_s);
        assert_eq!((saves.copy_s, saves.write_s), (Some(copy_s), write_s));
        assert_eq!(saves.stall_s(write_s + 1.0), copy_s);
        assert!((saves.stall_s(write_s - 1.5) - copy_s - 1.5).abs() < 1e-9);
        assert_eq!(saves.least_interval_s(), write_s);
        let waiting = Saves::of(&cluster, &mesh(1, 8), 40.0 * GB, false);
        assert_eq!((waiting.stall_s(1e9), waiting.least_interval_s()), (write_s, 0.0));
    }

    /// 405 billion parameters with two moments and master weights, 12 bytes each, on 2,048 nodes.
    #[test]
    fn terabytes_go_to_the_storage_that_there_is() {
        let mut cluster = Cluster::preset("dgx-h100x2048").unwrap();
        let bytes = 405.0 * 12.0 * GB;
        let mesh = mesh(1, 16_384);
        let of = |cluster: &Cluster| Saves::of(cluster, &mesh, bytes / 16_384.0, true);
        let usual = of(&cluster);
        assert!((usual.write_s - bytes / (2048.0 * 20.0 / 32.0 * GB)).abs() < 1e-9, "{usual:?}");
        cluster.storage_gb_per_s = Some(100.0);
        let slow = of(&cluster);
        assert!(
            (slow.write_s - 48.6).abs() < 1e-9 && (slow.least_interval_s() - 972.0).abs() < 1e-6,
            "{slow:?}"
        );
    }

    #[test]
    fn of_replicas_one_writes() {
        let cluster = Cluster::preset("dgx-h100x2").unwrap();
        let write_s = |mesh| Saves::of(&cluster, &mesh, GB, true).write_s;
        assert_eq!(write_s(mesh(2, 8)), write_s(mesh(1, 16)) / 2.0);
        assert_eq!(write_s(mesh(16, 1)), write_s(mesh(1, 16)) / 16.0);
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

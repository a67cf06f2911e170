//! Capacities of the machines, a plan's shortage of them (device memory, host memory, disk), and the price of the machines.

use lockstep_plan::{MemoryBytes, MemoryCategory, Plan, Residence, Residences, StepLayout, offloaded_bytes};

use crate::Planner;
use crate::cluster::NodeKind;
use crate::recordings::Recording;
use crate::search::Rejection;

/// Fraction of memory that a plan may use: the rest goes to the driver or the system, and to fragmentation.
pub(crate) const USABLE: f64 = 0.94;

impl Planner {
    /// Returns the rejection if host memory or disk is too small for the offloaded state and activations.
    pub(crate) fn lacking_elsewhere(
        &self,
        plan: &Plan,
        layout: &StepLayout,
        recording: &Recording,
    ) -> Option<Rejection> {
        if !self.offloads(plan) {
            return None;
        }
        let ranks = layout.mesh.world_size();
        let Residences { optimizer, activations, .. } = self.residences_of(plan);
        let of_rank = |rank: usize| {
            let stages = layout.stages_on(rank);
            let state = self.state_plan(plan, layout, recording, rank);
            let shard_ranks = |summing| layout.mesh.shard_ranks(summing);
            offloaded_bytes(&recording.profile, &stages, shard_ranks, &state)
        };
        let held: Vec<[u64; 2]> = (0..layout.pipeline_ranks()).map(of_rank).collect();
        [Residence::Host, Residence::Disk].into_iter().find_map(|place| {
            let of_kind = |bytes: u64, residence| if residence == place { bytes } else { 0 };
            let of_rank = |[state, kept]: &[u64; 2]| of_kind(*state, optimizer) + of_kind(*kept, activations);
            let needed = held.iter().map(of_rank).max().unwrap_or(0);
            let available = self.room_bytes(place, ranks) as u64;
            (needed > available).then_some(Rejection::Room { place, needed, available })
        })
    }

    /// Returns the bytes that a rank may book.
    pub(crate) fn capacity_bytes(&self, ranks: usize) -> u64 {
        let of_node = |node: &NodeKind| {
            let bytes = match node.device.is_host {
                true => node.host_memory_bytes / (ranks.min(node.devices).max(1) as u64),
                false => node.device.memory_bytes,
            };
            (bytes as f64 * USABLE) as u64
        };
        self.cluster.nodes.iter().map(of_node).min().unwrap_or(0)
    }

    /// Returns the rejection of the pipeline rank that lacks most memory, if any does; on a host, whose ranks share its memory, by
    /// the mean.
    pub(crate) fn lacking(&self, layout: &StepLayout, memory: &[MemoryBytes]) -> Option<Rejection> {
        let ranks = layout.mesh.world_size();
        let available = self.capacity_bytes(ranks);
        let most = |bytes: MemoryBytes| {
            bytes
                .entries()
                .max_by_key(|(_, bytes)| *bytes)
                .map_or(MemoryCategory::Activations, |(most, _)| most)
        };
        let of_ranks = memory.iter().copied().enumerate();
        let ((stage, largest), needed) = if self.is_host() {
            let mean = memory.iter().copied().sum::<MemoryBytes>().total() / memory.len().max(1);
            (of_ranks.max_by_key(|(_, bytes)| bytes.total())?, mean)
        } else {
            let largest = of_ranks.rev().max_by_key(|(_, bytes)| bytes.total())?;
            (largest, largest.1.total())
        };
        let needed = needed as u64;
        (needed > available).then(|| Rejection::Memory { stage, needed, available, most: most(largest) })
    }

    pub(crate) fn price_per_hour(&self, devices: usize) -> Option<f64> {
        let mut left = devices;
        let mut price = 0.0;
        for node in &self.cluster.nodes {
            let nodes = left.div_ceil(node.devices.max(1)).min(node.count);
            price += node.price_per_hour? * nodes as f64;
            left = left.saturating_sub(nodes * node.devices);
        }
        Some(price)
    }
}

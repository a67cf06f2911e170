//! Plans for what does not fit into memory: how much of it has to be on disk, and what that comes to at least.
//!
//! Of a candidate that has something there all blocks forget what it says, or none, and of the model's state as small a part is there as lets
//! every rank fit: moving it takes time.

use lockstep_plan::cluster::NodeKind;
use lockstep_plan::search::{Candidate, Rejection};
use lockstep_plan::{MemoryCategory, Recompute, Residence};

use crate::RunConfig;
use crate::planner::{Evaluated, Objective, Planner};

/// Parts of the state of which as many are on disk as have to be.
const PARTS: usize = 32;
/// What bounds leave out of the disk's time: windows, weights and frames that are found in memory.
const FOUND: f64 = 0.2;

/// What a mean rank of the pipeline has at least, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
    /// Weights, gradients and what the optimizer keeps.
    pub(super) state: [f64; 3],
    /// What blocks keep of the micro-batches in flight.
    pub(super) kept: f64,
    /// What they keep of all, but for the last blocks, whose part need not go to the disk.
    pub(super) kept_of_all: f64,
    /// Micro-batches of a step.
    pub(super) micro_batches: f64,
}

impl Planner {
    /// The least that a candidate with something on disk can come to; none if more than may go there does not fit. `step_ms` is its step
    /// without the disk, and `least` what a mean rank holds and passes through.
    ///
    /// Of the optimizer's state each byte that is there is read and written when all passes are over, and each of a gradient read once more;
    /// what blocks keep, gradients and weights come and go beside the passes, in each micro-batch.
    pub(super) fn bound_on_disk(&self, candidate: &Candidate, step_ms: f64, least: Least) -> Option<f64> {
        let Least { state, kept, kept_of_all, micro_batches } = least;
        let ranks = candidate.degrees.world_size()?;
        let available = self.capacity_bytes(ranks) as f64;
        let on_disk = candidate.on_disk;
        let there = |residence: Residence, bytes: f64| if residence == Residence::Disk { bytes } else { 0.0 };
        let [weights, gradients, optimizer] = state;
        let kept_there = there(on_disk.activations, kept);
        let of_state = there(on_disk.optimizer, optimizer)
            + there(on_disk.gradients, gradients)
            + there(on_disk.parameters, weights);
        let missing = (state.iter().sum::<f64>() + kept - kept_there - available).max(0.0);
        if missing > of_state || missing + kept_there > self.disk_bytes(ranks) {
            return None;
        }
        let share = if of_state > 0.0 { missing / of_state } else { 0.0 };
        let in_update = share * (2.0 * optimizer + there(on_disk.gradients, gradients));
        let in_passes = share
            * (there(on_disk.gradients, gradients) * (2.0 * micro_batches - 1.0)
                + there(on_disk.parameters, weights))
            + 2.0 * there(on_disk.activations, kept_of_all);
        let rate = self.disk_rate(ranks);
        let ms = |bytes: f64| 1e3 * (1.0 - FOUND) * bytes / rate;
        let least_ms = f64::max(step_ms, ms(in_passes)) + ms(in_update);
        Some(match self.objective {
            Objective::Time => least_ms,
            Objective::Cost => self.price_of(ranks, least_ms),
            Objective::Headroom => 0.0,
        })
    }

    /// Room that each of so many ranks has on its node's disk.
    fn disk_bytes(&self, ranks: usize) -> f64 {
        let of_node =
            |node: &NodeKind| node.disk_bytes as f64 / self.cluster.ranks_of_a_node(node, ranks) as f64;
        self.cluster.nodes.iter().map(of_node).fold(f64::INFINITY, f64::min)
    }

    /// Bytes a second that each of so many ranks gets of the fastest node's disk.
    fn disk_rate(&self, ranks: usize) -> f64 {
        let of_node =
            |node: &NodeKind| node.disk_gb_per_s * 1e9 / self.cluster.ranks_of_a_node(node, ranks) as f64;
        self.cluster.nodes.iter().map(of_node).fold(f64::MIN_POSITIVE, f64::max)
    }

    /// What a candidate comes to with as little on disk as lets it fit.
    pub(super) fn value_on_disk(
        &mut self,
        candidate: &Candidate,
        limit: f64,
    ) -> Result<(f64, RunConfig), Rejection> {
        let layers = self.model.config.num_hidden_layers();
        let forgetting = if candidate.recompute == Recompute::None { 0 } else { layers };
        let trial = self.tried(candidate, forgetting)?;
        let config = self.configured(candidate, &trial).ok_or(Rejection::Invalid)?;
        let parts = if candidate.on_disk.optimizer == Residence::Disk { PARTS } else { 1 };
        let (mut too_few, mut enough, mut best, mut largest) = (0, parts + 1, None, None);
        while enough > too_few + 1 {
            let middle = if parts == 1 { 1 } else { too_few.midpoint(enough) };
            let found = self.with_parts(&config, middle, parts)?;
            if found.fits {
                (best, enough) = (Some(found), middle);
                continue;
            }
            // More of it there takes no less.
            if self.objective == Objective::Time && found.step.step_ms >= limit {
                return Err(Rejection::Worse);
            }
            (largest, too_few) = (Some(found.largest()), middle);
        }
        let Some(best) = best else {
            let (stage, memory) = largest.unwrap_or_default();
            let most = memory.entries().max_by_key(|(_, bytes)| *bytes);
            return Err(Rejection::Memory {
                stage,
                needed: memory.total() as u64,
                available: self.capacity_bytes(candidate.degrees.world_size().unwrap_or(usize::MAX)),
                most: most.map_or(MemoryCategory::Activations, |(most, _)| most),
            });
        };
        let objective = match self.objective {
            Objective::Time => best.step.step_ms,
            Objective::Cost => self.price_of(best.devices, best.step.step_ms),
            Objective::Headroom => best.largest().1.total() as f64 / best.capacity_bytes.max(1) as f64,
        };
        if objective >= limit { Err(Rejection::Worse) } else { Ok((objective, best.config)) }
    }

    /// What a run comes to with so many of the parts of its state on disk.
    fn with_parts(
        &mut self,
        config: &RunConfig,
        on_disk: usize,
        parts: usize,
    ) -> Result<Evaluated, Rejection> {
        let mut config = config.clone();
        config.parallel.offload_fraction = on_disk as f64 / parts as f64;
        self.evaluate(&config).map_err(|_| Rejection::Invalid)
    }
}

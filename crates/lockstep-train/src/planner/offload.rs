//! Plans for a model whose state does not fit into device memory: which part of it is offloaded to host memory or disk, and the time of a step then.
//!
//! All blocks of such a plan recompute what the candidate says, or none; and the fraction of the model's state that is offloaded is the
//! smallest with which every rank fits, since moving it takes time.

use lockstep_plan::cluster::{NodeKind, Software};
use lockstep_plan::search::{Candidate, Rejection};
use lockstep_plan::{
    FRAME_PLACES, MemoryBytes, MemoryCategory, Offload, OffloadBytes, OffloadTraffic, RankTraffic, Recompute,
    Residence, StageMemory, WINDOW_ELEMENTS, WINDOW_SLOTS,
};

use crate::RunConfig;
use crate::config::{OptimizerKind, Origin};
use crate::planner::bounds::{Trial, ranks_to_book};
use crate::planner::subject::{Layout, USABLE};
use crate::planner::{Objective, Planner};

/// The fraction of state that is offloaded is a multiple of one over this.
const PARTS: usize = 32;
/// Fraction of the traffic that bounds leave out: windows, weights and frames that are found in device memory.
const FOUND: f64 = 0.2;
/// Elements of the windows that are in device memory, which need not be read.
const WINDOWS: u64 = (WINDOW_SLOTS * WINDOW_ELEMENTS) as u64;

/// Lower bounds of what a mean pipeline rank holds and moves, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
    /// Weights, gradients and optimizer state.
    pub(super) state: [f64; 3],
    /// Saved activations of the micro-batches in flight.
    pub(super) kept: f64,
    /// Saved activations of all micro-batches, without those of the last blocks, which need not be moved.
    pub(super) kept_of_all: f64,
    /// Micro-batches of a step.
    pub(super) micro_batches: f64,
}

/// The place that an offload moves anything to; `None` if it moves nothing.
fn place_of(offload: &Offload) -> Option<Residence> {
    let Offload { optimizer, gradients, parameters, activations } = *offload;
    [optimizer, gradients, parameters, activations].into_iter().find(|place| *place != Residence::Memory)
}

impl Planner {
    /// Whether what does not fit may go to `place`: the nodes have such a place, the run leaves it open, and it keeps no copies of its state.
    pub(super) fn may_offload_to(&self, place: Residence) -> bool {
        let has_place = |node: &NodeKind| match place {
            Residence::Memory => false,
            Residence::Host => !node.device.is_host && node.host_memory_bytes > 0,
            Residence::Disk => node.disk_bytes > 0,
        };
        let is_open = |what: &str| self.config.origin(&format!("parallel.offload.{what}")) == Origin::Default;
        self.cluster.software == Software::Lockstep
            && self.cluster.nodes.iter().all(has_place)
            && ["optimizer", "gradients", "parameters", "activations", "fraction"].into_iter().all(is_open)
            && self.config.rollback_after() == 0
            && matches!(self.config.optimizer.kind, OptimizerKind::AdamW | OptimizerKind::Lion)
    }

    /// Lower bound of the objective of a candidate that offloads; `None` if more than may be offloaded does not fit. `step_ms` is a lower bound
    /// of its step without the traffic.
    ///
    /// Each offloaded byte of the optimizer state is read and written after all passes, and each of a gradient read once more; activations,
    /// gradients and weights come and go beside the passes of each micro-batch.
    pub(super) fn bound_offloaded(&self, candidate: &Candidate, step_ms: f64, least: Least) -> Option<f64> {
        let Least { state, kept, kept_of_all, micro_batches } = least;
        let ranks = candidate.degrees.world_size()?;
        let available = self.capacity_bytes(ranks) as f64;
        let offload = candidate.offload;
        let place = place_of(&offload)?;
        let moved =
            |residence: Residence, bytes: f64| if residence == Residence::Memory { 0.0 } else { bytes };
        let [weights, gradients, optimizer] = state;
        let kept_there = moved(offload.activations, kept);
        let [weights, gradients] = [moved(offload.parameters, weights), moved(offload.gradients, gradients)];
        let of_state = moved(offload.optimizer, optimizer) + gradients + weights;
        let missing = (state.iter().sum::<f64>() + kept - kept_there - available).max(0.0);
        if missing > of_state || missing + kept_there > self.room_bytes(place, ranks) {
            return None;
        }
        let share = if of_state > 0.0 { missing / of_state } else { 0.0 };
        let written = share * optimizer;
        let in_update_ms = self.least_moving_ms(place, ranks, written + share * gradients, written);
        let frames = moved(offload.activations, kept_of_all);
        let in_passes_ms = self.least_moving_ms(
            place,
            ranks,
            share * (gradients * (micro_batches - 1.0) + weights) + frames,
            share * gradients * micro_batches + frames,
        );
        let least_ms = f64::max(step_ms, in_passes_ms) + in_update_ms;
        Some(match self.objective {
            Objective::Time => least_ms,
            Objective::Cost => self.price_of(ranks, least_ms),
            Objective::Headroom => 0.0,
        })
    }

    /// Room that each of `ranks` ranks has at `place` of its node.
    pub(super) fn room_bytes(&self, place: Residence, ranks: usize) -> f64 {
        let of_node = |node: &NodeKind| {
            let bytes = match place {
                Residence::Memory => 0.0,
                Residence::Host => node.host_memory_bytes as f64 * USABLE,
                Residence::Disk => node.disk_bytes as f64,
            };
            bytes / self.cluster.ranks_of_a_node(node, ranks) as f64
        };
        self.cluster.nodes.iter().map(of_node).fold(f64::INFINITY, f64::min)
    }

    /// Lower bound of the milliseconds in which each of `ranks` ranks moves so many bytes from and to `place`, on the fastest node.
    fn least_moving_ms(&self, place: Residence, ranks: usize, read: f64, written: f64) -> f64 {
        let on_node = |node: &NodeKind| {
            let sharers = self.cluster.ranks_of_a_node(node, ranks) as f64;
            match place {
                Residence::Memory => 0.0,
                Residence::Host => read.max(written) / node.host_gb_per_s,
                Residence::Disk => (read + written) * sharers / node.disk_gb_per_s,
            }
        };
        let fastest = self.cluster.nodes.iter().map(on_node).fold(f64::INFINITY, f64::min);
        1e3 * (1.0 - FOUND) * fastest / 1e9
    }

    /// The objective of a candidate with the smallest fraction offloaded with which it fits, and its keys.
    ///
    /// The quick sums of memory say how small the fraction can be at least, and with it how long the step takes at least; ledgers are asked
    /// only if that is below `limit`.
    pub(super) fn value_offloaded(
        &mut self,
        candidate: &Candidate,
        limit: f64,
    ) -> Result<(f64, RunConfig), Rejection> {
        let layers = self.model.config.num_hidden_layers();
        let recomputed = if candidate.recompute == Recompute::None { 0 } else { layers };
        let trial = self.tried(candidate, recomputed)?;
        let parts = if candidate.offload.optimizer == Residence::Memory { 1 } else { PARTS };
        let fewest = self.fewest_parts(candidate, &trial, parts)?;
        self.is_not_worse(candidate, &trial, fewest as f64 / parts as f64, limit)?;
        let config = self.configured(candidate, &trial).ok_or(Rejection::Invalid)?;
        let (enough, memory) = self.fewest_parts_booked(candidate, &config, &trial, fewest, parts)?;
        if enough > fewest {
            self.is_not_worse(candidate, &trial, enough as f64 / parts as f64, limit)?;
        }
        let config = with_parts(&config, enough, parts);
        let recording = self.recording_of(&config, &trial.layout.mesh);
        if let Some(lacking) = self.lacking_elsewhere(&config, &trial.layout, &recording) {
            return Err(lacking);
        }
        let objective = match self.objective {
            Objective::Headroom => self.share_of_memory(candidate, &memory),
            _ => {
                let traffic = self.traffic_of(&config, &trial.layout, &recording)?;
                let of_layout = |layout: &Layout| of_micro_batches(&traffic, &trial.layout, layout);
                let step_ms = self.step_ms(candidate, &trial, of_layout, limit)?;
                self.objective_of_time(candidate, step_ms)
            }
        };
        if objective >= limit { Err(Rejection::Worse) } else { Ok((objective, config)) }
    }

    /// Checks that the step of a candidate with at least a fraction of its state offloaded can be below `limit`.
    fn is_not_worse(
        &mut self,
        candidate: &Candidate,
        trial: &Trial,
        fraction: f64,
        limit: f64,
    ) -> Result<(), Rejection> {
        if self.objective == Objective::Headroom {
            return Ok(());
        }
        let traffic = |layout: &Layout| least_traffic(candidate, trial, layout, fraction);
        let least_ms = self.step_ms(candidate, trial, traffic, limit)?;
        if self.objective_of_time(candidate, least_ms) < limit { Ok(()) } else { Err(Rejection::Worse) }
    }

    /// The fewest parts, `fewest` at least, with which the ranks fit whose ledgers are asked, and what they book. More parts take no more memory.
    fn fewest_parts_booked(
        &mut self,
        candidate: &Candidate,
        config: &RunConfig,
        trial: &Trial,
        fewest: usize,
        parts: usize,
    ) -> Result<(usize, Vec<MemoryBytes>), Rejection> {
        let (mut too_few, mut enough, mut step) = (fewest - 1, None, 1);
        let mut lacking = Rejection::Invalid;
        while enough.as_ref().is_none_or(|(enough, _)| *enough > too_few + 1) && too_few < parts {
            // The quick sums are near: gallop up from them, then halve.
            let tried =
                enough.as_ref().map_or((too_few + step).min(parts), |(enough, _)| too_few.midpoint(*enough));
            let memory = self.quick_memory_offloaded(candidate, trial, tried as f64 / parts as f64);
            let ranks = ranks_to_book(&memory);
            let memory =
                self.booked_instead(&with_parts(config, tried, parts), &trial.layout, memory, ranks)?;
            match self.lacking(&trial.layout, &memory) {
                None => enough = Some((tried, memory)),
                Some(lacks) => (lacking, too_few, step) = (lacks, tried, step * 2),
            }
        }
        enough.ok_or(lacking)
    }

    /// Lower bound of the parts of the state that have to be offloaded, by the quick sums of memory.
    fn fewest_parts(&self, candidate: &Candidate, trial: &Trial, parts: usize) -> Result<usize, Rejection> {
        let lacks = |offloaded: usize| {
            let memory = self.quick_memory_offloaded(candidate, trial, offloaded as f64 / parts as f64);
            self.lacking(&trial.layout, &memory)
        };
        let (mut too_few, mut enough) = (0, parts);
        if let Some(lacking) = lacks(parts) {
            return Err(lacking);
        }
        while enough > too_few + 1 {
            let middle = too_few.midpoint(enough);
            if lacks(middle).is_some() { too_few = middle } else { enough = middle }
        }
        Ok(enough)
    }

    /// Lower bound of the memory of each pipeline rank with a fraction of its state offloaded. Whole units are, so that it can be one more than
    /// the fraction says.
    fn quick_memory_offloaded(
        &self,
        candidate: &Candidate,
        trial: &Trial,
        fraction: f64,
    ) -> Vec<MemoryBytes> {
        let Trial { layout, units, memory, .. } = trial;
        let offload = candidate.offload;
        let of_rank = |(rank, memory): (usize, &MemoryBytes)| {
            let stages = layout.of_rank(rank, units.times.units());
            let fraction = fraction + largest_share(&stages, |unit| units.times.elements(unit).iter().sum());
            let kept = 1.0 - fraction.min(1.0);
            let mut memory = *memory;
            for (category, residence) in [
                (MemoryCategory::Parameters, offload.parameters),
                (MemoryCategory::Gradients, offload.gradients),
                (MemoryCategory::Optimizer, offload.optimizer),
            ] {
                if residence != Residence::Memory {
                    memory[category] = (memory[category] as f64 * kept) as usize;
                }
            }
            if offload.activations != Residence::Memory {
                memory[MemoryCategory::Activations] = units.profile.activation_bytes(&stages, true);
            }
            memory
        };
        memory.iter().enumerate().map(of_rank).collect()
    }
}

/// Lower bound of the traffic of each pipeline rank with a fraction of its state offloaded: what no window or frame in device memory saves.
fn least_traffic(candidate: &Candidate, trial: &Trial, layout: &Layout, fraction: f64) -> Vec<RankTraffic> {
    let Trial { units, memory, .. } = trial;
    let Offload { optimizer, gradients, activations, .. } = candidate.offload;
    let micro_batches = layout.micro_batches as f64;
    let of_rank = |(rank, memory): (usize, &MemoryBytes)| {
        let stages = layout.of_rank(rank, units.times.units());
        let elements = |unit: usize| units.times.elements(unit).iter().sum::<f64>();
        let here = || stages.iter().flat_map(|stage| stage.units.clone());
        let all: f64 = here().map(elements).sum();
        let moved = |bytes: usize, of_element: u64, residence| match residence {
            Residence::Memory => 0.0,
            _ => (fraction * bytes as f64 - (WINDOWS * of_element) as f64).max(0.0),
        };
        let state = moved(memory[MemoryCategory::Optimizer], units.state.optimizer, optimizer);
        let sums = moved(memory[MemoryCategory::Gradients], units.state.gradient, gradients);
        let mut traffic = OffloadTraffic {
            forward: vec![OffloadBytes::default(); units.times.units()],
            backward: vec![OffloadBytes::default(); units.times.units()],
            update: OffloadBytes { read: (state + sums) as u64, written: state as u64, waited: 0 },
        };
        for unit in here() {
            let sums = sums * elements(unit) / all.max(1.0);
            traffic.backward[unit].read += (sums * (micro_batches - 1.0)) as u64;
            traffic.backward[unit].written += (sums * micro_batches) as u64;
        }
        if activations != Residence::Memory {
            for stage in &stages {
                let frames = stage
                    .units
                    .clone()
                    .filter_map(|unit| Some((unit, units.profile.frame_on_disk_bytes(stage, unit)?)));
                let frames: Vec<(usize, usize)> = frames.collect();
                let moved = frames.len().saturating_sub(FRAME_PLACES);
                for (unit, bytes) in frames.into_iter().take(moved) {
                    traffic.forward[unit].written += (bytes as f64 * micro_batches) as u64;
                    traffic.backward[unit].read += (bytes as f64 * micro_batches) as u64;
                }
            }
        }
        match place_of(&candidate.offload) {
            Some(Residence::Disk) => RankTraffic { disk: traffic, host: OffloadTraffic::default() },
            _ => RankTraffic { host: traffic, disk: OffloadTraffic::default() },
        }
    };
    memory.iter().enumerate().map(of_rank).collect()
}

/// The traffic of a layout as that of one with more micro-batches: each further one moves as much.
fn of_micro_batches(traffic: &[RankTraffic], whole: &Layout, part: &Layout) -> Vec<RankTraffic> {
    if whole.micro_batches == part.micro_batches {
        return traffic.to_vec();
    }
    let share = part.micro_batches as f64 / whole.micro_batches as f64;
    traffic.iter().map(|traffic| traffic.of_passes(share)).collect()
}

/// A run with so many of the parts of its state offloaded.
fn with_parts(config: &RunConfig, offloaded: usize, parts: usize) -> RunConfig {
    let mut config = config.clone();
    config.parallel.offload_fraction = offloaded as f64 / parts as f64;
    config
}

/// The largest share that a unit of these stages has of their elements.
fn largest_share(stages: &[StageMemory], elements: impl Fn(usize) -> f64) -> f64 {
    let here = || stages.iter().flat_map(|stage| stage.units.clone()).map(&elements);
    here().fold(0.0, f64::max) / here().sum::<f64>().max(1.0)
}

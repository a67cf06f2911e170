//! Plans with offload, for a model whose state does not fit into device memory: the part of it that goes to host memory or disk,
//! and the step time then.
//!
//! All blocks of such a plan use the candidate's recompute mode, or none of them. The offloaded fraction of the model state is the
//! smallest with which every rank fits, since moving it takes time.

use lockstep_config::{OptimizerKind, Origin};
use lockstep_plan::{
    FRAME_PLACES, MemoryBytes, MemoryCategory, ModelProfile, Offload, OffloadBytes, OffloadTraffic, Plan,
    RankTraffic, Recompute, Residence, Residences, StageMemory, StepLayout, WINDOW_ELEMENTS, WINDOW_SLOTS,
};

use crate::capacity::USABLE;
use crate::cluster::NodeKind;
use crate::offloaded_units::StateByUnit;
use crate::search::{Candidate, Rejection};
use crate::trial::{Trial, ranks_to_book};
use crate::{Objective, Planner};

/// Granularity of the offloaded fraction: it is a multiple of 1 / `PARTS`.
const PARTS: usize = 32;
/// Fraction of the traffic that bounds ignore: windows, weights and frames that are still in device memory when they are needed.
const FOUND: f64 = 0.2;
/// Elements of the optimizer-state windows that are in device memory and need not be read.
const WINDOWS: u64 = (WINDOW_SLOTS * WINDOW_ELEMENTS) as u64;

/// Lower bounds of the bytes that a mean pipeline rank holds and moves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Least {
    /// Weights, gradients and optimizer state, in bytes.
    pub(crate) state: [f64; 3],
    /// Saved activations of the micro-batches in flight, in bytes.
    pub(crate) kept: f64,
    /// Saved activations of all micro-batches of a step, in bytes, without those of the last blocks, which stay in device memory.
    pub(crate) kept_of_all: f64,
    /// Micro-batches of a step.
    pub(crate) micro_batches: f64,
}

/// Returns the place that anything is offloaded to; `None` if nothing is.
fn place_of(offload: &Offload) -> Option<Residence> {
    let Offload { optimizer, gradients, parameters, activations } = *offload;
    [optimizer, gradients, parameters, activations].into_iter().find(|place| *place != Residence::Memory)
}

impl Planner {
    /// Returns true if state may be offloaded to `place`: the nodes have it, the run leaves offload open and keeps no copies of its
    /// state for rollbacks, and the optimizer supports it.
    pub(crate) fn may_offload_to(&self, place: Residence) -> bool {
        let has_place = |node: &NodeKind| match place {
            Residence::Memory => false,
            Residence::Host => !node.device.is_host && node.host_memory_bytes > 0,
            Residence::Disk => node.disk_bytes > 0,
        };
        let is_open = |what: &str| self.config.origin(&format!("parallel.offload.{what}")) == Origin::Default;
        self.traits().has_ledger
            && self.cluster.nodes.iter().all(has_place)
            && ["optimizer", "gradients", "parameters", "activations", "fraction"].into_iter().all(is_open)
            && self.config.rollback_after() == 0
            && matches!(self.config.optimizer.kind, OptimizerKind::AdamW | OptimizerKind::Lion)
    }

    /// Returns a lower bound of the objective of a candidate with offload; `None` if it does not fit even with everything offloaded
    /// that may be. `step_ms` is a lower bound of its step without the traffic.
    ///
    /// Each offloaded byte of optimizer state is read and written after all passes, and each gradient byte is read once more.
    /// Traffic of activations, gradients and weights overlaps with the passes of each micro-batch.
    pub(crate) fn bound_offloaded(&self, candidate: &Candidate, step_ms: f64, least: Least) -> Option<f64> {
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
            Objective::Headroom => 0.0,
            _ => self.objective_of_time(candidate, least_ms),
        })
    }

    /// Returns the capacity of `place` for each of `ranks` ranks, in bytes: the smallest over the nodes, each divided by its ranks.
    pub(crate) fn room_bytes(&self, place: Residence, ranks: usize) -> f64 {
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

    /// Returns a lower bound of the milliseconds in which each of `ranks` ranks reads and writes so many bytes at `place`, on the
    /// fastest node.
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

    /// Returns the objective and the plan of a candidate with the smallest offloaded fraction with which it fits.
    ///
    /// Cheap bounds give the smallest conceivable fraction, and with it the host memory or disk that a rank needs and the step time. The
    /// rank ledgers cost a hundred times as much. They are computed only if the capacity suffices and the step can be below `limit`.
    ///
    /// # Errors
    /// If the candidate is invalid or does not fit, or its objective is not below `limit`.
    pub(crate) fn value_offloaded(
        &mut self,
        candidate: &Candidate,
        limit: f64,
    ) -> Result<(f64, Plan), Rejection> {
        let layers = self.model.config.num_hidden_layers();
        let recomputed = if candidate.recompute == Recompute::None { 0 } else { layers };
        let trial = self.tried(candidate, recomputed)?;
        let ranks = self.offloadable(candidate, &trial);
        let parts = if candidate.offload.optimizer == Residence::Memory { 1 } else { PARTS };
        let fewest = self.fewest_parts(&trial, &ranks, parts)?;
        self.is_not_worse(candidate, &trial, &ranks, fewest as f64 / parts as f64, limit)?;
        let plan = self.planned(candidate, &trial).ok_or(Rejection::Invalid)?;
        let (enough, memory) =
            self.fewest_parts_booked(candidate, &plan, &trial, &ranks, [fewest, parts], limit)?;
        let plan = with_parts(&plan, enough, parts);
        let recording = self.recording_of(&plan, &trial.layout.mesh);
        if let Some(lacking) = self.lacking_elsewhere(&plan, &trial.layout, &recording) {
            return Err(lacking);
        }
        let objective = match self.objective {
            Objective::Headroom => self.share_of_memory(candidate, &memory),
            _ => {
                let traffic = self.traffic_of(&plan, &trial.layout, &recording)?;
                let of_layout = |layout: &StepLayout| of_micro_batches(&traffic, &trial.layout, layout);
                let step_ms = self.step_ms(candidate, &trial, of_layout, limit)?;
                self.objective_of_time(candidate, step_ms)
            }
        };
        if objective >= limit { Err(Rejection::Worse) } else { Ok((objective, plan)) }
    }

    /// Checks that a candidate that offloads at least `fraction` of its state has the capacity for it, and that its objective can
    /// be below `limit`.
    fn is_not_worse(
        &mut self,
        candidate: &Candidate,
        trial: &Trial,
        ranks: &[OffloadableRank],
        fraction: f64,
        limit: f64,
    ) -> Result<(), Rejection> {
        if let Some(lacking) = self.lacks_room(candidate, ranks, fraction) {
            return Err(lacking);
        }
        if self.objective == Objective::Headroom {
            return Ok(());
        }
        let traffic = |layout: &StepLayout| least_traffic(candidate, trial, ranks, layout, fraction);
        let least_ms = self.step_ms(candidate, trial, traffic, limit)?;
        if self.objective_of_time(candidate, least_ms) < limit { Ok(()) } else { Err(Rejection::Worse) }
    }

    /// Returns the rejection if host memory or disk is too small for at least `fraction` of a candidate's state.
    fn lacks_room(
        &self,
        candidate: &Candidate,
        ranks: &[OffloadableRank],
        fraction: f64,
    ) -> Option<Rejection> {
        let place = place_of(&candidate.offload)?;
        let needed = ranks.iter().map(|rank| rank.least_bytes(fraction)).max()?;
        let available = self.room_bytes(place, self.ranks_of(candidate)) as u64;
        (needed > available).then_some(Rejection::Room { place, needed, available })
    }

    /// Returns the fewest offloaded parts, at least `fewest`, with which the ranks whose ledgers are computed fit, and the memory
    /// of every rank. More parts never take more memory or less time, so the search gallops and then bisects.
    fn fewest_parts_booked(
        &mut self,
        candidate: &Candidate,
        plan: &Plan,
        trial: &Trial,
        ranks: &[OffloadableRank],
        [fewest, parts]: [usize; 2],
        limit: f64,
    ) -> Result<(usize, Vec<MemoryBytes>), Rejection> {
        let (mut too_few, mut enough, mut step) = (fewest - 1, None, 1);
        let mut lacking = Rejection::Invalid;
        while enough.as_ref().is_none_or(|(enough, _)| *enough > too_few + 1) && too_few < parts {
            if too_few >= fewest {
                self.is_not_worse(candidate, trial, ranks, (too_few + 1) as f64 / parts as f64, limit)?;
            }
            // The bounds are close: gallop up from them, then bisect.
            let tried =
                enough.as_ref().map_or((too_few + step).min(parts), |(enough, _)| too_few.midpoint(*enough));
            let memory = least_memory(ranks, tried as f64 / parts as f64);
            let booked = ranks_to_book(&memory);
            let memory =
                self.booked_instead(&with_parts(plan, tried, parts), &trial.layout, memory, booked)?;
            match self.lacking(&trial.layout, &memory) {
                None => enough = Some((tried, memory)),
                Some(lacks) => (lacking, too_few, step) = (lacks, tried, step * 2),
            }
        }
        enough.ok_or(lacking)
    }

    /// Returns a lower bound of the parts of the state that have to be offloaded.
    fn fewest_parts(
        &self,
        trial: &Trial,
        ranks: &[OffloadableRank],
        parts: usize,
    ) -> Result<usize, Rejection> {
        let lacks = |offloaded: usize| {
            self.lacking(&trial.layout, &least_memory(ranks, offloaded as f64 / parts as f64))
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

    /// Returns the state and activations that each pipeline rank of a trial can offload.
    fn offloadable(&self, candidate: &Candidate, trial: &Trial) -> Vec<OffloadableRank> {
        let Trial { layout, units, memory, .. } = trial;
        let Offload { optimizer, gradients, parameters, activations } = candidate.offload;
        let is_moved = [parameters, gradients, optimizer].map(|residence| residence != Residence::Memory);
        let of_rank = |(rank, memory): (usize, &MemoryBytes)| {
            let stages = layout.stages_on(rank);
            let elements = self.elements_of(&units.times, &stages);
            let state = StateByUnit::new(units.state, &layout.mesh, candidate.zero_stage, &stages, elements);
            // Gradients of tied embeddings stay in device memory.
            let tied_bytes = match self.model.config.tie_word_embeddings() && is_moved[1] {
                true => units.times.elements(0).trained[0] as u64 * units.state.gradient,
                false => 0,
            };
            let mut memory = *memory;
            let mut frames_bytes = 0;
            if activations != Residence::Memory {
                memory[MemoryCategory::Activations] = units.profile.activation_bytes(&stages, true);
                frames_bytes = frames_of(&units.profile, &stages)
                    .map(|(stage, _, bytes)| (bytes * stage.slots) as u64)
                    .sum();
            }
            OffloadableRank { state, is_moved, tied_bytes, memory, frames_bytes }
        };
        memory.iter().enumerate().map(of_rank).collect()
    }
}

/// Lower bounds of the memory of a pipeline rank, on its device and elsewhere, by the offloaded fraction of its state.
#[derive(Debug)]
struct OffloadableRank {
    state: StateByUnit,
    /// True for each of weights, gradients and optimizer state that is offloaded.
    is_moved: [bool; 3],
    /// Bytes of gradients that are never offloaded.
    tied_bytes: u64,
    /// Lower bound of the rank's device memory with all of its model state on the device.
    memory: MemoryBytes,
    /// Bytes of offloaded activations.
    frames_bytes: u64,
}

impl OffloadableRank {
    /// Returns a lower bound of the device memory with a fraction of the state offloaded.
    fn memory(&self, fraction: f64) -> MemoryBytes {
        let mut memory = self.memory;
        let moved = self.state.most_moved(fraction);
        for (category, bytes) in
            [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer]
                .into_iter()
                .zip(self.of_kinds(moved))
        {
            memory[category] = memory[category].saturating_sub(bytes as usize);
        }
        memory
    }

    /// Returns a lower bound of the bytes in host memory or on disk.
    fn least_bytes(&self, fraction: f64) -> u64 {
        let [weights, gradients, optimizer] = self.of_kinds(self.state.least_moved(fraction));
        weights + gradients.saturating_sub(self.tied_bytes) + optimizer + self.frames_bytes
    }

    fn of_kinds(&self, bytes: [u64; 3]) -> [u64; 3] {
        let [weights, gradients, optimizer] = self.is_moved;
        [(weights, bytes[0]), (gradients, bytes[1]), (optimizer, bytes[2])]
            .map(|(is_moved, bytes)| if is_moved { bytes } else { 0 })
    }
}

/// Returns a lower bound of the device memory of each pipeline rank.
fn least_memory(ranks: &[OffloadableRank], fraction: f64) -> Vec<MemoryBytes> {
    ranks.iter().map(|rank| rank.memory(fraction)).collect()
}

/// Returns the frames of some stages that activation offload moves, as (stage, unit, bytes of a micro-batch).
fn frames_of<'s>(
    profile: &'s ModelProfile,
    stages: &'s [StageMemory],
) -> impl Iterator<Item = (&'s StageMemory, usize, usize)> {
    let of_stage = move |stage: &'s StageMemory| {
        let frame = move |unit| Some((stage, unit, profile.frame_on_disk_bytes(stage, unit)?));
        stage.units.clone().filter_map(frame)
    };
    stages.iter().flat_map(of_stage)
}

/// Returns a lower bound of the traffic of each pipeline rank with a fraction of its state offloaded: what windows and frames in
/// device memory cannot save.
fn least_traffic(
    candidate: &Candidate,
    trial: &Trial,
    ranks: &[OffloadableRank],
    layout: &StepLayout,
    fraction: f64,
) -> Vec<RankTraffic> {
    let Trial { units, .. } = trial;
    let micro_batches = layout.micro_batches as u64;
    let of_rank = |(rank, offloadable): (usize, &OffloadableRank)| {
        let stages = layout.stages_on(rank);
        let beyond_windows = |bytes: u64, of_element: u64| bytes.saturating_sub(WINDOWS * of_element);
        let [_, gradients, optimizer] = offloadable.of_kinds(offloadable.state.least_moved(fraction));
        let state = beyond_windows(optimizer, units.state.optimizer);
        let sums = beyond_windows(gradients.saturating_sub(offloadable.tied_bytes), units.state.gradient);
        let mut traffic = OffloadTraffic {
            forward: vec![OffloadBytes::default(); units.times.units()],
            backward: vec![OffloadBytes::default(); units.times.units()],
            update: OffloadBytes { read: state + sums, written: state, waited: 0 },
        };
        for (unit, share) in offloadable.state.least_units(fraction) {
            let sums = sums as f64 * share;
            traffic.backward[unit].read += (sums * (micro_batches - 1) as f64) as u64;
            traffic.backward[unit].written += (sums * micro_batches as f64) as u64;
        }
        if candidate.offload.activations != Residence::Memory {
            for stage in &stages {
                let frames: Vec<_> = frames_of(&units.profile, std::slice::from_ref(stage)).collect();
                let moved = frames.len().saturating_sub(FRAME_PLACES);
                for (_, unit, bytes) in frames.into_iter().take(moved) {
                    traffic.forward[unit].written += bytes as u64 * micro_batches;
                    traffic.backward[unit].read += bytes as u64 * micro_batches;
                }
            }
        }
        match place_of(&candidate.offload) {
            Some(Residence::Disk) => RankTraffic { disk: traffic, host: OffloadTraffic::default() },
            _ => RankTraffic { host: traffic, disk: OffloadTraffic::default() },
        }
    };
    ranks.iter().enumerate().map(of_rank).collect()
}

/// Scales the traffic of a layout to one with another number of micro-batches, each of which moves as much.
fn of_micro_batches(traffic: &[RankTraffic], whole: &StepLayout, part: &StepLayout) -> Vec<RankTraffic> {
    if whole.micro_batches == part.micro_batches {
        return traffic.to_vec();
    }
    let share = part.micro_batches as f64 / whole.micro_batches as f64;
    traffic.iter().map(|traffic| traffic.of_passes(share)).collect()
}

/// Returns `plan` with `offloaded` of `parts` parts of its model state offloaded.
fn with_parts(plan: &Plan, offloaded: usize, parts: usize) -> Plan {
    let fraction = offloaded as f64 / parts as f64;
    Plan { residence: Residences { fraction, ..plan.residence }, ..plan.clone() }
}

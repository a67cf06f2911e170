//! Step time: passes through the pipeline, gradient reductions, weight gathers and the optimizer step.

use std::ops::Range;

use crate::cluster::{Cluster, LinkTime};
use crate::predict::prediction::{PlanShape, StagePrediction, StepPrediction};
use crate::predict::state::{SharedState, StateExchange, StatePassage};
use crate::predict::tasks::{KernelTimes, PassCost, Timed};
use crate::predict::timed::{TimedModel, TimedUnit, among, device, slowest_kind};
use crate::system::SystemTraits;
use lockstep_plan::schedule::{Costs, CostsError, Schedule, StageCost};
use lockstep_plan::work::{Collective, ModelWork, UnitElements};
use lockstep_plan::{Axis, ExpertAxis, OffloadBytes, RankTraffic, ZeroStage};

/// Predicts the time of a step of a model's work with this layout on a cluster.
///
/// # Errors
/// If the layout's stages are not those of its schedule.
pub fn predict_step(
    cluster: &Cluster,
    work: &ModelWork,
    shape: PlanShape<'_>,
) -> Result<StepPrediction, CostsError> {
    let model = TimedModel::new(cluster, work, &shape.layout.mesh);
    Step::new(cluster, &model, shape).predict()
}

/// Predicts the milliseconds of a step, for a model whose task times on this cluster are known.
///
/// # Errors
/// If the layout's stages are not those of its schedule.
pub fn predict_step_ms(
    cluster: &Cluster,
    model: &TimedModel,
    shape: PlanShape<'_>,
) -> Result<f64, CostsError> {
    Step::new(cluster, model, shape).step_ms()
}

pub(super) struct Step<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) model: &'a TimedModel,
    pub(super) shape: PlanShape<'a>,
    pub(super) style: SystemTraits,
    /// For each pipeline rank, the kind of node that decides its time.
    pub(super) kinds: Vec<usize>,
}

/// Part of the model on a pipeline rank: its elements and units, and the kind of node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Holding {
    elements: UnitElements,
    units: usize,
    kind: usize,
}

/// Times of gradient reductions, weight gathers and the optimizer step, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StateCost {
    /// Gradient reduction after the last backward.
    pub(super) sum: LinkTime,
    /// Gradient reduction of each micro-batch.
    sum_of_micro_batch: LinkTime,
    /// One gather of all weights.
    gather: LinkTime,
    /// Copies of gathered weights and of their gradients, in a forward and in a backward.
    copies_s: [f64; 2],
    /// Gather of weights after the optimizer step.
    pub(super) arrive: LinkTime,
    /// Duration of the optimizer step.
    update_s: f64,
    /// Exposed offload transfers of the optimizer step: host memory, disk.
    offload_s: [f64; 2],
}

/// Times of a pipeline rank up to the optimizer step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RankEnd {
    /// Passes of all micro-batches.
    passes: PassCost,
    /// End of the last pass.
    pub(super) passes_end_s: f64,
    /// Exposed gradient reduction after that.
    pub(super) sum_s: f64,
    /// Exposed weight gather after the optimizer step.
    pub(super) arrive_s: f64,
    /// Duration of the rank's communication, overlapped or exposed.
    busy_s: f64,
    /// Additional exposed time of both due to contention with exchanges inside passes.
    after_shared_s: f64,
}

impl RankEnd {
    pub(super) fn end_s(&self) -> f64 {
        self.passes_end_s + self.sum_s + self.arrive_s + self.after_shared_s
    }

    /// Returns the exposed time due to contention for links, in passes and after them.
    pub(super) fn contention_s(&self) -> f64 {
        self.passes.contention_s + self.after_shared_s
    }
}

impl<'a> Step<'a> {
    pub(super) fn new(cluster: &'a Cluster, model: &'a TimedModel, shape: PlanShape<'a>) -> Self {
        let ranks = shape.layout.pipeline_ranks();
        let kinds =
            (0..ranks).map(|rank| slowest_kind(cluster, &shape.layout.mesh, model.dtype(), rank)).collect();
        Self { cluster, model, shape, style: cluster.software.traits(), kinds }
    }

    fn predict(&self) -> Result<StepPrediction, CostsError> {
        let states = self.states();
        let stages = self.stages(&states);
        let simulation = match self.schedule() {
            Some(schedule) => Some(schedule.simulate(&self.costs(&stages, self.message().seconds))?),
            None => None,
        };
        let end_ms = |rank: usize| {
            let last = simulation.as_ref()?.spans[rank].iter().nth_back(1);
            Some(last.map_or(0.0, |span| span.end_ms))
        };
        let ends: Vec<RankEnd> = (0..self.kinds.len())
            .map(|rank| self.end_of(rank, &states[rank], &stages, end_ms(rank)))
            .collect();
        let last = ends.iter().max_by(|a, b| a.end_s().total_cmp(&b.end_s())).copied().unwrap_or_default();
        let [update_s, host_s, disk_s] = self.update_s(&states);
        Ok(StepPrediction {
            step_ms: (last.end_s() + update_s + host_s + disk_s) * 1e3,
            work_ms: last.passes.work_s * 1e3,
            exchange_ms: last.passes.exposed_s * 1e3,
            bubble_ms: f64::max(last.passes_end_s - last.passes.seconds(), 0.0) * 1e3,
            gradients_ms: (last.sum_s + last.arrive_s + last.after_shared_s) * 1e3,
            update_ms: update_s * 1e3,
            host_ms: (last.passes.host_s + host_s) * 1e3,
            disk_ms: (last.passes.disk_s + disk_s) * 1e3,
            exchange_busy_ms: last.busy_s * 1e3,
            stages,
            simulation,
        })
    }

    fn step_ms(&self) -> Result<f64, CostsError> {
        let states = self.states();
        let stages = self.stages(&states);
        let ends = self.ends(&states, &stages, self.message().seconds)?;
        let last_s = ends.iter().map(RankEnd::end_s).max_by(f64::total_cmp).unwrap_or_default();
        Ok((last_s + self.update_s(&states).iter().sum::<f64>()) * 1e3)
    }

    /// Returns the times of each pipeline rank up to the optimizer step, if a message takes `message_s`.
    pub(super) fn ends(
        &self,
        states: &[StateCost],
        stages: &[StagePrediction],
        message_s: f64,
    ) -> Result<Vec<RankEnd>, CostsError> {
        let ends_ms = match self.schedule() {
            Some(schedule) => {
                schedule.ends_ms(&self.costs(stages, message_s))?.into_iter().map(Some).collect()
            }
            None => vec![None; self.kinds.len()],
        };
        let ends = ends_ms.into_iter().enumerate();
        Ok(ends.map(|(rank, end_ms)| self.end_of(rank, &states[rank], stages, end_ms)).collect())
    }

    /// Returns the times of gradient reductions, gathers and the optimizer step of each pipeline rank. Ranks with equal holdings have
    /// equal times.
    pub(super) fn states(&self) -> Vec<StateCost> {
        let mut known: Vec<(Holding, StateCost)> = Vec::new();
        let state = |rank: usize| {
            let holding = self.holding(rank);
            if let Some((_, state)) = known.iter().find(|(of, _)| *of == holding) {
                return *state;
            }
            let state = self.state(&holding);
            known.push((holding, state));
            state
        };
        let mut states: Vec<StateCost> = (0..self.kinds.len()).map(state).collect();
        for (rank, state) in states.iter_mut().enumerate() {
            state.update_s /= self.speed_of(rank);
            if let Some(traffic) = self.shape.traffic.get(rank) {
                let host_s = self.host_s(rank, traffic.host.update, 1);
                let disk_s = self.disk_s(rank, traffic.disk.update.total() as f64);
                let host_s = f64::max(host_s - state.update_s, 0.0);
                state.offload_s = [host_s, f64::max(disk_s - state.update_s - host_s, 0.0)];
            }
        }
        states
    }

    /// Returns the times of each stage's passes. Stages of equal units have equal times.
    pub(super) fn stages(&self, states: &[StateCost]) -> Vec<StagePrediction> {
        let mut known: Vec<(&[usize], usize, StagePrediction)> = Vec::new();
        let mut stages = vec![StagePrediction::default(); self.shape.layout.stages.len()];
        for (rank, state) in states.iter().enumerate() {
            let of_rank = self.units_of(rank);
            for &stage in &self.stages_of(rank) {
                let units = self.shape.layout.stages[stage].clone();
                let (same, kind) = (self.model.kinds_of_units(units.clone()), self.kinds[rank]);
                let passes = known.iter().find(|(of, on, _)| *of == same && *on == kind);
                let passes = passes.map(|(.., passes)| *passes).unwrap_or_else(|| {
                    let passes = self.passes(units.clone(), kind);
                    known.push((same, kind, passes));
                    passes
                });
                let passes = passes.at_speed(self.speed_of(rank));
                let passes = self.with_state(passes, units.len(), of_rank, state);
                let passes = self.with_messages(passes, stage).map(PassCost::stretched);
                stages[stage] = self.with_offload(passes, rank, units);
            }
        }
        stages
    }

    /// Returns the longest optimizer step, including the all-reduce of the gradient norm, and its exposed transfers to host memory and
    /// disk.
    fn update_s(&self, states: &[StateCost]) -> [f64; 3] {
        let of_rank = |state: &StateCost| [state.update_s, state.offload_s[0], state.offload_s[1]];
        let seconds = |update: &[f64; 3]| update.iter().sum::<f64>();
        let longest = states.iter().map(of_rank).max_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        let [update_s, host_s, disk_s] = longest.unwrap_or_default();
        [update_s + self.norm_s(), host_s, disk_s]
    }

    /// Returns the seconds of 1/`parts` of these transfers over a rank's host link, which carries both directions at once. The ranks of a
    /// node share the bandwidth of host memory.
    fn host_s(&self, rank: usize, bytes: OffloadBytes, parts: usize) -> f64 {
        let node = &self.cluster.nodes[self.kinds[rank]];
        let sharers = self.cluster.ranks_of_a_node(node, self.shape.layout.mesh.world_size());
        let over_link = bytes.read.max(bytes.written) as f64 / node.host_gb_per_s;
        let in_memory =
            node.host_memory_gb_per_s.map_or(0.0, |rate| (bytes.total() * sharers as u64) as f64 / rate);
        over_link.max(in_memory) / 1e9 / parts.max(1) as f64
    }

    /// Returns the seconds in which a pipeline rank moves `bytes` with its share of the node's disk bandwidth.
    fn disk_s(&self, rank: usize, bytes: f64) -> f64 {
        let node = &self.cluster.nodes[self.kinds[rank]];
        let sharers = self.cluster.ranks_of_a_node(node, self.shape.layout.mesh.world_size());
        bytes * sharers as f64 / (node.disk_gb_per_s * 1e9)
    }

    /// Adds the messages to neighbouring stages to the link load of a stage's passes; each overlaps with the next pass.
    fn with_messages(&self, mut prediction: StagePrediction, stage: usize) -> StagePrediction {
        let Some(schedule) = self.schedule().filter(|_| self.style.overlaps_sends) else {
            return prediction;
        };
        let crosses = |other: usize| schedule.rank_of(other) != schedule.rank_of(stage);
        let filled_s = self.message().filled_s;
        if stage + 1 < schedule.stages() && crosses(stage + 1) {
            prediction.forward.fill(&filled_s);
        }
        if stage > 0 && crosses(stage - 1) {
            prediction.backward.fill(&filled_s);
            prediction.backward_inputs.fill(&filled_s);
        }
        prediction
    }

    /// Adds the exposed offload transfers to a stage's passes. Transfers that overlap with nothing are exposed in full. All others are
    /// read ahead and written behind, and are exposed only as far as they exceed the passes.
    fn with_offload(
        &self,
        mut prediction: StagePrediction,
        rank: usize,
        units: Range<usize>,
    ) -> StagePrediction {
        let Some(RankTraffic { host, disk }) = self.shape.traffic.get(rank) else { return prediction };
        let parts = self.shape.layout.micro_batches.max(1);
        let sum = |of_units: &[OffloadBytes]| {
            let here = of_units.get(units.clone()).unwrap_or_default();
            here.iter().fold(OffloadBytes::default(), |sum, bytes| sum + *bytes)
        };
        let of_host = |of_units: &[OffloadBytes]| {
            let all = sum(of_units);
            // Transfers that wait are reads, except for the few last windows that are written.
            let waited = OffloadBytes { read: all.waited, written: 0, waited: 0 };
            [self.host_s(rank, all, parts), self.host_s(rank, waited, parts)]
        };
        let of_disk = |of_units: &[OffloadBytes]| {
            let all = sum(of_units);
            [all.total(), all.waited].map(|bytes| self.disk_s(rank, bytes as f64 / parts as f64))
        };
        let forward = [of_host(&host.forward), of_disk(&disk.forward)];
        let backward = [of_host(&host.backward), of_disk(&disk.backward)];
        let half = backward.map(|seconds| seconds.map(|seconds| seconds / 2.0));
        for (pass, [host, disk]) in [
            (&mut prediction.forward, forward),
            (&mut prediction.backward, backward),
            (&mut prediction.backward_inputs, half),
            (&mut prediction.backward_weights, half),
        ] {
            let waits = |[moving, waited]: [f64; 2], beside: f64| f64::max(moving - beside, waited);
            pass.host_s = waits(host, pass.seconds());
            pass.disk_s = waits(disk, pass.seconds());
        }
        prediction
    }

    /// Returns the speed of the slowest device of a pipeline rank, relative to the others.
    fn speed_of(&self, rank: usize) -> f64 {
        self.shape.slow.filter(|slow| slow.pipeline_rank == rank).map_or(1.0, |slow| slow.speed)
    }

    /// Returns the number of units on a pipeline rank.
    fn units_of(&self, rank: usize) -> usize {
        self.stages_of(rank).iter().map(|stage| self.shape.layout.stages[*stage].len()).sum()
    }

    /// Returns true if communication overlaps with compute; the ranks of a host communicate with the cores that compute.
    fn hides(&self) -> bool {
        !self.cluster.is_host()
    }

    pub(super) fn stages_of(&self, rank: usize) -> Vec<usize> {
        self.shape.layout.stages_of(rank)
    }

    /// Returns the schedule of the pipeline; `None` without pipeline parallelism.
    pub(super) fn schedule(&self) -> Option<&'a Schedule> {
        self.shape.layout.schedule.as_deref()
    }

    /// Returns the times of a rank up to the optimizer step; `passes_end_ms` is the end of its passes in a pipeline.
    fn end_of(
        &self,
        rank: usize,
        state: &StateCost,
        stages: &[StagePrediction],
        passes_end_ms: Option<f64>,
    ) -> RankEnd {
        let of_rank = self.stages_of(rank);
        let splits = |schedule: &Schedule| of_rank.iter().any(|stage| schedule.splits_backward(*stage));
        let splits_backward = self.schedule().is_some_and(splits);
        let (mut forward, mut backward, mut units) = (PassCost::default(), PassCost::default(), 0);
        for &stage in &of_rank {
            units += self.shape.layout.stages[stage].len();
            forward += stages[stage].forward;
            if splits_backward {
                backward += stages[stage].backward_inputs;
                backward += stages[stage].backward_weights;
            } else {
                backward += stages[stage].backward;
            }
        }
        let micro_batches = self.shape.layout.micro_batches as f64;
        let mut passes = forward;
        passes += backward;
        let passes = passes.times(micro_batches);
        let passes_end_s = passes_end_ms.map_or_else(|| passes.seconds(), |end_ms| end_ms / 1e3);
        // The reduction of the last unit's gradients has nothing left to overlap with.
        let least_s = state.sum.seconds / units.max(1) as f64;
        let [sum_s, shared_by_sum_s] =
            self.beside(&state.sum, &backward, self.hides() && self.style.overlaps_reductions, least_s);
        let [arrive_s, shared_by_arrival_s] = self.beside(&state.arrive, &forward, self.hides(), 0.0);
        let busy_s = passes.exchange_s + state.sum.seconds + state.arrive.seconds;
        let after_shared_s = shared_by_sum_s + shared_by_arrival_s;
        RankEnd { passes, passes_end_s, sum_s, arrive_s, busy_s, after_shared_s }
    }

    /// Returns the exposed seconds of exchanges of state that overlap with a pass if `goes_beside`, at least `least_s`; and the
    /// additional exposed seconds due to contention with the pass's own exchanges.
    fn beside(&self, exchanges: &LinkTime, pass: &PassCost, goes_beside: bool, least_s: f64) -> [f64; 2] {
        if !goes_beside {
            return [exchanges.seconds, 0.0];
        }
        let alone_s = f64::max(exchanges.seconds - pass.work_s, least_s);
        let contention_s = f64::max(pass.overfilled_s(&exchanges.filled_s) - alone_s, 0.0);
        [alone_s, contention_s]
    }

    /// Returns the times of passes through some units on a kind of node, without gathers and reductions.
    pub(super) fn passes(&self, units: Range<usize>, kind: usize) -> StagePrediction {
        let pass = |tasks: fn(&TimedUnit) -> &Vec<Timed>| {
            PassCost::of(units.clone().flat_map(|unit| tasks(self.model.on(unit, kind))))
        };
        StagePrediction {
            forward: pass(|unit| &unit.forward),
            backward: pass(|unit| &unit.backward),
            backward_inputs: pass(|unit| &unit.backward_inputs),
            backward_weights: pass(|unit| &unit.backward_weights),
        }
    }

    /// Adds a stage's part of its rank's gathers and reductions; the rank has `of_rank` units in all.
    fn with_state(
        &self,
        mut prediction: StagePrediction,
        units: usize,
        of_rank: usize,
        state: &StateCost,
    ) -> StagePrediction {
        let share = units as f64 / of_rank.max(1) as f64;
        // Weights that stay are gathered by the first micro-batch's forward.
        let parts = if self.shape.gathers_once { self.shape.layout.micro_batches.max(1) as f64 } else { 1.0 };
        let gather = state.gather.times(share / parts);
        let again = if self.shape.gathers_once { LinkTime::default() } else { gather };
        let sum = state.sum_of_micro_batch.times(share);
        let mut again_and_sum = again;
        again_and_sum += sum;
        let [copies, copies_back] = state.copies_s.map(|seconds| share * seconds);
        for (pass, beside, copies) in [
            (&mut prediction.forward, gather, copies),
            (&mut prediction.backward, again_and_sum, copies_back),
            (&mut prediction.backward_inputs, again, 0.0),
            (&mut prediction.backward_weights, sum, copies_back),
        ] {
            pass.fill(&beside.filled_s);
            let beside = beside.seconds;
            pass.exchange_s += beside;
            // The first unit waits for its own weights.
            let first = beside / units.max(1) as f64;
            let hidden = if self.hides() && self.style.overlaps_gathers { pass.work_s } else { 0.0 };
            pass.exposed_s += f64::max(beside - hidden, first.min(beside));
            pass.work_s += copies;
        }
        prediction
    }

    pub(super) fn among(&self, collective: Collective, bytes: f64, size: usize, stride: usize) -> LinkTime {
        among(self.cluster, collective, bytes, size, stride)
    }

    pub(super) fn holding(&self, rank: usize) -> Holding {
        let mut holding = Holding { kind: self.kinds[rank], ..Holding::default() };
        for stage in self.stages_of(rank) {
            for unit in self.shape.layout.stages[stage].clone() {
                holding.elements += self.model.elements(unit);
                holding.units += 1;
            }
        }
        holding
    }

    fn state(&self, holding: &Holding) -> StateCost {
        let updated = |state: &SharedState, elements: f64| {
            let shares = self.shape.zero_stage != ZeroStage::Nothing;
            if shares { elements / state.sharers as f64 } else { elements }
        };
        let [dense, experts] = self.shared_states(holding);
        let [trained_dense, trained_experts] = holding.elements.trained;
        let updated = updated(&dense, trained_dense) + updated(&experts, trained_experts);
        let is_gathered = self.shape.zero_stage == ZeroStage::Parameters;
        let gathered = if is_gathered { holding.elements.all.iter().sum() } else { 0.0 };
        let worker = self.worker(holding.kind);
        let copies = |bytes: f64| if bytes > 0.0 { worker.stream(gathered * bytes) } else { 0.0 };
        let mut cost = StateCost {
            copies_s: self.style.unit_bytes.map(copies),
            update_s: worker.update(updated),
            ..StateCost::default()
        };
        for exchange in self.state_exchanges(holding) {
            let of_passage = match exchange.passage {
                StatePassage::Sum => &mut cost.sum,
                StatePassage::SumOfMicroBatch => &mut cost.sum_of_micro_batch,
                StatePassage::Gather => &mut cost.gather,
                StatePassage::Arrive => &mut cost.arrive,
            };
            *of_passage += self.time_of(&exchange);
        }
        cost
    }

    fn worker(&self, kind: usize) -> KernelTimes<'_> {
        let device = device(self.cluster, &self.shape.layout.mesh, kind);
        KernelTimes::new(device, self.style, self.model.dtype())
    }

    /// Returns the state that a rank may shard: of the dense parameters, and of the experts.
    pub(super) fn shared_states(&self, holding: &Holding) -> [SharedState; 2] {
        let view = self.shape.layout.mesh.ranks();
        let experts = self.shape.layout.mesh.experts();
        let gradient_bytes = self.style.state_bytes(self.model.dtype()).gradient as f64;
        let weight_bytes = self.model.dtype().size_bytes() as f64;
        let UnitElements { all, trained } = holding.elements;
        let of = |[all, trained]: [f64; 2], sharers: usize, stride: usize| SharedState {
            gradient_bytes: trained * gradient_bytes,
            updated_bytes: trained * weight_bytes,
            weight_bytes: all * weight_bytes,
            units: holding.units,
            sharers,
            stride,
            replicas: view.degree(Axis::Replicate),
        };
        let sharers = view.degree(Axis::Shard) * view.degree(Axis::Context);
        let of_experts = experts.degree(ExpertAxis::ExpertTensor) * experts.degree(ExpertAxis::Expert);
        [
            of([all[0], trained[0]], sharers, view.degree(Axis::Tensor)),
            of([all[1], trained[1]], experts.degree(ExpertAxis::ExpertShard), of_experts),
        ]
    }

    /// Returns the exchanges of that state.
    pub(super) fn state_exchanges(&self, holding: &Holding) -> impl Iterator<Item = StateExchange> {
        let (zero_stage, micro_batches) = (self.shape.zero_stage, self.shape.layout.micro_batches);
        let of = move |state: SharedState| state.exchanges(&self.style, zero_stage, micro_batches);
        self.shared_states(holding).into_iter().flat_map(of)
    }

    /// Returns the time of all repetitions of an exchange.
    fn time_of(&self, exchange: &StateExchange) -> LinkTime {
        let StateExchange { collective, times, bytes, slowness, size, stride, .. } = *exchange;
        self.among(collective, bytes * slowness, size, stride).times(times)
    }

    /// Returns the seconds of the all-reduce of the squared gradient norm over all ranks.
    fn norm_s(&self) -> f64 {
        self.among(Collective::AllReduce, 8.0, self.shape.layout.mesh.world_size(), 1).seconds
    }

    /// Returns the bytes of a message between stages, and whether each tensor-parallel rank sends a slice of the common value.
    pub(super) fn message_bytes(&self) -> (f64, bool) {
        let tensor = self.shape.layout.mesh.ranks().degree(Axis::Tensor);
        let is_sliced = self.model.is_boundary_whole && self.style.slices_messages && tensor > 1;
        (self.model.boundary_bytes as f64 / if is_sliced { tensor as f64 } else { 1.0 }, is_sliced)
    }

    /// Returns the distance between ranks of consecutive stages.
    pub(super) fn neighbour(&self) -> usize {
        let mesh = &self.shape.layout.mesh;
        mesh.world_size() / mesh.ranks().degree(Axis::Pipeline).max(1)
    }

    /// Returns the time of a message between stages.
    pub(super) fn message(&self) -> LinkTime {
        let (bytes, is_sliced) = self.message_bytes();
        let mut message = self.cluster.send_time(bytes as u64, 0, self.neighbour());
        if is_sliced {
            let tensor = self.shape.layout.mesh.ranks().degree(Axis::Tensor);
            message += self.among(Collective::AllGather, self.model.boundary_bytes as f64, tensor, 1);
        }
        message
    }

    /// Returns the inputs of the pipeline simulation, with messages of `message_s`.
    fn costs(&self, stages: &[StagePrediction], message_s: f64) -> Costs {
        let waits_ms = if self.style.overlaps_sends { 0.0 } else { message_s * 1e3 };
        let last = stages.len().saturating_sub(1);
        let stage = |(index, stage): (usize, &StagePrediction)| {
            let (weights_s, inputs_s) = (
                stage.backward_weights.seconds(),
                stage.backward.seconds() - stage.backward_weights.seconds(),
            );
            StageCost {
                forward_ms: stage.forward.seconds() * 1e3 + if index < last { waits_ms } else { 0.0 },
                backward_input_ms: inputs_s * 1e3 + if index > 0 { waits_ms } else { 0.0 },
                backward_weight_ms: weights_s * 1e3,
                ..StageCost::default()
            }
        };
        Costs {
            stages: stages.iter().enumerate().map(stage).collect(),
            latency_ms: 0.0,
            transfer_ms: if self.style.overlaps_sends { message_s * 1e3 } else { 0.0 },
            optimizer_ms: 0.0,
        }
    }
}

//! The time of a step: passes through the pipeline, sums of gradients, gathers of weights and the update.

use std::ops::Range;

use crate::cluster::{Cluster, LinkTime};
use crate::predict::state::{SharedState, StateExchange, StatePassage};
use crate::predict::style::Style;
use crate::predict::tasks::{PassCost, Timed, Worker};
use crate::predict::timed::{TimedModel, TimedUnit, among, device, slowest_kind};
use lockstep_plan::schedule::{Costs, CostsError, Schedule, Simulation, StageCost};
use lockstep_plan::work::{Collective, ModelWork, UnitElements};
use lockstep_plan::{Axis, ExpertAxis, OffloadBytes, RankTraffic, StepLayout, ZeroStage};

/// The inputs of the step-time model other than the recorded work of a rank.
#[derive(Debug, Clone, Copy)]
pub struct PlanShape<'a> {
    /// The layout of the step.
    pub layout: &'a StepLayout,
    /// The ZeRO stage.
    pub zero_stage: ZeroStage,
    /// True if sharded weights (stage 3) are gathered once a step and stay, instead of for each pass.
    pub gathers_once: bool,
    /// A device that holds the others up.
    pub slow: Option<SlowDevice>,
    /// Traffic of offloaded state of each pipeline rank in a step; empty if nothing is offloaded.
    pub traffic: &'a [RankTraffic],
}

/// A device that is slower than the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlowDevice {
    /// The rank of the pipeline in whose place it is. All ranks in this place wait for it: those that share blocks or sequences with it
    /// at each exchange, those that read other parts of the batch at the sums of gradients.
    pub pipeline_rank: usize,
    /// Its speed, as a share of the others'.
    pub speed: f64,
}

/// What the passes of a stage take.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StagePrediction {
    /// A forward of a micro-batch.
    pub forward: PassCost,
    /// A backward in one piece.
    pub backward: PassCost,
    /// The first half of a split one.
    pub backward_inputs: PassCost,
    /// The second half.
    pub backward_weights: PassCost,
}

impl StagePrediction {
    fn map(self, change: impl Fn(PassCost) -> PassCost) -> Self {
        Self {
            forward: change(self.forward),
            backward: change(self.backward),
            backward_inputs: change(self.backward_inputs),
            backward_weights: change(self.backward_weights),
        }
    }

    /// The same with work at a share of the speed.
    fn at_speed(self, speed: f64) -> Self {
        self.map(|pass| PassCost { work_s: pass.work_s / speed, ..pass })
    }
}

/// What a step takes. Times are of the rank that is busy longest; the parts add up to the step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepPrediction {
    /// From beginning to end.
    pub step_ms: f64,
    /// Work on micro-batches.
    pub work_ms: f64,
    /// Waiting for exchanges inside passes: tensor, context and expert parallel, gathers of weights.
    pub exchange_ms: f64,
    /// Waiting for other stages.
    pub bubble_ms: f64,
    /// Waiting for sums of gradients, and for weights after the update.
    pub gradients_ms: f64,
    /// The update.
    pub update_ms: f64,
    /// Waiting for offloaded state from host memory, in passes and in the optimizer step.
    pub host_ms: f64,
    /// Waiting for offloaded state from disk, in passes and in the optimizer step.
    pub disk_ms: f64,
    /// The passes of each stage of the model.
    pub stages: Vec<StagePrediction>,
    /// What happens when in the pipeline, if there is one.
    pub simulation: Option<Simulation>,
    /// What all exchanges of the rank take, hidden or not.
    pub exchange_busy_ms: f64,
}

impl StepPrediction {
    /// What of the step ranks wait for each other, in milliseconds, bubbles left out.
    pub fn exposed_ms(&self) -> f64 {
        self.exchange_ms + self.gradients_ms
    }
}

/// What a step takes of a model's work, laid out so on a cluster.
///
/// # Errors
/// Stages that are not those of the schedule.
pub fn predict_step(
    cluster: &Cluster,
    work: &ModelWork,
    shape: PlanShape<'_>,
) -> Result<StepPrediction, CostsError> {
    let model = TimedModel::new(cluster, work, &shape.layout.mesh);
    Step::new(cluster, &model, shape).predict()
}

/// The same in milliseconds and no more, of a model whose tasks were timed on this cluster before.
///
/// # Errors
/// Stages that are not those of the schedule.
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
    pub(super) style: Style,
    /// For each rank of the pipeline, the kind of node that decides its time.
    pub(super) kinds: Vec<usize>,
}

/// What a pipeline rank has of the model: elements and units; and on which kind of node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Holding {
    elements: UnitElements,
    units: usize,
    kind: usize,
}

/// What the ranks do with gradients and weights beside passes, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StateCost {
    /// Sums after the last backward.
    pub(super) sum: LinkTime,
    /// Sums of each micro-batch.
    sum_of_micro_batch: LinkTime,
    /// A gather of all weights.
    gather: LinkTime,
    /// Copies of gathered weights and of their gradients, in a forward and in a backward.
    copies_s: [f64; 2],
    /// Weights that arrive after the update.
    pub(super) arrive: LinkTime,
    /// The update.
    update_s: f64,
    /// Waiting for offloaded state in the optimizer step, beyond its own work: for host memory, for the disk.
    offload_s: [f64; 2],
}

/// What a rank of the pipeline has behind it before the update.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RankEnd {
    /// Its passes of all micro-batches.
    passes: PassCost,
    /// When the last of them ends.
    pub(super) passes_end_s: f64,
    /// What it then waits for sums of gradients.
    pub(super) sum_s: f64,
    /// What it waits for weights, after the update.
    pub(super) arrive_s: f64,
    /// What its exchanges take, hidden or not.
    busy_s: f64,
    /// What it waits longer for both because passes have exchanges of their own on the same links.
    after_shared_s: f64,
}

impl RankEnd {
    pub(super) fn end_s(&self) -> f64 {
        self.passes_end_s + self.sum_s + self.arrive_s + self.after_shared_s
    }

    /// What it waits, in passes and after them, because several exchanges are to go over one level of links at once.
    pub(super) fn shared_s(&self) -> f64 {
        self.passes.shared_s + self.after_shared_s
    }
}

impl<'a> Step<'a> {
    pub(super) fn new(cluster: &'a Cluster, model: &'a TimedModel, shape: PlanShape<'a>) -> Self {
        let ranks = shape.layout.pipeline_ranks();
        let kinds =
            (0..ranks).map(|rank| slowest_kind(cluster, &shape.layout.mesh, model.dtype(), rank)).collect();
        Self { cluster, model, shape, style: cluster.software.style(), kinds }
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

    /// When each rank has done everything but the update, if a message takes so long.
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

    /// What each rank does with state. Ranks that hold as much do the same.
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

    /// What the passes of each stage take. Stages of the same units do the same.
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

    /// The longest optimizer step, the gradient norm before it included, and its waits for host memory and for the disk.
    fn update_s(&self, states: &[StateCost]) -> [f64; 3] {
        let of_rank = |state: &StateCost| [state.update_s, state.offload_s[0], state.offload_s[1]];
        let seconds = |update: &[f64; 3]| update.iter().sum::<f64>();
        let longest = states.iter().map(of_rank).max_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        let [update_s, host_s, disk_s] = longest.unwrap_or_default();
        [update_s + self.norm_s(), host_s, disk_s]
    }

    /// Seconds for a part of these transfers over the link of a pipeline rank to host memory, which goes both ways at once; host memory itself
    /// is shared by the ranks of a node.
    fn host_s(&self, rank: usize, bytes: OffloadBytes, parts: usize) -> f64 {
        let node = &self.cluster.nodes[self.kinds[rank]];
        let sharers = self.cluster.ranks_of_a_node(node, self.shape.layout.mesh.world_size());
        let over_link = bytes.read.max(bytes.written) as f64 / node.host_gb_per_s;
        let in_memory =
            node.host_memory_gb_per_s.map_or(0.0, |rate| (bytes.total() * sharers as u64) as f64 / rate);
        over_link.max(in_memory) / 1e9 / parts.max(1) as f64
    }

    /// What so many bytes take a rank of the pipeline at its part of its node's disk.
    fn disk_s(&self, rank: usize, bytes: f64) -> f64 {
        let node = &self.cluster.nodes[self.kinds[rank]];
        let sharers = self.cluster.ranks_of_a_node(node, self.shape.layout.mesh.world_size());
        bytes * sharers as f64 / (node.disk_gb_per_s * 1e9)
    }

    /// The passes of a stage with the messages that go beside them, to the stages before and after: each goes while the next pass goes on.
    fn with_messages(&self, mut prediction: StagePrediction, stage: usize) -> StagePrediction {
        let Some(schedule) = self.schedule().filter(|_| self.style.sends_beside) else {
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

    /// The passes of a stage with their waits for offloaded state. A transfer that overlaps with nothing is waited for; all others are read
    /// ahead of the passes and written behind them, and waited for only where they take longer than the passes.
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
            // What is waited for is read, but for the few last windows that are written.
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

    /// What is left of the speed of a pipeline rank's devices: what the slowest of them has.
    fn speed_of(&self, rank: usize) -> f64 {
        self.shape.slow.filter(|slow| slow.pipeline_rank == rank).map_or(1.0, |slow| slow.speed)
    }

    /// The units of a rank, in number.
    fn units_of(&self, rank: usize) -> usize {
        self.stages_of(rank).iter().map(|stage| self.shape.layout.stages[*stage].len()).sum()
    }

    /// Whether exchanges go on beside work: a host's ranks make them with the cores that compute.
    fn hides(&self) -> bool {
        self.cluster.nodes.iter().all(|node| !node.device.is_host)
    }

    pub(super) fn stages_of(&self, rank: usize) -> Vec<usize> {
        self.shape.layout.stages_of(rank)
    }

    /// The actions of the ranks of a pipeline; `None` without one.
    pub(super) fn schedule(&self) -> Option<&'a Schedule> {
        self.shape.layout.schedule.as_deref()
    }

    /// When a rank has done everything but the update; `passes_end_ms` is when its passes end in a pipeline.
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
        // What the last unit's gradients come to has nothing left to go beside.
        let least_s = state.sum.seconds / units.max(1) as f64;
        let [sum_s, shared_by_sum_s] =
            self.beside(&state.sum, &backward, self.hides() && self.style.sums_beside, least_s);
        let [arrive_s, shared_by_arrival_s] = self.beside(&state.arrive, &forward, self.hides(), 0.0);
        let busy_s = passes.exchange_s + state.sum.seconds + state.arrive.seconds;
        let after_shared_s = shared_by_sum_s + shared_by_arrival_s;
        RankEnd { passes, passes_end_s, sum_s, arrive_s, busy_s, after_shared_s }
    }

    /// What a rank waits, `least_s` at least, for exchanges of state that go beside a pass if `goes_beside`; and what it waits longer because
    /// the pass has exchanges of its own on the same links.
    fn beside(&self, exchanges: &LinkTime, pass: &PassCost, goes_beside: bool, least_s: f64) -> [f64; 2] {
        if !goes_beside {
            return [exchanges.seconds, 0.0];
        }
        let alone_s = f64::max(exchanges.seconds - pass.work_s, least_s);
        let shared_s = f64::max(pass.overfilled_s(&exchanges.filled_s) - alone_s, 0.0);
        [alone_s, shared_s]
    }

    /// What the passes of some units take on a kind of node, but for gathers and sums of state.
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

    /// The same of a stage with its share of the gathers and sums of its rank, which has `of_rank` units in all.
    fn with_state(
        &self,
        mut prediction: StagePrediction,
        units: usize,
        of_rank: usize,
        state: &StateCost,
    ) -> StagePrediction {
        let share = units as f64 / of_rank.max(1) as f64;
        // What stays is gathered by the first micro-batch's forward.
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
            let hidden = if self.hides() && self.style.gathers_beside { pass.work_s } else { 0.0 };
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

    fn worker(&self, kind: usize) -> Worker<'_> {
        let device = device(self.cluster, &self.shape.layout.mesh, kind);
        Worker::new(device, self.style, self.model.dtype())
    }

    /// What a rank sends of its state: of what all have, and of experts.
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

    /// The same, one exchange after the other.
    pub(super) fn state_exchanges(&self, holding: &Holding) -> impl Iterator<Item = StateExchange> {
        let (zero_stage, micro_batches) = (self.shape.zero_stage, self.shape.layout.micro_batches);
        let of = move |state: SharedState| state.exchanges(&self.style, zero_stage, micro_batches);
        self.shared_states(holding).into_iter().flat_map(of)
    }

    /// What all of them take that are alike.
    fn time_of(&self, exchange: &StateExchange) -> LinkTime {
        let StateExchange { collective, times, bytes, slowness, size, stride, .. } = *exchange;
        self.among(collective, bytes * slowness, size, stride).times(times)
    }

    /// The sum of the gradients' squares over all ranks.
    fn norm_s(&self) -> f64 {
        self.among(Collective::AllReduce, 8.0, self.shape.layout.mesh.world_size(), 1).seconds
    }

    /// Bytes of a message between stages, and whether each tensor-parallel rank sends a slice of what all of them have.
    pub(super) fn message_bytes(&self) -> (f64, bool) {
        let tensor = self.shape.layout.mesh.ranks().degree(Axis::Tensor);
        let is_sliced = self.model.is_boundary_whole && self.style.slices_messages && tensor > 1;
        (self.model.boundary_bytes as f64 / if is_sliced { tensor as f64 } else { 1.0 }, is_sliced)
    }

    /// How far a rank of the next stage is.
    pub(super) fn neighbour(&self) -> usize {
        let mesh = &self.shape.layout.mesh;
        mesh.world_size() / mesh.ranks().degree(Axis::Pipeline).max(1)
    }

    /// What a message between stages takes.
    pub(super) fn message(&self) -> LinkTime {
        let (bytes, is_sliced) = self.message_bytes();
        let mut message = self.cluster.send_time(bytes as u64, 0, self.neighbour());
        if is_sliced {
            let tensor = self.shape.layout.mesh.ranks().degree(Axis::Tensor);
            message += self.among(Collective::AllGather, self.model.boundary_bytes as f64, tensor, 1);
        }
        message
    }

    /// What the pipeline's passes cost, and messages that take so long.
    fn costs(&self, stages: &[StagePrediction], message_s: f64) -> Costs {
        let waits_ms = if self.style.sends_beside { 0.0 } else { message_s * 1e3 };
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
            transfer_ms: if self.style.sends_beside { message_s * 1e3 } else { 0.0 },
            optimizer_ms: 0.0,
        }
    }
}

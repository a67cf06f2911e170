//! The time of a step: passes through the pipeline, sums of gradients, gathers of weights and the update.

use std::borrow::Cow;
use std::ops::Range;

use crate::cluster::{Cluster, Device};
use crate::predict::style::{Style, UPDATE_BYTES};
use crate::predict::tasks::{PassCost, Worker};
use crate::schedule::{Costs, CostsError, PassKind, Schedule, Simulation, StageCost};
use crate::work::{Collective, Exchange, ModelWork, Peers, Task, UnitWork};
use crate::{Axis, ExpertAxis, Mesh, TensorDimensions, ZeroStage};

/// What of a plan its time depends on, beside the model's work on one of its ranks.
#[derive(Debug, Clone, Copy)]
pub struct PlanShape<'a> {
    /// Who is where.
    pub mesh: &'a Mesh,
    /// What is shared out over the shard axis.
    pub zero_stage: ZeroStage,
    /// Micro-batches of each part of the batch in a step.
    pub micro_batches: usize,
    /// What the ranks of a pipeline do; none without one.
    pub schedule: Option<&'a Schedule>,
    /// The units of each stage.
    pub stages: &'a [Range<usize>],
    /// Whether weights that are shared out (stage 3) are gathered once a step and stay, instead of for each pass.
    pub gathers_once: bool,
    /// How the tensor axis shares linear layers.
    pub tensor_dimensions: TensorDimensions,
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

/// Seconds of a forward and of a whole backward of each unit, on the slowest of the first stage's devices, exchanges included.
pub fn unit_seconds(
    cluster: &Cluster,
    work: &ModelWork,
    mesh: &Mesh,
    tensor_dimensions: TensorDimensions,
) -> Vec<[f64; 2]> {
    let shape = PlanShape {
        mesh,
        zero_stage: ZeroStage::Nothing,
        micro_batches: 1,
        schedule: None,
        stages: &[],
        gathers_once: false,
        tensor_dimensions,
    };
    let step = Step { cluster, work, shape, style: cluster.software.style() };
    let worker = step.worker(0);
    let exchange = |exchange: &Exchange| step.exchange_s(exchange);
    let seconds =
        |unit: &UnitWork| [&unit.forward, &unit.backward].map(|tasks| worker.pass(tasks, exchange).seconds());
    let distinct: Vec<[f64; 2]> = work.distinct.iter().map(seconds).collect();
    work.of_unit.iter().map(|distinct_unit| distinct[*distinct_unit]).collect()
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
    Step { cluster, work, shape, style: cluster.software.style() }.predict()
}

struct Step<'a> {
    cluster: &'a Cluster,
    work: &'a ModelWork,
    shape: PlanShape<'a>,
    style: Style,
}

/// What a pipeline rank has of the model, in elements.
#[derive(Debug, Clone, Copy, Default)]
struct Elements {
    dense: f64,
    experts: f64,
}

/// What the ranks do with gradients and weights beside passes, in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct StateCost {
    /// Sums after the last backward.
    sum_s: f64,
    /// Sums of each micro-batch.
    sum_of_micro_batch_s: f64,
    /// A gather of all weights.
    gather_s: f64,
    /// Weights that arrive after the update.
    arrive_s: f64,
    /// The update.
    update_s: f64,
}

/// What a rank of the pipeline has behind it before the update.
#[derive(Debug, Clone, Copy, Default)]
struct RankEnd {
    /// Its passes of all micro-batches.
    passes: PassCost,
    /// When the last of them ends.
    passes_end_s: f64,
    /// What it then waits for sums of gradients and for weights.
    gradients_s: f64,
    /// What its exchanges take, hidden or not.
    busy_s: f64,
}

impl RankEnd {
    fn end_s(&self) -> f64 {
        self.passes_end_s + self.gradients_s
    }
}

impl Step<'_> {
    fn predict(&self) -> Result<StepPrediction, CostsError> {
        let ranks = self.shape.mesh.ranks().degree(Axis::Pipeline);
        let states: Vec<StateCost> = (0..ranks).map(|rank| self.state(rank)).collect();
        let mut stages = vec![StagePrediction::default(); self.shape.stages.len()];
        for (rank, state) in states.iter().enumerate() {
            for stage in self.stages_of(rank) {
                stages[stage] = self.stage(stage, rank, state);
            }
        }
        let simulation = match self.shape.schedule {
            Some(schedule) => Some(schedule.simulate(&self.costs(&stages))?),
            None => None,
        };
        let ends: Vec<RankEnd> =
            (0..ranks).map(|rank| self.end_of(rank, &states[rank], &stages, simulation.as_ref())).collect();
        let last = ends.iter().max_by(|a, b| a.end_s().total_cmp(&b.end_s())).copied().unwrap_or_default();
        let update_s = states.iter().map(|state| state.update_s).fold(0.0, f64::max) + self.norm_s();
        Ok(StepPrediction {
            step_ms: (last.end_s() + update_s) * 1e3,
            work_ms: last.passes.work_s * 1e3,
            exchange_ms: last.passes.exposed_s * 1e3,
            bubble_ms: f64::max(last.passes_end_s - last.passes.seconds(), 0.0) * 1e3,
            gradients_ms: last.gradients_s * 1e3,
            update_ms: update_s * 1e3,
            exchange_busy_ms: last.busy_s * 1e3,
            stages,
            simulation,
        })
    }

    /// Whether exchanges go on beside work: a host's ranks make them with the cores that compute.
    fn hides(&self) -> bool {
        self.cluster.nodes.iter().all(|node| !node.device.is_host)
    }

    fn stages_of(&self, rank: usize) -> Vec<usize> {
        self.shape.schedule.map_or_else(|| vec![0], |schedule| schedule.stages_of(rank).collect())
    }

    /// When a rank has done everything but the update.
    fn end_of(
        &self,
        rank: usize,
        state: &StateCost,
        stages: &[StagePrediction],
        simulation: Option<&Simulation>,
    ) -> RankEnd {
        let splits =
            |schedule: &Schedule| schedule.passes(rank).any(|pass| pass.kind == PassKind::BackwardWeight);
        let splits_backward = self.shape.schedule.is_some_and(splits);
        let (mut forward, mut backward, mut units) = (PassCost::default(), PassCost::default(), 0);
        for stage in self.stages_of(rank) {
            units += self.shape.stages[stage].len();
            forward += stages[stage].forward;
            if splits_backward {
                backward += stages[stage].backward_inputs;
                backward += stages[stage].backward_weights;
            } else {
                backward += stages[stage].backward;
            }
        }
        let micro_batches = self.shape.micro_batches as f64;
        let mut passes = forward;
        passes += backward;
        let passes = passes.times(micro_batches);
        let passes_end_s = match simulation {
            Some(simulation) => {
                let of_passes = simulation.spans[rank].iter().rev().skip(1);
                of_passes.map(|span| span.end_ms / 1e3).fold(0.0, f64::max)
            }
            None => passes.seconds(),
        };
        // What the last unit's gradients come to has nothing left to go beside.
        let least_s = state.sum_s / units.max(1) as f64;
        let beside_s = if self.hides() && self.style.sums_beside { backward.work_s } else { 0.0 };
        let sum_s = f64::max(state.sum_s - beside_s, least_s);
        let arrive_s =
            if self.hides() { f64::max(state.arrive_s - forward.work_s, 0.0) } else { state.arrive_s };
        let busy_s = passes.exchange_s + state.sum_s + state.arrive_s;
        RankEnd { passes, passes_end_s, gradients_s: sum_s + arrive_s, busy_s }
    }

    /// What the passes of a stage take on the slowest of the ranks that have it.
    fn stage(&self, stage: usize, rank: usize, state: &StateCost) -> StagePrediction {
        let worker = self.worker(rank);
        let units = self.shape.stages[stage].clone();
        let exchange = |exchange: &Exchange| self.exchange_s(exchange);
        let pass = |tasks: fn(&UnitWork) -> &Vec<Task>| {
            worker.pass(units.clone().flat_map(|unit| tasks(self.work.unit(unit))), exchange)
        };
        let mut prediction = StagePrediction {
            forward: pass(|unit| &unit.forward),
            backward: pass(|unit| &unit.backward),
            backward_inputs: pass(|unit| &unit.backward_inputs),
            backward_weights: pass(|unit| &unit.backward_weights),
        };
        let of_rank: usize = self.stages_of(rank).iter().map(|stage| self.shape.stages[*stage].len()).sum();
        let share = units.len() as f64 / of_rank.max(1) as f64;
        // What stays is gathered by the first micro-batch's forward.
        let parts = if self.shape.gathers_once { self.shape.micro_batches.max(1) as f64 } else { 1.0 };
        let gather = share * state.gather_s / parts;
        let again = if self.shape.gathers_once { 0.0 } else { gather };
        let sum = share * state.sum_of_micro_batch_s;
        for (pass, beside) in [
            (&mut prediction.forward, gather),
            (&mut prediction.backward, again + sum),
            (&mut prediction.backward_inputs, again),
            (&mut prediction.backward_weights, sum),
        ] {
            pass.exchange_s += beside;
            // The first unit waits for its own weights.
            let first = beside / units.len().max(1) as f64;
            let hidden = if self.hides() && self.style.gathers_beside { pass.work_s } else { 0.0 };
            pass.exposed_s += f64::max(beside - hidden, first.min(beside));
        }
        prediction
    }

    fn worker(&self, rank: usize) -> Worker<'_> {
        let ranks = self.shape.mesh.world_size();
        let of_a_stage = ranks / self.shape.mesh.ranks().degree(Axis::Pipeline).max(1);
        let device = self.slowest_device(rank * of_a_stage..(rank + 1) * of_a_stage);
        Worker { device, style: self.style, dtype: self.work.dtype }
    }

    /// The device of some ranks that takes longest for a product. Where there are fewer ranks than a host's cores, each has several.
    fn slowest_device(&self, ranks: Range<usize>) -> Cow<'_, Device> {
        let of_a_node = self.shape.mesh.world_size().div_ceil(self.cluster.node_count().max(1));
        let mut first = 0;
        let mut slowest: Option<Cow<'_, Device>> = None;
        let speed = |device: &Device| {
            device.peak_tflops.get(&self.work.dtype).copied().unwrap_or_default() * device.efficiency.product
        };
        for node in &self.cluster.nodes {
            let end = first + node.count * node.devices;
            let is_of_ranks = ranks.start < end && first < ranks.end;
            let device = node.device_of(of_a_node.min(node.devices));
            if is_of_ranks && slowest.as_ref().is_none_or(|slowest| speed(&device) < speed(slowest)) {
                slowest = Some(device);
            }
            first = end;
        }
        slowest.unwrap_or_else(|| self.cluster.nodes[0].device_of(of_a_node))
    }

    /// Seconds of an exchange inside a pass.
    fn exchange_s(&self, exchange: &Exchange) -> f64 {
        let view = self.shape.mesh.ranks();
        let experts = self.shape.mesh.experts();
        let (tensor, context) = (view.degree(Axis::Tensor), view.degree(Axis::Context));
        let (size, stride) = match exchange.peers {
            Peers::Tensor => (tensor, 1),
            Peers::TensorLine => (tensor.isqrt(), tensor.isqrt()),
            Peers::Context => (context, tensor),
            Peers::TensorAndContext => (context * tensor, 1),
            Peers::Expert => {
                (experts.degree(ExpertAxis::Expert) * experts.degree(ExpertAxis::ExpertTensor), 1)
            }
        };
        self.among(exchange.collective, exchange.bytes as f64, size, stride)
    }

    /// Seconds of a collective of `size` ranks, each `stride` after the other.
    fn among(&self, collective: Collective, bytes: f64, size: usize, stride: usize) -> f64 {
        if size < 2 || bytes <= 0.0 {
            return 0.0;
        }
        self.cluster.seconds(collective, bytes as u64, &self.cluster.placement(size, stride))
    }

    /// What a rank of the pipeline has, in elements.
    fn elements(&self, rank: usize) -> Elements {
        let units = self.stages_of(rank).into_iter().flat_map(|stage| self.shape.stages[stage].clone());
        units.fold(Elements::default(), |sum, unit| {
            let unit = self.work.unit(unit);
            Elements {
                dense: sum.dense + (unit.parameter_elements - unit.expert_elements) as f64,
                experts: sum.experts + unit.expert_elements as f64,
            }
        })
    }

    fn state(&self, rank: usize) -> StateCost {
        let view = self.shape.mesh.ranks();
        let experts = self.shape.mesh.experts();
        let (replicas, tensor) = (view.degree(Axis::Replicate), view.degree(Axis::Tensor));
        let sharers = view.degree(Axis::Shard) * view.degree(Axis::Context);
        let of_experts = experts.degree(ExpertAxis::ExpertTensor) * experts.degree(ExpertAxis::Expert);
        let elements = self.elements(rank);
        let units: usize = self.stages_of(rank).iter().map(|stage| self.shape.stages[*stage].len()).sum();
        let dense = self.state_of(elements.dense, units, [sharers, tensor], replicas);
        let mixture = self.state_of(
            elements.experts,
            units,
            [experts.degree(ExpertAxis::ExpertShard), of_experts],
            replicas,
        );
        let updated = |elements: f64, sharers: usize| {
            if self.shape.zero_stage == ZeroStage::Nothing { elements } else { elements / sharers as f64 }
        };
        let updated = updated(elements.dense, sharers)
            + updated(elements.experts, experts.degree(ExpertAxis::ExpertShard));
        StateCost {
            sum_s: dense.sum_s + mixture.sum_s,
            sum_of_micro_batch_s: dense.sum_of_micro_batch_s + mixture.sum_of_micro_batch_s,
            gather_s: dense.gather_s + mixture.gather_s,
            arrive_s: dense.arrive_s + mixture.arrive_s,
            update_s: self.worker(rank).update(updated * UPDATE_BYTES),
        }
    }

    /// The state of so many elements, in so many units, that `sharers`, each `stride` after the other, may share out, in so many replicas.
    fn state_of(
        &self,
        elements: f64,
        units: usize,
        [sharers, stride]: [usize; 2],
        replicas: usize,
    ) -> StateCost {
        let gradients = elements * self.style.gradient_bytes;
        let weights = elements * self.work.dtype.size_bytes() as f64;
        let mut cost = StateCost::default();
        if self.shape.zero_stage == ZeroStage::Nothing {
            cost.sum_s = self.among(Collective::AllReduce, gradients, sharers * replicas, stride);
            return cost;
        }
        // What is shared out goes unit by unit.
        let units = units as f64 * self.style.gathers_of_a_unit;
        let unit_by_unit = |collective: Collective, bytes: f64| {
            units * self.among(collective, bytes / units / self.style.gathers_at, sharers, stride)
        };
        let scatter = unit_by_unit(Collective::ReduceScatter, gradients);
        let own = gradients / sharers as f64;
        cost.sum_s = self.among(Collective::AllReduce, own, replicas, stride * sharers);
        if self.shape.zero_stage >= ZeroStage::Gradients && self.shape.micro_batches > 1 {
            cost.sum_of_micro_batch_s = scatter;
        } else {
            cost.sum_s += scatter;
        }
        let gather = unit_by_unit(Collective::AllGather, weights);
        if self.shape.zero_stage == ZeroStage::Parameters {
            cost.gather_s = gather;
        } else {
            cost.arrive_s = gather;
        }
        cost
    }

    /// The sum of the gradients' squares over all ranks.
    fn norm_s(&self) -> f64 {
        self.among(Collective::AllReduce, 8.0, self.shape.mesh.world_size(), 1)
    }

    /// What the pipeline's passes and messages cost.
    fn costs(&self, stages: &[StagePrediction]) -> Costs {
        let view = self.shape.mesh.ranks();
        let tensor = view.degree(Axis::Tensor);
        let neighbour = self.shape.mesh.world_size() / view.degree(Axis::Pipeline).max(1);
        let is_sliced = self.work.is_boundary_whole && self.style.slices_messages && tensor > 1;
        let bytes = self.work.boundary_bytes as f64 / if is_sliced { tensor as f64 } else { 1.0 };
        let mut message_s = self.cluster.send_seconds(bytes as u64, 0, neighbour);
        if is_sliced {
            message_s += self.among(Collective::AllGather, self.work.boundary_bytes as f64, tensor, 1);
        }
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

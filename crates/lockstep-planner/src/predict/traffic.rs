//! Communication of a rank in a step: bytes over each link, duration, and exposed time, by kind.
//!
//! These are the exchanges of the step-time prediction, told apart by their group. So the exposed times add up to parts of
//! [`StepPrediction`](crate::predict::StepPrediction): `exchange_ms` and `gradients_ms`, except for [`StepTraffic::shared_ms`], in which
//! several kinds wait for the same link. Messages between stages are part of `bubble_ms`. The eight bytes of the gradient norm, which the
//! optimizer step waits for, are omitted.

use std::ops::Range;

use crate::cluster::{Cluster, MAX_LEVELS};
use crate::predict::prediction::{PlanShape, StagePrediction};
use crate::predict::state::StatePassage;
use crate::predict::step::{RankEnd, StateCost, Step};
use crate::predict::tasks::{PassCost, Timed, Waited};
use crate::predict::timed::{Leg, TimedModel, TimedUnit, legs};
use lockstep_plan::Axis;
use lockstep_plan::schedule::{Action, CostsError, Schedule};
use lockstep_plan::work::{Collective, Exchange, ModelWork, Peers, Task, TaskKind, UnitWork};

/// Kind of communication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sent {
    /// Activations and their gradients within the tensor-parallel group.
    Tensor,
    /// Keys, values and heads within the context-parallel group.
    Context,
    /// Activations within the tensor-parallel and context-parallel groups together.
    TensorAndContext,
    /// Tokens to and from the ranks of their experts.
    Experts,
    /// Statistics of batch norms that data-parallel ranks share.
    Statistics,
    /// Activations and their gradients between pipeline stages.
    Messages,
    /// All-gathers of sharded weights.
    Weights,
    /// Gradient reductions over data-parallel and context-parallel ranks.
    Gradients,
}

impl Sent {
    /// All kinds of communication.
    pub const ALL: [Self; 8] = [
        Self::Tensor,
        Self::Context,
        Self::TensorAndContext,
        Self::Experts,
        Self::Statistics,
        Self::Messages,
        Self::Weights,
        Self::Gradients,
    ];

    /// Returns the name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Context => "context",
            Self::TensorAndContext => "tensor and context",
            Self::Experts => "experts",
            Self::Statistics => "statistics",
            Self::Messages => "pipeline messages",
            Self::Weights => "parameter all-gather",
            Self::Gradients => "gradient reduction",
        }
    }
}

impl From<Peers> for Sent {
    fn from(peers: Peers) -> Self {
        match peers {
            Peers::Tensor | Peers::TensorLine => Self::Tensor,
            Peers::Context => Self::Context,
            Peers::TensorAndContext => Self::TensorAndContext,
            Peers::Expert => Self::Experts,
            Peers::Replicas => Self::Statistics,
        }
    }
}

/// Communication of one kind by a rank in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Traffic {
    /// Kind of communication.
    pub sent: Sent,
    /// Size of the group; if there are several groups, that of the largest.
    pub ranks: usize,
    /// Bytes over each level of the cluster's links, averaged over the ranks of a group.
    pub bytes: [f64; MAX_LEVELS],
    /// Duration, overlapped or exposed.
    pub busy_ms: f64,
    /// Exposed time; for messages, the time by which the passes would end earlier without them.
    pub exposed_ms: f64,
}

impl Traffic {
    /// Returns the bytes over all levels.
    pub fn total_bytes(&self) -> f64 {
        self.bytes.iter().sum()
    }

    /// Returns the fraction of the duration that is overlapped, from 0 to 1. Messages may delay a rank by more than their own duration.
    pub fn hidden(&self) -> f64 {
        if self.busy_ms > 0.0 { (1.0 - self.exposed_ms / self.busy_ms).clamp(0.0, 1.0) } else { 1.0 }
    }
}

/// Communication of the rank that ends last, whose times [`StepPrediction`](crate::predict::StepPrediction) has.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepTraffic {
    /// Pipeline rank that ends last.
    pub pipeline_rank: usize,
    /// Kinds of communication with any duration, in the order of [`Sent`].
    pub kinds: Vec<Traffic>,
    /// Additional exposed time due to contention: several kinds use one level of links at once, which carries one after the other.
    pub shared_ms: f64,
}

/// Predicts the communication of a step of a model's work with this layout on a cluster.
///
/// # Errors
/// If the layout's stages are not those of its schedule.
pub fn traffic(cluster: &Cluster, work: &ModelWork, shape: PlanShape<'_>) -> Result<StepTraffic, CostsError> {
    let model = TimedModel::new(cluster, work, &shape.layout.mesh);
    let step = Step::new(cluster, &model, shape);
    let states = step.states();
    let stages = step.stages(&states);
    let ends = step.ends(&states, &stages, step.message().seconds)?;
    let last = ends.iter().enumerate().max_by(|(_, a), (_, b)| a.end_s().total_cmp(&b.end_s()));
    let Some((rank, end)) = last else { return Ok(StepTraffic::default()) };
    let mut sums = Sums::default();
    let of_rank = RankTraffic { step: &step, work, rank };
    of_rank.add_passes(&mut sums);
    of_rank.add_state(&stages, &states[rank], end, &mut sums);
    if let Some(schedule) = &shape.layout.schedule {
        let without = step.ends(&states, &stages, 0.0)?;
        of_rank.add_messages(schedule, end.passes_end_s - without[rank].passes_end_s, &mut sums);
    }
    Ok(StepTraffic {
        pipeline_rank: rank,
        kinds: sums.0.into_iter().filter(|sum| sum.busy_ms > 0.0).collect(),
        shared_ms: end.contention_s() * 1e3,
    })
}

/// Sums so far; each kind is at its index in [`Sent::ALL`].
struct Sums([Traffic; Sent::ALL.len()]);

impl Default for Sums {
    fn default() -> Self {
        let nothing =
            |sent| Traffic { sent, ranks: 1, bytes: [0.0; MAX_LEVELS], busy_ms: 0.0, exposed_ms: 0.0 };
        Self(Sent::ALL.map(nothing))
    }
}

impl Sums {
    fn of(&mut self, sent: Sent) -> &mut Traffic {
        &mut self.0[sent as usize]
    }
}

impl Traffic {
    fn send(&mut self, ranks: usize, times: f64, bytes: [f64; MAX_LEVELS]) {
        self.ranks = self.ranks.max(ranks);
        self.bytes.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += times * bytes);
    }

    fn take(&mut self, busy_s: f64, exposed_s: f64) {
        self.busy_ms += busy_s * 1e3;
        self.exposed_ms += exposed_s * 1e3;
    }
}

/// Accessors of the tasks of one pass of a unit, and of their times.
type TasksOf = (fn(&UnitWork) -> &Vec<Task>, fn(&TimedUnit) -> &Vec<Timed>);

/// A pipeline rank whose communication is summed.
struct RankTraffic<'s, 'a> {
    step: &'s Step<'a>,
    work: &'s ModelWork,
    rank: usize,
}

impl RankTraffic<'_, '_> {
    fn micro_batches(&self) -> f64 {
        self.step.shape.layout.micro_batches as f64
    }

    fn splits_backward(&self) -> bool {
        let splits = |schedule: &Schedule| {
            self.step.stages_of(self.rank).iter().any(|stage| schedule.splits_backward(*stage))
        };
        self.step.schedule().is_some_and(splits)
    }

    /// Adds the exchanges inside passes.
    fn add_passes(&self, sums: &mut Sums) {
        let whole: [TasksOf; 2] =
            [(|unit| &unit.forward, |unit| &unit.forward), (|unit| &unit.backward, |unit| &unit.backward)];
        let split: [TasksOf; 3] = [
            (|unit| &unit.forward, |unit| &unit.forward),
            (|unit| &unit.backward_inputs, |unit| &unit.backward_inputs),
            (|unit| &unit.backward_weights, |unit| &unit.backward_weights),
        ];
        let passes = if self.splits_backward() { &split[..] } else { &whole[..] };
        for stage in self.step.stages_of(self.rank) {
            for tasks_of in passes {
                self.add_pass(self.step.shape.layout.stages[stage].clone(), *tasks_of, sums);
            }
        }
    }

    fn add_pass(&self, units: Range<usize>, (tasks, times): TasksOf, sums: &mut Sums) {
        let kind = self.step.kinds[self.rank];
        let tasks: Vec<&Task> = units.clone().flat_map(|unit| tasks(self.work.unit(unit))).collect();
        let timed = units.flat_map(|unit| times(self.step.model.on(unit, kind)));
        let exchange = |task: usize| match &tasks[task].kind {
            TaskKind::Exchange(exchange) => Some(exchange),
            _ => None,
        };
        let mut beside: Vec<(Sent, f64)> = Vec::new();
        let mut add = |task: usize, seconds: f64, exposed_s: f64| {
            let exchange = exchange(task)?;
            self.send(exchange, sums);
            let sent = Sent::from(exchange.peers);
            sums.of(sent).take(seconds * self.micro_batches(), exposed_s * self.micro_batches());
            Some(sent)
        };
        let mut exposed_beside: Vec<(Sent, f64)> = Vec::new();
        PassCost::told(timed, |waited| match waited {
            Waited::For { task, seconds, exposed_s } => {
                add(task, seconds, exposed_s);
            }
            Waited::Beside { task, seconds } => {
                beside.extend(add(task, seconds, 0.0).map(|sent| (sent, seconds)))
            }
            Waited::After { exposed_s } => {
                // Exposed time is divided among exchanges that overlap with the same work, in proportion to their duration.
                let all: f64 = beside.iter().map(|(_, seconds)| seconds).sum();
                let share = |(sent, seconds): (Sent, f64)| (sent, exposed_s * seconds / all);
                exposed_beside.extend(beside.drain(..).filter(|_| exposed_s > 0.0).map(share));
            }
        });
        for (sent, exposed_s) in exposed_beside {
            sums.of(sent).take(0.0, exposed_s * self.micro_batches());
        }
    }

    fn send(&self, exchange: &Exchange, sums: &mut Sums) {
        for Leg { collective, bytes, size, stride } in
            legs(self.step.cluster, &self.step.shape.layout.mesh, exchange)
        {
            let bytes = self.sent_bytes(collective, bytes, size, stride);
            sums.of(exchange.peers.into()).send(size, self.micro_batches(), bytes);
        }
    }

    fn sent_bytes(
        &self,
        collective: Collective,
        bytes: f64,
        size: usize,
        stride: usize,
    ) -> [f64; MAX_LEVELS] {
        let cluster = self.step.cluster;
        cluster.sent_bytes(collective, bytes, &cluster.placement(size, stride))
    }

    /// Adds gradient reductions and weight gathers.
    fn add_state(&self, stages: &[StagePrediction], state: &StateCost, end: &RankEnd, sums: &mut Sums) {
        let Step { shape, .. } = self.step;
        let gathers = if shape.gathers_once { 1.0 } else { 2.0 * self.micro_batches() };
        for exchange in self.step.state_exchanges(&self.step.holding(self.rank)) {
            let (sent, times) = match exchange.passage {
                StatePassage::Sum => (Sent::Gradients, 1.0),
                StatePassage::SumOfMicroBatch => (Sent::Gradients, self.micro_batches()),
                StatePassage::Gather => (Sent::Weights, gathers),
                StatePassage::Arrive => (Sent::Weights, 1.0),
            };
            if exchange.size > 1 && exchange.times > 0.0 {
                let bytes =
                    self.sent_bytes(exchange.collective, exchange.bytes, exchange.size, exchange.stride);
                sums.of(sent).send(exchange.size, times * exchange.times, bytes);
            }
        }
        sums.of(Sent::Gradients).take(state.sum.seconds, end.sum_s);
        sums.of(Sent::Weights).take(state.arrive.seconds, end.arrive_s);
        for stage in self.step.stages_of(self.rank) {
            self.add_state_of_passes(stage, &stages[stage], sums);
        }
    }

    /// Adds the time by which a stage's passes are longer because of gathers and reductions that overlap with them.
    fn add_state_of_passes(&self, stage: usize, with_state: &StagePrediction, sums: &mut Sums) {
        let passes =
            self.step.passes(self.step.shape.layout.stages[stage].clone(), self.step.kinds[self.rank]);
        let micro_batches = self.micro_batches();
        // Rounding may leave a small difference where there is none.
        let more = |with: &PassCost, without: &PassCost| {
            let more =
                |with: f64, without: f64| if with > without { (with - without) * micro_batches } else { 0.0 };
            // Contention is reported separately.
            let exposed_s = with.exposed_s - with.contention_s;
            [more(with.exchange_s, without.exchange_s), more(exposed_s, without.exposed_s)]
        };
        let mut take = |sent, [busy_s, exposed_s]: [f64; 2]| sums.of(sent).take(busy_s, exposed_s);
        take(Sent::Weights, more(&with_state.forward, &passes.forward));
        let again = more(&with_state.backward_inputs, &passes.backward_inputs);
        let summed = more(&with_state.backward_weights, &passes.backward_weights);
        if self.splits_backward() {
            take(Sent::Weights, again);
            take(Sent::Gradients, summed);
            return;
        }
        let [busy_s, exposed_s] = more(&with_state.backward, &passes.backward);
        for (sent, [part_s, _]) in [(Sent::Weights, again), (Sent::Gradients, summed)] {
            let share = if busy_s > 0.0 { part_s / (again[0] + summed[0]) } else { 0.0 };
            take(sent, [busy_s * share, exposed_s * share]);
        }
    }

    /// Adds the messages between stages, which delay the rank by `exposed_s`.
    fn add_messages(&self, schedule: &Schedule, exposed_s: f64, sums: &mut Sums) {
        let step = self.step;
        let sends =
            schedule.actions(self.rank).iter().filter(|action| matches!(action, Action::Send(_))).count()
                as f64;
        let (bytes, is_sliced) = step.message_bytes();
        let mut sent = [0.0; MAX_LEVELS];
        if let Some(level) = step.cluster.level_between(0, step.neighbour()) {
            sent[level] = bytes;
        }
        let view = step.shape.layout.mesh.ranks();
        let messages = sums.of(Sent::Messages);
        messages.send(view.degree(Axis::Pipeline), sends, sent);
        if is_sliced {
            // The receiving ranks all-gather the slices.
            let whole = step.model.boundary_bytes as f64;
            let gathered = self.sent_bytes(Collective::AllGather, whole, view.degree(Axis::Tensor), 1);
            messages.send(1, sends, gathered);
        }
        messages.take(sends * step.message().seconds, f64::max(exposed_s, 0.0));
    }
}

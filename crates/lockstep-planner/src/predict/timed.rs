//! A model's work with predicted task times. It is computed once per tensor-, context- and expert-parallel layout, since it depends on
//! neither stages, schedule nor ZeRO. A search predicts thousands of steps from each.

use std::borrow::Cow;
use std::ops::Range;
use std::rc::Rc;

use crate::cluster::{Cluster, Device, LinkTime};
use crate::predict::tasks::{KernelTimes, PassCost, Timed};
use lockstep_plan::work::{Collective, Exchange, ModelWork, Peers, UnitElements, UnitWork};
use lockstep_plan::{Axis, DType, ExpertAxis, Mesh};

/// Tasks of a unit with their times on one kind of node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TimedUnit {
    pub(super) forward: Vec<Timed>,
    pub(super) backward: Vec<Timed>,
    pub(super) backward_inputs: Vec<Timed>,
    pub(super) backward_weights: Vec<Timed>,
    /// Seconds of a forward and of a whole backward on their own.
    seconds: [f64; 2],
}

/// A unit on every kind of node of the cluster.
#[derive(Debug, PartialEq)]
struct OnNodes {
    kinds: Vec<TimedUnit>,
    elements: UnitElements,
}

/// Work of a model on one rank, with predicted task times on every kind of node.
#[derive(Debug, Clone, PartialEq)]
pub struct TimedModel {
    distinct: Vec<Rc<OnNodes>>,
    of_unit: Vec<usize>,
    dtype: DType,
    pub(super) boundary_bytes: u64,
    pub(super) is_boundary_whole: bool,
}

impl TimedModel {
    /// Predicts the task times of `work` on each kind of node of the cluster. `work` was recorded under the
    /// tensor-, context- and expert-parallel degrees of `mesh`; its other degrees have no effect, except that on CPUs the number of ranks
    /// matters too.
    pub fn new(cluster: &Cluster, work: &ModelWork, mesh: &Mesh) -> Self {
        let exchange = |exchange: &Exchange| exchange_time(cluster, mesh, exchange);
        let workers: Vec<KernelTimes<'_>> = (0..cluster.nodes.len())
            .map(|kind| KernelTimes::new(device(cluster, mesh, kind), cluster.software.traits(), work.dtype))
            .collect();
        let unit = |unit: &UnitWork| {
            let on = |worker: &KernelTimes<'_>| TimedUnit::new(unit, worker, exchange);
            Rc::new(OnNodes { kinds: workers.iter().map(on).collect(), elements: unit.elements() })
        };
        Self {
            distinct: work.distinct.iter().map(unit).collect(),
            of_unit: work.of_unit.clone(),
            dtype: work.dtype,
            boundary_bytes: work.boundary_bytes,
            is_boundary_whole: work.is_boundary_whole,
        }
    }

    /// Returns the model with `units` replaced by those of another recording of it, whose blocks recompute something else.
    #[must_use]
    pub fn with(&self, units: Range<usize>, other: &Self) -> Self {
        let mut mixed = self.clone();
        let offset = mixed.distinct.len();
        mixed.distinct.extend(other.distinct.iter().cloned());
        for unit in units {
            mixed.of_unit[unit] = offset + other.of_unit[unit];
        }
        mixed
    }

    /// Returns the dtype of weights and values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of units.
    pub fn units(&self) -> usize {
        self.of_unit.len()
    }

    /// Returns the seconds of a forward and of a whole backward of each unit, communication included; `kind` is the index of the kind of
    /// node.
    pub fn unit_seconds(&self, kind: usize) -> Vec<[f64; 2]> {
        (0..self.units()).map(|unit| self.on(unit, kind).seconds).collect()
    }

    /// Returns the seconds of a forward and a whole backward through consecutive units on a kind of node, communication included. At most
    /// the sum of [`TimedModel::unit_seconds`]: a collective at the end of a unit overlaps with the next one's work.
    pub fn pass_seconds(&self, units: Range<usize>, kind: usize) -> f64 {
        let seconds = |tasks: fn(&TimedUnit) -> &Vec<Timed>| {
            PassCost::of(units.clone().flat_map(|unit| tasks(self.on(unit, kind)))).seconds()
        };
        seconds(|unit| &unit.forward) + seconds(|unit| &unit.backward)
    }

    /// Returns the elements of a unit's parameters.
    pub fn elements(&self, unit: usize) -> UnitElements {
        self.distinct[self.of_unit[unit]].elements
    }

    /// Returns the index of the distinct unit of each of `units`; ranges with equal indices have equal work.
    pub fn kinds_of_units(&self, units: Range<usize>) -> &[usize] {
        &self.of_unit[units]
    }

    pub(super) fn on(&self, unit: usize, kind: usize) -> &TimedUnit {
        &self.distinct[self.of_unit[unit]].kinds[kind]
    }
}

impl TimedUnit {
    fn new(unit: &UnitWork, worker: &KernelTimes<'_>, exchange: impl Fn(&Exchange) -> LinkTime) -> Self {
        let timed = |tasks| worker.timed(tasks, &exchange);
        let (forward, backward) = (timed(&unit.forward), timed(&unit.backward));
        Self {
            seconds: [&forward, &backward].map(|pass| PassCost::of(pass).seconds()),
            forward,
            backward,
            backward_inputs: timed(&unit.backward_inputs),
            backward_weights: timed(&unit.backward_weights),
        }
    }
}

/// Returns the device of a rank on a kind of node. If there are fewer ranks than a host's cores, each has several cores.
pub fn device<'c>(cluster: &'c Cluster, mesh: &Mesh, kind: usize) -> Cow<'c, Device> {
    let node = &cluster.nodes[kind];
    node.device_of(cluster.ranks_of_a_node(node, mesh.world_size()))
}

/// Returns the index of the slowest kind of node, by the rate of GEMMs, among those that the ranks of a pipeline rank are on.
pub fn slowest_kind(cluster: &Cluster, mesh: &Mesh, dtype: DType, pipeline_rank: usize) -> usize {
    if cluster.nodes.len() == 1 {
        return 0;
    }
    let speed = |kind: usize| {
        let device = device(cluster, mesh, kind);
        device.peak_tflops.get(&dtype).copied().unwrap_or_default() * device.efficiency.product
    };
    let slower = |slowest: usize, kind: usize| if speed(kind) < speed(slowest) { kind } else { slowest };
    kinds_of(cluster, mesh, pipeline_rank).reduce(slower).unwrap_or(0)
}

/// Returns the indices of the kinds of nodes that the ranks of a pipeline rank are on.
pub fn kinds_of(cluster: &Cluster, mesh: &Mesh, pipeline_rank: usize) -> impl Iterator<Item = usize> {
    let of_a_stage = mesh.world_size() / mesh.ranks().degree(Axis::Pipeline).max(1);
    let ranks = pipeline_rank * of_a_stage..(pipeline_rank + 1) * of_a_stage;
    let mut first = 0;
    cluster.nodes.iter().enumerate().filter_map(move |(kind, node)| {
        let begin = first;
        first += node.count * node.devices;
        (ranks.start < first && begin < ranks.end).then_some(kind)
    })
}

/// Returns the time of an exchange inside a pass.
fn exchange_time(cluster: &Cluster, mesh: &Mesh, exchange: &Exchange) -> LinkTime {
    let mut time = LinkTime::default();
    for Leg { collective, bytes, size, stride } in legs(cluster, mesh, exchange) {
        time += among(cluster, collective, bytes, size, stride);
    }
    time
}

/// One collective of an exchange, among ranks at distances of `stride`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Leg {
    pub(super) collective: Collective,
    pub(super) bytes: f64,
    pub(super) size: usize,
    pub(super) stride: usize,
}

/// Returns the collectives that an exchange consists of. It is one, except for tensor-parallel experts whose group dispatches each token
/// once and then gathers it.
pub(super) fn legs(
    cluster: &Cluster,
    mesh: &Mesh,
    &Exchange { peers, collective, bytes, .. }: &Exchange,
) -> impl Iterator<Item = Leg> {
    let experts = mesh.experts();
    let (ranks, parts) = (experts.degree(ExpertAxis::Expert), experts.degree(ExpertAxis::ExpertTensor));
    let is_gathered = peers == Peers::Expert && parts > 1 && cluster.software.traits().gathers_for_experts;
    let bytes = bytes as f64;
    let (size, stride) = group_of(mesh, peers);
    // A reduce-scatter takes as long as an all-gather.
    let [sent, gathered] = if is_gathered {
        let sent = Leg { collective, bytes: bytes / parts as f64, size: ranks, stride: parts };
        [Some(sent), Some(Leg { collective: Collective::AllGather, bytes, size: parts, stride: 1 })]
    } else {
        [Some(Leg { collective, bytes, size, stride }), None]
    };
    [sent, gathered].into_iter().flatten().filter(|leg| leg.size > 1)
}

/// Returns the size and the stride of the group that an exchange runs in.
pub(super) fn group_of(mesh: &Mesh, peers: Peers) -> (usize, usize) {
    let (view, experts) = (mesh.ranks(), mesh.experts());
    let (tensor, context) = (view.degree(Axis::Tensor), view.degree(Axis::Context));
    match peers {
        Peers::Tensor => (tensor, 1),
        Peers::TensorLine => (tensor.isqrt(), tensor.isqrt()),
        Peers::Context => (context, tensor),
        Peers::TensorAndContext => (context * tensor, 1),
        Peers::Replicas => (view.degree(Axis::Replicate) * view.degree(Axis::Shard), context * tensor),
        Peers::Expert => (experts.degree(ExpertAxis::Expert) * experts.degree(ExpertAxis::ExpertTensor), 1),
    }
}

/// Returns the time of a collective of `size` ranks at distances of `stride`.
pub(super) fn among(
    cluster: &Cluster,
    collective: Collective,
    bytes: f64,
    size: usize,
    stride: usize,
) -> LinkTime {
    if size < 2 || bytes <= 0.0 {
        return LinkTime::default();
    }
    cluster.time(collective, bytes as u64, &cluster.placement(size, stride))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Software;
    use lockstep_plan::Degrees;
    use lockstep_plan::work::{Pass, Task, TaskKind};

    fn rows(bytes: u64, is_for_host: bool) -> Exchange {
        let (peers, collective) = (Peers::Expert, Collective::AllToAll);
        Exchange { peers, collective, bytes, is_overlapped: false, is_for_host }
    }

    /// Each node has one of eight experts, whose matrices four ranks shard.
    #[test]
    fn ranks_that_share_an_expert_gather_its_tokens_in_megatron_core() {
        let degrees = Degrees { shard: 8, tensor: 4, expert: 8, expert_tensor: 4, ..Degrees::default() };
        let mesh = Mesh::new(degrees).unwrap_or_else(|error| panic!("{error}"));
        let mut cluster = Cluster::preset("dgx-h100x4").unwrap_or_else(|error| panic!("{error}"));
        let exchange = rows(1 << 30, false);
        let whole = (1_u64 << 30) as f64;
        let to_each = Leg { collective: Collective::AllToAll, bytes: whole, size: 32, stride: 1 };
        assert_eq!(legs(&cluster, &mesh, &exchange).collect::<Vec<Leg>>(), [to_each]);
        let sent_to_each = exchange_time(&cluster, &mesh, &exchange).seconds;
        cluster.software = Software::MegatronCore;
        let once = Leg { collective: Collective::AllToAll, bytes: whole / 4.0, size: 8, stride: 4 };
        let gathered = Leg { collective: Collective::AllGather, bytes: whole, size: 4, stride: 1 };
        assert_eq!(legs(&cluster, &mesh, &exchange).collect::<Vec<Leg>>(), [once, gathered]);
        let sent_once = exchange_time(&cluster, &mesh, &exchange).seconds;
        assert!(sent_once < 0.6 * sent_to_each, "{sent_once} instead of {sent_to_each}");
    }

    #[test]
    fn a_device_waits_for_a_host_that_waits_for_counts_and_a_core_does_not() {
        let waited = |cluster: Cluster, is_for_host: bool| {
            let device = Cow::Borrowed(&cluster.nodes[0].device);
            let worker = KernelTimes::new(device, cluster.software.traits(), DType::BF16);
            let kind = TaskKind::Exchange(rows(8, is_for_host));
            let task = Task { name: "dispatch", pass: Pass::Forward, kind, bytes: 0, vector_flops: 0 };
            let link = LinkTime { seconds: 1e-5, ..LinkTime::default() };
            PassCost::of(&worker.timed([&task], |_| link)).exposed_s
        };
        let preset = || Cluster::preset("dgx-h100").unwrap_or_else(|error| panic!("{error}"));
        let wait_s = preset().software.traits().counts_wait_s;
        assert!(wait_s > 0.0);
        assert_eq!(waited(preset(), true), 1e-5 + wait_s);
        assert_eq!(waited(preset(), false), 1e-5);
        assert_eq!(waited(Cluster::local(2, 1 << 30), true), 1e-5);
    }
}

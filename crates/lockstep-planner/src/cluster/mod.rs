//! The machines that a plan is for: devices, what joins them, and what they cost.
//!
//! A cluster is nodes of one or several kinds, each with a number of devices, and levels of links from the innermost (NVLink, shared
//! memory) to the outermost (InfiniBand, Ethernet). Ranks are numbered node by node, device by device, so that the fastest axis of a
//! [`Mesh`](lockstep_plan::Mesh) stays inside a node.
//!
//! A cluster is read from a TOML file ([`Cluster::parse`]), or is one of the [`PRESETS`], which are such files. `docs/clusters.md`
//! says what may stand in one.

use std::borrow::Cow;
use std::collections::BTreeMap;

use lockstep_plan::DType;

mod collective;
mod preset;
mod problem;
mod read;
mod section;
mod write;

pub use collective::{LinkTime, Placement};
pub use preset::{DEVICES, LINKS, PRESETS};
pub use problem::{ClusterError, ClusterProblem};

/// Most levels of links.
pub const MAX_LEVELS: usize = 4;
/// No share of a peak is above this: peaks are measured as well.
const MOST_OF_A_PEAK: f64 = 1.2;

/// Machines.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// What it is called.
    pub name: String,
    /// Kinds of nodes, in the order of their ranks.
    pub nodes: Vec<NodeKind>,
    /// Levels of links, from the innermost to the outermost; the last joins all. At most [`MAX_LEVELS`]; none where there is one
    /// device.
    pub links: Vec<Link>,
    /// What the software does that its published or measured figures come from.
    pub software: Software,
    /// 10⁹ bytes a second that all nodes together write to the storage that outlives them, where checkpoints go; `None` if unknown.
    pub storage_gb_per_s: Option<f64>,
}

/// 10⁹ bytes a second of each node that storage is built for if a cluster does not say it: 20 for 32 nodes (NVIDIA DGX SuperPOD H100 reference
/// architecture, standard storage performance, writes).
const STORAGE_GB_PER_S_OF_NODE: f64 = 20.0 / 32.0;
/// The same of one node alone, at most.
const STORAGE_GB_PER_S_OF_LONE_NODE: f64 = 2.0;

/// Nodes of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeKind {
    /// How many there are.
    pub count: usize,
    /// Devices in each, with a rank each.
    pub devices: usize,
    /// Which. Where it is a core of the host, this is what one comes to while all of them are at work.
    pub device: Device,
    /// What a rank is that has all cores of the node to itself, where devices are cores and that was measured.
    pub alone: Option<Device>,
    /// Memory of the node, beside that of its devices. Where `Device::is_host` says that ranks live in it, they share it.
    pub host_memory_bytes: u64,
    /// 10⁹ bytes a second between a device and host memory, each way.
    pub host_gb_per_s: f64,
    /// 10⁹ bytes a second of host memory, which the transfers of all devices share, reads and writes together; `None` if unknown.
    pub host_memory_gb_per_s: Option<f64>,
    /// 10⁹ bytes a second of the node's disk, which all its ranks share.
    pub disk_gb_per_s: f64,
    /// Bytes of it.
    pub disk_bytes: u64,
    /// Price of a node in dollars an hour; `None` if unknown.
    pub price_per_hour: Option<f64>,
    /// Source and date of that price.
    pub price_source: Option<String>,
    /// Electric power of a node under load, in kilowatts, without cooling; `None` if unknown.
    pub kilowatts: Option<f64>,
    /// Hours until a node fails, on average.
    pub hours_between_failures: f64,
}

/// What computes: an accelerator, or a share of the cores of a host (`is_host`), usually one.
///
/// Ranks of a host share its memory: `memory_bytes` is all of it, `memory_gb_per_s` what a share of the cores gets while the others
/// stream as well, and all rates are those of a share while the others are at work. A plan with fewer ranks than shares gives each
/// several; [`NodeKind::device_of`] says what they come to.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// 10¹² operations a second of matrix products, by type (f32, bf16, f16), without sparsity.
    pub peak_tflops: BTreeMap<DType, f64>,
    /// Bytes of its memory that a rank may use. Of a CPU (`is_host`) the node's memory is meant, which its ranks share.
    pub memory_bytes: u64,
    /// 10⁹ bytes a second.
    pub memory_gb_per_s: f64,
    /// Whether it is a share of the host itself: a CPU.
    pub is_host: bool,
    /// How near work comes to these.
    pub efficiency: Efficiency,
}

/// How near work comes to a device's peaks. One set for all shapes: what a shape costs follows from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Efficiency {
    /// Share of the peak that a large product comes to.
    pub product: f64,
    /// Rows, inner elements and columns with which a product comes to half of that: its rate is
    /// `product * r/(r+half) * i/(i+half) * c/(c+half)`.
    pub half_shape: [f64; 3],
    /// Rows and columns of the part of a product that one of `units` makes at a time: a product takes whole waves. None where
    /// cores share rows finely.
    pub tile: Option<Tile>,
    /// Share of the peak that attention's products come to where scores are never written.
    pub attention: f64,
    /// Share of the peak that they come to where scores are.
    pub scores: f64,
    /// Share of the bandwidth of memory that passes over it come to.
    pub stream: f64,
    /// 10⁹ bytes a second at which a product fetches weights and stores results that no cache has, beside its computing; 0 where
    /// computing hides that.
    pub cold_gb_per_s: f64,
    /// Microseconds that starting a task takes.
    pub launch_us: f64,
    /// Kinds of tasks that were measured by themselves, by name and pass (`RMSNorm forward`), with the type behind it where types differ
    /// (`RMSNorm forward bf16`): 10⁹ bytes a second, and 10⁹ operations a second of attention. `update` is that of the weights, of 30
    /// bytes for each.
    pub measured: BTreeMap<String, f64>,
}

/// The grid of a device's units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tile {
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub columns: u64,
    /// Units that work at once.
    pub units: u64,
}

/// A level of links.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// What it is called.
    pub name: String,
    /// Which devices it joins.
    pub joins: Joins,
    /// 10⁹ bytes a second that a device can send and receive at once; of a torus, over one of its wires.
    pub gb_per_s: f64,
    /// Share of it that collectives and messages come to.
    pub efficiency: f64,
    /// Share of it at which switches add up what devices send them, in bytes of a rank's operand; none where they do not. Of a host, at
    /// which its memory does.
    pub in_switch: Option<f64>,
    /// Microseconds of a step of a collective.
    pub latency_us: f64,
    /// Microseconds of a collective beside its steps.
    pub start_us: f64,
    /// How much of the time that pieces of a message take to fill the path is seen: a collective whose steps take `l` and whose
    /// bytes take `b` takes `l + b + fill * sqrt(l * b)`. 2 with pieces of the best size, one after another; 0 if bytes wait for
    /// nothing.
    pub fill: f64,
    /// Dimensions of the torus that the wires make, each device with two wires in each; none where a switch joins all.
    pub torus: Option<usize>,
}

/// Which devices a level of links joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Joins {
    /// Those of a node.
    Node,
    /// So many in the order of their ranks, of several nodes.
    Devices(usize),
    /// All.
    All,
}

/// What the software does, where systems differ. The constants of a device are the same under each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Software {
    /// What Lockstep's engine does.
    Lockstep,
    /// Megatron-LM of 2021 and 2022: scores are written, gradients in f32 summed after the backward.
    Megatron,
    /// Megatron Core, of Megatron-LM and NeMo from 2023 on: as Lockstep, but for how tokens come to experts whose matrices are shared.
    MegatronCore,
    /// PyTorch FSDP with fused attention, its other operations one by one: weights are gathered and gradients summed beside the passes.
    Fsdp,
    /// The same as Mosaic's llm-foundry had it in 2023: with attention in Triton, whose backward was slow.
    LlmFoundry,
    /// DeepSpeed's ZeRO: gradients in 16 bits.
    DeepSpeed,
}

impl Software {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Lockstep, Self::Megatron, Self::MegatronCore, Self::Fsdp, Self::LlmFoundry, Self::DeepSpeed];

    /// The name in a cluster file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lockstep => "lockstep",
            Self::Megatron => "megatron",
            Self::MegatronCore => "megatron-core",
            Self::Fsdp => "fsdp",
            Self::LlmFoundry => "llm-foundry",
            Self::DeepSpeed => "deepspeed",
        }
    }
}

impl Default for Efficiency {
    /// Guesses for a device of which nothing is known but its peaks: what accelerators of the last years come to with large
    /// shapes.
    fn default() -> Self {
        Self {
            product: 0.82,
            half_shape: [32.0, 128.0, 32.0],
            tile: None,
            attention: 0.5,
            scores: 0.3,
            stream: 0.8,
            cold_gb_per_s: 0.0,
            launch_us: 4.0,
            measured: BTreeMap::new(),
        }
    }
}

impl Link {
    /// All exchanges take `factor` times as long.
    pub fn slow_down(&mut self, factor: f64) {
        self.gb_per_s /= factor;
        self.latency_us *= factor;
        self.start_us *= factor;
    }
}

impl Cluster {
    /// How many of so many ranks share a node of a kind.
    pub fn ranks_of_a_node(&self, node: &NodeKind, ranks: usize) -> usize {
        ranks.div_ceil(self.node_count().max(1)).clamp(1, node.devices.max(1))
    }

    /// 10⁹ bytes a second at which all nodes together write checkpoints to storage that outlives them; `None` where ranks are CPUs, whose
    /// checkpoints go to the disks of their nodes unless the cluster names such storage.
    pub fn checkpoint_gb_per_s(&self) -> Option<f64> {
        let usual = (STORAGE_GB_PER_S_OF_NODE * self.node_count() as f64).max(STORAGE_GB_PER_S_OF_LONE_NODE);
        let is_host = self.nodes.iter().any(|node| node.device.is_host);
        self.storage_gb_per_s.or((!is_host).then_some(usual))
    }

    /// Devices of all nodes: at least one, and no more than fit a `u32`.
    pub fn devices(&self) -> usize {
        self.nodes.iter().map(|kind| kind.count * kind.devices).sum()
    }

    /// Nodes of all kinds.
    pub fn node_count(&self) -> usize {
        self.nodes.iter().map(|kind| kind.count).sum()
    }

    /// The kind of the node that a rank lives on, and the number of that node; none beyond the last device.
    pub fn node_of(&self, rank: usize) -> Option<(&NodeKind, usize)> {
        let (mut first_rank, mut first_node) = (0, 0);
        for kind in &self.nodes {
            let within = rank - first_rank;
            if within < kind.count * kind.devices {
                return Some((kind, first_node + within / kind.devices));
            }
            first_rank += kind.count * kind.devices;
            first_node += kind.count;
        }
        None
    }
}

impl NodeKind {
    /// The same node of whose cores only so many are there, or which has more ranks than cores: these get less than a core each.
    #[must_use]
    pub fn with_cores(&self, cores: usize, ranks: usize) -> Self {
        let (cores, ranks) = (cores.max(1), ranks.max(1));
        let mut node = Self { devices: cores.max(ranks), ..self.clone() };
        if ranks > cores {
            node.device = self.device.times(cores as f64 / ranks as f64);
        }
        if node.devices != self.devices || ranks > cores {
            node.alone = None;
        }
        node
    }

    /// What each of `ranks` ranks on such a node computes with, if they share out its devices. An accelerator has one rank. Cores
    /// are shared out evenly: with a rank on each it is `device`; a rank that has all is `alone`, or as many times as fast as
    /// there are cores where that was not measured; in between a rank is as much faster as its cores are more.
    pub fn device_of(&self, ranks: usize) -> Cow<'_, Device> {
        let cores = self.devices / ranks.max(1);
        if !self.device.is_host || cores <= 1 {
            return Cow::Borrowed(&self.device);
        }
        match &self.alone {
            Some(alone) if cores == self.devices => Cow::Borrowed(alone),
            Some(alone) => {
                // Rates go with a power of the cores, so that both ends are met.
                let part = libm::log(cores as f64) / libm::log(self.devices as f64);
                Cow::Owned(self.device.between(alone, part))
            }
            None => Cow::Owned(self.device.times(cores as f64)),
        }
    }
}

impl Device {
    /// The peak of products of a type, in operations a second; none of a type that it does not multiply.
    pub fn peak_flops(&self, dtype: DType) -> Option<f64> {
        self.peak_tflops.get(&dtype).map(|tflops| tflops * 1e12)
    }

    /// Work in each type takes so many times as long as it did.
    pub fn slow_down(&mut self, factor: impl Fn(DType) -> f64) {
        let plain = factor(DType::F32);
        let Efficiency { product, attention, scores, stream, cold_gb_per_s, launch_us, measured, .. } =
            &mut self.efficiency;
        for share in [product, attention, scores, stream] {
            *share = (*share / plain).min(MOST_OF_A_PEAK);
        }
        *cold_gb_per_s /= plain;
        *launch_us *= plain;
        let others = || self.peak_tflops.keys().copied().filter(|dtype| *dtype != DType::F32);
        for (name, rate) in measured {
            let own = others().find(|dtype| name.ends_with(&format!(" {dtype}")));
            *rate /= own.map_or(plain, &factor);
        }
        // Shares are of all types: what a type has of its own is its peak.
        for (dtype, peak) in self.peak_tflops.iter_mut().filter(|(dtype, _)| **dtype != DType::F32) {
            *peak *= plain / factor(*dtype);
        }
    }

    /// So many of them at once.
    fn times(&self, factor: f64) -> Self {
        let mut device = self.clone();
        device.peak_tflops.values_mut().for_each(|rate| *rate *= factor);
        device.memory_gb_per_s *= factor;
        device.efficiency.measured.values_mut().for_each(|rate| *rate *= factor);
        device.efficiency.cold_gb_per_s *= factor;
        device
    }

    /// Between this (`part` = 0) and `other` (1), geometrically.
    fn between(&self, other: &Self, part: f64) -> Self {
        let mean = |a: f64, b: f64| a * libm::pow(b / a, part);
        let mut device = self.clone();
        for (dtype, rate) in &mut device.peak_tflops {
            *rate = other.peak_tflops.get(dtype).map_or(*rate, |&other| mean(*rate, other));
        }
        device.memory_gb_per_s = mean(self.memory_gb_per_s, other.memory_gb_per_s);
        let (own, others) = (&mut device.efficiency, &other.efficiency);
        for (name, rate) in &mut own.measured {
            *rate = others.measured.get(name).map_or(*rate, |&other| mean(*rate, other));
        }
        for (own, other) in [
            (&mut own.product, others.product),
            (&mut own.attention, others.attention),
            (&mut own.scores, others.scores),
            (&mut own.stream, others.stream),
        ] {
            *own = mean(*own, other);
        }
        for (own, other) in own.half_shape.iter_mut().zip(others.half_shape) {
            *own += part * (other - *own);
        }
        own.cold_gb_per_s += part * (others.cold_gb_per_s - own.cold_gb_per_s);
        own.launch_us += part * (others.launch_us - own.launch_us);
        device
    }
}

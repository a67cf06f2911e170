//! Description of the machines that a plan is for: devices, links, and prices.
//!
//! A cluster has nodes of one or several kinds, each with a number of devices. Its levels of links go from the innermost (NVLink, shared
//! memory) to the outermost (InfiniBand, Ethernet). Ranks are numbered node by node and device by device, so the fastest axis of a
//! [`Mesh`](lockstep_plan::Mesh) stays inside a node.
//!
//! A cluster is read from a TOML file ([`Cluster::parse`]) or is one of the [`PRESETS`], which are such files. `docs/clusters.md`
//! documents the keys.

use std::borrow::Cow;
use std::collections::BTreeMap;

use lockstep_plan::DType;

mod collective;
mod field;
mod preset;
mod problem;
mod read;
mod section;
mod write;

pub use collective::{GroupPlacement, LinkTime};
pub use preset::PRESETS;
pub(crate) use preset::with_nodes;
pub use problem::{ClusterError, ClusterProblem};
pub use read::{DEVICES, LINKS};

pub use crate::system::Software;

/// Maximum number of levels of links.
pub const MAX_LEVELS: usize = 4;
/// Upper limit of an efficiency factor; above 1, since measured peaks may exceed the vendor's.
const MOST_OF_A_PEAK: f64 = 1.2;

/// A cluster of machines.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// Name of the cluster.
    pub name: String,
    /// Kinds of nodes, in the order of their ranks.
    pub nodes: Vec<NodeKind>,
    /// Levels of links, innermost first; the last joins all devices. At most [`MAX_LEVELS`]; empty for a single device.
    pub links: Vec<Link>,
    /// Training system that runs on the cluster; predictions follow its implementation choices.
    pub software: Software,
    /// Write bandwidth of shared checkpoint storage, of all nodes together, in 10⁹ bytes per second; `None` if unknown.
    pub storage_gb_per_s: Option<f64>,
}

/// Default write bandwidth of checkpoint storage per node, in 10⁹ bytes per second: 20 for 32 nodes (NVIDIA DGX SuperPOD H100 reference
/// architecture, standard storage performance, writes).
const STORAGE_GB_PER_S_OF_NODE: f64 = 20.0 / 32.0;
/// Minimum of that default for the whole cluster.
const STORAGE_GB_PER_S_OF_LONE_NODE: f64 = 2.0;

/// A kind of node, and how many of them there are.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeKind {
    /// Number of nodes of this kind.
    pub count: usize,
    /// Devices per node, with one rank each.
    pub devices: usize,
    /// Device of each rank. If it is a CPU core, its rates hold while all cores are busy.
    pub device: Device,
    /// Measured device of a rank that has all cores of the node to itself; `None` for accelerators, or if not measured.
    pub alone: Option<Device>,
    /// Host memory of a node in bytes, excluding device memory. CPU ranks (`Device::is_host`) share it.
    pub host_memory_bytes: u64,
    /// Bandwidth between a device and host memory in each direction, in 10⁹ bytes per second.
    pub host_gb_per_s: f64,
    /// Bandwidth of host memory for transfers of all devices together, reads and writes, in 10⁹ bytes per second; `None` if unknown.
    pub host_memory_gb_per_s: Option<f64>,
    /// Bandwidth of the node's disk, shared by its ranks, in 10⁹ bytes per second.
    pub disk_gb_per_s: f64,
    /// Capacity of the node's disk in bytes.
    pub disk_bytes: u64,
    /// Price of a node in dollars an hour; `None` if unknown.
    pub price_per_hour: Option<f64>,
    /// Source and date of the price.
    pub price_source: Option<String>,
    /// Electric power of a node under load, in kilowatts, without cooling; `None` if unknown.
    pub kilowatts: Option<f64>,
    /// Mean time between failures of a node, in hours.
    pub hours_between_failures: f64,
}

/// A device that computes for a rank: an accelerator, or a share of a host's cores (`is_host`), usually one core.
///
/// Ranks of a host share its memory. `memory_bytes` is all of it; `memory_gb_per_s` is the bandwidth of one share while the others stream
/// as well, and all other rates also hold while the others are busy. A plan with fewer ranks than shares gives each rank several;
/// [`NodeKind::device_of`] computes their rates.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Peak rate of GEMMs without sparsity by dtype (f32, bf16, f16), in 10¹² operations per second.
    pub peak_tflops: BTreeMap<DType, f64>,
    /// Device memory that a rank may use, in bytes. For a CPU (`is_host`), the node's memory, which its ranks share.
    pub memory_bytes: u64,
    /// Bandwidth of device memory in 10⁹ bytes per second.
    pub memory_gb_per_s: f64,
    /// True if the device is a share of the host: a CPU.
    pub is_host: bool,
    /// Efficiency factors of its kernels.
    pub efficiency: Efficiency,
}

/// Efficiency factors of a device's kernels relative to its peaks. One set holds for all shapes; the cost of a shape follows from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Efficiency {
    /// Fraction of the peak that a large GEMM achieves.
    pub product: f64,
    /// Rows, inner elements and columns, at each of which the rate of a GEMM halves. With `half` for each side, it is
    /// `product * r/(r+half) * i/(i+half) * c/(c+half)`.
    pub half_shape: [f64; 3],
    /// Output tile of a GEMM on one of `units` compute units, so that a GEMM takes whole waves; `None` if cores split rows finely.
    pub tile: Option<Tile>,
    /// Fraction of the peak that fused attention achieves, which never writes scores.
    pub attention: f64,
    /// Fraction of the peak that unfused attention achieves, which writes scores.
    pub scores: f64,
    /// Fraction of the memory bandwidth that streaming kernels achieve.
    pub stream: f64,
    /// Bandwidth in 10⁹ bytes per second at which a GEMM reads weights and writes results that are in no cache, in addition to its
    /// compute; 0 if compute hides it.
    pub cold_gb_per_s: f64,
    /// Launch time of a task in microseconds.
    pub launch_us: f64,
    /// Measured rates of single kinds of tasks, by name and pass (`RMSNorm forward`), followed by the dtype if dtypes differ (`RMSNorm
    /// forward bf16`). They are in 10⁹ bytes per second, and for attention in 10⁹ operations per second. `update` is the optimizer step,
    /// at 30 bytes per weight.
    pub measured: BTreeMap<String, f64>,
}

/// Tile of a GEMM and the number of compute units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tile {
    /// Rows of the output tile of a matrix product that one compute unit computes at a time.
    pub rows: u64,
    /// Columns of that tile.
    pub columns: u64,
    /// Compute units that work in parallel.
    pub units: u64,
}

/// A level of links.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// Name of the level.
    pub name: String,
    /// Set of devices that the level joins.
    pub joins: Joins,
    /// Bandwidth of a device in each direction, both at once, in 10⁹ bytes per second; in a torus, of one of its wires.
    pub gb_per_s: f64,
    /// Fraction of the bandwidth that collectives and messages achieve.
    pub efficiency: f64,
    /// Fraction of the bandwidth at which switches reduce, relative to the bytes of a rank's operand (NVLink SHARP); `None` if they do
    /// not. For a host, the fraction at which ranks reduce in its memory.
    pub in_switch: Option<f64>,
    /// Latency of a step of a collective in microseconds.
    pub latency_us: f64,
    /// Start-up time of a collective in microseconds, in addition to its steps.
    pub start_us: f64,
    /// Visible part of the time to fill the path with pieces of a message. A collective whose steps take `l` and whose bytes take `b`
    /// takes `l + b + fill * sqrt(l * b)`: 2 for pieces of the best size one after another, 0 if bytes never wait.
    pub fill: f64,
    /// Dimensions of the torus, in each of which a device has two wires; `None` for a switch.
    pub torus: Option<usize>,
}

/// Set of devices that a level of links joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Joins {
    /// Devices of one node.
    Node,
    /// Groups of this many consecutive ranks, across nodes.
    Devices(usize),
    /// All devices of the cluster.
    All,
}

impl Default for Efficiency {
    /// Estimates for a device of which only the peaks are known: typical of recent accelerators with large shapes.
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
    /// Makes all communication over the link take `factor` times as long.
    pub fn slow_down(&mut self, factor: f64) {
        self.gb_per_s /= factor;
        self.latency_us *= factor;
        self.start_us *= factor;
    }
}

impl Cluster {
    /// Returns how many of `ranks` ranks are on one node of a kind.
    pub fn ranks_of_a_node(&self, node: &NodeKind, ranks: usize) -> usize {
        ranks.div_ceil(self.node_count().max(1)).clamp(1, node.devices.max(1))
    }

    /// Returns the write bandwidth of all nodes to shared checkpoint storage, in 10⁹ bytes per second. `None` if ranks are CPUs and the
    /// cluster names no such storage: checkpoints then go to the nodes' disks.
    pub fn checkpoint_gb_per_s(&self) -> Option<f64> {
        let usual = (STORAGE_GB_PER_S_OF_NODE * self.node_count() as f64).max(STORAGE_GB_PER_S_OF_LONE_NODE);
        self.storage_gb_per_s.or((!self.is_host()).then_some(usual))
    }

    /// Returns the number of devices of all nodes, from 1 to `u32::MAX`.
    pub fn devices(&self) -> usize {
        self.nodes.iter().map(|kind| kind.count * kind.devices).sum()
    }

    /// Returns true if ranks live in host memory and compute with CPU cores.
    pub fn is_host(&self) -> bool {
        self.nodes.iter().any(|kind| kind.device.is_host)
    }

    /// Returns the number of devices of the smallest node.
    pub(crate) fn devices_of_a_node(&self) -> usize {
        self.nodes.iter().map(|kind| kind.devices).min().unwrap_or(1)
    }

    /// Returns the number of nodes of all kinds.
    pub fn node_count(&self) -> usize {
        self.nodes.iter().map(|kind| kind.count).sum()
    }

    /// Returns the kind and the index of the node of a rank; `None` beyond the last device.
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
    /// Returns the node with another number of cores. If there are more ranks than cores, each rank gets a fraction of a core.
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

    /// Returns the device of each of `ranks` ranks that split such a node. An accelerator always has one rank. Cores are split evenly:
    /// one per rank is `device`, and all for one rank is `alone`, or if that was not measured, `device` times the number of cores. In
    /// between, the rates are interpolated.
    pub fn device_of(&self, ranks: usize) -> Cow<'_, Device> {
        let cores = self.devices / ranks.max(1);
        if !self.device.is_host || cores <= 1 {
            return Cow::Borrowed(&self.device);
        }
        match &self.alone {
            Some(alone) if cores == self.devices => Cow::Borrowed(alone),
            Some(alone) => {
                // Rates grow with a power of the cores, so that both ends are met.
                let part = libm::log(cores as f64) / libm::log(self.devices as f64);
                Cow::Owned(self.device.between(alone, part))
            }
            None => Cow::Owned(self.device.times(cores as f64)),
        }
    }
}

impl Device {
    /// Returns the peak rate of GEMMs of a dtype in operations per second; `None` if the device has none.
    pub fn peak_flops(&self, dtype: DType) -> Option<f64> {
        self.peak_tflops.get(&dtype).map(|tflops| tflops * 1e12)
    }

    /// Makes the work in each dtype take `factor(dtype)` times as long.
    pub fn slow_down(&mut self, factor: impl Fn(DType) -> f64) {
        let plain = factor(DType::F32);
        let Efficiency { product, attention, scores, stream, cold_gb_per_s, launch_us, measured, .. } =
            &mut self.efficiency;
        // An efficiency has an upper limit. What is faster still has a higher peak than the file or the guess said.
        let higher_peak = (product.max(*attention).max(*scores) / plain / MOST_OF_A_PEAK).max(1.0);
        for efficiency in [product, attention, scores] {
            *efficiency = (*efficiency / (plain * higher_peak)).min(MOST_OF_A_PEAK);
        }
        let more_bandwidth = (*stream / plain / MOST_OF_A_PEAK).max(1.0);
        *stream = (*stream / (plain * more_bandwidth)).min(MOST_OF_A_PEAK);
        self.memory_gb_per_s *= more_bandwidth;
        self.peak_tflops.values_mut().for_each(|peak| *peak *= higher_peak);
        *cold_gb_per_s /= plain;
        *launch_us *= plain;
        let others = || self.peak_tflops.keys().copied().filter(|dtype| *dtype != DType::F32);
        for (name, rate) in measured {
            let own = others().find(|dtype| name.ends_with(&format!(" {dtype}")));
            *rate /= own.map_or(plain, &factor);
        }
        // Efficiency factors hold for all dtypes, so a dtype's own factor goes into its peak.
        for (dtype, peak) in self.peak_tflops.iter_mut().filter(|(dtype, _)| **dtype != DType::F32) {
            *peak *= plain / factor(*dtype);
        }
    }

    /// Returns the device with all rates multiplied by `factor`.
    fn times(&self, factor: f64) -> Self {
        let mut device = self.clone();
        device.peak_tflops.values_mut().for_each(|rate| *rate *= factor);
        device.memory_gb_per_s *= factor;
        device.efficiency.measured.values_mut().for_each(|rate| *rate *= factor);
        device.efficiency.cold_gb_per_s *= factor;
        device
    }

    /// Interpolates between this device (`part` = 0) and `other` (1), rates geometrically.
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

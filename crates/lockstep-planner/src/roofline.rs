//! Rooflines: the work of a micro-batch against the peak and the memory bandwidth of the devices, products by their shapes.

use lockstep_config::human;
use lockstep_plan::StepLayout;
use lockstep_plan::work::{Pass, Product, Task, TaskKind};

use crate::predict::{KernelTimes, device, kinds_of};
use crate::recordings::Recording;
use crate::{Evaluated, Planner};

/// Tasks of a micro-batch that are drawn as one point: products of one shape in one pass, or operations of one name.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Name of the kind of operation.
    pub name: &'static str,
    /// The pass that the tasks belong to.
    pub pass: Pass,
    /// Shape of the product; `None` for other operations.
    pub shape: Option<Product>,
    /// Floating-point operations of a micro-batch.
    pub flops: f64,
    /// Memory traffic of a micro-batch, in bytes.
    pub bytes: f64,
    /// Predicted seconds of a micro-batch.
    pub seconds: f64,
}

impl Point {
    /// Returns the arithmetic intensity, in FLOP per byte of memory traffic.
    pub fn intensity(&self) -> f64 {
        self.flops / self.bytes.max(1.0)
    }

    /// Returns the achieved rate, in FLOP/s.
    pub fn rate(&self) -> f64 {
        self.flops / self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// The roofline of a rank on one kind of node: the limits of its device, and the work of a micro-batch under them.
#[derive(Debug, Clone, PartialEq)]
pub struct Roofline {
    /// Name of the device; on a host with fewer ranks than cores also the number of cores of a rank.
    pub device: String,
    /// Pipeline ranks that run on such nodes.
    pub pipeline_ranks: Vec<usize>,
    /// Peak rate, in FLOP/s.
    pub peak: f64,
    /// Memory bandwidth, in bytes per second.
    pub bandwidth: f64,
    /// Tasks of the units on these ranks, longest first.
    pub points: Vec<Point>,
}

impl Roofline {
    /// Returns the highest rate that a point could reach, in FLOP/s.
    pub fn roof(&self, point: &Point) -> f64 {
        self.peak.min(point.intensity() * self.bandwidth)
    }

    /// Returns true if a point is limited by memory bandwidth rather than by the peak.
    pub fn is_bound_by_memory(&self, point: &Point) -> bool {
        point.intensity() * self.bandwidth < self.peak
    }

    /// Returns the fraction of its limit (peak or bandwidth, whichever is lower) that a point achieves.
    pub fn share_of_roof(&self, point: &Point) -> f64 {
        let seconds = (point.flops / self.peak).max(point.bytes / self.bandwidth);
        seconds / point.seconds.max(f64::MIN_POSITIVE)
    }

    /// Returns the seconds of all points together.
    pub fn seconds(&self) -> f64 {
        self.points.iter().map(|point| point.seconds).sum()
    }
}

impl Planner {
    /// Returns the roofline of each kind of node that runs any ranks of a plan.
    pub(crate) fn rooflines(
        &self,
        found: &Evaluated,
        layout: &StepLayout,
        recording: &Recording,
    ) -> Vec<Roofline> {
        let kinds = 0..self.cluster.nodes.len();
        kinds.filter_map(|kind| self.roofline(found, layout, recording, kind)).collect()
    }

    fn roofline(
        &self,
        found: &Evaluated,
        layout: &StepLayout,
        recording: &Recording,
        kind: usize,
    ) -> Option<Roofline> {
        let is_here = |rank: &usize| kinds_of(&self.cluster, &layout.mesh, *rank).any(|of| of == kind);
        let pipeline_ranks: Vec<usize> = (0..layout.pipeline_ranks()).filter(is_here).collect();
        if pipeline_ranks.is_empty() {
            return None;
        }
        let work = &recording.work;
        let device = device(&self.cluster, &layout.mesh, kind);
        let worker = KernelTimes::new(device, self.traits(), work.dtype);
        let stages = pipeline_ranks.iter().flat_map(|rank| layout.stages_of(*rank));
        let mut points: Vec<Point> = Vec::new();
        for unit in stages.flat_map(|stage| layout.stages[stage].clone()) {
            let unit = work.unit(unit);
            for task in unit.forward.iter().chain(&unit.backward) {
                let Some(point) = point_of(task, worker.seconds(task)) else { continue };
                let is_alike = |other: &&mut Point| {
                    (other.name, other.pass, other.shape) == (point.name, point.pass, point.shape)
                };
                match points.iter_mut().find(is_alike) {
                    Some(sum) => {
                        sum.flops += point.flops;
                        sum.bytes += point.bytes;
                        sum.seconds += point.seconds;
                    }
                    None => points.push(point),
                }
            }
        }
        points.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let (node, device) = (&self.cluster.nodes[kind], &worker.device);
        let cores = node.devices / self.cluster.ranks_of_a_node(node, found.devices);
        Some(Roofline {
            device: if node.device.is_host && cores > 1 {
                format!("{}, {}", device.name, human::plural(cores, "core"))
            } else {
                device.name.clone()
            },
            pipeline_ranks,
            peak: device.peak_flops(work.dtype).unwrap_or(found.peak_tflops * 1e12),
            bandwidth: device.memory_gb_per_s * 1e9,
            points,
        })
    }
}

/// Returns the point of a single task; `None` for a collective.
fn point_of(task: &Task, seconds: f64) -> Option<Point> {
    let vector = task.vector_flops as f64;
    let (shape, flops) = match task.kind {
        TaskKind::Product(product) => (Some(product), product.flops() as f64 + vector),
        TaskKind::Attention(attention) => (None, attention.flops as f64 + vector),
        TaskKind::Stream => (None, vector),
        TaskKind::Exchange(_) => return None,
    };
    Some(Point { name: task.name, pass: task.pass, shape, flops, bytes: task.bytes as f64, seconds })
}

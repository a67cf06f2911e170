//! Rooflines: the work of a micro-batch beside the limits of the devices, each product by its shape.

use lockstep_config::human;
use lockstep_plan::StepLayout;
use lockstep_plan::work::{Labor, Pass, Product, Task};

use crate::predict::{Worker, device, kinds_of};
use crate::recordings::Recording;
use crate::{Evaluated, Planner};

/// Tasks that are alike: products of a shape in a pass, or what else has a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// The kind of operation.
    pub name: &'static str,
    /// The pass that it belongs to.
    pub pass: Pass,
    /// Shape of a product.
    pub shape: Option<Product>,
    /// Floating-point operations of a micro-batch.
    pub flops: f64,
    /// Bytes that go through memory for them.
    pub bytes: f64,
    /// Seconds that they take.
    pub seconds: f64,
}

impl Point {
    /// Operations for each byte that goes through memory.
    pub fn intensity(&self) -> f64 {
        self.flops / self.bytes.max(1.0)
    }

    /// Operations a second.
    pub fn rate(&self) -> f64 {
        self.flops / self.seconds.max(f64::MIN_POSITIVE)
    }

    /// Its shape, `rows × inner × columns`; nothing of what is no product.
    pub fn shape_in_words(&self) -> String {
        self.shape.map_or(String::new(), |Product { rows, inner, columns, count }| {
            let each = if count > 1 { format!("{count} of ") } else { String::new() };
            format!("{each}{rows} × {inner} × {columns}")
        })
    }
}

/// The limits of what a rank on one kind of node computes with, and the work of a micro-batch under them.
#[derive(Debug, Clone, PartialEq)]
pub struct Roofline {
    /// The device; of a host with fewer ranks than cores, all cores of a rank.
    pub device: String,
    /// Places in the pipeline whose ranks live on such nodes.
    pub pipeline_ranks: Vec<usize>,
    /// Operations a second.
    pub peak: f64,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Tasks of the units that are there, those that take longest first.
    pub points: Vec<Point>,
}

impl Roofline {
    /// Returns the most operations a second that a point could reach.
    pub fn roof(&self, point: &Point) -> f64 {
        self.peak.min(point.intensity() * self.bandwidth)
    }

    /// Returns true if memory bandwidth limits a point, and not the peak.
    pub fn is_bound_by_memory(&self, point: &Point) -> bool {
        point.intensity() * self.bandwidth < self.peak
    }

    /// The share of its limit that a point comes to: of operations, or of the bandwidth where that is less.
    pub fn share_of_roof(&self, point: &Point) -> f64 {
        let seconds = (point.flops / self.peak).max(point.bytes / self.bandwidth);
        seconds / point.seconds.max(f64::MIN_POSITIVE)
    }

    /// Seconds of all points.
    pub fn seconds(&self) -> f64 {
        self.points.iter().map(|point| point.seconds).sum()
    }
}

impl Planner {
    /// The roofline of each kind of node that has any ranks of a plan.
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
        let worker = Worker::new(device, self.cluster.software.style(), work.dtype);
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

/// A task by itself; none of an exchange.
fn point_of(task: &Task, seconds: f64) -> Option<Point> {
    let vector = task.vector_flops as f64;
    let (shape, flops) = match task.labor {
        Labor::Product(product) => (Some(product), product.flops() as f64 + vector),
        Labor::Attention(attention) => (None, attention.flops as f64 + vector),
        Labor::Stream => (None, vector),
        Labor::Exchange(_) => return None,
    };
    Some(Point { name: task.name, pass: task.pass, shape, flops, bytes: task.bytes as f64, seconds })
}

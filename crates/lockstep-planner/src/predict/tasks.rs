//! Predicted times of tasks on a device, and the exposed part of their communication.

use std::borrow::Cow;

use crate::cluster::{Device, Efficiency, LinkTime, MAX_LEVELS};
use crate::predict::shapes::Shapes;
use crate::system::{APART_BYTES, SCORE_BYTES_BACKWARD, SCORE_BYTES_FORWARD, SystemTraits};
use lockstep_plan::DType;
use lockstep_plan::work::{Attention, Collective, Exchange, Pass, Product, Task, TaskKind};

/// Time of a pass through some units.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PassCost {
    /// Seconds of compute.
    pub work_s: f64,
    /// Seconds of exposed communication.
    pub exposed_s: f64,
    /// Seconds of communication, overlapped or exposed.
    pub exchange_s: f64,
    /// Part of `exposed_s` due to contention: several exchanges use one level of links at once.
    pub contention_s: f64,
    /// Seconds of exposed transfers of offloaded state to and from host memory.
    pub host_s: f64,
    /// Seconds of exposed transfers of offloaded state to and from disk.
    pub disk_s: f64,
    /// Seconds for which communication occupies each level of links.
    pub filled_s: [f64; MAX_LEVELS],
}

impl PassCost {
    /// Returns the duration of the pass.
    pub fn seconds(&self) -> f64 {
        self.work_s + self.exposed_s + self.host_s + self.disk_s
    }

    /// Returns the times of `number` micro-batches.
    pub fn times(self, number: f64) -> Self {
        let Self { work_s, exposed_s, exchange_s, contention_s, host_s, disk_s, filled_s } = self;
        Self {
            work_s: work_s * number,
            exposed_s: exposed_s * number,
            exchange_s: exchange_s * number,
            contention_s: contention_s * number,
            host_s: host_s * number,
            disk_s: disk_s * number,
            filled_s: filled_s.map(|seconds| seconds * number),
        }
    }

    /// Adds to the load on each level of links.
    pub(super) fn fill(&mut self, filled_s: &[f64; MAX_LEVELS]) {
        self.filled_s.iter_mut().zip(filled_s).for_each(|(sum, seconds)| *sum += seconds);
    }

    /// Returns by how much the busiest level of links, with additional load `more`, exceeds the duration of the pass.
    pub(super) fn overfilled_s(&self, more: &[f64; MAX_LEVELS]) -> f64 {
        let all = self.filled_s.iter().zip(more).map(|(filled, more)| filled + more);
        f64::max(all.fold(0.0, f64::max) - self.seconds(), 0.0)
    }

    /// Returns the pass extended to the load of its busiest level of links.
    pub(super) fn stretched(mut self) -> Self {
        let longer_s = self.overfilled_s(&[0.0; MAX_LEVELS]);
        self.exposed_s += longer_s;
        self.contention_s += longer_s;
        self
    }
}

impl std::ops::AddAssign for PassCost {
    fn add_assign(&mut self, other: Self) {
        let Self { work_s, exposed_s, exchange_s, contention_s, host_s, disk_s, filled_s } = other;
        self.work_s += work_s;
        self.exposed_s += exposed_s;
        self.exchange_s += exchange_s;
        self.contention_s += contention_s;
        self.host_s += host_s;
        self.disk_s += disk_s;
        self.fill(&filled_s);
    }
}

/// A device that runs a training system's kernels.
#[derive(Debug, Clone)]
pub struct KernelTimes<'a> {
    /// Device that computes.
    pub device: Cow<'a, Device>,
    /// Implementation choices of the training system.
    pub style: SystemTraits,
    /// Dtype of weights and values.
    pub dtype: DType,
    shapes: Shapes,
}

impl<'a> KernelTimes<'a> {
    /// Creates the model of a device that runs a system's kernels on values of a dtype.
    pub fn new(device: Cow<'a, Device>, style: SystemTraits, dtype: DType) -> Self {
        let mut worker = Self { device, style, dtype, shapes: Shapes::default() };
        worker.shapes = Shapes::new(&worker.device.efficiency.measured, dtype, |is_of_weight, product| {
            worker.by_sides(is_of_weight, *product)
        });
        worker
    }
}

impl KernelTimes<'_> {
    /// Returns the seconds of a task; 0 for an exchange.
    pub fn seconds(&self, task: &Task) -> f64 {
        self.measured(task).unwrap_or_else(|| match task.kind {
            TaskKind::Product(product) => self.product(task, product),
            TaskKind::Attention(attention) => self.attention(task, attention),
            TaskKind::Stream => {
                let is_backward = matches!(task.pass, Pass::BackwardInputs | Pass::BackwardWeights);
                self.stream(task.bytes as f64 * self.style.passes_of(task.name, is_backward))
            }
            TaskKind::Exchange(_) => 0.0,
        })
    }

    /// Returns the seconds of a task by the measured rate of its kind; `None` if it was not measured.
    fn measured(&self, task: &Task) -> Option<f64> {
        let amount = match task.kind {
            TaskKind::Attention(attention) => attention.flops,
            TaskKind::Stream => task.bytes,
            TaskKind::Product(_) | TaskKind::Exchange(_) => return None,
        };
        let measured = &self.device.efficiency.measured;
        if measured.is_empty() {
            return None;
        }
        // Names of dtypes with a rate of their own follow the pass. A recomputation that was not measured takes the rate of the forward.
        let passes = match task.pass {
            Pass::Recompute => [Pass::Recompute, Pass::Forward],
            pass => [pass, pass],
        };
        let rate = passes.into_iter().find_map(|pass| {
            let name = format!("{} {}", task.name, pass.name());
            measured.get(&format!("{name} {}", self.dtype)).or_else(|| measured.get(&name))
        })?;
        Some(amount as f64 / (rate * 1e9) + self.launch())
    }

    fn peak(&self) -> f64 {
        let peaks = &self.device.peak_tflops;
        let own = peaks.get(&self.dtype).or_else(|| peaks.get(&DType::F32));
        own.or_else(|| peaks.values().next()).copied().unwrap_or(f64::MIN_POSITIVE) * 1e12
    }

    fn launch(&self) -> f64 {
        self.device.efficiency.launch_us * 1e-6
    }

    /// Returns the seconds in which `bytes` pass through memory.
    fn through_memory(&self, bytes: f64) -> f64 {
        bytes / (self.device.memory_gb_per_s * 1e9 * self.device.efficiency.stream)
    }

    /// Returns the seconds of an optimizer step of `elements` weights.
    pub fn update(&self, elements: f64) -> f64 {
        let bytes = elements * self.style.update_bytes;
        let measured = &self.device.efficiency.measured;
        match measured.get(&format!("update {}", self.dtype)).or_else(|| measured.get("update")) {
            Some(rate) => bytes / (rate * 1e9),
            None => self.stream(bytes),
        }
    }

    /// Returns the seconds of a kernel that streams `bytes` through memory.
    pub fn stream(&self, bytes: f64) -> f64 {
        self.through_memory(bytes) + self.launch()
    }

    /// Returns the fraction of the peak that a GEMM achieves by its shape; smaller sides achieve less.
    fn of_peak(&self, product: &Product) -> f64 {
        let Efficiency { product: large, half_shape, tile, .. } = &self.device.efficiency;
        let sides = [product.rows, product.inner, product.columns].map(|side| side as f64);
        let by_sides = sides.iter().zip(half_shape).map(|(side, half)| side / (side + half)).product::<f64>();
        let waves = tile.map_or(1.0, |tile| {
            let tiles =
                product.rows.div_ceil(tile.rows) * product.columns.div_ceil(tile.columns) * product.count;
            tiles as f64 / (tiles.div_ceil(tile.units) * tile.units) as f64
        });
        large * by_sides * waves
    }

    fn product(&self, task: &Task, product: Product) -> f64 {
        let is_of_weight = task.pass == Pass::BackwardWeights;
        let by_sides = self.by_sides(is_of_weight, product) * self.shapes.factor(is_of_weight, &product);
        let is_apart = is_of_weight && self.style.separate_accumulation;
        let elements = (product.rows * product.columns * product.count) as f64;
        let apart = if is_apart { self.stream(APART_BYTES * elements) } else { 0.0 };
        by_sides.max(self.through_memory(task.bytes as f64) + self.launch()) + apart
    }

    /// Returns the seconds of a GEMM by the formula of its sides.
    fn by_sides(&self, is_of_weight: bool, product: Product) -> f64 {
        let rate = self.peak() * self.of_peak(&product);
        product.flops() as f64 / rate + self.launch() + self.cold(is_of_weight, product)
    }

    /// Returns the seconds that a GEMM spends on memory that is in no cache, in addition to its compute: the weight that it reads and the
    /// result that it writes. A weight gradient reads the forward's input and accumulates in f32.
    fn cold(&self, is_of_weight: bool, product: Product) -> f64 {
        let rate = self.device.efficiency.cold_gb_per_s * 1e9;
        if rate <= 0.0 {
            return 0.0;
        }
        let Product { rows, inner, columns, count } = product;
        let of_values = self.dtype.size_bytes() as u64;
        let written = match is_of_weight {
            true => rows * columns * 2 * DType::F32.size_bytes() as u64,
            false => rows * columns * of_values,
        };
        ((written + inner * columns * of_values) * count) as f64 / rate
    }

    /// Returns the seconds of attention. A fused backward recomputes the scores, five products instead of four.
    fn attention(&self, task: &Task, attention: Attention) -> f64 {
        let efficiency = &self.device.efficiency;
        let is_backward = task.pass == Pass::BackwardInputs;
        if !self.style.unfused_attention {
            let flops = attention.flops as f64 * if is_backward { 1.25 } else { 1.0 };
            let share = self.style.attention[usize::from(is_backward)];
            let seconds = flops / (self.peak() * efficiency.attention * share);
            return seconds.max(self.through_memory(task.bytes as f64)) + self.launch();
        }
        let scores = attention.scores as f64;
        let (products, bytes) =
            if is_backward { (4.0, SCORE_BYTES_BACKWARD) } else { (2.0, SCORE_BYTES_FORWARD) };
        let flops = 2.0 * scores * attention.head_dim as f64;
        let one = (flops / (self.peak() * efficiency.scores)).max(self.through_memory(2.0 * scores));
        products * (one + self.launch()) + self.through_memory(bytes * scores) + 2.0 * self.launch()
    }

    /// Returns the times of a list of tasks; `exchange` predicts an exchange.
    pub(super) fn timed<'t>(
        &self,
        tasks: impl IntoIterator<Item = &'t Task>,
        exchange: impl Fn(&Exchange) -> LinkTime,
    ) -> Vec<Timed> {
        let timed = |task: &Task| match &task.kind {
            TaskKind::Exchange(what) => {
                let LinkTime { seconds, filled_s } = exchange(what);
                let waits = what.is_for_host && seconds > 0.0 && !self.device.is_host;
                let wait_s = if waits { self.style.counts_wait_s } else { 0.0 };
                Timed { seconds: seconds + wait_s, filled_s, beside: self.beside(task, what) }
            }
            _ => Timed { seconds: self.seconds(task), filled_s: [0.0; MAX_LEVELS], beside: Beside::Work },
        };
        tasks.into_iter().map(timed).collect()
    }

    /// Returns the work that an exchange overlaps with.
    fn beside(&self, task: &Task, what: &Exchange) -> Beside {
        let is_gathered_again = task.pass == Pass::Recompute && self.style.gathers_again_beside;
        match what.collective {
            _ if self.device.is_host => Beside::Nothing,
            Collective::AllGather if is_gathered_again => Beside::Next,
            _ if !what.is_overlapped => Beside::Nothing,
            Collective::AllGather | Collective::Broadcast | Collective::Ring | Collective::Shift => {
                Beside::Next
            }
            _ => Beside::Last,
        }
    }
}

/// Predicted time of a task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Timed {
    seconds: f64,
    filled_s: [f64; MAX_LEVELS],
    beside: Beside,
}

/// The work that a task overlaps with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// The task is work itself.
    Work,
    /// An exposed exchange.
    Nothing,
    /// An exchange that overlaps with the work that needs its result.
    Next,
    /// An exchange that overlaps with the work that made its operand.
    Last,
}

/// Events in the order of tasks, for callers that attribute exposed time to exchanges.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Waited {
    /// Exchange number `task` takes `seconds`, of which the rank waits `exposed_s`.
    For { task: usize, seconds: f64, exposed_s: f64 },
    /// Exchange number `task` takes `seconds` and overlaps with the next work.
    Beside { task: usize, seconds: f64 },
    /// The next work is done, and the exchanges that overlap with it take `exposed_s` longer.
    After { exposed_s: f64 },
}

impl PassCost {
    /// Sums up tasks that run one after the other.
    pub(super) fn of<'t>(tasks: impl IntoIterator<Item = &'t Timed>) -> Self {
        Self::told(tasks, |_| {})
    }

    /// Sums up tasks that run one after the other, and reports each exchange to `tell`.
    pub(super) fn told<'t>(tasks: impl IntoIterator<Item = &'t Timed>, mut tell: impl FnMut(Waited)) -> Self {
        let mut cost = Self::default();
        // Time of the last work that is left to overlap with, and of exchanges that overlap with the next.
        let (mut before, mut waiting) = (0.0, 0.0);
        for (task, Timed { seconds, filled_s, beside }) in tasks.into_iter().enumerate() {
            let (seconds, beside) = (*seconds, *beside);
            if beside == Beside::Work {
                cost.work_s += seconds;
                let exposed_s = f64::max(waiting - seconds, 0.0);
                cost.exposed_s += exposed_s;
                tell(Waited::After { exposed_s });
                waiting = 0.0;
                before = seconds;
                continue;
            }
            cost.exchange_s += seconds;
            cost.fill(filled_s);
            let exposed_s = match beside {
                Beside::Next => {
                    waiting += seconds;
                    tell(Waited::Beside { task, seconds });
                    continue;
                }
                Beside::Last => {
                    let hidden_s = f64::min(seconds, before);
                    before -= hidden_s;
                    seconds - hidden_s
                }
                Beside::Work | Beside::Nothing => seconds,
            };
            cost.exposed_s += exposed_s;
            tell(Waited::For { task, seconds, exposed_s });
        }
        cost.exposed_s += waiting;
        tell(Waited::After { exposed_s: waiting });
        cost
    }
}

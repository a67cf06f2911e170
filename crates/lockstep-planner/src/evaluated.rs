//! An evaluated plan: memory of every rank, the step, and the figures that follow from them.

use lockstep_config::RunConfig;
use lockstep_plan::{MemoryBytes, Plan, PlanPrediction, PlannedStep, RanksMemory};

use crate::cluster::Cluster;
use crate::predict::{Failures, Goodput, Saves, StepPrediction};
use crate::search::Rejection;

/// Seconds until a failed node is noticed and replaced.
const REPLACEMENT_S: f64 = 300.0;

/// A plan with its predicted memory and step.
#[derive(Debug, Clone)]
pub struct Evaluated {
    /// The run with the plan in its keys.
    pub config: RunConfig,
    /// The plan in the form of a plan file.
    pub plan: Plan,
    /// Prediction of the step.
    pub step: StepPrediction,
    /// Predicted saves of checkpoints.
    pub saves: Saves,
    /// Milliseconds that each step waits for its input data.
    pub data_stall_ms: f64,
    /// Bytes that each pipeline rank books, from the first stage on; all ranks with the same pipeline coordinate book the same.
    pub memory: Vec<MemoryBytes>,
    /// Bytes that a rank may book: of the device, or its share of a host.
    pub capacity_bytes: u64,
    /// True if every rank fits.
    pub fits: bool,
    /// The shortage of a rank; `None` if every rank fits.
    pub lacking: Option<Rejection>,
    /// Tokens of a step.
    pub tokens: u64,
    /// Model FLOPs of a step, without recomputation. Attention counts the full square of scores, as published figures do.
    pub model_flops: f64,
    /// Hardware FLOPs of a step: model FLOPs and recomputation.
    pub hardware_flops: f64,
    /// Number of devices.
    pub devices: usize,
    /// Peak of a device in the run's compute type, in TFLOP/s.
    pub peak_tflops: f64,
    /// True if the peak is known rather than the default of an unmeasured machine.
    pub knows_peak: bool,
    /// Price of all nodes, in dollars per hour; `None` if unknown.
    pub price_per_hour: Option<f64>,
}

impl Evaluated {
    /// Returns the model TFLOP/s of each device.
    pub fn tflops_per_device(&self) -> f64 {
        self.model_flops / (self.step.step_ms * 1e-3) / self.devices as f64 / 1e12
    }

    /// Returns the hardware TFLOP/s of each device, recomputation included.
    pub fn hardware_tflops_per_device(&self) -> f64 {
        self.hardware_flops / (self.step.step_ms * 1e-3) / self.devices as f64 / 1e12
    }

    /// Returns the model FLOPs utilization (MFU) as a fraction of the peak; `None` if the peak is unknown.
    pub fn mfu(&self) -> Option<f64> {
        self.knows_peak.then(|| self.tflops_per_device() / self.peak_tflops)
    }

    /// Returns the tokens per second.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / (self.step.step_ms * 1e-3)
    }

    /// Returns the pipeline rank that books most, with its bytes.
    pub fn largest(&self) -> (usize, MemoryBytes) {
        let by_total = self.memory.iter().enumerate().rev().max_by_key(|(_, memory)| memory.total());
        by_total.map_or((0, MemoryBytes::default()), |(rank, memory)| (rank, *memory))
    }

    /// Returns the prediction of the step in the form of a plan file.
    pub fn planned_step(&self, cluster: &Cluster) -> PlannedStep {
        let step = &self.step;
        PlannedStep {
            cluster: cluster.name.clone(),
            step_ms: step.step_ms,
            compute_ms: step.work_ms + step.update_ms,
            exposed_ms: step.exposed_ms(),
            bubble_ms: step.bubble_ms,
            host_ms: step.host_ms,
            disk_ms: step.disk_ms,
            tokens_per_s: self.tokens_per_s(),
            mfu: self.mfu(),
            price_per_billion_tokens: self.price_per_billion_tokens(),
        }
    }

    /// Returns the plan with its predicted memory and step.
    pub fn plan_with_prediction(&self, cluster: &Cluster) -> Plan {
        let of_a_stage = self.devices / self.memory.len().max(1);
        let memory = self.memory.iter().enumerate().map(|(rank, bytes)| RanksMemory {
            ranks: (rank * of_a_stage..(rank + 1) * of_a_stage).collect(),
            bytes: *bytes,
        });
        let predicted = PlanPrediction { memory: memory.collect(), step: Some(self.planned_step(cluster)) };
        Plan { predicted: Some(predicted), ..self.plan.clone() }
    }

    /// Returns the dollars for 10⁹ tokens; `None` if the price is unknown.
    pub fn price_per_billion_tokens(&self) -> Option<f64> {
        Some(self.price_per_step()? / self.tokens as f64 * 1e9)
    }

    /// Returns the fraction of time that failures leave with the best interval between saves. After a failure a node is replaced,
    /// the state is read, and the steps since the last written checkpoint are repeated.
    pub fn goodput(&self, cluster: &Cluster) -> Goodput {
        let written_s = self.saves.least_interval_s();
        let restart_s = REPLACEMENT_S + self.saves.write_s + written_s;
        // A save cannot be more frequent than a step.
        let least_s = written_s.max(self.step.step_ms * 1e-3);
        Failures::of(cluster, self.saves.stall_s(f64::INFINITY), restart_s).goodput(least_s)
    }

    /// Returns the milliseconds that steps wait for a save. For a run that saves only at its end, no earlier save is still being written.
    pub fn save_ms(&self) -> f64 {
        let between_s = match self.config.checkpoint.every {
            0 => f64::INFINITY,
            every => every as f64 * self.step.step_ms * 1e-3,
        };
        self.saves.stall_s(between_s) * 1e3
    }

    /// Returns the bytes of a checkpoint: those of all ranks of one data-parallel replica.
    pub fn saved_bytes(&self) -> f64 {
        let replicas = self.plan.mesh.replicate.max(1);
        self.saves.bytes * (self.devices / replicas) as f64
    }

    /// Returns the milliseconds that each step waits for saves on average; `None` for a run that saves only at its end.
    pub fn save_stall_ms(&self) -> Option<f64> {
        let every = self.config.checkpoint.every;
        (every > 0).then(|| self.save_ms() / every as f64)
    }

    /// Returns the dollars of a step; `None` if the price is unknown.
    pub fn price_per_step(&self) -> Option<f64> {
        self.price_per_hour.map(|price| price * self.step.step_ms / 3.6e6)
    }
}

//! An evaluated plan: memory of every rank, the step, and the figures that follow from them.

use lockstep_config::RunConfig;
use lockstep_plan::{MemoryBytes, Plan, PlanPrediction, PlannedStep, RanksMemory};

use crate::cluster::Cluster;
use crate::predict::{Failures, Goodput, Saves, StepPrediction};
use crate::search::Rejection;

/// Seconds until a node that failed is noticed and replaced.
const REPLACEMENT_S: f64 = 300.0;

/// A plan with its predicted memory and step.
#[derive(Debug, Clone)]
pub struct Evaluated {
    /// The run with the plan in its keys.
    pub config: RunConfig,
    /// The plan as a file has it.
    pub plan: Plan,
    /// Its step.
    pub step: StepPrediction,
    /// Predicted saves of checkpoints.
    pub saves: Saves,
    /// Milliseconds that each step waits for its sequences.
    pub data_stall_ms: f64,
    /// Bytes that each pipeline rank books, from the first stage on; all ranks with the same coordinate book as much.
    pub memory: Vec<MemoryBytes>,
    /// Bytes that a rank may book: of a host the rank's share.
    pub capacity_bytes: u64,
    /// True if every rank fits.
    pub fits: bool,
    /// Shortage of a rank, if one does not fit.
    pub lacking: Option<Rejection>,
    /// Tokens of a step.
    pub tokens: u64,
    /// Floating-point operations of a step of the model, the whole square of scores counted, as published figures do.
    pub model_flops: f64,
    /// The same with what is computed again.
    pub hardware_flops: f64,
    /// Devices.
    pub devices: usize,
    /// 10¹² operations a second that a device could do at best, in the run's type.
    pub peak_tflops: f64,
    /// True if the peak is known, and not a guess for a machine that nobody has measured.
    pub knows_peak: bool,
    /// Dollars an hour of all nodes, if that is known.
    pub price_per_hour: Option<f64>,
}

impl Evaluated {
    /// 10¹² operations a second of each device, without what is computed again.
    pub fn tflops_per_device(&self) -> f64 {
        self.model_flops / (self.step.step_ms * 1e-3) / self.devices as f64 / 1e12
    }

    /// The same with it.
    pub fn hardware_tflops_per_device(&self) -> f64 {
        self.hardware_flops / (self.step.step_ms * 1e-3) / self.devices as f64 / 1e12
    }

    /// Model FLOP/s as a share of the peak; none where that is a guess.
    pub fn mfu(&self) -> Option<f64> {
        self.knows_peak.then(|| self.tflops_per_device() / self.peak_tflops)
    }

    /// Tokens a second.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / (self.step.step_ms * 1e-3)
    }

    /// The rank of the pipeline that books most, and what.
    pub fn largest(&self) -> (usize, MemoryBytes) {
        let by_total = self.memory.iter().enumerate().rev().max_by_key(|(_, memory)| memory.total());
        by_total.map_or((0, MemoryBytes::default()), |(rank, memory)| (rank, *memory))
    }

    /// Returns the prediction of the step as a plan file has it.
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

    /// The plan, with what it is predicted to come to.
    pub fn plan_with_prediction(&self, cluster: &Cluster) -> Plan {
        let of_a_stage = self.devices / self.memory.len().max(1);
        let memory = self.memory.iter().enumerate().map(|(rank, bytes)| RanksMemory {
            ranks: (rank * of_a_stage..(rank + 1) * of_a_stage).collect(),
            bytes: *bytes,
        });
        let predicted = PlanPrediction { memory: memory.collect(), step: Some(self.planned_step(cluster)) };
        Plan { predicted: Some(predicted), ..self.plan.clone() }
    }

    /// Dollars for 10⁹ tokens, if that is known.
    pub fn price_per_billion_tokens(&self) -> Option<f64> {
        Some(self.price_per_step()? / self.tokens as f64 * 1e9)
    }

    /// Returns the fraction of time that failures leave with the best interval between saves. After a failure a node is replaced, the state is read,
    /// and the steps since the last written copy are repeated.
    pub fn goodput(&self, cluster: &Cluster) -> Goodput {
        let written_s = self.saves.least_interval_s();
        let restart_s = REPLACEMENT_S + self.saves.write_s + written_s;
        // Nothing is saved within a step.
        let least_s = written_s.max(self.step.step_ms * 1e-3);
        Failures::of(cluster, self.saves.stall_s(f64::INFINITY), restart_s).goodput(least_s)
    }

    /// Returns the milliseconds that steps wait for a save; of a run that saves only at its end, for a save that follows no other soon.
    pub fn save_ms(&self) -> f64 {
        let between_s = match self.config.checkpoint.every {
            0 => f64::INFINITY,
            every => every as f64 * self.step.step_ms * 1e-3,
        };
        self.saves.stall_s(between_s) * 1e3
    }

    /// Bytes of a checkpoint: those of all ranks of a replica.
    pub fn saved_bytes(&self) -> f64 {
        let replicas = self.plan.mesh.replicate.max(1);
        self.saves.bytes * (self.devices / replicas) as f64
    }

    /// The same for each of the steps between two; none where the run saves at its end only.
    pub fn save_stall_ms(&self) -> Option<f64> {
        let every = self.config.checkpoint.every;
        (every > 0).then(|| self.save_ms() / every as f64)
    }

    /// Dollars of a step, if that is known.
    pub fn price_per_step(&self) -> Option<f64> {
        self.price_per_hour.map(|price| price * self.step.step_ms / 3.6e6)
    }
}

//! Inputs and result of the step-time model: the shape of a plan, the passes of its stages, and the parts of its step.

use crate::predict::tasks::PassCost;
use lockstep_plan::schedule::Simulation;
use lockstep_plan::{RankTraffic, StepLayout, ZeroStage};

/// The inputs of the step-time model other than the recorded work of a rank.
#[derive(Debug, Clone, Copy)]
pub struct PlanShape<'a> {
    /// The layout of the step.
    pub layout: &'a StepLayout,
    /// The ZeRO stage.
    pub zero_stage: ZeroStage,
    /// True if sharded weights (stage 3) are gathered once a step and stay, instead of for each pass.
    pub gathers_once: bool,
    /// Straggler in the cluster; `None` if all devices are equally fast.
    pub slow: Option<SlowDevice>,
    /// Traffic of offloaded state of each pipeline rank in a step; empty if nothing is offloaded.
    pub traffic: &'a [RankTraffic],
}

/// A straggler: a device that is slower than the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlowDevice {
    /// Pipeline rank of the device. All ranks with this pipeline rank wait for it: its tensor- and context-parallel peers at each
    /// exchange, other data-parallel ranks at the gradient reduction.
    pub pipeline_rank: usize,
    /// Speed relative to the other devices, from 0 to 1.
    pub speed: f64,
}

/// Times of a stage's passes of one micro-batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StagePrediction {
    /// Forward of a micro-batch.
    pub forward: PassCost,
    /// Whole backward of a micro-batch.
    pub backward: PassCost,
    /// First half of a split backward.
    pub backward_inputs: PassCost,
    /// Second half of a split backward.
    pub backward_weights: PassCost,
}

impl StagePrediction {
    pub(super) fn map(self, change: impl Fn(PassCost) -> PassCost) -> Self {
        Self {
            forward: change(self.forward),
            backward: change(self.backward),
            backward_inputs: change(self.backward_inputs),
            backward_weights: change(self.backward_weights),
        }
    }

    /// Returns the times with compute slowed down to a fraction `speed`.
    pub(super) fn at_speed(self, speed: f64) -> Self {
        self.map(|pass| PassCost { work_s: pass.work_s / speed, ..pass })
    }
}

/// Predicted step time. The parts are those of the rank that ends last, and add up to the step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepPrediction {
    /// Duration of the whole step.
    pub step_ms: f64,
    /// Compute of micro-batches.
    pub work_ms: f64,
    /// Exposed communication inside passes: tensor, context and expert parallel, and weight gathers.
    pub exchange_ms: f64,
    /// Pipeline bubble: waiting for other stages.
    pub bubble_ms: f64,
    /// Exposed gradient reductions, and weight gathers after the optimizer step.
    pub gradients_ms: f64,
    /// Duration of the optimizer step.
    pub update_ms: f64,
    /// Exposed transfers of offloaded state to and from host memory, in passes and in the optimizer step.
    pub host_ms: f64,
    /// Exposed transfers of offloaded state to and from disk, in passes and in the optimizer step.
    pub disk_ms: f64,
    /// Times of each stage's passes.
    pub stages: Vec<StagePrediction>,
    /// Timeline of the pipeline; `None` without one.
    pub simulation: Option<Simulation>,
    /// Duration of all communication of the rank, overlapped or exposed.
    pub exchange_busy_ms: f64,
}

impl StepPrediction {
    /// Returns the exposed communication of the step in milliseconds, without bubbles.
    pub fn exposed_ms(&self) -> f64 {
        self.exchange_ms + self.gradients_ms
    }
}

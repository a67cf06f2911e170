//! Step-time model: predicts how long a step of a plan takes on a cluster, before it runs anywhere.
//!
//! ```text
//! recording -> tasks of each unit --KernelTimes--> seconds of each pass of each stage
//!                 exchanges  --Cluster--> seconds, overlapped or exposed
//!                                           --Schedule::simulate--> the pipeline's timeline
//!                                           + gradient reductions, weight gathers, optimizer step = step
//! ```
//!
//! Ranks with the same pipeline coordinate do the same at the same time, so one of them stands for all: 16,384 ranks cost no more than
//! the stages of their pipeline. With several kinds of nodes only the device differs; the slowest one of a stage decides.

mod goodput;
mod prediction;
mod saves;
mod shapes;
mod state;
mod step;
mod tasks;
mod timed;
mod traffic;

pub use goodput::{Failures, Goodput};
pub use prediction::{PlanShape, SlowDevice, StagePrediction, StepPrediction};
pub use saves::{Saves, data_stall_s};
pub use shapes::product_name;
pub use step::{predict_step, predict_step_ms};
pub use tasks::{KernelTimes, PassCost};
pub use timed::{TimedModel, device, kinds_of, slowest_kind};
pub use traffic::{Sent, StepTraffic, Traffic, traffic};

pub use crate::system::SystemTraits;

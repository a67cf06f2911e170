//! The planner: which plan trains a model best on a cluster, how long its step takes, what each rank needs, and why other plans do not do.
//!
//! - [`cluster`]: nodes, devices, links and prices, read from a cluster file or a preset.
//! - [`predict`]: the time of a training step on a cluster, from the work that recording a model finds.
//! - [`search`]: branch and bound over the plans of a model.
//! - [`Planner`]: the search for a run, with its model recorded for every layout that is looked at.
//! - [`Forecast`] and [`fit`]: the memory of each rank of a run, and the smallest change that fits where it is too much.
//! - [`Page`]: a plan on one page.
#![forbid(unsafe_code)]

mod advice;
mod bounds;
mod caches;
mod calibrate;
mod capacity;
mod choice;
pub mod cluster;
mod details;
mod error;
mod evaluate;
mod evaluated;
mod explain;
pub mod fit;
pub mod forecast;
mod layout;
mod ledger;
pub mod machine;
mod memory;
mod offload;
mod offloaded_units;
mod page;
mod planner;
pub mod predict;
mod recordings;
mod remedy;
mod roofline;
mod scaling;
pub mod search;
mod shortage;
mod system;
mod tensor_cost;
mod trial;
mod value;
mod workload;

pub use advice::Advice;
pub use calibrate::{Calibrated, CalibratedRun, ComputeFactor, FinishedRun, calibrate};
pub use choice::{Choice, Reason, choose};
pub use details::{Details, MemoryCurve};
pub use error::Error;
pub use evaluated::Evaluated;
pub use explain::{
    Help, Neighbour, StepPart, mesh_in_words, parts, recompute_in_words, rejection_in_words,
    residence_in_words, schedule_in_words,
};
pub use forecast::Forecast;
pub use machine::predict_step;
pub use page::Page;
pub use planner::{Objective, Planner, Searched};
pub use remedy::{Remedies, Remedy};
pub use roofline::{Point, Roofline};
pub use scaling::{Scaled, Scaling};
pub use tensor_cost::{LinearShape, LinearSplit, TensorCost, TensorLayout};
pub use workload::{Assumption, assumptions};

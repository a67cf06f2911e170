//! The planner: the devices and links of a cluster, the time and memory that a plan takes on them, and the search for the best plan.
//!
//! - [`cluster`]: nodes, devices, links and prices, read from a cluster file or a preset.
//! - [`predict`]: the time of a training step on a cluster, from the work that recording a model finds.
//! - [`search`]: branch and bound over the plans of a model.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod predict;
pub mod search;
mod tensor_cost;

pub use tensor_cost::{LinearShape, LinearSplit, TensorCost, TensorLayout};

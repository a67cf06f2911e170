//! A row of `metrics.jsonl`, which Prometheus shows as well.

use serde::Serialize;

use super::prometheus::Prometheus;
use super::step_metrics::{EvalMetrics, StepMetrics};
use crate::Error;

/// A record that is written as one line of the file.
pub trait Row: Serialize {
    /// Step to which the record belongs.
    fn step(&self) -> u64;

    /// Passes the record to Prometheus.
    ///
    /// # Errors
    /// If the file for Prometheus cannot be written.
    fn show(&self, prometheus: &mut Prometheus) -> Result<(), Error>;
}

impl Row for StepMetrics {
    fn step(&self) -> u64 {
        self.step
    }

    fn show(&self, prometheus: &mut Prometheus) -> Result<(), Error> {
        prometheus.step(self)
    }
}

impl Row for EvalMetrics {
    fn step(&self) -> u64 {
        self.step
    }

    fn show(&self, prometheus: &mut Prometheus) -> Result<(), Error> {
        prometheus.evaluation(self);
        Ok(())
    }
}

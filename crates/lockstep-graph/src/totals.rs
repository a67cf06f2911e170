//! Sums and counts of a model's reports over micro-batches and ranks, and what follows from them: means, the loss of a step, the
//! seeds of its gradients.

use crate::{
    replay::Seed,
    reports::{MAX_REPORTS, Report},
};

/// Sums of a model's reports and the rows or elements that they count, in the order of
/// [`Program::reports`](crate::Program::reports); zeros beyond the last.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Totals {
    /// Sums of the numbers.
    pub sums: [f64; MAX_REPORTS],
    /// Numbers of rows or elements that count.
    pub counts: [u64; MAX_REPORTS],
}

impl Totals {
    /// Adds the totals of other rows.
    pub fn add(&mut self, other: &Self) {
        self.sums.iter_mut().zip(other.sums).for_each(|(sum, other)| *sum += other);
        self.counts.iter_mut().zip(other.counts).for_each(|(count, other)| *count += other);
    }

    /// Returns the mean of a report; `None` if nothing counts.
    pub fn mean(&self, report: usize) -> Option<f64> {
        (self.counts[report] > 0).then(|| self.sums[report] / self.counts[report] as f64)
    }

    /// Returns the loss of a step: the weighted sum of the means of all losses that count anything; 0 without any.
    pub fn loss(&self, reports: &[Report]) -> f64 {
        let weighted = |(report, of): (usize, &Report)| {
            let (weight, mean) = (of.weight()?, self.mean(report)?);
            // A weight of 1 must not round.
            Some(if weight == 1.0 { mean } else { f64::from(weight) * mean })
        };
        reports.iter().enumerate().filter_map(weighted).reduce(|a, b| a + b).unwrap_or(0.0)
    }

    /// Returns the gradients that seed the backward of a step of `samples` samples with these counts; all are multiplied by
    /// `scale`.
    pub fn seed(&self, reports: &[Report], samples: u64, scale: f64) -> Seed {
        let mut seed = Seed { of_sequences: (scale / samples as f64) as f32, ..Seed::default() };
        for (report, (of, count)) in reports.iter().zip(self.counts).enumerate() {
            let Some(weight) = of.weight().filter(|_| count > 0) else { continue };
            let gradient = if weight == 1.0 { scale } else { f64::from(weight) * scale } / count as f64;
            seed.of_reports[report] = gradient as f32;
        }
        seed.of_tokens = seed.of_reports[0];
        seed
    }
}

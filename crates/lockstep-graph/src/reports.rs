//! Reports of a model's last unit: its losses and its metrics, each a number for every row, with a sum and a count of its own.
//!
//! The loss that the unit returns is the first report, with weight 1. [`Recorder::add_loss`] adds further losses,
//! [`Recorder::add_metric`] numbers without a gradient. The loss of a step is `Σ weight · sum / count` over the losses,
//! where sums and counts are those of all micro-batches and ranks; so a gradient is seeded with `weight / count`.

use lockstep_plan::DType;

use crate::{
    block::{HeadOutput, Value},
    facts::Facts,
    recorder::Recorder,
    replay::Seed,
};

/// Most reports of a model: its losses and metrics together.
pub const MAX_REPORTS: usize = 8;

/// A loss or a metric of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Name in the metrics of a run, e.g. `accuracy`.
    pub name: String,
    /// Loss with its weight, or metric.
    pub kind: ReportKind,
    /// Named input whose elements count, labels of -100 excepted; `None` for what the model's labels count.
    pub target: Option<String>,
    /// Number of classes that the target names; `None` if it is not of classes.
    pub classes: Option<usize>,
    /// Its numbers, f32 `[rows, 1]`.
    pub(crate) values: Value,
}

/// Kind of a report.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReportKind {
    /// A loss, which is trained on.
    Loss {
        /// Factor on its mean in the loss of a step.
        weight: f32,
    },
    /// A metric, which is only reported.
    Metric,
}

impl Report {
    /// Returns the weight of a loss; `None` for a metric.
    pub fn weight(&self) -> Option<f32> {
        match self.kind {
            ReportKind::Loss { weight } => Some(weight),
            ReportKind::Metric => None,
        }
    }
}

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

/// Name and target of the numbers that a loss or metric writes.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    pub(crate) values: Value,
    pub(crate) name: &'static str,
    pub(crate) target: String,
    pub(crate) classes: Option<usize>,
}

/// Reports while a unit is recorded.
#[derive(Debug, Default)]
pub(crate) struct Recorded {
    /// What the operations of this crate have measured.
    pub(crate) measured: Vec<Measured>,
    /// Reports besides the loss that the unit returns.
    pub(crate) added: Vec<Report>,
}

impl Recorder {
    /// Adds `weight` times the mean of `losses` to the model's loss, beside the loss that the last unit returns. `losses`
    /// are those of an operation such as [`Recorder::squared_error_of`]; `name` names them in the metrics of a run. With
    /// [`HeadOutput::Logits`] nothing is added.
    ///
    /// # Panics
    /// If the weight is not positive and finite, the name is taken, or there are more than [`MAX_REPORTS`].
    #[track_caller]
    pub fn add_loss(&mut self, name: &str, losses: Value, weight: f32) {
        assert!(weight.is_finite() && weight > 0.0, "the loss {name} has the weight {weight}");
        self.add_report(name, losses, ReportKind::Loss { weight });
    }

    /// Reports the mean of `values` (f32 `[rows, 1]`, 0 in rows that do not count) in the metrics of a run and its
    /// evaluations. They have no gradient. With [`HeadOutput::Logits`] nothing is added.
    ///
    /// # Panics
    /// If the name is taken, or there are more than [`MAX_REPORTS`].
    #[track_caller]
    pub fn add_metric(&mut self, name: &str, values: Value) {
        self.add_report(name, values, ReportKind::Metric);
    }

    #[track_caller]
    fn add_report(&mut self, name: &str, values: Value, kind: ReportKind) {
        if self.head_output == HeadOutput::Logits {
            return;
        }
        let info = self.values[values.0];
        let is_column = (info.columns, info.dtype) == (1, DType::F32);
        assert!(is_column, "the report {name} has one f32 number per row, not {}", self.describe(values));
        let Recorded { measured, added } = &mut self.reports;
        assert!(added.iter().all(|report| report.name != name), "two reports are named {name}");
        assert!(added.len() + 1 < MAX_REPORTS, "a model has at most {MAX_REPORTS} losses and metrics");
        let measured = measured.iter().find(|measured| measured.values == values);
        let (target, classes) = (measured.map(|of| of.target.clone()), measured.and_then(|of| of.classes));
        added.push(Report { name: name.to_owned(), kind, target, classes, values });
    }

    /// Notes what the numbers of an operation are, for the report that they may become.
    pub(crate) fn measure(
        &mut self,
        values: Value,
        name: &'static str,
        target: &str,
        classes: Option<usize>,
    ) {
        self.reports.measured.push(Measured { values, name, target: target.to_owned(), classes });
    }
}

impl Recorded {
    /// Returns the reports of a unit with the output `output`: none if that is no loss.
    ///
    /// # Panics
    /// If losses or metrics were added to a unit that does not end in a loss, or a loss is no output of a loss.
    pub(crate) fn of_unit(self, output: Value, facts: &[Facts]) -> Vec<Report> {
        let is_loss = |value: Value| facts.iter().any(|facts| facts.is_loss && facts.output() == value);
        let Self { measured, added } = self;
        if !is_loss(output) {
            let names: Vec<&str> = added.iter().map(|report| report.name.as_str()).collect();
            assert!(added.is_empty(), "the unit has the reports {names:?} and does not end in a loss");
            return added;
        }
        for report in &added {
            let is_sound = report.weight().is_none() || is_loss(report.values) && report.values != output;
            assert!(is_sound, "the loss {} is no further output of a loss", report.name);
        }
        let main = measured.into_iter().find(|measured| measured.values == output);
        let (name, target, classes) = match main {
            Some(Measured { name, target, classes, .. }) => (name, Some(target), classes),
            None => ("loss", None, None),
        };
        let kind = ReportKind::Loss { weight: 1.0 };
        let main = Report { name: name.to_owned(), kind, target, classes, values: output };
        [main].into_iter().chain(added).collect()
    }
}

//! Reports of a model's last unit: its losses and its metrics, each a number for every row, with a sum and a count of its own.
//!
//! The loss that the unit returns is the first report, with weight 1. [`Recorder::add_loss`](crate::Recorder::add_loss) adds further losses,
//! [`Recorder::add_metric`](crate::Recorder::add_metric) numbers without a gradient. The loss of a step is `Σ weight · sum / count` over the losses,
//! where sums and counts are those of all micro-batches and ranks; so a gradient is seeded with `weight / count`.

use crate::{block::Value, facts::Facts};

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
    /// Names and targets of the numbers that operations of this crate write.
    pub(crate) measured: Vec<Measured>,
    /// Reports besides the loss that the unit returns.
    pub(crate) added: Vec<Report>,
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

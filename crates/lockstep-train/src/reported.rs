//! The losses and metrics of a run's model as its rows and messages name them.

use std::sync::Arc;

use lockstep_graph::{Report, Totals};
use lockstep_model::RecordedModel;
use lockstep_observe::metrics::{CountUnit, Means};

/// Reports of a model, with their names in metrics.
#[derive(Debug)]
pub(crate) struct Reported {
    reports: Vec<Report>,
    names: Vec<Arc<str>>,
    /// Unit in which the run counts what it trains on.
    pub(crate) unit: CountUnit,
}

impl Reported {
    /// Returns the reports of a model with a vocabulary of `vocab_size` tokens; 0 for one without tokens.
    pub(crate) fn of(model: &RecordedModel, vocab_size: usize) -> Self {
        let unit = if vocab_size > 0 { CountUnit::Tokens } else { CountUnit::Samples };
        let reports = model.reports().to_vec();
        let names = reports.iter().map(|report| report.name.as_str().into()).collect();
        Self { reports, names, unit }
    }

    /// Returns the loss of a step: the weighted sum of the means of all losses.
    pub(crate) fn loss(&self, totals: &Totals) -> f64 {
        totals.loss(&self.reports)
    }

    /// Returns the reports.
    pub(crate) fn reports(&self) -> &[Report] {
        &self.reports
    }

    /// Returns the names of the inputs whose labels the reports count.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &str> {
        self.reports.iter().filter_map(|report| report.target.as_deref())
    }

    /// Returns the mean of each metric.
    pub(crate) fn metrics(&self, totals: &Totals) -> Means {
        self.means(totals, |report| report.weight().is_none())
    }

    /// Returns the mean of each loss if there are several.
    pub(crate) fn losses(&self, totals: &Totals) -> Means {
        let losses = self.reports.iter().filter(|report| report.weight().is_some()).count();
        if losses > 1 { self.means(totals, |report| report.weight().is_some()) } else { Means::default() }
    }

    fn means(&self, totals: &Totals, is_wanted: impl Fn(&Report) -> bool) -> Means {
        let reports = self.reports.iter().zip(&self.names).enumerate();
        let wanted = reports.filter(|(_, (report, _))| is_wanted(report));
        Means(wanted.filter_map(|(index, (_, name))| Some((Arc::clone(name), totals.mean(index)?))).collect())
    }
}

//! A recorded step: the spans of its operations, and its collectives and messages.

use std::time::Duration;

use lockstep_engine::TimedOperation;
use lockstep_graph::{Activity, Cost, Span};
use lockstep_model::RecordedModel;

use crate::roofline::layer;

/// A step with its operations.
#[derive(Debug, Clone)]
pub(super) struct RecordedStep {
    pub(super) step: u64,
    /// Time since the begin of the first recorded step.
    pub(super) start: Duration,
    pub(super) duration: Duration,
    pub(super) spans: Vec<Span>,
    /// Collectives and messages of this rank.
    pub(super) called: Vec<TimedOperation>,
}

/// Work between two recorded steps, or a background save.
#[derive(Debug)]
pub(super) struct Pause {
    pub(super) name: &'static str,
    pub(super) start: Duration,
    pub(super) duration: Duration,
}

/// Returns the name of a unit, such as `block 3`.
pub(super) fn unit_name(unit: usize, model: &RecordedModel) -> String {
    match unit {
        0 => "embedding".to_owned(),
        unit if unit + 1 == model.units() => "head".to_owned(),
        unit => format!("block {}", unit - 1),
    }
}

/// Returns the name of an operation within its unit.
pub(super) fn operation_name(activity: &Activity, model: &RecordedModel) -> String {
    match layer(activity, model) {
        Some(layer) => format!("{} {layer}", activity.name),
        None => activity.name.to_owned(),
    }
}

/// An operation between ranks from the end of the one before it; they run in order.
pub(super) struct Turn {
    pub(super) called: TimedOperation,
    pub(super) start: Duration,
    /// Time for which the operation overlaps with compute of this rank.
    pub(super) hidden: Duration,
}

impl RecordedStep {
    /// Returns the operations between ranks, in order.
    pub(super) fn turns(&self) -> Vec<Turn> {
        let mut before = Duration::ZERO;
        let turn = |called: &TimedOperation| {
            let (start, end) = (called.start.max(before).min(called.end), called.end);
            before = end;
            let is_work = |span: &&Span| span.cost != Cost::default();
            let overlap =
                |span: &Span| end.min(span.start + span.duration).saturating_sub(start.max(span.start));
            Turn { called: *called, start, hidden: self.spans.iter().filter(is_work).map(overlap).sum() }
        };
        self.called.iter().map(turn).collect()
    }
}

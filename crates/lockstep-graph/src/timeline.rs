//! Traces of a step: one span for each operation that runs, recorded only while tracing is on.
//!
//! The executor of operations holds a [`Timeline`] and wraps each operation in a span. While tracing is off, a span
//! costs one test of a flag and allocates nothing.

use std::cell::{Cell, RefCell};
use std::ops::AddAssign;
use std::time::{Duration, Instant};

use lockstep_plan::work::Pass;

use crate::block::ParameterIndex;

/// The operation that a span of time was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Activity {
    /// Kind of operation, such as `linear`.
    pub name: &'static str,
    /// Part of the step, for an operation of the model.
    pub pass: Option<Pass>,
    /// Index of the unit that the operation belongs to.
    pub unit: Option<usize>,
    /// First parameter of the unit that the operation reads or trains.
    pub parameter: Option<ParameterIndex>,
}

impl Activity {
    /// Returns an activity that belongs to the step as a whole.
    pub const fn of_step(name: &'static str) -> Self {
        Self { name, pass: None, unit: None, parameter: None }
    }
}

/// Work of an operation, derived from its shapes alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations of matrix products, 2 per multiply-add; a device's matrix units can run them.
    pub product_flops: u64,
    /// All other floating-point operations; a transcendental function counts as one.
    pub vector_flops: u64,
    /// Bytes of all operands, each counted once per required read or write.
    pub bytes: u64,
}

impl Cost {
    /// Returns the cost of an operation that only moves bytes.
    pub const fn of_bytes(bytes: u64) -> Self {
        Self { product_flops: 0, vector_flops: 0, bytes }
    }

    /// All floating-point operations.
    pub const fn flops(&self) -> u64 {
        self.product_flops + self.vector_flops
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.product_flops += other.product_flops;
        self.vector_flops += other.vector_flops;
        self.bytes += other.bytes;
    }
}

/// A recorded operation with its start and duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The operation that ran.
    pub activity: Activity,
    /// Work of the operation.
    pub cost: Cost,
    /// Start time, relative to [`Timeline::start`].
    pub start: Duration,
    /// Wall-clock duration of the operation.
    pub duration: Duration,
}

/// Start time of an open span; empty while its timeline is off.
#[derive(Debug, Clone, Copy)]
#[must_use = "a span is recorded when it is ended"]
pub struct Begin(Option<Instant>);

/// A recorder of spans. It allocates only while it is on.
#[derive(Debug)]
pub struct Timeline {
    origin: Cell<Instant>,
    is_on: Cell<bool>,
    spans: RefCell<Vec<Span>>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { origin: Cell::new(Instant::now()), is_on: Cell::new(false), spans: RefCell::default() }
    }
}

impl Timeline {
    /// Starts recording and discards spans of an earlier recording.
    pub fn start(&self) {
        self.spans.borrow_mut().clear();
        self.origin.set(Instant::now());
        self.is_on.set(true);
    }

    /// Stops recording and returns the spans, in the order in which they ended.
    pub fn stop(&self) -> Vec<Span> {
        self.is_on.set(false);
        self.spans.take()
    }

    /// Begins a span, which [`Timeline::end`] ends.
    pub fn begin(&self) -> Begin {
        Begin(self.is_on.get().then(Instant::now))
    }

    /// Ends a span. `what` is called only if the span is recorded.
    pub fn end(&self, begin: Begin, what: impl FnOnce() -> (Activity, Cost)) {
        let Some(begin) = begin.0 else { return };
        let duration = begin.elapsed();
        let (activity, cost) = what();
        let start = begin.duration_since(self.origin.get());
        self.spans.borrow_mut().push(Span { activity, cost, start, duration });
    }

    /// Runs `work` inside a span.
    pub fn span<R>(&self, what: impl FnOnce() -> (Activity, Cost), work: impl FnOnce() -> R) -> R {
        let begin = self.begin();
        let result = work();
        self.end(begin, what);
        result
    }
}

/// The timeline that a replay records into, and the unit that it replays.
#[derive(Debug, Clone, Copy)]
pub struct Trace<'a> {
    /// Destination of the spans.
    pub timeline: &'a Timeline,
    /// Index of the unit in its model.
    pub unit: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHAT: (Activity, Cost) = (Activity::of_step("test"), Cost::of_bytes(8));

    #[test]
    fn nothing_is_recorded_while_a_timeline_is_off() {
        let timeline = Timeline::default();
        assert_eq!(timeline.span(|| panic!("nobody asks what it was"), || 3), 3);
        timeline.start();
        timeline.span(|| WHAT, || ());
        let spans = timeline.stop();
        assert_eq!(spans.iter().map(|span| (span.activity, span.cost)).collect::<Vec<_>>(), [WHAT]);
        timeline.span(|| WHAT, || ());
        assert_eq!(timeline.stop(), []);
    }

    #[test]
    fn a_span_that_began_before_the_recording_starts_with_it() {
        let timeline = Timeline::default();
        let before = timeline.begin();
        timeline.start();
        timeline.end(before, || WHAT);
        assert_eq!(timeline.stop(), []);
    }
}

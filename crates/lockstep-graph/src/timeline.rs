//! Where the time of a step goes: one span for each operation that runs, recorded only while somebody asks.
//!
//! Whoever executes operations holds a [`Timeline`] and wraps each of them in a span. While it is off that
//! costs one test of a flag, and nothing is allocated.

use std::cell::{Cell, RefCell};
use std::ops::AddAssign;
use std::time::{Duration, Instant};

use lockstep_plan::work::Pass;

use crate::ParameterIndex;

/// What a span of time was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Activity {
    /// The kind of operation, such as `linear`.
    pub name: &'static str,
    /// For an operation of the model.
    pub pass: Option<Pass>,
    /// The unit that it belongs to.
    pub unit: Option<usize>,
    /// The first of the unit's parameters that it works with.
    pub parameter: Option<ParameterIndex>,
}

impl Activity {
    /// Something that belongs to the step as a whole.
    pub const fn of_step(name: &'static str) -> Self {
        Self { name, pass: None, unit: None, parameter: None }
    }
}

/// What an operation has to do, from its shapes alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations of matrix products, 2 per multiply-add: what a CPU's widest units can take.
    pub product_flops: u64,
    /// All other floating-point operations; a transcendental function counts one.
    pub vector_flops: u64,
    /// Bytes of every operand, once for each time that it must be read or written.
    pub bytes: u64,
}

impl Cost {
    /// An operation that only moves bytes.
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

/// An operation that has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// What it was.
    pub activity: Activity,
    /// What it had to do.
    pub cost: Cost,
    /// When it began, from [`Timeline::start`].
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
}

/// When a span began; nothing while its timeline is off.
#[derive(Debug, Clone, Copy)]
#[must_use = "a span is recorded when it is ended"]
pub struct Begin(Option<Instant>);

/// Records spans while it is on. Recording allocates; being off does not.
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
    /// Records from now on; what was recorded before is forgotten.
    pub fn start(&self) {
        self.spans.borrow_mut().clear();
        self.origin.set(Instant::now());
        self.is_on.set(true);
    }

    /// Ends the recording and returns it, in the order in which the spans ended.
    pub fn stop(&self) -> Vec<Span> {
        self.is_on.set(false);
        self.spans.take()
    }

    /// Begins a span that [`Timeline::end`] ends.
    pub fn begin(&self) -> Begin {
        Begin(self.is_on.get().then(Instant::now))
    }

    /// Ends a span; `what` is asked only if it is recorded.
    pub fn end(&self, begin: Begin, what: impl FnOnce() -> (Activity, Cost)) {
        let Some(begin) = begin.0 else { return };
        let duration = begin.elapsed();
        let (activity, cost) = what();
        let start = begin.duration_since(self.origin.get());
        self.spans.borrow_mut().push(Span { activity, cost, start, duration });
    }

    /// Does `work` in a span of its own.
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
    /// Where spans go.
    pub timeline: &'a Timeline,
    /// Number of the unit in its model.
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

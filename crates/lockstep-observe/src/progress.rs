//! The progress display of a run, on standard error.
//!
//! On a terminal one line is redrawn in place and everything else is printed above it. Elsewhere (a file, a pipe, a dumb
//! terminal) there is a plain line every `log_every` steps. Both show the text of [`StepLine`]. A few labelled lines describe the
//! run before its first step; [`Detail::Everything`] adds more.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockstep_config::human;

use crate::metrics::{CountUnit, EvalMetrics, Means, StepMetrics};
use crate::screen;

/// Weight of the newest step in the exponential moving average from which the remaining time is estimated.
const SMOOTHING: f64 = 0.1;

/// Steps of a run and the interval of progress lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// Steps completed before this process began; 0 without a resume.
    pub done: u64,
    /// The last step.
    pub total: u64,
    /// Steps between plain lines.
    pub log_every: u64,
}

/// Amount of description that a run prints before its first step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Detail {
    /// Model, data, step and memory.
    #[default]
    Summary,
    /// Additionally everything else that follows from the configuration.
    Everything,
}

/// Progress display of a run. A failure to print never fails the run.
pub struct Progress {
    steps: Steps,
    display: Display,
    detail: Detail,
    smoothed_ms: Option<f64>,
}

/// Destination of what a rank displays; clones share it.
#[derive(Clone)]
enum Display {
    Bar(ProgressBar),
    Lines(Lines),
    /// Display of a rank other than the first, with its number: it prints only messages.
    OfOther(usize),
}

/// Destination of plain lines.
type Lines = Arc<Mutex<Box<dyn Write + Send>>>;

/// Printer of messages for any thread. A failure to print never fails the run.
#[derive(Clone)]
pub struct MessagePrinter(Display);

impl MessagePrinter {
    /// Returns a printer to standard error, for use before the progress display exists.
    pub fn on_stderr() -> Self {
        Self(Display::Lines(Arc::new(Mutex::new(Box::new(io::stderr())))))
    }

    /// Prints a message, above the progress line if there is one.
    pub fn message(&self, text: &str) {
        match &self.0 {
            Display::Bar(bar) => bar.println(text),
            Display::Lines(out) => write_line(out, text),
            Display::OfOther(rank) => {
                // The reader may be gone.
                let _ = writeln!(io::stderr(), "rank {rank}: {text}");
            }
        }
    }
}

impl Progress {
    /// Returns a display on standard error: a line in place on a terminal that can move its cursor, else plain lines.
    pub fn on_stderr(steps: Steps) -> Self {
        if screen::is_terminal() {
            Self::in_place(steps, ProgressDrawTarget::stderr())
        } else {
            Self::as_lines(steps, Box::new(io::stderr()))
        }
    }

    /// Returns a display that writes plain lines to `out`.
    pub fn as_lines(steps: Steps, out: Box<dyn Write + Send>) -> Self {
        Self::new(steps, Display::Lines(Arc::new(Mutex::new(out))))
    }

    /// Returns a display that prints nothing except the messages of its [`MessagePrinter`].
    pub fn of_other_rank(steps: Steps, rank: usize) -> Self {
        Self::new(steps, Display::OfOther(rank))
    }

    /// Returns a printer of messages for other threads.
    pub fn voice(&self) -> MessagePrinter {
        MessagePrinter(self.display.clone())
    }

    /// Returns a display with one line, redrawn in place.
    pub fn in_place(steps: Steps, target: ProgressDrawTarget) -> Self {
        let style = ProgressStyle::with_template("{bar:16.green} {wide_msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> ");
        let bar = ProgressBar::with_draw_target(Some(steps.total), target).with_style(style);
        bar.set_position(steps.done);
        Self::new(steps, Display::Bar(bar))
    }

    fn new(steps: Steps, display: Display) -> Self {
        Self { steps, display, detail: Detail::Summary, smoothed_ms: None }
    }

    /// Sets the amount of description before the first step.
    pub fn with_detail(self, detail: Detail) -> Self {
        Self { detail, ..self }
    }

    /// Prints a labelled line about the run.
    pub fn field(&mut self, label: &str, text: &str) {
        self.message(&screen::field(label, text));
    }

    /// Prints a labelled line if [`Detail::Everything`] is asked for.
    pub fn detail(&mut self, label: &str, text: &str) {
        if self.detail == Detail::Everything {
            self.field(label, text);
        }
    }

    /// Shows a completed step.
    pub fn step(&mut self, metrics: &StepMetrics) {
        let is_first = self.smoothed_ms.is_none();
        let previous = self.smoothed_ms.unwrap_or(metrics.step_ms);
        let smoothed_ms = previous + SMOOTHING * (metrics.step_ms - previous);
        self.smoothed_ms = Some(smoothed_ms);
        let is_due = is_first
            || metrics.step.is_multiple_of(self.steps.log_every.max(1))
            || metrics.step == self.steps.total
            || metrics.skipped;
        let line = StepLine {
            metrics,
            total_steps: self.steps.total,
            seconds_left: self.steps.total.saturating_sub(metrics.step) as f64 * smoothed_ms / 1e3,
        };
        match &mut self.display {
            Display::Bar(bar) => {
                bar.set_message(line.to_string());
                bar.set_position(metrics.step);
            }
            Display::Lines(out) if is_due => write_line(out, line),
            Display::Lines(_) | Display::OfOther(_) => {}
        }
    }

    /// Shows an evaluation.
    pub fn evaluation(&mut self, metrics: &EvalMetrics) {
        let seconds = human::seconds(metrics.ms / 1e3);
        let beside = match metrics.unit {
            CountUnit::Tokens => format!("  perplexity {:.2}", libm::exp(metrics.loss)),
            CountUnit::Samples => String::new(),
        };
        self.message(&format!(
            "step {}/{}  eval loss {:.4}{beside}{}  {} {} in {seconds}",
            metrics.step,
            self.steps.total,
            metrics.loss,
            Named(&metrics.metrics),
            human::count(metrics.counted as f64),
            metrics.unit.word(),
        ));
    }

    /// Prints a message, above the progress line if there is one.
    pub fn message(&mut self, text: &str) {
        match &mut self.display {
            Display::Bar(bar) => bar.println(text),
            Display::Lines(out) => write_line(out, text),
            Display::OfOther(_) => {}
        }
    }

    /// Ends the display; the progress line stays, and later output appears below it.
    pub fn finish(self) {
        if let Display::Bar(bar) = self.display {
            bar.abandon();
        }
    }
}

/// Writes a line. Errors are ignored because the reader may be gone; the run goes on.
fn write_line(out: &Lines, line: impl fmt::Display) {
    let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Metrics as the lines of a run show them, each behind two spaces.
struct Named<'m>(&'m Means);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(name, mean)| write!(f, "  {name} {mean:.4}"))
    }
}

/// Text of one step, with an estimate of the remaining time.
#[derive(Debug, Clone, Copy)]
pub struct StepLine<'m> {
    /// Metrics of the step.
    pub metrics: &'m StepMetrics,
    /// Last step of the run.
    pub total_steps: u64,
    /// Estimate of the remaining time in seconds.
    pub seconds_left: f64,
}

impl fmt::Display for StepLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let metrics = self.metrics;
        let width = self.total_steps.to_string().len();
        write!(f, "step {:>width$}/{}  loss {:.4}", metrics.step, self.total_steps, metrics.loss)?;
        let amount = &metrics.amount;
        write!(f, "{}", Named(&metrics.metrics))?;
        write!(f, "  lr {:.2e}  {} {}/s", metrics.lr, human::count(amount.per_s), amount.unit.word())?;
        if let Some(mfu) = metrics.mfu {
            write!(f, "  mfu {:.1}%", 100.0 * mfu)?;
        }
        write!(f, "  {}", human::bytes(metrics.memory.peak as u64))?;
        if let Some(scale) = metrics.loss_scale {
            write!(f, "  scale {}", human::count(scale))?;
        }
        if metrics.skipped_steps > 0 {
            write!(f, "  {} skipped", metrics.skipped_steps)?;
        }
        if metrics.rollbacks > 0 {
            write!(f, "  {}", human::plural(metrics.rollbacks as usize, "rollback"))?;
        }
        if metrics.step < self.total_steps {
            write!(f, "  {} left", human::seconds(self.seconds_left))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use indicatif::InMemoryTerm;

    use super::*;
    use crate::metrics::{Amount, example};

    const STEPS: Steps = Steps { done: 0, total: 25, log_every: 10 };

    /// A writer whose content the test can read while `Progress` owns a clone.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines_of(steps: Steps, act: impl FnOnce(&mut Progress)) -> Vec<String> {
        let out = Shared::default();
        let mut progress = Progress::as_lines(steps, Box::new(out.clone()));
        act(&mut progress);
        progress.finish();
        let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_line_tells_step_loss_rate_speed_memory_and_time_left() {
        let metrics = example(5);
        let line = StepLine { metrics: &metrics, total_steps: 1000, seconds_left: 80.0 };
        assert_eq!(
            line.to_string(),
            "step    5/1000  loss 5.5483  lr 3.00e-5  39.7k tokens/s  477 MiB  1m 20s left"
        );
        let metrics = StepMetrics { mfu: Some(0.4123), skipped_steps: 2, rollbacks: 1, ..metrics };
        let line = StepLine { metrics: &metrics, total_steps: 5, seconds_left: 0.0 };
        assert_eq!(
            line.to_string(),
            "step 5/5  loss 5.5483  lr 3.00e-5  39.7k tokens/s  mfu 41.2%  477 MiB  2 skipped  1 rollback"
        );
    }

    #[test]
    fn plain_lines_come_at_the_first_every_tenth_and_the_last_step() {
        let lines = lines_of(STEPS, |progress| (1..=25).for_each(|step| progress.step(&example(step))));
        let steps: Vec<&str> = lines.iter().map(|line| &line[..10]).collect();
        assert_eq!(steps, ["step  1/25", "step 10/25", "step 20/25", "step 25/25"]);
        assert!(lines[0].ends_with(" 9.9s left") && !lines[3].contains("left"), "{lines:?}");
    }

    #[test]
    fn skipped_steps_evaluations_and_messages_are_never_left_out() {
        let lines = lines_of(Steps { done: 2, ..STEPS }, |progress| {
            progress.step(&example(3));
            progress.step(&StepMetrics { skipped: true, skipped_steps: 1, loss: f64::NAN, ..example(4) });
            let row =
                EvalMetrics { step: 4, loss: 2.0, counted: 81_920, ms: 400.0, ..EvalMetrics::default() };
            progress.evaluation(&row);
            progress.message("saved checkpoints/step-00000004");
        });
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert!(lines[1].contains("loss NaN") && lines[1].contains("1 skipped"), "{lines:?}");
        assert_eq!(lines[2], "step 4/25  eval loss 2.0000  perplexity 7.39  81.9k tokens in 0.4s");
        assert_eq!(lines[3], "saved checkpoints/step-00000004");
    }

    #[test]
    fn a_classifier_shows_its_accuracy_and_samples_in_place_of_perplexity_and_tokens() {
        let accuracy = |mean| Means(vec![("accuracy".into(), mean)]);
        let unit = CountUnit::Samples;
        let amount = Amount { unit, per_s: 1234.0, ..example(5).amount };
        let metrics = StepMetrics { metrics: accuracy(0.4375), amount, ..example(5) };
        let line = StepLine { metrics: &metrics, total_steps: 5, seconds_left: 0.0 };
        assert_eq!(
            line.to_string(),
            "step 5/5  loss 5.5483  accuracy 0.4375  lr 3.00e-5  1.2k samples/s  477 MiB"
        );
        let row = EvalMetrics {
            step: 5,
            loss: 1.5,
            metrics: accuracy(0.625),
            unit,
            counted: 500,
            ms: 400.0,
            ..EvalMetrics::default()
        };
        let lines = lines_of(STEPS, |progress| progress.evaluation(&row));
        assert_eq!(lines, ["step 5/25  eval loss 1.5000  accuracy 0.6250  500 samples in 0.4s"]);
    }

    #[test]
    fn on_a_terminal_one_line_stays_below_the_messages() {
        let term = InMemoryTerm::new(10, 120);
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(term.clone()), 255);
        let mut progress = Progress::in_place(STEPS, target);
        for step in 1..=5 {
            progress.step(&example(step));
        }
        progress.message("saved");
        progress.finish();
        let contents = term.contents();
        let lines: Vec<&str> = contents.lines().collect();
        assert_eq!(lines.len(), 2, "{contents}");
        assert_eq!(lines[0], "saved");
        assert!(lines[1].starts_with("===>             step  5/25  loss 5.5483"), "{contents}");
    }

    #[test]
    fn a_narrow_terminal_shortens_the_line() {
        let term = InMemoryTerm::new(10, 40);
        let mut progress = Progress::in_place(STEPS, ProgressDrawTarget::term_like(Box::new(term.clone())));
        progress.step(&example(1));
        progress.finish();
        assert_eq!(term.contents().lines().count(), 1, "{}", term.contents());
    }
}

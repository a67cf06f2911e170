//! The watch over a search: a progress line on a terminal, and an early end by `--limit` or Ctrl-C.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use lockstep_config::human;
use lockstep_launch::interrupt::Interrupt;
use lockstep_planner::search::{Observer, Progress};

use crate::exit::Failure;

/// Least time between two updates of the progress line, which cost more than a candidate.
const BETWEEN_LINES: Duration = Duration::from_millis(100);

/// Time for advice if no plan fits.
const FOR_ADVICE: Duration = Duration::from_secs(4);

/// The reason for the early end of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// `--limit` was reached.
    Limit,
    /// Ctrl-C or SIGTERM.
    Interrupt,
}

/// Observer of searches; all searches of a command share one limit.
pub(super) struct Watch {
    interrupt: Interrupt,
    begin: Instant,
    limit: Duration,
    bar: Option<ProgressBar>,
    drawn: Instant,
    stopped: Option<Stop>,
}

impl Watch {
    /// Starts a watch that ends after `limit`.
    pub(super) fn start(limit: Duration) -> Result<Self, Failure> {
        let style = ProgressStyle::with_template("{spinner} {wide_msg}");
        let bar = style
            .ok()
            .filter(|_| stderr().is_terminal())
            .map(|style| ProgressBar::new_spinner().with_style(style));
        let begin = Instant::now();
        Ok(Self { interrupt: Interrupt::on_signals()?, begin, limit, bar, drawn: begin, stopped: None })
    }

    /// Extends the limit to a few seconds from now, for advice if no plan fits.
    pub(super) fn leave_a_moment(&mut self) {
        self.limit = self.begin.elapsed() + FOR_ADVICE;
    }

    /// Returns the reason for the early end, if there was one.
    pub(super) fn stopped(&self) -> Option<Stop> {
        self.stopped
    }

    /// Removes the progress line.
    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn draw(&mut self, progress: Progress) {
        let Some(bar) = &self.bar else { return };
        if self.drawn.elapsed() < BETWEEN_LINES {
            return;
        }
        self.drawn = Instant::now();
        bar.set_message(line(progress));
        bar.tick();
    }
}

/// Returns the progress of a search in one line.
fn line(Progress { candidates, done, best, bound }: Progress) -> String {
    let done = human::thousands(done as u64);
    let Some(candidates) = candidates else {
        return format!("{done} plans bounded (Ctrl-C ends the search)");
    };
    let all = human::thousands(candidates as u64);
    let found = match (best, bound) {
        (Some(best), Some(bound)) if best > 0.0 => {
            let gap = (1.0 - bound / best).max(0.0) * 100.0;
            format!("one found, those left are at most {gap:.1} % better")
        }
        _ => "none that fits yet".to_owned(),
    };
    format!("{done} of {all} plans evaluated, {found} (Ctrl-C shows the best so far)")
}

impl Observer for Watch {
    fn goes_on(&mut self, progress: Progress) -> bool {
        self.draw(progress);
        if self.interrupt.is_requested() {
            self.stopped = Some(Stop::Interrupt);
        } else if self.begin.elapsed() >= self.limit {
            self.stopped.get_or_insert(Stop::Limit);
        }
        self.stopped.is_none()
    }
}

/// Parses a duration: `30s`, `2m`, `500ms`, or a number of seconds.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim() {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        other => return Err(format!("no unit {other:?}: ms, s, m and h are")),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * factor);
    let seconds = seconds.filter(|seconds| (0.0..=1e9).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "a time such as 30s, 2m or 500ms".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let table =
            [("30s", 30.0), ("30", 30.0), ("2m", 120.0), ("1.5h", 5400.0), ("500ms", 0.5), ("0", 0.0)];
        for (text, seconds) in table {
            assert_eq!(duration(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
        for text in ["", "s", "1.2.3s", "5 days", "-1s", "1e99s"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_line_says_how_far_the_search_is() {
        let progress = Progress { candidates: Some(448_000), done: 1_200, best: Some(6.0), bound: Some(5.4) };
        let text = line(progress);
        assert!(
            text.starts_with("1,200 of 448,000 plans evaluated") && text.contains("at most 10.0 % better"),
            "{text}"
        );
        let text = line(Progress { best: None, ..progress });
        assert!(text.contains("none that fits yet"), "{text}");
    }
}

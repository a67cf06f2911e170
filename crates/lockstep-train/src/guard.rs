//! The guard: decides for every step whether it may change the weights.
//!
//! A step is skipped if its loss or gradient norm is not finite, or exceeds the median of earlier sound steps by a factor: its
//! data are consumed and its gradient is dropped. After several skipped steps in a row the weights themselves are suspect, and
//! the run rolls back to a copy of them in memory; data, step count and learning rate go on. All decisions follow from the losses
//! and norms alone, so a run and its repetition decide alike.

use std::fmt;

use lockstep_config::{Precision, RunConfig};
use lockstep_engine::{Engine, Snapshot};
use serde_json::{Value, json};

use crate::Error;

/// Number of recent sound steps over which the median is taken.
const HISTORY: usize = 64;
/// Least number of sound steps before a step can be called a spike.
const LEAST_HISTORY: usize = 16;
/// A loss has risen if it exceeds this multiple of the median of earlier sound steps by [`LEAST_RISE`] or more. Weights with a
/// risen loss replace no earlier checkpoint.
const RISEN: f64 = 1.5;
const LEAST_RISE: f64 = 0.5;
/// Number of consecutive skipped steps at which the run gives up.
const MAX_SKIPPED_IN_A_ROW: u64 = 10;

/// Judgement of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Verdict {
    /// The step may change the weights.
    Accepted,
    /// The loss or the gradient norm is not finite.
    NotFinite {
        /// Loss of the step.
        loss: f64,
        /// Gradient norm before clipping.
        grad_norm: f64,
    },
    /// The loss or the gradient norm exceeds the allowed multiple of its median.
    Spike {
        /// Name of the value: `loss` or `gradient norm`.
        what: &'static str,
        /// Value in this step.
        value: f64,
        /// Median of earlier sound steps.
        median: f64,
    },
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accepted => f.write_str("sound"),
            Self::NotFinite { loss, grad_norm } if loss.is_finite() => {
                write!(f, "the gradient norm is {grad_norm} (loss {})", Short(*loss))
            }
            Self::NotFinite { loss, .. } => write!(f, "the loss is {loss}"),
            Self::Spike { what, value, median } => {
                write!(
                    f,
                    "the {what} is {}, {:.1} times the median {median:.4}",
                    Short(*value),
                    value / median
                )
            }
        }
    }
}

/// A loss or norm with a readable number of digits.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.abs() < 1e5 { write!(f, "{:.4}", self.0) } else { write!(f, "{:.3e}", self.0) }
    }
}

/// Action of the run after a skipped step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Continue with the next step.
    GoOn,
    /// Restore the last copy of the state.
    RollBack,
}

/// The guard and its history.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    /// Allowed multiple of the median; `None` skips only values that are not finite.
    spike_factor: Option<f64>,
    /// The keys to change, for the error when the run gives up.
    advice: &'static str,
    /// Number of consecutive skipped steps that cause a rollback; 0 for never.
    rollback_after: u64,
    losses: Window,
    norms: Window,
    pub(crate) skipped_in_a_row: u64,
    /// Losses of sound steps that had not risen.
    recent_losses: Window,
    /// True if the loss of the last sound step had risen above the median of `recent_losses`.
    is_risen: bool,
    /// Last step that changed the weights.
    last_good: u64,
    /// Skipped steps of the whole run.
    pub(crate) skipped: u64,
    /// Rollbacks of the whole run.
    pub(crate) rollbacks: u64,
}

impl Guard {
    /// Returns the guard of a run that has completed `step` steps, restored from the state `remembered` in a checkpoint.
    pub(crate) fn new(config: &RunConfig, step: u64, remembered: &Value) -> Self {
        let number = |name: &str| remembered[name].as_u64().unwrap_or(0);
        Self {
            spike_factor: (config.train.spike_factor > 0.0).then_some(config.train.spike_factor),
            advice: match (config.train.precision, config.train.spike_factor > 0.0) {
                (Precision::F32, false) => "lower optimizer.lr, or lengthen schedule.warmup_steps",
                (Precision::F32, true) => "lower optimizer.lr, or raise train.spike_factor",
                (_, false) => "lower optimizer.lr, or set train.precision to \"f32\"",
                (_, true) => {
                    "lower optimizer.lr, set train.precision to \"f32\", or raise train.spike_factor"
                }
            },
            rollback_after: config.rollback_after(),
            losses: Window::from_json(&remembered["losses"]),
            norms: Window::from_json(&remembered["gradient_norms"]),
            skipped_in_a_row: number("skipped_in_a_row"),
            recent_losses: Window::from_json(&remembered["calm_losses"]),
            is_risen: remembered["is_risen"] == true,
            last_good: step - number("skipped_in_a_row").min(step),
            skipped: number("skipped"),
            rollbacks: number("rollbacks"),
        }
    }

    /// Returns the guard's state for a checkpoint.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "losses": self.losses.to_json(),
            "gradient_norms": self.norms.to_json(),
            "skipped_in_a_row": self.skipped_in_a_row,
            "calm_losses": self.recent_losses.to_json(),
            "is_risen": self.is_risen,
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
        })
    }

    /// Judges a step by its loss and gradient norm.
    pub(crate) fn judge(&self, loss: f64, grad_norm: f64) -> Verdict {
        if !(loss.is_finite() && grad_norm.is_finite()) {
            return Verdict::NotFinite { loss, grad_norm };
        }
        let Some(factor) = self.spike_factor else { return Verdict::Accepted };
        let usual = [("loss", loss, &self.losses), ("gradient norm", grad_norm, &self.norms)];
        let spike = usual.into_iter().find_map(|(what, value, window)| {
            let median = window.median()?;
            (value > factor * median).then_some(Verdict::Spike { what, value, median })
        });
        spike.unwrap_or(Verdict::Accepted)
    }

    /// Records a step that changed the weights.
    pub(crate) fn accept(&mut self, step: u64, loss: f64, grad_norm: f64) {
        self.skipped_in_a_row = 0;
        self.last_good = step;
        if self.spike_factor.is_some() {
            self.losses.push(loss);
            self.norms.push(grad_norm);
        }
        // A risen loss does not enter the median, however long it lasts.
        self.is_risen = self.recent_losses.median().is_some_and(|median| loss > RISEN * median + LEAST_RISE);
        if !self.is_risen {
            self.recent_losses.push(loss);
        }
    }

    /// Returns true if the run is failing, so that its newest weights are worth less than earlier ones. Its last step was
    /// skipped, or its loss had risen far above the median.
    pub(crate) fn is_doubtful(&self) -> bool {
        self.skipped_in_a_row > 0 || self.is_risen
    }

    /// Counts a step that was skipped for `verdict`. When the run gives up, `suspect` finds a parameter whose gradient is not
    /// finite.
    ///
    /// # Errors
    /// If too many steps in a row were skipped.
    pub(crate) fn skip(
        &mut self,
        step: u64,
        verdict: Verdict,
        suspect: impl FnOnce() -> Option<String>,
    ) -> Result<Action, Error> {
        self.skipped += 1;
        self.skipped_in_a_row += 1;
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW {
            let parameter = suspect().map_or(String::new(), |name| {
                format!("; the first parameter whose gradient is not finite is {name}")
            });
            return Err(Error::TooManySkipped {
                step,
                consecutive: self.skipped_in_a_row,
                last_good: self.last_good,
                reason: format!("{verdict}{parameter}"),
                advice: self.advice,
            });
        }
        if self.skipped_in_a_row == self.rollback_after {
            self.rollbacks += 1;
            return Ok(Action::RollBack);
        }
        Ok(Action::GoOn)
    }

    /// Counts a step that was skipped to adjust the loss scale; it does not make the weights suspect.
    pub(crate) fn skip_for_scale(&mut self) {
        self.skipped += 1;
    }
}

/// The most recent values of a series.
#[derive(Debug, Clone)]
struct Window {
    values: [f64; HISTORY],
    /// Number of values ever pushed; the newest is at `(count - 1) % HISTORY`.
    count: usize,
}

impl Window {
    fn push(&mut self, value: f64) {
        self.values[self.count % HISTORY] = value;
        self.count += 1;
    }

    /// Returns the (upper) median, or `None` with fewer than `LEAST_HISTORY` values.
    fn median(&self) -> Option<f64> {
        let count = self.count.min(HISTORY);
        if count < LEAST_HISTORY {
            return None;
        }
        let mut sorted = self.values;
        let sorted = &mut sorted[..count];
        sorted.sort_unstable_by(f64::total_cmp);
        Some(sorted[count / 2])
    }

    /// Returns the values from the oldest to the newest.
    fn to_json(&self) -> Value {
        let count = self.count.min(HISTORY);
        (self.count - count..self.count).map(|index| self.values[index % HISTORY]).collect()
    }

    fn from_json(json: &Value) -> Self {
        let mut window = Self { values: [0.0; HISTORY], count: 0 };
        let values = json.as_array().into_iter().flatten().filter_map(Value::as_f64);
        values.for_each(|value| window.push(value));
        window
    }
}

/// Copy of the state in memory for rollbacks.
pub(crate) struct RollbackSnapshot {
    snapshot: Snapshot,
    /// Number of optimizer steps of the copied state.
    updates: u64,
}

impl RollbackSnapshot {
    /// Copies the engine's state after `updates` optimizer steps.
    ///
    /// # Errors
    /// If there is no memory for the copy.
    pub(crate) fn new(engine: &Engine, updates: u64) -> Result<Self, Error> {
        let mut copy = Self { snapshot: Snapshot::new(engine)?, updates };
        copy.renew(engine, updates);
        Ok(copy)
    }

    /// Replaces the copy with the current state.
    pub(crate) fn renew(&mut self, engine: &Engine, updates: u64) {
        self.snapshot.take(engine);
        self.updates = updates;
    }

    /// Restores the copy and returns its number of optimizer steps.
    ///
    /// # Errors
    /// If the communication with other ranks fails.
    pub(crate) fn restore(&self, engine: &mut Engine) -> Result<u64, Error> {
        self.snapshot.restore(engine)?;
        Ok(self.updates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAN: Verdict = Verdict::NotFinite { loss: f64::NAN, grad_norm: 1.0 };

    fn guard(settings: &[&str]) -> Guard {
        let config = RunConfig::parse("", "test", settings).unwrap();
        Guard::new(&config, 0, &Value::Null)
    }

    fn after_sound_steps(mut guard: Guard, steps: u64) -> Guard {
        (1..=steps).for_each(|step| guard.accept(step, 4.0, 1.0 + (step % 3) as f64));
        guard
    }

    #[test]
    fn what_is_not_finite_is_refused_from_the_first_step_and_nothing_else_is_by_default() {
        let guard = after_sound_steps(guard(&[]), 100);
        for (loss, norm) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::INFINITY, 1.0), (1.0, f64::INFINITY)] {
            let verdict = guard.judge(loss, norm);
            assert!(matches!(verdict, Verdict::NotFinite { .. }), "{loss}, {norm}: {verdict}");
        }
        assert_eq!(guard.judge(1e30, 1e30), Verdict::Accepted);
    }

    #[test]
    fn a_loss_or_norm_beyond_the_factor_is_a_spike_once_enough_is_known() {
        let settings = ["train.spike_factor=5"];
        let known = after_sound_steps(guard(&settings), LEAST_HISTORY as u64);
        assert_eq!(known.judge(20.0, 10.0), Verdict::Accepted);
        assert_eq!(known.judge(20.1, 1.0), Verdict::Spike { what: "loss", value: 20.1, median: 4.0 });
        let norm = known.judge(4.0, 10.1);
        assert_eq!(norm, Verdict::Spike { what: "gradient norm", value: 10.1, median: 2.0 });
        assert_eq!(norm.to_string(), "the gradient norm is 10.1000, 5.0 times the median 2.0000");
        let unknown = after_sound_steps(guard(&settings), LEAST_HISTORY as u64 - 1);
        assert_eq!(unknown.judge(1e9, 1e9), Verdict::Accepted);
    }

    #[test]
    fn old_steps_are_forgotten() {
        let mut guard = after_sound_steps(guard(&["train.spike_factor=5"]), 200);
        (0..HISTORY as u64).for_each(|step| guard.accept(step, 0.1, 0.1));
        assert!(matches!(guard.judge(4.0, 0.1), Verdict::Spike { what: "loss", .. }));
    }

    #[test]
    fn a_guard_from_a_checkpoint_is_the_one_that_was_saved() {
        let mut guard = after_sound_steps(guard(&["train.spike_factor=5"]), 150);
        guard.accept(151, 1.0 / 3.0, 2.0_f64.sqrt());
        guard.skip(152, NAN, || None).unwrap();
        let config = RunConfig::parse("", "test", &["train.spike_factor=5"]).unwrap();
        let text = guard.to_json().to_string();
        let restored = Guard::new(&config, 152, &serde_json::from_str(&text).unwrap());
        assert_eq!(restored.to_json(), guard.to_json());
        assert_eq!((restored.last_good, restored.skipped), (151, 1));
        assert_eq!(restored.judge(21.0, 1.0), guard.judge(21.0, 1.0));
    }

    #[test]
    fn after_some_skipped_steps_the_run_goes_back_and_after_more_it_gives_up() {
        let mut guard = guard(&["train.spike_factor=5"]);
        guard.accept(1, 1.0, 1.0);
        let actions: Vec<_> = (2..=10).map(|step| guard.skip(step, NAN, || None).unwrap()).collect();
        let back = |action: &&Action| **action == Action::RollBack;
        assert_eq!((actions[2], actions.iter().filter(back).count()), (Action::RollBack, 1));
        let error = guard.skip(11, NAN, || Some("w".to_owned())).unwrap_err();
        assert!(
            matches!(error, Error::TooManySkipped { step: 11, consecutive: 10, last_good: 1, .. }),
            "{error}"
        );
    }
}

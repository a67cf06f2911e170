//! Dynamic loss scaling for f16, which keeps small gradients from underflow (DeepSpeed's scaler).
//!
//! When a gradient overflows, the step is skipped. After `hysteresis` overflows the scale is halved; after `window` steps without
//! one it is doubled.

use lockstep_config::{Precision, RunConfig};
use serde_json::{Value, json};

/// Ratio of one adjustment of the scale.
const FACTOR: f64 = 2.0;

/// The loss scale and its rule of adjustment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LossScale {
    value: f64,
    rule: Option<Rule>,
}

/// Rule by which the scale is adjusted; a fixed scale has none.
#[derive(Debug, Clone, PartialEq)]
struct Rule {
    window: u64,
    hysteresis: u64,
    minimum: f64,
    /// Overflows until the scale is lowered.
    patience: u64,
    /// Steps without an overflow since the last one, or since the beginning.
    calm_steps: u64,
}

impl LossScale {
    /// Returns the loss scale of a run in f16, restored from a checkpoint's state; `None` in other precisions.
    pub(crate) fn new(config: &RunConfig, remembered: &Value) -> Option<Self> {
        let train = &config.train;
        if train.precision != Precision::F16 {
            return None;
        }
        if train.loss_scale > 0.0 {
            return Some(Self { value: train.loss_scale, rule: None });
        }
        let number = |name: &str, default: u64| remembered[name].as_u64().unwrap_or(default);
        let rule = Rule {
            window: train.loss_scale_window,
            hysteresis: train.hysteresis,
            minimum: train.min_loss_scale,
            patience: number("patience", train.hysteresis),
            calm_steps: number("calm_steps", 0),
        };
        let initial = FACTOR.powi(train.initial_scale_power as i32).max(train.min_loss_scale);
        Some(Self { value: remembered["value"].as_f64().unwrap_or(initial), rule: Some(rule) })
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn to_json(&self) -> Value {
        match &self.rule {
            Some(rule) => {
                json!({ "value": self.value, "patience": rule.patience, "calm_steps": rule.calm_steps })
            }
            None => Value::Null,
        }
    }

    /// Scale of the current step.
    pub(crate) fn value(&self) -> f64 {
        self.value
    }

    /// Records a step without an overflow.
    pub(crate) fn calm(&mut self) {
        let Some(rule) = &mut self.rule else { return };
        rule.calm_steps += 1;
        if rule.calm_steps.is_multiple_of(rule.window) {
            rule.patience = rule.hysteresis;
            self.value *= FACTOR;
        }
    }

    /// Records a step with an overflow and returns the scale of the next step, which is lowered now or at a later overflow;
    /// `None` if it cannot be lowered, so that the overflow has another cause.
    pub(crate) fn overflow(&mut self) -> Option<f64> {
        let rule = self.rule.as_mut()?;
        rule.calm_steps = 0;
        if rule.patience > 1 {
            rule.patience -= 1;
        } else if self.value > rule.minimum {
            self.value = (self.value / FACTOR).max(rule.minimum);
        } else {
            return None;
        }
        Some(self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(settings: &[&str]) -> LossScale {
        let settings = [&["train.precision=\"f16\""], settings].concat();
        LossScale::new(&RunConfig::parse("", "test", &settings).unwrap(), &Value::Null).unwrap()
    }

    /// DeepSpeed's `DynamicLossScaler.update_scale`, with its own counters.
    struct DeepSpeed {
        scale: f64,
        iteration: i64,
        last_overflow: i64,
        hysteresis: u64,
    }

    impl DeepSpeed {
        fn update(&mut self, overflow: bool, window: i64, delayed_shift: u64, minimum: f64) {
            if overflow {
                if delayed_shift == 1 || self.hysteresis == 1 {
                    self.scale = (self.scale / 2.0).max(minimum);
                } else {
                    self.hysteresis -= 1;
                }
                self.last_overflow = self.iteration;
            } else if (self.iteration - self.last_overflow) % window == 0 {
                self.hysteresis = delayed_shift;
                self.scale *= 2.0;
            }
            self.iteration += 1;
        }
    }

    #[test]
    fn the_scale_follows_deepspeed_through_any_overflows() {
        for (window, hysteresis) in [(1000, 2), (5, 2), (3, 1), (4, 3)] {
            let settings = [
                format!("train.loss_scale_window={window}"),
                format!("train.hysteresis={hysteresis}"),
                "train.min_loss_scale=4".to_owned(),
            ];
            let mut ours = scale(&settings.each_ref().map(String::as_str));
            let mut theirs = DeepSpeed { scale: 65536.0, iteration: 0, last_overflow: -1, hysteresis };
            for step in 0_u64..400 {
                // Overflows are rare at first, then frequent, then rare again.
                let overflow = (step * step) % 17 == 3 || (150..190).contains(&step);
                assert_eq!(
                    ours.value(),
                    theirs.scale,
                    "step {step}, window {window}, hysteresis {hysteresis}"
                );
                if overflow {
                    ours.overflow();
                } else {
                    ours.calm();
                }
                theirs.update(overflow, window, hysteresis, 4.0);
            }
        }
    }

    #[test]
    fn at_the_minimum_or_with_a_fixed_scale_an_overflow_is_not_the_scales_fault() {
        let mut lowest = scale(&["train.initial_scale_power=1", "train.hysteresis=1"]);
        assert_eq!(lowest.overflow(), Some(1.0));
        assert_eq!(lowest.overflow(), None);
        let mut fixed = scale(&["train.loss_scale=128"]);
        fixed.calm();
        assert_eq!((fixed.value(), fixed.overflow()), (128.0, None));
    }

    #[test]
    fn a_scale_from_a_checkpoint_goes_on_as_the_one_that_was_saved() {
        let config =
            RunConfig::parse("", "test", &["train.precision=\"f16\"", "train.loss_scale_window=7"]).unwrap();
        let mut saved = LossScale::new(&config, &Value::Null).unwrap();
        saved.overflow();
        (0..5).for_each(|_| saved.calm());
        let mut restored = LossScale::new(&config, &saved.to_json()).unwrap();
        assert_eq!(restored, saved);
        (0..2).for_each(|_| [&mut saved, &mut restored].into_iter().for_each(LossScale::calm));
        assert_eq!((restored.value(), &restored), (131_072.0, &saved));
    }

    #[test]
    fn other_precisions_have_none() {
        assert_eq!(LossScale::new(&RunConfig::default(), &Value::Null), None);
    }
}

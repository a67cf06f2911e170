//! The learning rate as a pure function of the step.
//!
//! With `W` warm-up steps, `D` decay steps and `T` steps in all, the rate rises linearly over `W` steps,
//! stays at its peak for `S = T + 1 - W - D` steps (at least one) and then falls over `D` steps from 1
//! towards `min_ratio`:
//!
//! ```text
//! s < W      (s + 1) / W
//! s < W + S  1
//! else       min + (1 - min) f(p),  p = (s + 1 - W - S) / D,
//!            f = 1 - p | 1 - sqrt(p) | (1 + cos(pi p)) / 2
//! ```
//!
//! `s` counts from 0, so the first step already moves. These are torchtitan's conventions; where `W + D > T`
//! the curve is not squeezed but cut off by the end of the run, which repeats the beginning of a longer one.

use serde::Serialize;

/// Shape of the decay from the peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// The rate stays at its peak.
    None,
    /// Linear, `1 - p`.
    Linear,
    /// `1 - sqrt(p)`: steep first, as suits a short decay after a long stable phase (Hägele et al. 2024,
    /// "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", section 4).
    Sqrt,
    /// Half a cosine (Loshchilov and Hutter, "SGDR", 2017, equation 5).
    Cosine,
}

/// The learning rate of every step of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LearningRate {
    /// The peak learning rate.
    pub peak: f64,
    /// Steps of the linear warm-up.
    pub warmup_steps: u64,
    /// Steps of the run, with which the decay ends.
    pub total_steps: u64,
    /// Shape of the decay.
    pub decay: Decay,
    /// Steps of the decay; 0 for none.
    pub decay_steps: u64,
    /// The rate at the end of the decay, as a fraction of the peak.
    pub min_ratio: f64,
}

impl LearningRate {
    /// Returns the rate of the step with index `step`, from 0. Past the decay it stays at the minimum.
    pub fn at(&self, step: u64) -> f64 {
        self.peak * self.factor(step)
    }

    /// Returns the steps between warm-up and decay, `S`; `u64::MAX` if there is no decay.
    pub fn stable_steps(&self) -> u64 {
        match self.decay {
            Decay::None => u64::MAX,
            _ => self.total_steps.saturating_add(1).saturating_sub(self.decay_start()).max(1),
        }
    }

    fn decay_start(&self) -> u64 {
        self.warmup_steps.saturating_add(self.decay_steps)
    }

    fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return (step + 1) as f64 / self.warmup_steps as f64;
        }
        let stable_end = self.warmup_steps.saturating_add(self.stable_steps());
        if step < stable_end || self.decay_steps == 0 {
            return 1.0;
        }
        let progress = ((step - stable_end).saturating_add(1) as f64 / self.decay_steps as f64).min(1.0);
        let fall = match self.decay {
            Decay::None => return 1.0,
            Decay::Linear => 1.0 - progress,
            Decay::Sqrt => 1.0 - libm::sqrt(progress),
            Decay::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress)),
        };
        self.min_ratio + (1.0 - self.min_ratio) * fall
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn assert_rates(rate: LearningRate, expected: &[(u64, f64)]) {
        for &(step, value) in expected {
            let got = rate.at(step);
            assert!((got - value).abs() <= 1e-12 * value.abs(), "step {step}: {got}, expected {value}");
        }
    }

    const BASE: LearningRate = LearningRate {
        peak: 1.0,
        warmup_steps: 4,
        total_steps: 12,
        decay: Decay::Linear,
        decay_steps: 8,
        min_ratio: 0.0,
    };

    #[test]
    fn warm_up_moves_from_the_first_step_and_linear_falls_to_one_step_before_zero() {
        assert_rates(
            BASE,
            &[
                (0, 0.25),
                (1, 0.5),
                (2, 0.75),
                (3, 1.0),
                (4, 1.0),
                (5, 0.875),
                (8, 0.5),
                (11, 0.125),
                (12, 0.0),
            ],
        );
    }

    #[test]
    fn a_minimum_is_a_share_of_the_peak_and_leaves_the_warm_up_alone() {
        let rate = LearningRate { peak: 2e-3, min_ratio: 0.1, ..BASE };
        // 2e-3 * (0.1 + 0.9 * 0.5) at half of the decay.
        assert_rates(rate, &[(0, 5e-4), (4, 2e-3), (8, 1.1e-3), (12, 2e-4), (1_000_000, 2e-4)]);
    }

    #[test]
    fn cosine_follows_the_half_wave() {
        let rate = LearningRate { decay: Decay::Cosine, ..BASE };
        let half_wave = |eighths: f64| (1.0 + (std::f64::consts::PI * eighths / 8.0).cos()) / 2.0;
        assert_rates(
            rate,
            &[(4, 1.0), (5, half_wave(1.0)), (6, half_wave(2.0)), (8, 0.5), (10, half_wave(6.0))],
        );
    }

    #[test]
    fn warmup_stable_decay_holds_the_peak_then_falls_with_one_minus_sqrt() {
        let rate =
            LearningRate { warmup_steps: 2, total_steps: 20, decay: Decay::Sqrt, decay_steps: 4, ..BASE };
        // S = 20 + 1 - 2 - 4 = 15: the peak holds up to step 16.
        assert_eq!(rate.stable_steps(), 15);
        assert_rates(
            rate,
            &[(0, 0.5), (1, 1.0), (16, 1.0), (17, 0.5), (19, 1.0 - 0.75_f64.sqrt()), (20, 0.0)],
        );
    }

    /// nanoGPT's recipe for Shakespeare: its first 200 of 5,000 steps, as Python computes them.
    #[test]
    fn a_short_run_repeats_the_beginning_of_a_long_schedule() {
        let rate = LearningRate {
            peak: 1e-3,
            warmup_steps: 100,
            total_steps: 200,
            decay: Decay::Cosine,
            decay_steps: 4900,
            min_ratio: 0.1,
        };
        let python =
            |step: f64| 1e-4 + 9e-4 * 0.5 * (1.0 + (std::f64::consts::PI * (step - 100.0) / 4900.0).cos());
        assert_rates(rate, &[(0, 1e-5), (99, 1e-3), (100, 1e-3), (150, python(150.0)), (199, python(199.0))]);
        let whole = LearningRate { total_steps: 5000, ..rate };
        assert_rates(whole, &[(150, rate.at(150)), (199, rate.at(199)), (4999, python(4999.0))]);
    }

    #[test]
    fn degenerate_lengths_stay_at_the_peak() {
        let constant = LearningRate { decay: Decay::None, decay_steps: 0, min_ratio: 1.0, ..BASE };
        assert_rates(constant, &[(4, 1.0), (11, 1.0), (u64::MAX, 1.0)]);
        let no_decay = LearningRate { decay_steps: 0, ..BASE };
        assert_rates(no_decay, &[(4, 1.0), (11, 1.0), (u64::MAX, 1.0)]);
        let no_warmup = LearningRate { warmup_steps: 0, decay: Decay::None, ..BASE };
        assert_rates(no_warmup, &[(0, 1.0)]);
    }

    proptest! {
        #[test]
        fn the_rate_is_positive_at_most_the_peak_and_never_rises_after_the_warm_up(
            warmup_steps in 0u64..50, total_steps in 1u64..100, decay_steps in 0u64..120, min_ratio in 0.0f64..=1.0,
            decay in prop::sample::select(vec![Decay::None, Decay::Linear, Decay::Sqrt, Decay::Cosine]),
        ) {
            let warmup_steps = warmup_steps.min(total_steps);
            let rate = LearningRate { peak: 3e-4, warmup_steps, total_steps, decay, decay_steps, min_ratio };
            let mut previous = f64::INFINITY;
            for step in 0..total_steps {
                let now = rate.at(step);
                prop_assert!((0.0..=3e-4).contains(&now) && (now > 0.0 || step + 1 >= total_steps), "{step}: {now}");
                if step >= warmup_steps {
                    prop_assert!(now <= previous, "step {step}: {now} after {previous}");
                    previous = now;
                }
            }
        }
    }
}

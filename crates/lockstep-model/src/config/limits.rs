//! Limits on the sizes in a configuration, far above every published model.
//!
//! They keep arithmetic on shapes from overflowing (no allowed model has more than 2^61 parameters) and
//! turn a hostile or mistyped number into a message.

use crate::error::ConfigProblem;

/// Largest number of tokens in a vocabulary.
pub(super) const VOCABULARY: usize = 1 << 24;
/// Largest width of the residual stream and of feed-forward layers.
pub(super) const WIDTH: usize = 1 << 22;
/// Largest number of blocks.
pub(super) const LAYERS: usize = 1 << 12;
/// Largest number of heads, and of elements of a head.
pub(super) const HEADS: usize = 1 << 12;
/// Largest number of experts of a layer.
pub(super) const EXPERTS: usize = 1 << 10;
/// Longest context in tokens.
pub(super) const POSITIONS: usize = 1 << 30;

/// Range checks of sizes and numbers that collect the problems they find.
#[derive(Default)]
pub(super) struct Checks {
    pub(super) problems: Vec<ConfigProblem>,
}

impl Checks {
    /// Requires `1 <= value <= most`.
    pub(super) fn size(&mut self, key: &str, value: usize, most: usize) {
        if value == 0 || value > most {
            self.out_of_range(key, value, format!("1 to {most}"));
        }
    }

    /// Requires `0 < value < 1`, as for an epsilon.
    pub(super) fn epsilon(&mut self, key: &str, value: f64) {
        if !(value > 0.0 && value < 1.0) {
            self.out_of_range(key, value, "above 0 and below 1");
        }
    }

    /// Requires `0 <= value < 1`, as for a dropout probability.
    pub(super) fn fraction(&mut self, key: &str, value: f64) {
        if !(0.0..1.0).contains(&value) {
            self.out_of_range(key, value, "from 0 to below 1");
        }
    }

    /// Requires `0 < value <= 1`, as for the part of a whole.
    pub(super) fn part(&mut self, key: &str, value: f64) {
        if !(value > 0.0 && value <= 1.0) {
            self.out_of_range(key, value, "above 0 and at most 1");
        }
    }

    /// Requires `0 <= value <= 1`, as for the standard deviation of initial weights.
    pub(super) fn deviation(&mut self, key: &str, value: f64) {
        if !(0.0..=1.0).contains(&value) {
            self.out_of_range(key, value, "from 0 to 1");
        }
    }

    /// Requires `0 <= value <= 1e6`, as for the coefficient of a loss.
    pub(super) fn coefficient(&mut self, key: &str, value: f64) {
        if !(0.0..=1e6).contains(&value) {
            self.out_of_range(key, value, "from 0 to 1e6");
        }
    }

    /// Requires `0 < value <= 1e6`, as for a factor.
    pub(super) fn factor(&mut self, key: &str, value: f64) {
        if !(value > 0.0 && value <= 1e6) {
            self.out_of_range(key, value, "above 0 and at most 1e6");
        }
    }

    /// Requires that `divisor` divides `value`. A zero divisor is reported elsewhere.
    pub(super) fn divides(&mut self, (divisor_key, divisor): (&str, usize), (key, value): (&str, usize)) {
        if divisor != 0 && !value.is_multiple_of(divisor) {
            self.conflict(format!("`{divisor_key}` = {divisor} does not divide `{key}` = {value}"));
        }
    }

    pub(super) fn conflict(&mut self, message: String) {
        self.problems.push(ConfigProblem::Conflict { message });
    }

    fn out_of_range(&mut self, key: &str, value: impl ToString, allowed: impl Into<String>) {
        self.problems.push(ConfigProblem::OutOfRange {
            key: key.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        });
    }
}

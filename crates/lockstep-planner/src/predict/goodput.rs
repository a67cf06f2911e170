//! Cost of failures: the optimal checkpoint interval, and the goodput, the fraction of time spent on work that lasts.
//!
//! Sources: Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, "A higher order estimate of the
//! optimum checkpoint interval for restart dumps", 2006, equations 20 (time to solution) and 37 (interval).

use crate::cluster::Cluster;

/// Failure rate of a cluster, and the costs of saves and restarts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Failures {
    /// Mean time between failures of any node, in seconds.
    pub between_s: f64,
    /// Seconds for which a save stalls the steps.
    pub save_s: f64,
    /// Seconds from a failure until steps continue: detection, replacement of the node, and loading of the state.
    pub restart_s: f64,
}

/// Goodput of a run with failures, at the best checkpoint interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goodput {
    /// Seconds of work between two saves.
    pub interval_s: f64,
    /// Fraction of the time spent on work that no failure undoes, from 0 to 1.
    pub share: f64,
}

impl Failures {
    /// Computes the failure rate of a cluster whose nodes fail independently.
    pub fn of(cluster: &Cluster, save_s: f64, restart_s: f64) -> Self {
        let rate = |node: &crate::cluster::NodeKind| node.count as f64 / node.hours_between_failures;
        let an_hour: f64 = cluster.nodes.iter().map(rate).sum();
        Self { between_s: 3600.0 / an_hour, save_s, restart_s }
    }

    /// Returns the goodput with the best interval of at least `least_s`.
    pub fn goodput(&self, least_s: f64) -> Goodput {
        let interval_s = self.daly_interval_s().max(least_s);
        Goodput { interval_s, share: self.share_with(interval_s) }
    }

    /// Returns Young's interval, which minimizes lost work and saves to first order.
    pub fn young_interval_s(&self) -> f64 {
        (2.0 * self.save_s * self.between_s).sqrt()
    }

    /// Returns Daly's interval of work between two saves.
    pub fn daly_interval_s(&self) -> f64 {
        let Self { between_s, save_s, .. } = *self;
        if save_s >= 2.0 * between_s {
            return between_s;
        }
        let ratio = save_s / (2.0 * between_s);
        self.young_interval_s() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - save_s
    }

    /// Returns the goodput with `interval_s` of work between two saves.
    pub fn share_with(&self, interval_s: f64) -> f64 {
        let Self { between_s, save_s, restart_s } = *self;
        if !between_s.is_finite() {
            return interval_s / (interval_s + save_s);
        }
        if interval_s <= 0.0 {
            return 0.0;
        }
        let cycles =
            between_s * (restart_s / between_s).exp() * (((interval_s + save_s) / between_s).exp() - 1.0);
        interval_s / cycles
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_interval_is_better_than_dalys_by_much() {
        for (between_s, save_s) in [(3600.0, 30.0), (86_400.0, 120.0), (10_000.0, 1.0), (3600.0, 900.0)] {
            let failures = Failures { between_s, save_s, restart_s: 300.0 };
            let best = failures.goodput(0.0);
            for factor in [0.25, 0.5, 0.8, 1.25, 2.0, 4.0] {
                let other = failures.share_with(best.interval_s * factor);
                assert!(other < best.share * 1.002, "{failures:?}: {best:?}, {factor} gives {other}");
            }
        }
    }

    #[test]
    fn saves_that_cost_little_are_made_as_young_says() {
        let failures = Failures { between_s: 1e6, save_s: 1.0, restart_s: 0.0 };
        let (young, daly) = (failures.young_interval_s(), failures.daly_interval_s());
        assert!((daly / young - 1.0).abs() < 1e-3, "{daly} and {young}");
        // Saves and repeated work lose equally much: sqrt(2 C / M).
        assert!((1.0 - failures.goodput(0.0).share - (2e-6_f64).sqrt()).abs() < 1e-5, "{failures:?}");
    }
}

//! Scaling of a run with the number of nodes: the best plan for each number, with the same global batch (strong scaling) and with
//! one that grows with the nodes (weak scaling), and Amdahl's law fitted to the former.

use crate::search::Observer;
use crate::{Evaluated, Planner};

/// The best plans for a number of nodes; `None` where nothing fits, or no plan divides the batch.
#[derive(Debug, Clone)]
pub struct Scaled {
    /// Number of nodes.
    pub nodes: usize,
    /// Best plan with the global batch of the question.
    pub strong: Option<Evaluated>,
    /// Sequences of the global batch that grows with the nodes.
    pub weak_batch: usize,
    /// Best plan with the batch that grows with the nodes.
    pub weak: Option<Evaluated>,
}

/// A run on several numbers of nodes.
#[derive(Debug, Clone)]
pub struct Scaling {
    /// Best plans, in ascending order of the nodes.
    pub rows: Vec<Scaled>,
    /// Serial fraction in Amdahl's law, fitted to the strong scaling and relative to the fewest nodes; `None` with fewer than two rows.
    pub serial_fraction: Option<f64>,
}

impl Planner {
    /// Finds the best plans for each of these numbers of nodes of a cluster with one kind of node. The weak-scaling batch equals
    /// the question's batch at the question's number of nodes.
    pub fn scaling(&mut self, nodes: &[usize], observer: &mut impl Observer) -> Scaling {
        let (count, batch) = (self.cluster.nodes[0].count, self.config.train.global_batch);
        let mut rows = Vec::new();
        for &nodes in nodes {
            let strong = self.best_on(nodes, batch, observer);
            let weak_batch = (batch * nodes).div_ceil(count).max(1);
            let weak =
                if weak_batch == batch { strong.clone() } else { self.best_on(nodes, weak_batch, observer) };
            rows.push(Scaled { nodes, strong, weak_batch, weak });
        }
        let steps = rows.iter().filter_map(|row| Some((row.nodes, row.strong.as_ref()?.step.step_ms)));
        let serial_fraction = amdahl(&steps.collect::<Vec<_>>());
        Scaling { rows, serial_fraction }
    }

    fn best_on(&mut self, nodes: usize, batch: usize, observer: &mut impl Observer) -> Option<Evaluated> {
        let offloads = self.offloads.clone();
        let found = self.on_nodes(nodes, |planner| {
            let before = std::mem::replace(&mut planner.config.train.global_batch, batch);
            let found = planner.find_observed(1, observer).ranking.best.into_iter().next();
            planner.config.train.global_batch = before;
            found
        });
        self.offloads = offloads;
        found.map(|found| found.value)
    }
}

/// Returns the serial fraction `s` of `t(n) = t(1) (s + (1 - s) / n)` by least squares, with the first time as `t(1)` and `n`
/// relative to its nodes; `None` for fewer than two times.
fn amdahl(times: &[(usize, f64)]) -> Option<f64> {
    let (&(fewest, longest), others) = times.split_first()?;
    let (mut products, mut squares) = (0.0, 0.0);
    for &(nodes, time) in others {
        let parallel = fewest as f64 / nodes as f64;
        products += (time / longest - parallel) * (1.0 - parallel);
        squares += (1.0 - parallel).powi(2);
    }
    (squares > 0.0).then(|| (products / squares).clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amdahls_law_is_fitted_to_times_that_follow_it() {
        for serial in [0.0, 0.02, 0.5, 1.0] {
            let time = |nodes: usize| (nodes, 40.0 * (serial + (1.0 - serial) * 2.0 / nodes as f64));
            let fitted = amdahl(&[2, 4, 8, 64].map(time)).unwrap();
            assert!((fitted - serial).abs() < 1e-12, "{fitted} instead of {serial}");
        }
        assert_eq!(amdahl(&[(1, 3.0)]), None);
        // Superlinear scaling: the serial fraction is 0.
        assert_eq!(amdahl(&[(1, 4.0), (2, 1.9)]), Some(0.0));
    }
}

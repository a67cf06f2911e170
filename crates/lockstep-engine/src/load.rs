//! Expert load: the number of tokens routed to each expert in a step, and the bias steps that balance it.

use lockstep_comm::CommError;
use lockstep_model::RecordedModel;
use lockstep_tensor::View;

use crate::Groups;

/// Token counts by layer and expert, for the layers that have experts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExpertLoad {
    experts: usize,
    /// Index of each unit's layer among those with experts; `None` for other units.
    layers: Vec<Option<usize>>,
    counts: Vec<i64>,
    /// Host copy of one micro-batch's counts.
    scratch: Vec<f32>,
}

impl ExpertLoad {
    /// Returns zero counts for the experts of `model`; empty for a model without experts.
    pub(crate) fn new(model: &RecordedModel) -> Self {
        let experts_of = |unit| model.program(unit).experts();
        let experts = (0..model.units()).filter_map(experts_of).max().unwrap_or(0);
        let mut numbers = 0..;
        let number = |unit| experts_of(unit).and_then(|_| numbers.next());
        let layers: Vec<_> = (0..model.units()).map(number).collect();
        Self { experts, layers, counts: vec![0; numbers.start * experts], scratch: Vec::new() }
    }

    /// Returns the counts of each layer that has experts. They add up to the tokens of the step times the experts
    /// chosen per token.
    pub fn layers(&self) -> impl Iterator<Item = &[i64]> {
        self.counts.chunks_exact(self.experts.max(1))
    }

    /// Returns the counts of a unit's layer; `None` if it has no experts.
    pub(crate) fn of_unit(&self, unit: usize) -> Option<&[i64]> {
        let layer = self.layers[unit]?;
        Some(&self.counts[layer * self.experts..(layer + 1) * self.experts])
    }

    pub(crate) fn clear(&mut self) {
        self.counts.fill(0);
    }

    /// Adds the counts of one micro-batch in a unit: f32 `[sequences, experts]`.
    pub(crate) fn add(&mut self, unit: usize, counts: View<'_>) {
        let Some(layer) = self.layers[unit] else { return };
        self.scratch.resize(counts.elements(), 0.0);
        counts.read(&mut self.scratch).wait();
        let total = &mut self.counts[layer * self.experts..(layer + 1) * self.experts];
        for of_sequence in self.scratch.chunks_exact(self.experts) {
            total.iter_mut().zip(of_sequence).for_each(|(total, count)| *total += *count as i64);
        }
    }

    /// Returns the change of each expert's router bias in a unit: `+rate` below the mean load, `-rate` above it, 0 at
    /// the mean (Wang et al., 2024, algorithm 1).
    pub(crate) fn steps_to_balance(&self, unit: usize, rate: f32) -> Option<impl Iterator<Item = f32>> {
        let counts = self.of_unit(unit)?;
        let (total, experts) = (counts.iter().sum::<i64>(), counts.len() as i64);
        Some(counts.iter().map(move |count| rate * (total - count * experts).signum() as f32))
    }

    /// All-reduces the counts over all ranks.
    pub(crate) fn sum(&mut self, groups: &Groups) -> Result<(), CommError> {
        if self.counts.is_empty() { Ok(()) } else { groups.sum_over_world(&mut self.counts) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_move_against_the_load_and_stay_where_it_is_even() {
        let counts = vec![3, 1, 0, 4, 2, 2, 2, 2];
        let load =
            ExpertLoad { experts: 4, layers: vec![None, Some(0), Some(1)], counts, scratch: Vec::new() };
        let steps = |unit| load.steps_to_balance(unit, 0.5).map(Iterator::collect::<Vec<_>>);
        assert_eq!(steps(0), None);
        assert_eq!(steps(1), Some(vec![-0.5, 0.5, 0.5, -0.5]));
        assert_eq!(steps(2), Some(vec![0.0; 4]));
    }
}

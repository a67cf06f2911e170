//! Model state of a pipeline rank by unit, for bounds on the bytes that an offloaded fraction moves. Whole units are offloaded,
//! from the first on, until they have that fraction of the rank's own elements.

use lockstep_plan::work::UnitElements;
use lockstep_plan::{
    Axis, DISK_ALIGNMENT_BYTES, DType, ExpertAxis, Mesh, StageMemory, StateBytes, StateOnRank, ZeroStage,
};

use crate::memory::state_of_unit;

/// Tolerance of the border between offloaded and other units, as a fraction of a rank's state: padding of single parameters is ignored.
const BORDER: f64 = 0.02;
/// Elements of which a rank's own part is a whole multiple.
const RANGE_ELEMENTS: f64 = (DISK_ALIGNMENT_BYTES / DType::BF16.size_bytes()) as f64;

/// Model state of a rank by unit. Trained and frozen parameters are offloaded separately, each by the same fraction.
#[derive(Debug)]
pub(crate) struct StateByUnit {
    units: Vec<usize>,
    trained: Sums,
    frozen: Sums,
}

/// Prefix sums over the units: before each of them, and over all.
#[derive(Debug)]
struct Sums {
    /// Elements that the rank owns.
    owned: Vec<f64>,
    /// Bytes of weights, gradients and optimizer state.
    bytes: Vec<[u64; 3]>,
}

impl StateByUnit {
    /// Sums the state of the rank with these stages; `elements` gives the parameters of a unit.
    pub(crate) fn new(
        state: StateBytes,
        mesh: &Mesh,
        zero_stage: ZeroStage,
        stages: &[StageMemory],
        elements: impl Fn(usize) -> UnitElements,
    ) -> Self {
        let (view, experts) = (mesh.ranks(), mesh.experts());
        let sharers =
            [view.degree(Axis::Shard) * view.degree(Axis::Context), experts.degree(ExpertAxis::ExpertShard)]
                .map(|ranks| if zero_stage == ZeroStage::Nothing { 1 } else { ranks });
        let mut all = Self { units: Vec::new(), trained: Sums::empty(), frozen: Sums::empty() };
        for unit in stages.iter().flat_map(|stage| stage.units.clone()) {
            let elements = elements(unit);
            let (trained, frozen) = (elements.trained, elements.frozen());
            let held = |all, trained| state_of_unit(state, mesh, zero_stage, UnitElements { all, trained });
            all.trained.add(trained, sharers, held(trained, trained));
            all.frozen.add(frozen, sharers, held(frozen, [0.0; 2]));
            all.units.push(unit);
        }
        all
    }

    /// Returns an upper bound of the bytes of weights, gradients and optimizer state that a fraction offloads.
    pub(crate) fn most_moved(&self, fraction: f64) -> [u64; 3] {
        self.moved_bytes(fraction + BORDER)
    }

    /// Returns a lower bound of the bytes of weights, gradients and optimizer state that a fraction offloads.
    pub(crate) fn least_moved(&self, fraction: f64) -> [u64; 3] {
        self.moved_bytes(fraction - BORDER)
    }

    /// Returns the units whose trained parameters a fraction offloads at least, each with its share of the rank's elements in these units.
    pub(crate) fn least_units(&self, fraction: f64) -> impl Iterator<Item = (usize, f64)> {
        let Sums { owned, .. } = &self.trained;
        let moved = self.trained.moved(fraction - BORDER);
        let all = owned[moved].max(1.0);
        (0..moved).map(move |index| (self.units[index], (owned[index + 1] - owned[index]) / all))
    }

    fn moved_bytes(&self, fraction: f64) -> [u64; 3] {
        let [trained, frozen] = [&self.trained, &self.frozen].map(|sums| sums.bytes[sums.moved(fraction)]);
        [trained[0] + frozen[0], trained[1] + frozen[1], trained[2] + frozen[2]]
    }
}

impl Sums {
    fn empty() -> Self {
        Self { owned: vec![0.0], bytes: vec![[0; 3]] }
    }

    fn add(&mut self, elements: [f64; 2], sharers: [usize; 2], held: StateOnRank) {
        let (mut owned, [weights, gradients, optimizer]) = self.last();
        for (elements, ranks) in elements.into_iter().zip(sharers) {
            owned += (elements / ranks as f64 / RANGE_ELEMENTS).ceil() * RANGE_ELEMENTS;
        }
        self.owned.push(owned);
        self.bytes.push([weights + held.weights, gradients + held.gradients, optimizer + held.optimizer]);
    }

    fn last(&self) -> (f64, [u64; 3]) {
        (self.owned.last().copied().unwrap_or_default(), self.bytes.last().copied().unwrap_or_default())
    }

    /// Returns the number of units that a fraction offloads.
    fn moved(&self, fraction: f64) -> usize {
        let (all, _) = self.last();
        let wanted = fraction * all;
        let units = self.owned.len() - 1;
        self.owned[..units].partition_point(|before| *before < wanted)
    }
}

#[cfg(test)]
mod tests {
    use lockstep_plan::Degrees;

    use super::*;

    #[test]
    fn whole_units_are_offloaded_until_they_have_the_fraction() {
        let mesh = Mesh::new(Degrees { shard: 2, ..Degrees::default() }).unwrap();
        let stages = [StageMemory::whole(4)];
        let elements = |_| UnitElements { all: [1e6, 0.0], trained: [1e6, 0.0] };
        let state = StateByUnit::new(StateBytes::MIXED_ADAM, &mesh, ZeroStage::Optimizer, &stages, elements);
        let moved = |bytes: [u64; 3]| bytes[0] / 2_000_000;
        for (fraction, least, most) in [(0.0, 0, 1), (0.1, 1, 1), (0.26, 1, 2), (0.5, 2, 3), (1.0, 4, 4)] {
            let bounds = [state.least_moved(fraction), state.most_moved(fraction)].map(moved);
            assert_eq!(bounds, [least, most], "{fraction}");
        }
        assert_eq!(state.least_moved(1.0), [8_000_000, 8_000_000, 24_000_000]);
        let units: Vec<(usize, f64)> = state.least_units(0.5).collect();
        assert_eq!(units, [(0, 0.5), (1, 0.5)]);
    }
}

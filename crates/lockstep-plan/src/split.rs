//! Split of a model into pipeline stages by cost.
//!
//! A model is a sequence of units: the embedding, the blocks, the head. Their costs differ (the head of a small model costs as much as
//! several blocks), and a pipeline is as slow as its largest stage. So a stage is a run of one or more consecutive units, and the runs
//! minimize, in this order:
//!
//! 1. the cost of the largest stage;
//! 2. in a V-shaped schedule with two stages per rank, the cost of the largest rank;
//! 3. the sum of the squared stage costs, which makes all stages as even as possible.
//!
//! All three minima are exact, by dynamic programming. Ties go to splits with larger late stages, since those hold fewer micro-batches at
//! a time.

use crate::schedule::Kind;

/// Upper limit of a unit's cost: beyond it, squares of sums overflow.
const LARGEST_COST: f64 = 1e100;

/// Error of a split that is not possible.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    /// There are more stages than units, or no stages.
    #[error("{units} units cannot be split into {stages} stages; each stage has at least one")]
    Stages {
        /// Units of the model.
        units: usize,
        /// Stages of the pipeline.
        stages: usize,
    },
    /// A cost is negative, too large, or not a number.
    #[error("unit {unit} cannot cost {cost}")]
    Cost {
        /// Index of the unit.
        unit: usize,
        /// Cost that was given.
        cost: f64,
    },
}

/// Returns the number of units of each stage, first stage first, for a schedule of `ranks` with `chunks` stages each.
///
/// # Errors
/// If there are no stages, more stages than units, or a cost that is not a number from 0 to 1e100.
pub fn split_units(kind: Kind, costs: &[f64], ranks: usize, chunks: usize) -> Result<Vec<usize>, SplitError> {
    let stages = ranks.saturating_mul(chunks);
    if stages == 0 || stages > costs.len() {
        return Err(SplitError::Stages { units: costs.len(), stages });
    }
    if let Some(unit) = costs.iter().position(|cost| !(0.0..=LARGEST_COST).contains(cost)) {
        return Err(SplitError::Cost { unit, cost: costs[unit] });
    }
    let runs = Runs::new(costs);
    let (largest, _) = runs.split_in_a_row(stages, f64::max);
    let square = |cost: f64| if is_less(largest, cost) { f64::INFINITY } else { cost * cost };
    if !kind.is_v_shaped() || chunks != 2 {
        return Ok(runs.split_in_a_row(stages, |cost, rest| square(cost) + rest).1);
    }
    let (largest_rank, _) = runs.split_as_a_v(ranks, largest, |down, up, rest| rest.max(down + up));
    let (_, stages) = runs.split_as_a_v(ranks, largest, |down, up, rest| {
        if is_less(largest_rank, down + up) { f64::INFINITY } else { square(down) + square(up) + rest }
    });
    Ok(stages)
}

/// Returns the number of units of each stage so that the largest stage is as cheap as possible: only the first aim of [`split_units`], in
/// microseconds. `costs(stage)` are the costs of all `units` on that stage, since stages may be on different nodes. Remainders make the
/// first stages smaller, which hold the most micro-batches at a time. Returns `None` if there are no stages, or more than units.
pub fn split_minmax<'c>(
    costs: impl Fn(usize) -> &'c [f64],
    units: usize,
    stages: usize,
) -> Option<Vec<usize>> {
    if stages == 0 || stages > units {
        return None;
    }
    let costs: Vec<&[f64]> = (0..stages).map(costs).collect();
    // From the last unit back, each stage takes as many units as fit, and leaves at least one for each earlier stage.
    let lengths = |largest: f64| {
        let mut lengths = vec![0; stages];
        let mut end = units;
        for stage in (0..stages).rev() {
            let mut cost = 0.0;
            while end > stage && cost + costs[stage][end - 1] <= largest {
                end -= 1;
                cost += costs[stage][end];
                lengths[stage] += 1;
            }
            if lengths[stage] == 0 {
                return None;
            }
        }
        (end == 0).then_some(lengths)
    };
    // Lower bound: the dearest unit on its cheapest node. Upper bound: all units on their dearest nodes.
    let mut unlike = costs.clone();
    unlike.dedup_by_key(|of| of.as_ptr());
    let at = |unit: usize, choose: fn(f64, f64) -> f64| unlike.iter().map(|of| of[unit]).reduce(choose);
    let all = |choose: fn(f64, f64) -> f64| -> Vec<f64> {
        (0..units).filter_map(|unit| at(unit, choose)).collect()
    };
    let (mut too_little, mut enough) =
        (all(f64::min).into_iter().fold(0.0, f64::max), all(f64::max).into_iter().sum::<f64>());
    if let Some(lengths) = lengths(too_little) {
        return Some(lengths);
    }
    for _ in 0..40 {
        let middle = too_little.midpoint(enough);
        if lengths(middle).is_some() { enough = middle } else { too_little = middle }
    }
    lengths(enough)
}

/// Costs of runs of consecutive units, as prefix sums.
struct Runs {
    /// Sum of the costs of all units before each.
    before: Vec<f64>,
}

impl Runs {
    fn new(costs: &[f64]) -> Self {
        let mut before = vec![0.0];
        before.extend(costs.iter().scan(0.0, |sum, cost| {
            *sum += cost;
            Some(*sum)
        }));
        Self { before }
    }

    fn units(&self) -> usize {
        self.before.len() - 1
    }

    fn cost(&self, from: usize, to: usize) -> f64 {
        self.before[to] - self.before[from]
    }

    /// Returns the minimum of a split into `stages` runs, and their lengths. `add` combines the cost of the last run with the value of
    /// the runs before it.
    fn split_in_a_row(&self, stages: usize, add: impl Fn(f64, f64) -> f64) -> (f64, Vec<usize>) {
        // For each number of units from the left: the minimum over this many runs, and the start of the last run.
        let mut tables = vec![vec![(f64::INFINITY, 0); self.units() + 1]];
        tables[0][0].0 = 0.0;
        for stage in 0..stages {
            let before = &tables[stage];
            let best = |to: usize| {
                let starts = (stage..to).map(|from| (add(self.cost(from, to), before[from].0), from));
                starts.fold(
                    (f64::INFINITY, 0),
                    |best, start| if is_less(start.0, best.0) { start } else { best },
                )
            };
            let table = (0..=self.units()).map(best).collect();
            tables.push(table);
        }
        let mut to = self.units();
        let mut lengths = vec![0; stages];
        for (stage, length) in lengths.iter_mut().enumerate().rev() {
            let (_, from) = tables[stage + 1][to];
            *length = to - from;
            to = from;
        }
        (tables[stages][self.units()].0, lengths)
    }

    /// Returns the minimum of a V-shaped split into `2 ranks` runs none of which costs more than `largest`, and their lengths. `add`
    /// combines the costs of a rank's two runs with the value of the ranks after it, whose runs lie between them.
    fn split_as_a_v(
        &self,
        ranks: usize,
        largest: f64,
        add: impl Fn(f64, f64, f64) -> f64,
    ) -> (f64, Vec<usize>) {
        let width = self.units() + 1;
        // For each range (from, to) of units left for this rank and those after it: the minimum, and the range left after this rank.
        // After the last rank the range is empty.
        let mut table: Vec<(f64, usize, usize)> = (0..width * width)
            .map(|pair| (if pair / width == pair % width { 0.0 } else { f64::INFINITY }, 0, 0))
            .collect();
        let mut tables = Vec::with_capacity(ranks);
        for rank in (0..ranks).rev() {
            let best = |from: usize, to: usize| {
                let mut best = (f64::INFINITY, 0, 0);
                for down in (from + 1..to).take_while(|&down| !is_less(largest, self.cost(from, down))) {
                    for up in (down..to).rev().take_while(|&up| !is_less(largest, self.cost(up, to))) {
                        let rest = table[down * width + up].0;
                        let value = add(self.cost(from, down), self.cost(up, to), rest);
                        if is_less(value, best.0) {
                            best = (value, down, up);
                        }
                    }
                }
                best
            };
            let mut next = vec![(f64::INFINITY, 0, 0); width * width];
            let from_to = |from: usize| (from..width).map(move |to| (from, to));
            // The first rank starts with all units.
            let left: Vec<(usize, usize)> =
                if rank == 0 { vec![(0, self.units())] } else { (0..width).flat_map(from_to).collect() };
            for (from, to) in left {
                next[from * width + to] = best(from, to);
            }
            tables.push(std::mem::replace(&mut table, next));
        }
        let (value, ..) = table[self.units()];
        let mut lengths = vec![0; 2 * ranks];
        let (mut from, mut to) = (0, self.units());
        for rank in 0..ranks {
            let (_, down, up) = table[from * width + to];
            lengths[rank] = down - from;
            lengths[2 * ranks - 1 - rank] = to - up;
            (from, to) = (down, up);
            table = tables.pop().unwrap_or_default();
        }
        (value, lengths)
    }
}

/// Returns true if `value` is less than `than` by more than rounding, so that equal values compare as equal.
fn is_less(value: f64, than: f64) -> bool {
    value < than - 1e-12 * value.abs()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_quick_split_has_as_small_a_largest_stage_as_the_exact_one() {
        let mut generator = 7_u64;
        let mut next = |most: u64| {
            generator =
                generator.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (generator >> 33) % most
        };
        for _ in 0..200 {
            let costs: Vec<f64> = (0..2 + next(20)).map(|_| next(9) as f64).collect();
            let stages = 1 + next(costs.len() as u64) as usize;
            let largest = |lengths: &[usize]| {
                let mut start = 0;
                let sums = lengths.iter().map(|length| {
                    start += length;
                    costs[start - length..start].iter().sum::<f64>()
                });
                sums.fold(0.0, f64::max)
            };
            let exact =
                super::split_units(crate::schedule::Kind::OneForwardOneBackward, &costs, stages, 1).unwrap();
            let quick = super::split_minmax(|_| &costs, costs.len(), stages).unwrap();
            assert!(
                quick.iter().all(|length| *length > 0) && quick.iter().sum::<usize>() == costs.len(),
                "{costs:?} {quick:?}"
            );
            assert!(
                (largest(&quick) - largest(&exact)).abs() < 1e-6,
                "{costs:?} over {stages}: {quick:?}, {exact:?}"
            );
        }
    }

    #[test]
    fn a_quick_split_gives_slow_nodes_less() {
        // The second half of the stages is on nodes of half the speed.
        let (fast, slow) = (vec![1.0; 12], vec![2.0; 12]);
        let lengths = super::split_minmax(|stage| if stage < 2 { &fast } else { &slow }, 12, 4).unwrap();
        assert_eq!(lengths, [4, 4, 2, 2]);
        // A unit that is too dear for a slow node goes to a fast one.
        let (fast, slow) = (vec![1.0, 1.0, 4.0], vec![2.0, 2.0, 8.0]);
        let lengths = super::split_minmax(|stage| if stage < 1 { &slow } else { &fast }, 3, 2).unwrap();
        assert_eq!(lengths, [2, 1]);
    }

    use proptest::prelude::*;

    use super::*;

    const ONE_EACH: Kind = Kind::OneForwardOneBackward;

    /// Every split of `units` into `stages` runs.
    fn all_splits(units: usize, stages: usize) -> Vec<Vec<usize>> {
        if stages == 1 {
            return vec![vec![units]];
        }
        let first = |length: usize| {
            all_splits(units - length, stages - 1).into_iter().map(move |rest| [vec![length], rest].concat())
        };
        (1..=units - (stages - 1)).flat_map(first).collect()
    }

    /// Returns the cost of the largest stage, that of the largest rank of a V (0 if it is none), and the sum of squares.
    fn value(kind: Kind, costs: &[f64], split: &[usize]) -> (f64, f64, f64) {
        let mut units = costs.iter();
        let stages: Vec<f64> = split.iter().map(|&length| units.by_ref().take(length).sum()).collect();
        let pairs = stages.iter().zip(stages.iter().rev()).map(|(a, b)| a + b);
        let largest_rank = if kind.is_v_shaped() { pairs.fold(0.0, f64::max) } else { 0.0 };
        let squares = stages.iter().map(|cost| cost * cost).sum();
        (stages.iter().copied().fold(0.0, f64::max), largest_rank, squares)
    }

    proptest! {
        #[test]
        fn no_other_split_is_better(
            costs in prop::collection::vec(0_u32..12, 2..11), ranks in 1..5_usize, chunks in 1..4_usize,
            v_shaped in any::<bool>(),
        ) {
            let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
            let (kind, chunks) = if v_shaped { (Kind::ZeroBubbleV, 2) } else { (Kind::LoopedBreadthFirst, chunks) };
            let split = split_units(kind, &costs, ranks, chunks);
            if ranks * chunks > costs.len() {
                prop_assert_eq!(split, Err(SplitError::Stages { units: costs.len(), stages: ranks * chunks }));
                return Ok(());
            }
            let split = split.unwrap();
            prop_assert_eq!((split.len(), split.iter().sum()), (ranks * chunks, costs.len()));
            let best = all_splits(costs.len(), ranks * chunks)
                .into_iter()
                .min_by(|a, b| value(kind, &costs, a).partial_cmp(&value(kind, &costs, b)).unwrap())
                .unwrap();
            prop_assert_eq!(value(kind, &costs, &split), value(kind, &costs, &best), "{:?}, not {:?}", split, best);
        }
    }

    #[test]
    fn a_large_head_gets_fewer_blocks_beside_it() {
        // gpt2-124m by parameters that take part in GEMMs: a block has 7.1 million, the head 38.6.
        let mut costs = vec![7.1; 14];
        (costs[0], costs[13]) = (0.0, 38.6);
        assert_eq!(split_units(ONE_EACH, &costs, 2, 1).unwrap(), [10, 4]);
        assert_eq!(split_units(ONE_EACH, &costs, 4, 1).unwrap(), [5, 4, 4, 1]);
        // In a V the head's rank has the first stage as well, which therefore is smaller.
        assert_eq!(split_units(Kind::ZeroBubbleV, &costs, 2, 2).unwrap(), [4, 4, 5, 1]);
    }

    #[test]
    fn equal_blocks_leave_the_larger_stages_at_the_end() {
        assert_eq!(split_units(ONE_EACH, &[0.1; 10], 4, 1).unwrap(), [2, 2, 3, 3]);
        assert_eq!(split_units(Kind::Interleaved, &[0.1; 12], 4, 2).unwrap(), [1, 1, 1, 1, 2, 2, 2, 2]);
        let v = split_units(Kind::DualPipeV, &[0.1; 12], 4, 2).unwrap();
        assert!(v.iter().zip(v.iter().rev()).all(|(a, b)| a + b == 3), "{v:?}");
    }

    #[test]
    fn a_large_model_is_split_at_once() {
        let mut costs: Vec<f64> = (0..130).map(|unit| 1.0 + f64::from(unit % 7) / 100.0).collect();
        costs[129] = 3.0;
        for (kind, ranks, chunks) in
            [(Kind::Interleaved, 16, 4), (Kind::ZeroBubbleV, 16, 2), (Kind::ZeroBubbleV, 3, 2)]
        {
            let split = split_units(kind, &costs, ranks, chunks).unwrap();
            assert_eq!(split.iter().sum::<usize>(), 130, "{split:?}");
        }
    }

    #[test]
    fn what_cannot_be_split_is_told() {
        let message = |costs: &[f64], ranks| split_units(ONE_EACH, costs, ranks, 1).unwrap_err().to_string();
        assert_eq!(
            message(&[1.0; 3], 4),
            "3 units cannot be split into 4 stages; each stage has at least one"
        );
        assert_eq!(
            message(&[1.0; 3], 0),
            "3 units cannot be split into 0 stages; each stage has at least one"
        );
        assert_eq!(message(&[1.0, f64::NAN], 2), "unit 1 cannot cost NaN");
        assert_eq!(message(&[-1.0, 1.0], 2), "unit 0 cannot cost -1");
    }
}

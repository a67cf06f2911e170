//! All parameter gathers of a rank, their times and their memory, computed before the run from the layout of its weights and its passes.

use super::{GatherPlan, LiveLimitTooLow, RankPasses, Sequence};
use crate::{DType, ModelProfile, ReductionGroup, Sharding, StoreLayout, aligned_buffer_bytes};

/// Store of a rank's weights: trained or frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// Store of trained weights.
    Trained,
    /// Store of frozen weights.
    Frozen,
}

/// A flat parameter in a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bundled {
    /// Store of the flat parameter.
    pub kept: Kept,
    /// Index of the flat parameter in its store.
    pub flat: usize,
    /// Offset in the bundle, in elements.
    pub start: usize,
    /// Size in elements.
    pub elements: usize,
    /// True if the rank's own shard is on disk.
    pub is_on_disk: bool,
    /// Offset of its secondary shard among all secondary shards of this rank, in elements; `None` if there is none.
    pub secondary_start: Option<usize>,
}

/// Parameter gathers of a rank: the bundles, and their plans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathers {
    /// Bundles: flat parameters that are read by the same units.
    pub bundles: Vec<Vec<Bundled>>,
    /// For each unit, the bundles that it reads.
    pub needs: Vec<Vec<usize>>,
    /// For each flat parameter of both stores, its bundle and its offset there; `None` if it is not sharded and so never gathered.
    pub in_bundle: [Vec<Option<(usize, usize)>>; 2],
    /// Gather plans, indexed by [`Sequence`].
    pub plans: [GatherPlan; 3],
    /// Elements of all secondary shards of this rank; `None` if there are no secondary shard groups.
    pub secondary_elements: Option<usize>,
}

impl Gathers {
    /// Plans the gathers of a rank whose shards of `model` are laid out as `stores` and used by `passes`. `shard_ranks` returns the size
    /// of the shard group for each reduction group.
    ///
    /// Vocabulary shards may differ in size. Planning uses the largest, so that ranks that gather from each other make the same plan.
    ///
    /// # Errors
    /// If a unit reads more elements than may be unsharded at once.
    pub fn new(
        model: &ModelProfile,
        stores: [Option<&StoreLayout>; 2],
        shard_ranks: impl Fn(ReductionGroup) -> usize,
        passes: &RankPasses,
        sharding: &Sharding,
    ) -> Result<Self, LiveLimitTooLow> {
        let units = model.units.len();
        let (mut bundles, mut needs): (Vec<Vec<Bundled>>, _) = (Vec::new(), vec![Vec::new(); units]);
        let mut in_bundle = [Vec::new(), Vec::new()];
        let mut readers_of: Vec<Vec<usize>> = Vec::new();
        // Sizes of the largest shards among the tensor-parallel ranks.
        let mut sizes: Vec<usize> = Vec::new();
        for (kept, layout) in [Kept::Trained, Kept::Frozen].into_iter().zip(stores) {
            let Some(layout) = layout else { continue };
            let mut readers = vec![Vec::new(); layout.flat_parameters.len()];
            for (unit, profile) in model.units.iter().enumerate() {
                for id in &profile.parameters {
                    if let Some((flat, _)) = layout.places[id.0]
                        && readers[flat].last() != Some(&unit)
                    {
                        readers[flat].push(unit);
                    }
                }
            }
            let largest = layout.largest(&model.records, &model.largest_elements);
            for (index, (flat, readers)) in layout.flat_parameters.iter().zip(readers).enumerate() {
                // A flat parameter that is not sharded is read in place, unless it is on disk.
                if shard_ranks(flat.summing) == 1 && !flat.is_on_disk || readers.is_empty() {
                    in_bundle[kept as usize].push(None);
                    continue;
                }
                let known = readers_of.iter().position(|other| *other == readers);
                let bundle = known.unwrap_or_else(|| {
                    readers.iter().for_each(|unit| needs[*unit].push(bundles.len()));
                    bundles.push(Vec::new());
                    sizes.push(0);
                    readers_of.push(readers);
                    bundles.len() - 1
                });
                let start = bundles[bundle].last().map_or(0, |last| last.start + last.elements);
                let (elements, is_on_disk, secondary_start) = (flat.elements, flat.is_on_disk, None);
                let bundled = Bundled { kept, flat: index, start, elements, is_on_disk, secondary_start };
                bundles[bundle].push(bundled);
                in_bundle[kept as usize].push(Some((bundle, start)));
                sizes[bundle] += largest[index];
            }
        }
        let first_trained = model.units.iter().position(|unit| unit.has_backward);
        let plan = |sequence| {
            GatherPlan::plan(
                &sizes,
                &needs,
                &passes.uses(sequence, first_trained),
                sharding.live_parameters(),
            )
        };
        let [step, micro_batch, evaluation] = Sequence::ALL;
        let plans = [plan(step)?, plan(micro_batch)?, plan(evaluation)?];
        let neighbours = |summing| sharding.neighbours(shard_ranks(summing));
        let has_neighbours =
            model.records.iter().any(|record| neighbours(ReductionGroup::of(&record.share)).is_some());
        let mut kept_elements = 0;
        let mut is_repeated = vec![false; bundles.len()];
        for stay in plans.iter().flat_map(GatherPlan::stays) {
            is_repeated[stay.bundle] |= stay.earlier > 0;
        }
        for (bundle, _) in bundles.iter_mut().zip(is_repeated).filter(|(_, is_repeated)| *is_repeated) {
            for part in bundle {
                let layout = stores[part.kept as usize].expect("what is bundled is of a store");
                let Some(count) = neighbours(layout.flat_parameters[part.flat].summing) else { continue };
                part.secondary_start = Some(kept_elements);
                kept_elements += part.elements / count;
            }
        }
        let secondary_elements = has_neighbours.then_some(kept_elements);
        Ok(Self { bundles, needs, in_bundle, plans, secondary_elements })
    }

    /// Returns the size in bytes of the pool for gathered weights of `dtype`.
    pub fn pool_bytes(&self, dtype: DType) -> usize {
        let bytes = self.pool_elements().saturating_mul(dtype.size_bytes());
        let is_on_disk = self.bundles.iter().flatten().any(|part| part.is_on_disk);
        if is_on_disk { aligned_buffer_bytes(bytes) } else { bytes }
    }

    /// Returns the size in elements of that pool.
    pub fn pool_elements(&self) -> usize {
        self.plans.iter().map(GatherPlan::pool_elements).max().unwrap_or(0)
    }
}

//! Everything that a rank gathers, when, and what memory that takes: known before it runs, from where its weights stand and how its
//! passes use them.

use super::{GatherPlan, RankPasses, Sequence, TooFewLive};
use crate::{DType, ModelProfile, Sharding, StoreLayout, Summing, aligned_buffer_bytes};

/// Which store of a rank's own weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// What is trained.
    Trained,
    /// What is not.
    Frozen,
}

/// A stretch in a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bundled {
    /// The store that it is of.
    pub kept: Kept,
    /// Its number in that store.
    pub stretch: usize,
    /// Its first element in the bundle.
    pub start: usize,
    /// Its elements.
    pub elements: usize,
    /// Whether the rank's own part of it is on disk.
    pub is_on_disk: bool,
    /// Where what this rank keeps of it for its neighbours begins among all that it keeps so, if it does.
    pub secondary_start: Option<usize>,
}

/// What a rank gathers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathers {
    /// The stretches that the same units read.
    pub bundles: Vec<Vec<Bundled>>,
    /// The bundles that each unit reads.
    pub needs: Vec<Vec<usize>>,
    /// The bundle of each stretch of the stores, and where it begins there; none of those that nobody else owns a part of.
    pub in_bundle: [Vec<Option<(usize, usize)>>; 2],
    /// By [`Sequence`].
    pub plans: [GatherPlan; 3],
    /// Elements that this rank keeps for its neighbours; none if it has no neighbours.
    pub secondary_elements: Option<usize>,
}

impl Gathers {
    /// Those of a rank that keeps its own part of `model` as `stores` are laid out, which `passes` use; `shard_ranks` says how many share
    /// out what is summed so.
    ///
    /// Parts of a vocabulary may differ in size. It is planned with the largest, so that all that gather from each other plan alike.
    ///
    /// # Errors
    /// [`TooFewLive`].
    pub fn new(
        model: &ModelProfile,
        stores: [Option<&StoreLayout>; 2],
        shard_ranks: impl Fn(Summing) -> usize,
        passes: &RankPasses,
        sharding: &Sharding,
    ) -> Result<Self, TooFewLive> {
        let units = model.units.len();
        let (mut bundles, mut needs): (Vec<Vec<Bundled>>, _) = (Vec::new(), vec![Vec::new(); units]);
        let mut in_bundle = [Vec::new(), Vec::new()];
        let mut readers_of: Vec<Vec<usize>> = Vec::new();
        // Of the largest parts that there are.
        let mut sizes: Vec<usize> = Vec::new();
        for (kept, layout) in [Kept::Trained, Kept::Frozen].into_iter().zip(stores) {
            let Some(layout) = layout else { continue };
            let mut readers = vec![Vec::new(); layout.stretches.len()];
            for (unit, profile) in model.units.iter().enumerate() {
                for id in &profile.parameters {
                    if let Some((stretch, _)) = layout.places[id.0]
                        && readers[stretch].last() != Some(&unit)
                    {
                        readers[stretch].push(unit);
                    }
                }
            }
            let largest = layout.largest(&model.records, &model.largest_elements);
            for (index, (stretch, readers)) in layout.stretches.iter().zip(readers).enumerate() {
                // What nobody else owns a part of is read where it is kept, but not from a disk.
                if shard_ranks(stretch.summing) == 1 && !stretch.is_on_disk || readers.is_empty() {
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
                let (elements, is_on_disk, secondary_start) = (stretch.elements, stretch.is_on_disk, None);
                let bundled = Bundled { kept, stretch: index, start, elements, is_on_disk, secondary_start };
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
            model.records.iter().any(|record| neighbours(Summing::of(&record.share)).is_some());
        let mut kept_elements = 0;
        let mut is_repeated = vec![false; bundles.len()];
        for stay in plans.iter().flat_map(GatherPlan::stays) {
            is_repeated[stay.bundle] |= stay.earlier > 0;
        }
        for (bundle, _) in bundles.iter_mut().zip(is_repeated).filter(|(_, is_repeated)| *is_repeated) {
            for part in bundle {
                let layout = stores[part.kept as usize].expect("what is bundled is of a store");
                let Some(count) = neighbours(layout.stretches[part.stretch].summing) else { continue };
                part.secondary_start = Some(kept_elements);
                kept_elements += part.elements / count;
            }
        }
        let secondary_elements = has_neighbours.then_some(kept_elements);
        Ok(Self { bundles, needs, in_bundle, plans, secondary_elements })
    }

    /// Bytes of the pool in which everything lies that was gathered, if it is of `dtype`.
    pub fn pool_bytes(&self, dtype: DType) -> usize {
        let bytes = self.pool_elements().saturating_mul(dtype.size_bytes());
        let is_on_disk = self.bundles.iter().flatten().any(|part| part.is_on_disk);
        if is_on_disk { aligned_buffer_bytes(bytes) } else { bytes }
    }

    /// Elements of that pool.
    pub fn pool_elements(&self) -> usize {
        self.plans.iter().map(GatherPlan::pool_elements).max().unwrap_or(0)
    }
}

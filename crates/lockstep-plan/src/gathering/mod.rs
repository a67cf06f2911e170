//! Plan of parameter all-gathers under ZeRO stage 3 (FSDP): when each sharded weight is unsharded on a rank, and for how long.
//!
//! Weights that the same units read are gathered together, as a *bundle*. A step is a known sequence of uses, each of one unit. So this
//! module decides before the run when each bundle is gathered, how long it stays, and where it lies in the pool; nothing is traced. While
//! one use computes, the bundles of the next one are prefetched. Bundles are kept between uses as long as there is room. Otherwise the
//! one whose next use is furthest away is evicted, as in Gemini's chunk manager (Fang et al., 2023); with bundles of one size no other
//! choice gathers less (Belady, 1966).
//!
//! ```text
//! uses     F0   F1   F2   F3   B3   B2   B1   B0
//! bundle 0 ====                            -----====      === used, --- in flight or kept for later
//! bundle 1 ----====                  ----====
//! bundle 2      ----====-----------=====
//! bundle 3           ----============
//! ```

mod gathers;
mod packing;
#[cfg(test)]
mod tests;
mod uses;

use std::collections::BTreeSet;

use crate::named_enum::named_enum;

pub use gathers::{Bundled, Gathers, Kept};
pub use packing::{Lifetime, pack};
pub use uses::{RankPasses, Sequence};

/// Limit on prefetching, in uses. Collectives of a group run in order, so a gather that starts too early only delays gradient reductions
/// that others wait for.
const MOST_AHEAD: usize = 4;

named_enum! {
    /// Reshard policy: the handling of a unit's gathered weights after its forward.
    #[derive(Default)]
    pub enum ReshardAfterForward {
        /// Weights are resharded after each forward, except those that the backward starts with.
        Always = "always",
        /// Weights stay unsharded as long as there is room.
        #[default]
        Auto = "auto",
        /// Weights stay unsharded; the pool has room for all of them.
        Never = "never",
    }
}

/// Limits on the sharded parameters that are unsharded on a rank at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LiveParameters {
    /// Reshard policy after a forward.
    pub reshard: ReshardAfterForward,
    /// Upper limit of unsharded elements (DeepSpeed's `stage3_max_live_parameters`); `None` for the largest pair of consecutive uses.
    /// Ignored under [`ReshardAfterForward::Never`].
    pub limit: Option<usize>,
}

/// Error: one unit reads more parameters than may be unsharded at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("unit {unit} reads {needed} parameters at once, and {limit} may be whole")]
pub struct LiveLimitTooLow {
    /// Index of the unit.
    pub unit: usize,
    /// Elements that the unit reads.
    pub needed: usize,
    /// Upper limit of unsharded elements.
    pub limit: usize,
}

/// Residency of a bundle in the pool, from its gather to its last use before it is dropped. Times are indices of uses in the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residency {
    /// Index of the bundle.
    pub bundle: usize,
    /// Use during which the gather starts; if it equals `first_use`, the gather runs before that use.
    pub from: usize,
    /// First use that reads the bundle.
    pub first_use: usize,
    /// Last use that reads the bundle.
    pub to: usize,
    /// Offset of the bundle in the pool, in elements.
    pub start: usize,
    /// Number of earlier gathers of this bundle in the sequence.
    pub earlier: usize,
}

/// Gathers and pool offsets of all bundles for one sequence of uses. The pool is empty before the first use, and nothing is in flight
/// after the last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GatherPlan {
    /// Stays in order of their start.
    stays: Vec<Residency>,
    /// For each use, the index of the first stay that starts with it or later; the last entry is the number of stays.
    first_of_use: Vec<usize>,
    pool_elements: usize,
    most_live: usize,
}

impl GatherPlan {
    /// Plans a sequence of uses. `uses` are unit indices; unit `u` reads the bundles `needs[u]`, in ascending order, of `sizes[bundle]`
    /// elements. The plan depends on nothing else, so ranks that gather from each other make the same one.
    ///
    /// # Errors
    /// If a unit reads more elements than the limit in `live`.
    pub fn plan(
        sizes: &[usize],
        needs: &[Vec<usize>],
        uses: &[usize],
        live: LiveParameters,
    ) -> Result<Self, LiveLimitTooLow> {
        let planner = Planner { sizes, needs, uses, limit: limit_of(sizes, needs, uses, live)? };
        let mut stays = planner.least();
        if live.reshard != ReshardAfterForward::Always {
            planner.keep(&mut stays);
        }
        planner.begin_early(&mut stays);
        let lifetime =
            |stay: &Residency| Lifetime { from: stay.from, to: stay.to, elements: sizes[stay.bundle] };
        let (starts, pool_elements) = pack(&stays.iter().map(lifetime).collect::<Vec<_>>());
        let mut gathered = vec![0; sizes.len()];
        for (stay, start) in stays.iter_mut().zip(starts) {
            stay.start = start;
            stay.earlier = gathered[stay.bundle];
            gathered[stay.bundle] += 1;
        }
        let first_of_use = (0..=uses.len()).map(|at| stays.partition_point(|stay| stay.from < at)).collect();
        let most_live = planner.live(&stays).into_iter().max().unwrap_or(0);
        Ok(Self { stays, first_of_use, pool_elements, most_live })
    }

    /// Returns the stays whose gather starts with a use: those that it reads itself first.
    pub fn begins_with(&self, at: usize) -> &[Residency] {
        &self.stays[self.first_of_use[at]..self.first_of_use[at + 1]]
    }

    /// Returns how many of [`GatherPlan::begins_with`] the use reads itself; the others are prefetches.
    pub fn read_at_once(&self, at: usize) -> usize {
        self.begins_with(at).partition_point(|stay| stay.first_use == at)
    }

    /// Returns the number of uses.
    pub fn len(&self) -> usize {
        self.first_of_use.len().saturating_sub(1)
    }

    /// Returns true if there are no uses.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all stays, in order of their start.
    pub fn stays(&self) -> &[Residency] {
        &self.stays
    }

    /// Returns the size of the pool in elements: at least [`GatherPlan::most_live`], and more if bundles of different sizes leave gaps.
    pub fn pool_elements(&self) -> usize {
        self.pool_elements
    }

    /// Returns the maximum number of elements that are unsharded or in flight at once.
    pub fn most_live(&self) -> usize {
        self.most_live
    }
}

/// Returns the limit of unsharded elements, after a check that it suffices for each unit of the sequence.
fn limit_of(
    sizes: &[usize],
    needs: &[Vec<usize>],
    uses: &[usize],
    LiveParameters { reshard, limit }: LiveParameters,
) -> Result<usize, LiveLimitTooLow> {
    let of = |bundles: &BTreeSet<usize>| bundles.iter().map(|bundle| sizes[*bundle]).sum::<usize>();
    let read_by = |units: &[usize]| of(&units.iter().flat_map(|unit| needs[*unit].iter().copied()).collect());
    if reshard == ReshardAfterForward::Never {
        return Ok(read_by(uses));
    }
    // Pairs of units are few, uses are many.
    let pairs: BTreeSet<[usize; 2]> = uses.windows(2).map(|pair| [pair[0], pair[1]]).collect();
    let single = uses.first().map_or(0, |unit| read_by(&[*unit]));
    let limit = limit.unwrap_or_else(|| pairs.iter().map(|pair| read_by(pair)).fold(single, usize::max));
    let units: BTreeSet<usize> = uses.iter().copied().collect();
    match units.into_iter().map(|unit| (unit, read_by(&[unit]))).find(|(_, needed)| *needed > limit) {
        Some((unit, needed)) => Err(LiveLimitTooLow { unit, needed, limit }),
        None => Ok(limit),
    }
}

struct Planner<'a> {
    sizes: &'a [usize],
    needs: &'a [Vec<usize>],
    uses: &'a [usize],
    limit: usize,
}

impl Planner<'_> {
    fn needs(&self, at: usize) -> &[usize] {
        self.uses.get(at).map_or(&[], |unit| &self.needs[*unit])
    }

    /// Returns the mandatory stays: each bundle during the uses that read it, and during the use before them if there is room.
    fn least(&self) -> Vec<Residency> {
        let mut stays: Vec<Residency> = Vec::new();
        let mut last_of: Vec<Option<usize>> = vec![None; self.sizes.len()];
        let mut be_there = |at: usize, bundle: usize, first_use: usize| match last_of[bundle] {
            Some(last) if stays[last].to + 1 == at => stays[last].to = at,
            _ => {
                last_of[bundle] = Some(stays.len());
                stays.push(Residency { bundle, from: at, first_use, to: at, start: 0, earlier: 0 });
            }
        };
        for at in 0..self.uses.len() {
            let (own, next) = (self.needs(at), self.needs(at + 1));
            let of_next = || next.iter().filter(|bundle| !own.contains(bundle));
            let elements: usize = own.iter().chain(of_next()).map(|bundle| self.sizes[*bundle]).sum();
            own.iter().for_each(|bundle| be_there(at, *bundle, at));
            if elements <= self.limit {
                of_next().for_each(|bundle| be_there(at, *bundle, at + 1));
            }
        }
        stays
    }

    /// Joins stays of one bundle if there is room to keep it between them.
    fn keep(&self, stays: &mut Vec<Residency>) {
        let room: Vec<usize> = self.live(stays).into_iter().map(|live| self.limit - live).collect();
        let mut next_of = vec![None; stays.len()];
        let mut last_of: Vec<Option<usize>> = vec![None; self.sizes.len()];
        for (index, stay) in stays.iter().enumerate() {
            if let Some(last) = last_of[stay.bundle].replace(index) {
                next_of[last] = Some(index);
            }
        }
        // Bundles kept at the moment: the start of the next stay, and the index of the stay before it.
        let mut kept: BTreeSet<(usize, usize)> = BTreeSet::new();
        let mut kept_elements = 0;
        let mut ends: Vec<Vec<usize>> = vec![Vec::new(); self.uses.len()];
        stays.iter().enumerate().for_each(|(index, stay)| ends[stay.to].push(index));
        let mut is_continued = vec![false; stays.len()];
        for at in 1..self.uses.len() {
            while let Some(&(until, index)) = kept.first().filter(|(until, _)| *until <= at) {
                kept.remove(&(until, index));
                kept_elements -= self.sizes[stays[index].bundle];
                is_continued[index] = true;
            }
            for &index in &ends[at - 1] {
                if let Some(next) = next_of[index] {
                    kept.insert((stays[next].from, index));
                    kept_elements += self.sizes[stays[index].bundle];
                }
            }
            while kept_elements > room[at]
                && let Some((_, index)) = kept.pop_last()
            {
                kept_elements -= self.sizes[stays[index].bundle];
            }
        }
        // Backwards, so that a chain of stays ends up in its first.
        let mut is_gone = vec![false; stays.len()];
        for index in (0..stays.len()).rev() {
            if let Some(next) = next_of[index].filter(|_| is_continued[index]) {
                stays[index].to = stays[next].to;
                is_gone[next] = true;
            }
        }
        let mut is_gone = is_gone.into_iter();
        stays.retain(|_| !is_gone.next().unwrap_or(false));
    }

    /// Starts gathers earlier if there is room.
    fn begin_early(&self, stays: &mut [Residency]) {
        let mut live = self.live(stays);
        let mut free_from = vec![0; self.sizes.len()];
        for stay in stays.iter_mut() {
            let size = self.sizes[stay.bundle];
            let earliest = free_from[stay.bundle].max(stay.first_use.saturating_sub(MOST_AHEAD));
            while stay.from > earliest && live[stay.from - 1] + size <= self.limit {
                stay.from -= 1;
                live[stay.from] += size;
            }
            free_from[stay.bundle] = stay.to + 1;
        }
        stays.sort_by_key(|stay| (stay.from, stay.first_use, stay.bundle));
    }

    /// Returns the number of elements that are unsharded or in flight during each use.
    fn live(&self, stays: &[Residency]) -> Vec<usize> {
        let mut changes = vec![(0, 0); self.uses.len() + 1];
        for stay in stays {
            changes[stay.from].0 += self.sizes[stay.bundle];
            changes[stay.to + 1].1 += self.sizes[stay.bundle];
        }
        let mut live = 0;
        let live_at = |(come, gone): (usize, usize)| {
            live = live + come - gone;
            live
        };
        changes.into_iter().take(self.uses.len()).map(live_at).collect()
    }
}

//! Invariants of every gather plan, and the minimum number of gathers where it can be known.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const RESHARDS: [ReshardAfterForward; 3] =
    [ReshardAfterForward::Always, ReshardAfterForward::Auto, ReshardAfterForward::Never];

fn live(reshard: ReshardAfterForward, limit: Option<usize>) -> LiveParameters {
    LiveParameters { reshard, limit }
}

/// Forward and backward of a model whose units read one bundle each, `times` times.
fn steps(units: usize, times: usize) -> Vec<usize> {
    (0..times).flat_map(|_| (0..units).chain((0..units).rev())).collect()
}

fn own_bundles(units: usize) -> Vec<Vec<usize>> {
    (0..units).map(|unit| vec![unit]).collect()
}

/// Returns the first invariant that a plan breaks, if any.
fn fault(
    plan: &GatherPlan,
    sizes: &[usize],
    needs: &[Vec<usize>],
    uses: &[usize],
    limit: usize,
) -> Option<String> {
    let mut there: BTreeMap<usize, Residency> = BTreeMap::new();
    for at in 0..uses.len() {
        there.retain(|_, stay| stay.to >= at);
        for stay in plan.begins_with(at) {
            if let Some(before) = there.insert(stay.bundle, *stay) {
                return Some(format!("use {at}: {stay:?} begins while {before:?} is there"));
            }
        }
        let elements: usize = there.keys().map(|bundle| sizes[*bundle]).sum();
        if elements > limit {
            return Some(format!("use {at}: {elements} elements are whole, of {limit}: {there:?}"));
        }
        for bundle in &needs[uses[at]] {
            if there.get(bundle).is_none_or(|stay| stay.first_use > at) {
                return Some(format!(
                    "use {at} of unit {}: bundle {bundle} is not there: {there:?}",
                    uses[at]
                ));
            }
        }
        let mut ranges: Vec<_> =
            there.values().map(|stay| (stay.start, stay.start + sizes[stay.bundle])).collect();
        ranges.sort_unstable();
        if ranges.windows(2).any(|pair| pair[0].1 > pair[1].0) {
            return Some(format!("use {at}: {there:?} overlap"));
        }
        if ranges.iter().any(|(_, end)| *end > plan.pool_elements()) {
            return Some(format!("use {at}: {there:?} leave the pool of {}", plan.pool_elements()));
        }
    }
    None
}

/// Returns the minimum number of gathers of bundles of one size, by trying every choice of what is kept. Each use needs its own bundles
/// and, if there is room, those of the next one.
fn fewest_gathers(needs: &[Vec<usize>], uses: &[usize], limit: usize) -> usize {
    let mask = |bundles: &[usize]| bundles.iter().fold(0_u32, |mask, bundle| mask | 1 << bundle);
    let mut best: BTreeMap<u32, usize> = BTreeMap::from([(0, 0)]);
    for at in 0..uses.len() {
        let own = mask(&needs[uses[at]]);
        let with_next = own | uses.get(at + 1).map_or(0, |unit| mask(&needs[*unit]));
        let needed = if with_next.count_ones() as usize <= limit { with_next } else { own };
        let mut next: BTreeMap<u32, usize> = BTreeMap::new();
        for (&there, &gathers) in &best {
            let come = (needed & !there).count_ones() as usize;
            // Any subset of what was there may be kept.
            let mut kept = there;
            loop {
                let state = kept | needed;
                if state.count_ones() as usize <= limit {
                    let found = next.entry(state).or_insert(usize::MAX);
                    *found = (*found).min(gathers + come);
                }
                if kept == 0 {
                    break;
                }
                kept = (kept - 1) & there;
            }
        }
        best = next;
    }
    best.into_values().min().unwrap_or(0)
}

proptest! {
    #[test]
    fn whatever_is_used_is_there_and_no_more_than_the_limit(
        sizes in prop::collection::vec(1usize..9, 6),
        needs in prop::collection::vec(prop::collection::btree_set(0usize..6, 0..4), 5),
        uses in prop::collection::vec(0usize..5, 0..24),
        more in 0usize..20,
        reshard in prop::sample::select(RESHARDS.to_vec()),
    ) {
        let needs: Vec<Vec<usize>> = needs.into_iter().map(|set| set.into_iter().collect()).collect();
        let of = |unit: &usize| needs[*unit].iter().map(|bundle| sizes[*bundle]).sum::<usize>();
        let least = uses.iter().map(of).max().unwrap_or(0);
        for limit in [None, Some(least + more)] {
            let plan = GatherPlan::plan(&sizes, &needs, &uses, live(reshard, limit)).unwrap();
            let limit = match (reshard, limit) {
                (ReshardAfterForward::Never, _) | (_, None) => sizes.iter().sum(),
                (_, Some(limit)) => limit,
            };
            prop_assert_eq!(fault(&plan, &sizes, &needs, &uses, limit), None);
            prop_assert_eq!(plan.len(), uses.len());
        }
        if least > 0 {
            let refused = GatherPlan::plan(&sizes, &needs, &uses, live(ReshardAfterForward::Auto, Some(least - 1)));
            prop_assert!(refused.is_err());
        }
    }

    #[test]
    fn no_plan_of_bundles_of_one_size_gathers_less(
        needs in prop::collection::vec(prop::collection::btree_set(0usize..5, 1..3), 5),
        uses in prop::collection::vec(0usize..5, 1..12),
        more in 0usize..4,
    ) {
        let needs: Vec<Vec<usize>> = needs.into_iter().map(|set| set.into_iter().collect()).collect();
        let limit = uses.iter().map(|unit| needs[*unit].len()).max().unwrap_or(0) + more;
        let plan = GatherPlan::plan(&[1; 5], &needs, &uses, live(ReshardAfterForward::Auto, Some(limit))).unwrap();
        prop_assert_eq!(plan.stays().len(), fewest_gathers(&needs, &uses, limit), "{:?}", plan);
    }

    #[test]
    fn what_is_packed_does_not_overlap(
        lifetimes in prop::collection::vec((0usize..20, 0usize..6, 1usize..9), 0..40)
    ) {
        let mut lifetimes: Vec<Lifetime> = lifetimes
            .into_iter()
            .map(|(from, more, elements)| Lifetime { from, to: from + more, elements })
            .collect();
        lifetimes.sort_by_key(|lifetime| lifetime.from);
        let (starts, pool) = pack(&lifetimes);
        for (a, (one, &start)) in lifetimes.iter().zip(&starts).enumerate() {
            prop_assert!(start + one.elements <= pool);
            for (two, &other) in lifetimes.iter().zip(&starts).take(a) {
                let at_once = one.from <= two.to && two.from <= one.to;
                let overlap = start < other + two.elements && other < start + one.elements;
                prop_assert!(!(at_once && overlap), "{one:?} at {start}, {two:?} at {other}");
            }
        }
    }
}

#[test]
fn with_room_for_everything_each_bundle_is_gathered_once_in_a_step_of_several_micro_batches() {
    let (sizes, needs, uses) = ([7, 3, 3, 5], own_bundles(4), steps(4, 3));
    for settings in [live(ReshardAfterForward::Never, None), live(ReshardAfterForward::Auto, Some(18))] {
        let plan = GatherPlan::plan(&sizes, &needs, &uses, settings).unwrap();
        let gathered: Vec<_> = plan.stays().iter().map(|stay| (stay.bundle, stay.earlier)).collect();
        assert_eq!(gathered, [(0, 0), (1, 0), (2, 0), (3, 0)]);
        assert_eq!((plan.most_live(), plan.pool_elements()), (18, 18));
    }
}

#[test]
fn always_gathers_each_bundle_for_each_use_but_where_two_follow_each_other() {
    let uses = steps(4, 2);
    let plan =
        GatherPlan::plan(&[5; 4], &own_bundles(4), &uses, live(ReshardAfterForward::Always, None)).unwrap();
    let mut gathers = [0; 4];
    plan.stays().iter().for_each(|stay| gathers[stay.bundle] += 1);
    // The last unit's forward is followed by its backward, and the first one's backward by its forward.
    assert_eq!(gathers, [3, 4, 4, 2]);
    assert_eq!((plan.most_live(), plan.pool_elements()), (10, 10));
    let ahead = plan.stays().iter().filter(|stay| stay.from < stay.first_use).count();
    assert_eq!(ahead, plan.stays().len() - 1, "all but the first are begun ahead: {plan:?}");
}

#[test]
fn what_the_backward_begins_with_is_what_stays() {
    let plan = |limit| {
        let settings = live(ReshardAfterForward::Auto, Some(limit));
        GatherPlan::plan(&[4; 6], &own_bundles(6), &steps(6, 1), settings).unwrap()
    };
    for (limit, once) in [(8, &[5, 4][..]), (12, &[5, 4, 3]), (16, &[5, 4, 3, 2]), (24, &[5, 4, 3, 2, 1, 0])]
    {
        let plan = plan(limit);
        let gathers = |bundle: &usize| plan.stays().iter().filter(|stay| stay.bundle == *bundle).count();
        let found: BTreeSet<usize> = (0..6).filter(|bundle| gathers(bundle) == 1).collect();
        assert_eq!(found, once.iter().copied().collect(), "limit {limit}: {plan:?}");
    }
}

#[test]
fn a_table_of_the_first_and_the_last_unit_is_gathered_once_if_there_is_room() {
    // Bundle 0 is the table, 1 to 4 are blocks, 5 is read only by the last unit.
    let needs = vec![vec![0], vec![1], vec![2], vec![3], vec![4], vec![0, 5]];
    let sizes = [9, 1, 1, 1, 1, 1];
    let gathers_of_table = |limit| {
        let plan =
            GatherPlan::plan(&sizes, &needs, &steps(6, 1), live(ReshardAfterForward::Auto, limit)).unwrap();
        let gathers = plan.stays().iter().filter(|stay| stay.bundle == 0).count();
        assert_eq!(fault(&plan, &sizes, &needs, &steps(6, 1), 14), None);
        (gathers, plan.pool_elements())
    };
    // Two consecutive units have eleven elements, and so do two blocks with the table.
    assert_eq!(gathers_of_table(None), (1, 11));
    assert_eq!(gathers_of_table(Some(10)).0, 3);
}

#[test]
fn the_stages_of_a_rank_may_follow_each_other_in_any_order() {
    // Units 0 and 1 are one stage, units 4 and 5 another.
    let needs = vec![vec![0], vec![1], vec![], vec![], vec![2], vec![3]];
    let uses = [0, 1, 4, 5, 5, 4, 0, 1, 1, 0, 4, 5, 5, 4, 1, 0];
    let plan = GatherPlan::plan(&[3; 4], &needs, &uses, live(ReshardAfterForward::Always, None)).unwrap();
    assert_eq!(fault(&plan, &[3; 4], &needs, &uses, 6), None);
    assert!(plan.stays()[1..].iter().all(|stay| stay.from < stay.first_use), "{plan:?}");
}

#[test]
fn a_unit_that_reads_more_than_may_be_whole_is_named() {
    let found =
        GatherPlan::plan(&[3, 8], &own_bundles(2), &steps(2, 1), live(ReshardAfterForward::Auto, Some(7)));
    assert_eq!(found, Err(LiveLimitTooLow { unit: 1, needed: 8, limit: 7 }));
}

#[test]
fn a_thousand_micro_batches_are_planned_in_no_time() {
    let begin = std::time::Instant::now();
    let sizes: Vec<usize> = (0..40).map(|unit| 1 + unit % 3).collect();
    for reshard in RESHARDS {
        let plan = GatherPlan::plan(&sizes, &own_bundles(40), &steps(40, 1000), live(reshard, None)).unwrap();
        assert_eq!(plan.len(), 80_000);
    }
    let elapsed = begin.elapsed();
    assert!(elapsed.as_secs() < 10, "{elapsed:?}");
}

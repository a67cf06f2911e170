//! Expert capacity: the limit on the number of slots of a sequence that an expert takes.

use lockstep_plan::DType;

use super::{
    operands::{check_disjoint, expect},
    router::MAX_EXPERTS,
};
use crate::{Permutation, TokenPositions, View};

/// Makes one pass over the slots, with a counter for each expert.
pub(super) fn limit_slots(
    experts: View<'_>,
    places: TokenPositions,
    capacity: usize,
    before: Option<View<'_>>,
    kept: View<'_>,
) {
    let (tokens, top_k) = experts.shape().as_matrix();
    expect("limit_slots: experts", experts, DType::U32, tokens * top_k);
    expect("limit_slots: kept", kept, DType::U32, tokens * top_k);
    check_disjoint(&[kept], &[experts]);
    before.into_iter().for_each(|before| check_disjoint(&[kept], &[before]));
    // SAFETY: the outputs share no memory with what is read, and nothing else touches them meanwhile.
    let (experts, kept, before) = unsafe {
        let before = before.map(|view: View<'_>| (view.slice::<f32>(), view.shape().as_matrix().1));
        (experts.slice::<u32>(), kept.slice_mut::<u32>(), before)
    };
    let mut counters = [0_u32; MAX_EXPERTS];
    let mut sequence = None;
    for (slot, (expert, kept)) in experts.iter().zip(kept).enumerate() {
        let (own, _) = places.of(slot / top_k);
        if sequence.replace(own) != Some(own) {
            counters.fill(0);
            if let Some((before, count)) = before {
                let row = &before[own * count..(own + 1) * count];
                counters.iter_mut().zip(row).for_each(|(counter, before)| *counter = *before as u32);
            }
        }
        let counter = counters.get_mut(*expert as usize);
        let counter =
            counter.unwrap_or_else(|| panic!("limit_slots: expert {expert}; allowed: below {MAX_EXPERTS}"));
        *kept = if (*counter as usize) < capacity { *expert } else { Permutation::NONE };
        *counter += 1;
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::tensor;
    use crate::{Arena, CpuQueue, PermutationKernels};

    const NONE: u32 = Permutation::NONE;

    #[test]
    fn each_expert_keeps_its_first_slots_of_every_sequence() {
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        // Two sequences of three tokens with two slots each.
        let slots = [0_u32, 1, 0, 2, 0, 1, 1, 0, 1, 2, 1, 0];
        let experts = tensor(&slots);
        let experts = experts.view().reshape([6, 2]);
        let kept = tensor(&[7_u32; 12]);
        queue.limit_slots(experts, TokenPositions::whole(3), 2, None, kept.view());
        let expected = [0, 1, 0, 2, NONE, 1, 1, 0, 1, 2, NONE, 0];
        assert_eq!(kept.view().to_vec::<u32>(), expected);
        queue.limit_slots(experts, TokenPositions::whole(3), 12, None, kept.view());
        assert_eq!(kept.view().to_vec::<u32>(), slots, "there is room for all");
    }

    #[test]
    fn what_earlier_tokens_have_taken_elsewhere_counts() {
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        let slots = [0_u32, 1, 0, 2, 0, 1, 1, 0, 1, 2, 1, 0];
        let all = tensor(&[7_u32; 12]);
        queue.limit_slots(
            tensor(&slots).view().reshape([6, 2]),
            TokenPositions::whole(3),
            2,
            None,
            all.view(),
        );
        // The tokens from the third on; the sequence began with slots of experts 0, 1, 0 and 2.
        let (experts, part) = (tensor(&slots[4..]), tensor(&[7_u32; 8]));
        let before = tensor(&[2.0_f32, 1.0, 1.0, 0.0, 0.0, 0.0]);
        let places = TokenPositions { first_row: 2, ..TokenPositions::whole(3) };
        let before = before.view().reshape([2, 3]);
        queue.limit_slots(experts.view().reshape([4, 2]), places, 2, Some(before), part.view());
        assert_eq!(part.view().to_vec::<u32>(), all.view().to_vec::<u32>()[4..]);
    }
}

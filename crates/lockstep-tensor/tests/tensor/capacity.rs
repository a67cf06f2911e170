//! Limits on the slots of an expert.

use lockstep_tensor::{Arena, CpuQueue, Permutation, PermutationKernels, TokenPositions};

use crate::testing::tensor;

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
    queue.limit_slots(tensor(&slots).view().reshape([6, 2]), TokenPositions::whole(3), 2, None, all.view());
    // The tokens from the third on; the sequence began with slots of experts 0, 1, 0 and 2.
    let (experts, part) = (tensor(&slots[4..]), tensor(&[7_u32; 8]));
    let before = tensor(&[2.0_f32, 1.0, 1.0, 0.0, 0.0, 0.0]);
    let places = TokenPositions { first_row: 2, ..TokenPositions::whole(3) };
    let before = before.view().reshape([2, 3]);
    queue.limit_slots(experts.view().reshape([4, 2]), places, 2, Some(before), part.view());
    assert_eq!(part.view().to_vec::<u32>(), all.view().to_vec::<u32>()[4..]);
}

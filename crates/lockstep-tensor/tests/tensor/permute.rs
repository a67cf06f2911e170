//! Permutations of tokens to experts and back.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CpuQueue, Permutation, PermutationKernels, Tensor};
use proptest::prelude::*;

use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
};

const NONE: u32 = Permutation::NONE;

/// Permutation tables of slots with these experts, of which `first..first + groups` are on this rank.
struct Sorted {
    slots: Tensor,
    rows: Tensor,
    offsets: Tensor,
}

impl Sorted {
    fn new(queue: &CpuQueue, experts: &[u32], first: u32, groups: usize) -> Self {
        let [slots, rows] = [(); 2].map(|()| tensor(&vec![77_u32; experts.len()]));
        let sorted = Self { slots, rows, offsets: tensor(&vec![77_u32; groups + 1]) };
        queue.sort_slots(tensor(experts).view(), first, sorted.permutation(), sorted.offsets.view());
        sorted
    }

    fn permutation(&self) -> Permutation<'_> {
        Permutation { slots: self.slots.view(), rows: self.rows.view() }
    }

    fn tables(&self) -> [Vec<u32>; 3] {
        [&self.slots, &self.rows, &self.offsets].map(|table| table.view().to_vec())
    }
}

fn queue() -> CpuQueue {
    CpuQueue::new(1, &Arena::new()).unwrap()
}

#[test]
fn slots_are_sorted_by_expert_and_then_by_number() {
    let [slots, rows, offsets] = Sorted::new(&queue(), &[2, 0, 2, 1, 0, 2], 0, 4).tables();
    assert_eq!(slots, [1, 4, 3, 0, 2, 5]);
    assert_eq!(rows, [3, 0, 4, 2, 1, 5]);
    assert_eq!(offsets, [0, 2, 3, 6, 6]);
}

#[test]
fn slots_of_experts_that_are_elsewhere_have_no_row() {
    let [slots, rows, offsets] = Sorted::new(&queue(), &[2, 0, 3, 1, 0, 2], 1, 2).tables();
    assert_eq!(slots, [3, 0, 5, NONE, NONE, NONE]);
    assert_eq!(rows, [1, NONE, NONE, 0, NONE, 2]);
    assert_eq!(offsets, [0, 1, 3]);
    let [slots, rows, offsets] = Sorted::new(&queue(), &[], 0, 2).tables();
    assert_eq!((slots.len(), rows.len(), offsets), (0, 0, vec![0, 0, 0]));
}

#[test]
fn parts_of_an_expert_are_on_neighbouring_ranks() {
    // Three pairs of ranks with two experts for each pair, in two parts: experts 2 r and 2 r + 1 are on ranks 2 r
    // and 2 r + 1.
    let (experts, of_parts) = (tensor(&[0_u32, 3, NONE, 5]), tensor(&[77_u32; 8]));
    queue().part_slots(experts.view(), 2, of_parts.view());
    assert_eq!(of_parts.view().to_vec::<u32>(), [0, 2, 5, 7, NONE, NONE, 9, 11]);
}

#[test]
fn rows_arrive_by_sender_and_then_by_expert() {
    let (counts, arrived) = (tensor(&[1_u32, 2, 0, 3]), tensor(&[77_u32; 6]));
    queue().arrived_experts(counts.view(), 2, arrived.view());
    assert_eq!(arrived.view().to_vec::<u32>(), [0, 1, 1, 1, 1, 1]);
}

#[test]
fn slots_of_parts_share_a_weight_and_its_gradient() {
    // A token of two slots with a weight each, of two parts.
    let sorted = Sorted::new(&queue(), &[1, 0, 0, 1], 0, 2);
    let rows = floats(DType::F32, [4, 1], &[3.0, 5.0, 7.0, 11.0]);
    let (weights, dy) = (floats(DType::F32, [2], &[2.0, 10.0]), floats(DType::F32, [1, 1], &[1.0]));
    let (y, drows) = (floats(DType::F32, [1, 1], &[0.0]), floats(DType::F32, [4, 1], &[0.0; 4]));
    let dweights = floats(DType::F32, [2], &[9.0; 2]);
    queue().unpermute(sorted.permutation(), rows.view(), Some(weights.view()), y.view());
    // Rows 2, 0, 1, 3 are those of slots 0 to 3.
    assert_eq!(values(y.view()), [2.0 * (7.0 + 3.0) + 10.0 * (5.0 + 11.0)]);
    let [weights, dy, rows] = [weights.view(), dy.view(), rows.view()];
    queue().unpermute_backward(sorted.permutation(), dy, rows, weights, drows.view(), dweights.view());
    assert_eq!(values(dweights.view()), [10.0, 16.0]);
    assert_eq!(values(drows.view()), [2.0, 10.0, 2.0, 10.0]);
}

/// Computes `y` and the gradients of rows and weights by the definition; rows without a slot are not counted.
fn expected(
    slots: &[u32],
    (tokens, top_k, width): (usize, usize, usize),
    rows: &[f64],
    weights: &[f64],
    dy: &[f64],
) -> [Vec<f64>; 3] {
    let (mut y, mut drows, mut dweights) =
        (vec![0.0; tokens * width], vec![0.0; rows.len()], vec![0.0; weights.len()]);
    for (row, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != NONE) {
        let (slot, token) = (*slot as usize, *slot as usize / top_k);
        for i in 0..width {
            y[token * width + i] += weights[slot] * rows[row * width + i];
            drows[row * width + i] = weights[slot] * dy[token * width + i];
            dweights[slot] += dy[token * width + i] * rows[row * width + i];
        }
    }
    [y, drows, dweights]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn tokens_go_to_their_rows_and_come_back_weighted(
        (tokens, width) in prop_oneof![(1usize..20, 1usize..40), (60usize..90, 450usize..800)],
        top_k in 1usize..5,
        is_part in proptest::bool::ANY,
    ) {
        let count = tokens * top_k;
        let expert = |slot: u32| (slot.wrapping_mul(0x9e37_79b9) >> 16) % 7;
        let experts: Vec<u32> = (0..count as u32).map(expert).collect();
        let (first, groups) = if is_part { (2, 3) } else { (0, 7) };
        for dtype in ACTIVATIONS {
            let (x, dy) = (random_of(dtype, 1, tokens * width), random_of(dtype, 2, tokens * width));
            let (rows, weights) = (random_of(dtype, 3, count * width), random_of(DType::F32, 4, count));
            let [slots, _, offsets] = Sorted::new(&queue(), &experts, first, groups).tables();
            let used = offsets[groups] as usize * width;
            let run = |queue: &CpuQueue| {
                let sorted = Sorted::new(queue, &experts, first, groups);
                let permutation = sorted.permutation();
                let (x, dy) = (floats(dtype, [tokens, width], &x), floats(dtype, [tokens, width], &dy));
                let rows = floats(dtype, [count, width], &rows);
                let weights = floats(DType::F32, [count], &weights);
                let [permuted, drows] =
                    [(); 2].map(|()| floats(dtype, [count, width], &vec![9.0; count * width]));
                let [y, dx] = [(); 2].map(|()| floats(dtype, [tokens, width], &vec![9.0; tokens * width]));
                let dweights = floats(DType::F32, [count], &vec![9.0; count]);
                queue.permute(permutation, x.view(), permuted.view());
                queue.unpermute(permutation, rows.view(), Some(weights.view()), y.view());
                queue.unpermute(permutation, rows.view(), None, dx.view());
                let [dy, rows, weights] = [&dy, &rows, &weights].map(Tensor::view);
                queue.unpermute_backward(permutation, dy, rows, weights, drows.view(), dweights.view());
                [permuted, y, dx, drows, dweights].map(|tensor| values(tensor.view())).to_vec()
            };
            let shape = (tokens, top_k, width);
            let [y, drows, dweights] = expected(&slots, shape, &rows, &weights, &dy);
            let [dx, _, _] = expected(&slots, shape, &rows, &vec![1.0; count], &dy);
            let permuted = slots.iter().filter(|slot| **slot != NONE);
            let permuted: Vec<f64> =
                permuted.flat_map(|slot| x[*slot as usize / top_k * width..][..width].to_vec()).collect();
            on_every_queue(run, |results| {
                assert_eq!(results[0][..used], permuted);
                let relative = tolerance(dtype);
                assert_close("y", &results[1], &y, relative, 4e-6);
                assert_close("dx", &results[2], &dx, relative, 4e-6);
                // Half the spacing of subnormal f16 numbers.
                assert_close("drows", &results[3][..used], &drows[..used], relative, 2.0_f64.powi(-25));
                assert_close("dweights", &results[4], &dweights, 1e-5, 1e-4);
                let beyond = |result: &[f64]| result[used..].iter().all(|x| *x == 9.0);
                assert!(beyond(&results[0]) && beyond(&results[3]), "rows without a slot were written");
            });
        }
    }
}

#[test]
fn the_gradients_match_finite_differences() {
    let (tokens, top_k, width, experts) = (3, 2, 4, [1_u32, 0, 2, 1, 0, 2]);
    let sorted = Sorted::new(&queue(), &experts, 0, 3);
    let [slots, _, _] = sorted.tables();
    let [x, dy] = [1, 2].map(|seed| random_of(DType::F32, seed, tokens * width));
    let (rows, weights) = (random_of(DType::F32, 3, 6 * width), random_of(DType::F32, 4, 6));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let loss = |rows: &[f64], weights: &[f64]| {
        dot(&expected(&slots, (tokens, top_k, width), rows, weights, &dy)[0], &dy)
    };
    let by_rows = crate::reference::finite_differences(&rows, |rows| loss(rows, &weights));
    let by_weights = crate::reference::finite_differences(&weights, |weights| loss(&rows, weights));
    let permuted = |x: &[f64]| -> Vec<f64> {
        slots.iter().flat_map(|slot| x[*slot as usize / top_k * width..][..width].to_vec()).collect()
    };
    let by_x = crate::reference::finite_differences(&x, |x| dot(&permuted(x), &rows));
    let vector = |x: &[f64]| floats(DType::F32, [x.len() / width, width], x);
    let (row_values, dweights) = (vector(&rows), floats(DType::F32, [6], &[0.0; 6]));
    let (drows, dx) = (vector(&[0.0; 24]), vector(&[0.0; 12]));
    let (queue, permutation) = (queue(), sorted.permutation());
    let weights = floats(DType::F32, [6], &weights);
    let (dy, row_values) = (vector(&dy), row_values.view());
    queue.unpermute_backward(
        permutation,
        dy.view(),
        row_values,
        weights.view(),
        drows.view(),
        dweights.view(),
    );
    queue.unpermute(permutation, row_values, None, dx.view());
    assert_close("drows", &values(drows.view()), &by_rows, 1e-6, 1e-6);
    assert_close("dweights", &values(dweights.view()), &by_weights, 1e-6, 1e-6);
    assert_close("dx", &values(dx.view()), &by_x, 1e-6, 1e-6);
}

#[test]
#[should_panic(expected = "a permutation of 5 rows for 2 tokens")]
fn a_permutation_of_other_tokens_is_refused() {
    let sorted = Sorted::new(&queue(), &[0; 5], 0, 1);
    let (x, rows) = (floats(DType::F32, [2, 1], &[0.0; 2]), floats(DType::F32, [5, 1], &[0.0; 5]));
    queue().permute(sorted.permutation(), x.view(), rows.view());
}

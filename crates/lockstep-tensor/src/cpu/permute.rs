//! Token permutation for mixture of experts: sorting tokens by expert, and back.
//!
//! Each of these kernels writes along its own order (rows or tokens) and reads from the places that the permutation
//! names. So tasks share only inputs; sums over a token's slots are in ascending order.

use lockstep_plan::DType;

use super::{
    CpuQueue,
    capacity::limit_slots,
    operands::{Operand, check_disjoint, expect},
    simd::{BLOCK, Block, Float, inlined, sum, with_float},
    tasks::rows_per_task,
};
use crate::{Permutation, PermutationKernels, TokenPositions, View};

const NONE: u32 = Permutation::NONE;

impl PermutationKernels for CpuQueue {
    fn sort_slots(
        &self,
        experts: View<'_>,
        first_expert: u32,
        permutation: Permutation<'_>,
        offsets: View<'_>,
    ) {
        let count = experts.elements();
        let groups = offsets.elements().checked_sub(1).expect("offsets of experts have at least one element");
        expect("sort_slots: experts", experts, DType::U32, count);
        expect("sort_slots: slots", permutation.slots, DType::U32, count);
        expect("sort_slots: rows", permutation.rows, DType::U32, count);
        expect("sort_slots: offsets", offsets, DType::U32, groups + 1);
        assert!(count < NONE as usize, "{count} slots are more than can be numbered");
        check_disjoint(&[permutation.slots, permutation.rows, offsets], &[experts]);
        // SAFETY: the four views share no memory, and nothing else touches them meanwhile.
        let (experts, slots, rows, offsets) = unsafe {
            (
                experts.slice::<u32>(),
                permutation.slots.slice_mut::<u32>(),
                permutation.rows.slice_mut::<u32>(),
                offsets.slice_mut::<u32>(),
            )
        };
        // An expert before the first one wraps around to a group beyond the last.
        let group_of =
            |expert: u32| Some(expert.wrapping_sub(first_expert) as usize).filter(|group| *group < groups);
        offsets.fill(0);
        for group in experts.iter().filter_map(|expert| group_of(*expert)) {
            offsets[group + 1] += 1;
        }
        for group in 0..groups {
            offsets[group + 1] += offsets[group];
        }
        slots.fill(NONE);
        for (slot, (expert, row)) in experts.iter().zip(rows).enumerate() {
            *row = group_of(*expert).map_or(NONE, |group| {
                let row = offsets[group];
                offsets[group] += 1;
                slots[row as usize] = slot as u32;
                row
            });
        }
        // Each offset has moved to the start of the next group.
        offsets.copy_within(0..groups, 1);
        offsets[0] = 0;
    }

    fn limit_slots(
        &self,
        experts: View<'_>,
        places: TokenPositions,
        capacity: usize,
        before: Option<View<'_>>,
        kept: View<'_>,
    ) {
        limit_slots(experts, places, capacity, before, kept);
    }

    fn part_slots(&self, experts: View<'_>, experts_of_rank: usize, of_parts: View<'_>) {
        let count = experts.elements();
        expect("part_slots: experts", experts, DType::U32, count);
        expect("part_slots: of_parts", of_parts, DType::U32, of_parts.elements());
        let parts = of_parts.elements().checked_div(count).unwrap_or(1);
        assert_eq!(parts * count, of_parts.elements(), "part_slots: {of_parts:?} for parts of {count} slots");
        check_disjoint(&[of_parts], &[experts]);
        // SAFETY: the two views share no memory, and nothing else touches them meanwhile.
        let (experts, of_parts) = unsafe { (experts.slice::<u32>(), of_parts.slice_mut::<u32>()) };
        let (own, parts) = (experts_of_rank as u32, parts as u32);
        for (expert, of_parts) in experts.iter().zip(of_parts.chunks_exact_mut(parts.max(1) as usize)) {
            for (part, of_part) in (0..parts).zip(of_parts) {
                *of_part = match *expert {
                    NONE => NONE,
                    expert => (expert / own * parts + part) * own + expert % own,
                };
            }
        }
    }

    fn arrived_experts(&self, counts: View<'_>, experts: usize, arrived: View<'_>) {
        expect("arrived_experts: counts", counts, DType::U32, counts.elements());
        expect("arrived_experts: arrived", arrived, DType::U32, arrived.elements());
        check_disjoint(&[arrived], &[counts]);
        // SAFETY: the two views share no memory, and nothing else touches them meanwhile.
        let (counts, mut rest) = unsafe { (counts.slice::<u32>(), arrived.slice_mut::<u32>()) };
        let total: usize = counts.iter().map(|count| *count as usize).sum();
        assert_eq!(total, rest.len(), "arrived_experts: rows by {counts:?}");
        for (index, count) in counts.iter().enumerate() {
            let (own, others) = rest.split_at_mut(*count as usize);
            own.fill((index % experts) as u32);
            rest = others;
        }
    }

    fn permute(&self, permutation: Permutation<'_>, x: View<'_>, rows: View<'_>) {
        let ((tokens, width), (count, _)) = (x.shape().as_matrix(), rows.shape().as_matrix());
        expect("permute: rows", rows, x.dtype(), count * width);
        check_disjoint(&[rows], &[x, permutation.slots, permutation.rows]);
        // SAFETY: as just checked.
        let tables = unsafe { Tables::new(permutation, tokens, count) };
        with_float!(x.dtype(), T => {
            let (x, rows) = (Operand::<T>::new(x), Operand::<T>::new(rows));
            self.for_each_row(count, width, inlined!(|row, _| {
                let Some(slot) = tables.slot(row) else { return };
                let token = slot / tables.top_k;
                // SAFETY: `x` is only read, it does not overlap the rows, and each row belongs to one task.
                unsafe {
                    let row = rows.write(row * width..(row + 1) * width);
                    row.copy_from_slice(x.read(token * width..(token + 1) * width));
                }
            }));
        });
    }

    fn unpermute(
        &self,
        permutation: Permutation<'_>,
        rows: View<'_>,
        weights: Option<View<'_>>,
        y: View<'_>,
    ) {
        let ((tokens, width), (count, _)) = (y.shape().as_matrix(), rows.shape().as_matrix());
        expect("unpermute: rows", rows, y.dtype(), count * width);
        check_disjoint(&[y], &[rows, permutation.slots, permutation.rows]);
        let share = weights.map_or(1, |weights| {
            check_disjoint(&[y], &[weights]);
            slots_of_weight("unpermute: weights", weights, count)
        });
        // SAFETY: as just checked; kernels write only their outputs.
        let (tables, weights) = unsafe {
            (Tables::new(permutation, tokens, count), weights.map(|weights: View<'_>| weights.slice::<f32>()))
        };
        with_float!(y.dtype(), T => {
            let (rows, y) = (Operand::<T>::new(rows), Operand::<T>::new(y));
            self.for_each_row(tokens, width * (tables.top_k + 1), inlined!(|token, isa| {
                for column in (0..width).step_by(BLOCK) {
                    let n = BLOCK.min(width - column);
                    let mut total = Block::ZERO;
                    for (slot, row) in tables.slots_of(token) {
                        let weight = weights.map_or(1.0, |weights| weights[slot / share]);
                        let first = row * width + column;
                        // SAFETY: the rows are only read.
                        let row = unsafe { rows.read(first..first + n) };
                        for (total, x) in total.0[..n].iter_mut().zip(row) {
                            *total = isa.mul_add(weight, x.load(), *total);
                        }
                    }
                    let first = token * width + column;
                    // SAFETY: each token belongs to one task.
                    T::store_all(isa, &total.0[..n], unsafe { y.write(first..first + n) });
                }
            }));
        });
    }

    fn unpermute_backward(
        &self,
        permutation: Permutation<'_>,
        dy: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        drows: View<'_>,
        dweights: View<'_>,
    ) {
        let ((tokens, width), (count, _)) = (dy.shape().as_matrix(), rows.shape().as_matrix());
        expect("unpermute_backward: rows", rows, dy.dtype(), count * width);
        let share = slots_of_weight("unpermute_backward: weights", weights, count);
        expect("unpermute_backward: drows", drows, dy.dtype(), count * width);
        expect("unpermute_backward: dweights", dweights, DType::F32, weights.elements());
        check_disjoint(&[drows, dweights], &[dy, rows, weights, permutation.slots, permutation.rows]);
        // SAFETY: as just checked; kernels write only their outputs.
        let (tables, weights) = unsafe { (Tables::new(permutation, tokens, count), weights.slice::<f32>()) };
        with_float!(dy.dtype(), T => {
            let [dy, rows, drows] = [dy, rows, drows].map(Operand::<T>::new);
            let dweights = Operand::<f32>::new(dweights);
            self.for_each_range(count, rows_per_task(count, width), inlined!(|range, isa| {
                let mut results = Block::ZERO;
                for row in range {
                    let Some(slot) = tables.slot(row) else { continue };
                    let (token, weight) = (slot / tables.top_k, weights[slot / share]);
                    for column in (0..width).step_by(BLOCK) {
                        let n = BLOCK.min(width - column);
                        let (from, to) = (token * width + column, row * width + column);
                        // SAFETY: the gradient is only read.
                        let gradient = unsafe { dy.read(from..from + n) };
                        for (result, dy) in results.0.iter_mut().zip(gradient) {
                            *result = weight * dy.load();
                        }
                        // SAFETY: each row belongs to one task.
                        T::store_all(isa, &results.0[..n], unsafe { drows.write(to..to + n) });
                    }
                }
            }));
            self.for_each_row(tokens, width * (tables.top_k + 1), inlined!(|token, _| {
                let own = tables.top_k / share;
                // SAFETY: the gradient and the rows are only read; the slots of a token belong to one task.
                let (dy, dweights) = unsafe {
                    (dy.read(token * width..(token + 1) * width), dweights.write(token * own..(token + 1) * own))
                };
                dweights.fill(0.0);
                for (slot, row) in tables.slots_of(token) {
                    // SAFETY: as above.
                    let row = unsafe { rows.read(row * width..(row + 1) * width) };
                    let [product] = sum([dy, row], inlined!(|[dy, x]| [dy * x]));
                    dweights[slot % tables.top_k / share] += product;
                }
            }));
        });
    }
}

/// Index tables of a permutation of `count` rows.
struct Tables<'a> {
    slots: &'a [u32],
    rows: &'a [u32],
    top_k: usize,
}

impl<'a> Tables<'a> {
    /// # Safety
    /// The caller must have checked that no output overlaps the tables.
    ///
    /// # Panics
    /// If the tables have a size that does not fit this number of tokens.
    unsafe fn new(permutation: Permutation<'a>, tokens: usize, rows: usize) -> Self {
        expect("slots of a permutation", permutation.slots, DType::U32, rows);
        expect("rows of a permutation", permutation.rows, DType::U32, rows);
        let top_k = rows.checked_div(tokens).unwrap_or(0);
        assert_eq!(top_k * tokens, rows, "a permutation of {rows} rows for {tokens} tokens");
        // SAFETY: kernels write only their outputs.
        unsafe { Self { slots: permutation.slots.slice(), rows: permutation.rows.slice(), top_k } }
    }

    /// Returns the slot of a row; `None` if it has none.
    fn slot(&self, row: usize) -> Option<usize> {
        Some(self.slots[row]).filter(|slot| *slot != NONE).map(|slot| slot as usize)
    }

    /// Returns the slots of a token and their rows, slots without a row excepted.
    fn slots_of(&self, token: usize) -> impl Iterator<Item = (usize, usize)> {
        let slots = token * self.top_k..(token + 1) * self.top_k;
        slots
            .map(|slot| (slot, self.rows[slot]))
            .filter(|(_, row)| *row != NONE)
            .map(|(slot, row)| (slot, row as usize))
    }
}

/// Returns the number of neighbouring slots of a token that share each weight.
fn slots_of_weight(what: &str, weights: View<'_>, slots: usize) -> usize {
    let share = slots.checked_div(weights.elements()).unwrap_or(1);
    expect(what, weights, DType::F32, slots / share);
    assert_eq!(weights.elements() * share, slots, "{what}: {weights:?} for {slots} slots");
    share
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::testing::{
        ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
    };
    use crate::{Arena, Tensor};

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
        let by_rows = crate::cpu::reference::finite_differences(&rows, |rows| loss(rows, &weights));
        let by_weights = crate::cpu::reference::finite_differences(&weights, |weights| loss(&rows, weights));
        let permuted = |x: &[f64]| -> Vec<f64> {
            slots.iter().flat_map(|slot| x[*slot as usize / top_k * width..][..width].to_vec()).collect()
        };
        let by_x = crate::cpu::reference::finite_differences(&x, |x| dot(&permuted(x), &rows));
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
}

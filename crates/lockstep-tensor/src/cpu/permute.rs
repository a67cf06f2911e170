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

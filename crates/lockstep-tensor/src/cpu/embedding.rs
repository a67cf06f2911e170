//! Embedding lookup and its gradient. The table may be a vocabulary shard: it holds the rows from `first_id` on, and
//! ids outside belong to other ranks.
//!
//! The backward is split by columns: each element of the gradient belongs to one task, which adds the tokens in
//! ascending order.

use lockstep_plan::DType;

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, expect},
    simd::{Float, inlined, with_float},
    tasks::rows_per_task,
};
use crate::{EmbeddingKernels, View};

/// Columns of the gradient of one task: whole cache lines, and long enough for fast loads.
const COLUMNS_PER_TASK: usize = 128;

impl EmbeddingKernels for CpuQueue {
    fn embedding(&self, ids: View<'_>, table: View<'_>, first_id: u32, out: View<'_>) {
        let (rows, width) = table.shape().as_matrix();
        let tokens = ids.elements();
        expect("embedding: ids", ids, DType::U32, tokens);
        expect("embedding: out", out, table.dtype(), tokens * width);
        check_disjoint(&[out], &[ids, table]);
        // SAFETY: the ids overlap no output, and kernels write only their outputs.
        let ids = unsafe { ids.slice::<u32>() };
        with_float!(table.dtype(), T => {
            let (table, out) = (Operand::<T>::new(table), Operand::<T>::new(out));
            self.for_each_row(tokens, width, inlined!(|token, _| {
                // SAFETY: each row of `out` belongs to one task.
                let out = unsafe { out.write(token * width..(token + 1) * width) };
                match row_of(ids[token], first_id, rows) {
                    // SAFETY: the table is only read, and it does not overlap `out`.
                    Some(row) => out.copy_from_slice(unsafe { table.read(row * width..(row + 1) * width) }),
                    None => out.fill(T::store(0.0)),
                }
            }));
        });
    }

    fn embedding_backward(&self, ids: View<'_>, dy: View<'_>, first_id: u32, gradient: View<'_>) {
        let (rows, width) = gradient.shape().as_matrix();
        let tokens = ids.elements();
        expect("embedding_backward: ids", ids, DType::U32, tokens);
        expect("embedding_backward: dy", dy, dy.dtype(), tokens * width);
        expect("embedding_backward: gradient", gradient, DType::F32, rows * width);
        check_disjoint(&[gradient], &[ids, dy]);
        // SAFETY: as in the forward.
        let ids = unsafe { ids.slice::<u32>() };
        with_float!(dy.dtype(), T => {
            let (dy, gradient) = (Operand::<T>::new(dy), Operand::<f32>::new(gradient));
            let columns_per_task =
                if rows_per_task(tokens, width) >= tokens { width.max(1) } else { COLUMNS_PER_TASK };
            self.for_each_range(width, columns_per_task, inlined!(|columns, _| {
                for (token, &id) in ids.iter().enumerate() {
                    let Some(row) = row_of(id, first_id, rows) else { continue };
                    let (from, to) = (token * width, row * width);
                    // SAFETY: `dy` is only read and does not overlap the gradient; these columns of the gradient belong
                    // to one task.
                    let (dy, gradient) = unsafe {
                        (
                            dy.read(from + columns.start..from + columns.end),
                            gradient.write(to + columns.start..to + columns.end),
                        )
                    };
                    for (gradient, dy) in gradient.iter_mut().zip(dy) {
                        *gradient += dy.load();
                    }
                }
            }));
        });
    }
}

/// Returns the row of an id in a table of `rows` rows that starts with `first_id`; `None` if the id is outside.
#[inline(always)]
fn row_of(id: u32, first_id: u32, rows: usize) -> Option<usize> {
    // An id before the first one wraps around to a row beyond the last.
    let row = id.wrapping_sub(first_id) as usize;
    (row < rows).then_some(row)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Arena;
    use crate::cpu::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, values};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]

        #[test]
        fn tokens_read_their_rows_and_add_their_gradients_to_them(
            (tokens, width) in prop_oneof![(1usize..20, 1usize..40), (150usize..300, 450usize..800)],
            vocabulary in 1usize..50,
        ) {
            for dtype in ACTIVATIONS {
                let table = random_of(dtype, 1, vocabulary * width);
                let (dy, before) = (random_of(dtype, 2, tokens * width), random_of(dtype, 3, vocabulary * width));
                let ids: Vec<u32> = (0..tokens).map(|i| (i * i % vocabulary) as u32).collect();
                let run = |queue: &CpuQueue| {
                    let ids = tensor(&ids);
                    let table = floats(dtype, [vocabulary, width], &table);
                    let out = floats(dtype, [tokens, width], &vec![0.0; tokens * width]);
                    let dy = floats(dtype, [tokens, width], &dy);
                    let gradient = floats(DType::F32, [vocabulary, width], &before);
                    queue.embedding(ids.view(), table.view(), 0, out.view());
                    queue.embedding_backward(ids.view(), dy.view(), 0, gradient.view());
                    vec![values(out.view()), values(gradient.view())]
                };
                let rows = ids.iter().flat_map(|id| table[*id as usize * width..][..width].to_vec());
                let out: Vec<f64> = rows.collect();
                // The order of the additions is part of the definition, so the f32 sums must agree exactly.
                let mut gradient: Vec<f32> = before.iter().map(|x| *x as f32).collect();
                for (token, id) in ids.iter().enumerate() {
                    for i in 0..width {
                        gradient[*id as usize * width + i] += dy[token * width + i] as f32;
                    }
                }
                let gradient: Vec<f64> = gradient.into_iter().map(f64::from).collect();
                on_every_queue(run, |results| {
                    assert_eq!(results[0], out);
                    assert_close("gradient", &results[1], &gradient, 0.0, 0.0);
                });
            }
        }
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        let (ids, width) = ([2_u32, 0, 2], 3);
        let dy = random_of(DType::F32, 1, 9);
        let loss = |table: &[f64]| -> f64 {
            (0..9).map(|i| dy[i] * table[ids[i / width] as usize * width + i % width]).sum()
        };
        let expected = crate::cpu::reference::finite_differences(&random_of(DType::F32, 2, 12), loss);
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        let gradient = floats(DType::F32, [4, width], &[0.0; 12]);
        queue.embedding_backward(
            tensor(&ids).view(),
            floats(DType::F32, [3, 3], &dy).view(),
            0,
            gradient.view(),
        );
        assert_close("gradient", &values(gradient.view()), &expected, 1e-6, 1e-6);
    }

    /// Table shards that are adjacent or empty, with ids in all of them and beyond. Each shard must give the row of
    /// the whole table if it holds the id, and zeros if not.
    #[test]
    fn parts_of_a_table_add_up_to_the_whole() {
        let (vocabulary, width, cuts) = (300, 260, [0, 7, 7, 130, 300]);
        let ids: Vec<u32> = (0..250).map(|i| i * i % 300).chain([300, 1000, u32::MAX]).collect();
        let within = ids.len() - 3;
        for dtype in ACTIVATIONS {
            let table = random_of(dtype, 1, vocabulary * width);
            let (dy, before) =
                (random_of(dtype, 2, ids.len() * width), random_of(DType::F32, 3, vocabulary * width));
            let run = |queue: &CpuQueue, cuts: &[usize]| {
                let (ids, dy) = (tensor(&ids), floats(dtype, [ids.len(), width], &dy));
                let table = floats(dtype, [vocabulary, width], &table);
                let gradient = floats(DType::F32, [vocabulary, width], &before);
                let outs = cuts.windows(2).map(|cut| {
                    let out = floats(dtype, [ids.view().elements(), width], &vec![9.0; dy.view().elements()]);
                    let rows = cut[0]..cut[1];
                    let (table, gradient) = (table.view().rows(rows.clone()), gradient.view().rows(rows));
                    queue.embedding(ids.view(), table, cut[0] as u32, out.view());
                    queue.embedding_backward(ids.view(), dy.view(), cut[0] as u32, gradient);
                    values(out.view())
                });
                let outs: Vec<_> = outs.collect();
                let sum = (0..outs[0].len()).map(|i| outs.iter().map(|out| out[i]).sum()).collect();
                vec![sum, values(gradient.view())]
            };
            let both = |queue: &CpuQueue| [run(queue, &cuts), run(queue, &[0, vocabulary])].concat();
            on_every_queue(both, |results| {
                assert_eq!(results[0], results[2], "rows of the parts and of the whole");
                assert_eq!(results[1], results[3], "gradients of the parts and of the whole");
                assert!(results[0][within * width..].iter().all(|x| *x == 0.0), "ids that nobody has");
            });
        }
    }
}

//! Rows of a table by token id, and their gradient.
//!
//! The backward is split by columns, so that each element of the gradient is the work of one task, which adds
//! the tokens in ascending order.

use lockstep_plan::DType;

use super::{
    CpuQueue, check_disjoint,
    simd::{Float, with_float},
    tasks::{Operand, expect, rows_per_task},
};
use crate::View;

/// Columns of the gradient that make a task: whole cache lines, and long enough to load fast.
const COLUMNS_PER_TASK: usize = 128;

pub(super) fn forward(queue: &CpuQueue, ids: View<'_>, table: View<'_>, out: View<'_>) {
    let (vocabulary, width) = table.shape().as_matrix();
    let tokens = ids.elements();
    expect("embedding: ids", ids, DType::U32, tokens);
    expect("embedding: out", out, table.dtype(), tokens * width);
    check_disjoint(&[out], &[ids, table]);
    let ids = check_ids(ids, vocabulary);
    with_float!(table.dtype(), T => {
        let (table, out) = (Operand::<T>::new(table), Operand::<T>::new(out));
        queue.for_each_range(tokens, rows_per_task(tokens, width), #[inline(always)] |tokens, _| {
            for token in tokens {
                let row = ids[token] as usize * width;
                // SAFETY: the table is only read, it does not overlap `out`, and each row of `out` belongs to one task.
                unsafe {
                    out.write(token * width..(token + 1) * width).copy_from_slice(table.read(row..row + width));
                }
            }
        });
    });
}

pub(super) fn backward(queue: &CpuQueue, ids: View<'_>, dy: View<'_>, gradient: View<'_>) {
    let (vocabulary, width) = gradient.shape().as_matrix();
    let tokens = ids.elements();
    expect("embedding_backward: ids", ids, DType::U32, tokens);
    expect("embedding_backward: dy", dy, dy.dtype(), tokens * width);
    expect("embedding_backward: gradient", gradient, DType::F32, vocabulary * width);
    check_disjoint(&[gradient], &[ids, dy]);
    let ids = check_ids(ids, vocabulary);
    with_float!(dy.dtype(), T => {
        let (dy, gradient) = (Operand::<T>::new(dy), Operand::<f32>::new(gradient));
        let columns_per_task =
            if rows_per_task(tokens, width) >= tokens { width.max(1) } else { COLUMNS_PER_TASK };
        queue.for_each_range(width, columns_per_task, #[inline(always)] |columns, _| {
            for (token, &id) in ids.iter().enumerate() {
                let (from, to) = (token * width, id as usize * width);
                // SAFETY: `dy` is only read and does not overlap the gradient, of which these columns belong to one task.
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
        });
    });
}

/// The ids, all of which lie in the vocabulary.
fn check_ids<'a>(ids: View<'a>, vocabulary: usize) -> &'a [u32] {
    // SAFETY: the caller has checked that ids overlap no output, and kernels write nothing else.
    let ids = unsafe { ids.slice::<u32>() };
    if let Some((token, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocabulary) {
        panic!("token {token} has id {id}, but the vocabulary has {vocabulary} entries");
    }
    ids
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, values};
    use crate::{Arena, Kernels};

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
                    queue.embedding(ids.view(), table.view(), out.view());
                    queue.embedding_backward(ids.view(), dy.view(), gradient.view());
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
            gradient.view(),
        );
        assert_close("gradient", &values(gradient.view()), &expected, 1e-6, 1e-6);
    }

    #[test]
    #[should_panic(expected = "token 1 has id 5, but the vocabulary has 5 entries")]
    fn an_id_outside_the_vocabulary_is_named() {
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        let (table, out) = (floats(DType::F32, [5, 2], &[0.0; 10]), floats(DType::F32, [2, 2], &[0.0; 4]));
        queue.embedding(tensor(&[4_u32, 5]).view(), table.view(), out.view());
    }
}

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
        queue.for_each_range(tokens, rows_per_task(tokens, width), #[inline(always)] |tokens| {
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
        queue.for_each_range(width, columns_per_task, #[inline(always)] |columns| {
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

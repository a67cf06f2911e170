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

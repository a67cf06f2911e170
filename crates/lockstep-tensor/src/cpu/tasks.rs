//! Splits a kernel into tasks by its shape alone.
//!
//! A kernel covers `0..count` with ranges of a fixed length, so the assignment of ranges to threads changes no bit.
//! Sums over rows are partial sums over fixed groups of rows, added in the order of the groups.

use std::{
    hint,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use lockstep_plan::{DType, MemoryCategory};

use super::{
    CpuQueue,
    operands::Operand,
    pool::Workers,
    simd::{BLOCK, Block, Isa, add_to, inlined},
};
use crate::View;

/// Kernels on fewer elements run on the calling thread: waking others costs more.
const PARALLEL_ELEMENTS: usize = 64 * 1024;
/// Approximate number of elements of a task.
const TASK_ELEMENTS: usize = 16 * 1024;
/// Number of rows of one partial sum.
const ROWS_PER_GROUP: usize = 64;

/// Returns true if a kernel on this many elements is worth waking threads for.
pub(super) fn is_parallel(elements: usize) -> bool {
    elements >= PARALLEL_ELEMENTS
}

/// Returns the number of rows of `width` elements of one task, for kernels that work row by row.
pub(super) fn rows_per_task(rows: usize, width: usize) -> usize {
    let elements = rows.saturating_mul(width);
    if is_parallel(elements) { (TASK_ELEMENTS / width.max(1)).max(1) } else { rows.max(1) }
}

/// Returns the number of elements of one task of an elementwise kernel: whole blocks.
pub(super) fn elements_per_task(elements: usize) -> usize {
    if is_parallel(elements) { TASK_ELEMENTS } else { elements.max(1) }
}

impl Workers {
    /// Touches the pages of `bytes`, elements of `element_bytes` bytes each, without a change of their contents. Pages that no one
    /// has touched yet are then on the memory nodes of the threads that have these elements in elementwise kernels.
    pub fn touch(&self, bytes: &mut [u8], element_bytes: usize) {
        const PAGE: usize = 4096;
        let elements = bytes.len() / element_bytes.max(1);
        let part = elements_per_task(elements) * element_bytes.max(1);
        let parts: Vec<_> = bytes.chunks_mut(part).map(Mutex::new).collect();
        self.run(parts.len(), |index| {
            for byte in parts[index].lock().unwrap_or_else(PoisonError::into_inner).iter_mut().step_by(PAGE) {
                // A write of unknown contents is not optimized away.
                *byte = hint::black_box(*byte);
            }
        });
    }
}

impl CpuQueue {
    /// Calls `work` with consecutive ranges of `grain` (the last may be shorter) that cover `0..count`. `work` is
    /// compiled for the queue's level and receives its [`Isa`]. The closure must be `inlined!`, or it is
    /// compiled for the lowest level.
    #[inline(always)]
    pub(super) fn for_each_range(&self, count: usize, grain: usize, work: impl Fn(Range<usize>, Isa) + Sync) {
        let tasks = count.div_ceil(grain);
        let task = |index: usize| {
            let range = index * grain..count.min((index + 1) * grain);
            self.level.run_with_isa(inlined!(|isa| work(range, isa)));
        };
        self.pool.run(tasks, task);
    }

    /// Calls `work` with each of `rows` rows of `width` elements, as [`CpuQueue::for_each_range`] does with ranges of them. The closure
    /// must be `inlined!`.
    #[inline(always)]
    pub(super) fn for_each_row(&self, rows: usize, width: usize, work: impl Fn(usize, Isa) + Sync) {
        self.for_each_range(
            rows,
            rows_per_task(rows, width),
            inlined!(|rows, isa| {
                for row in rows {
                    work(row, isa);
                }
            }),
        );
    }

    /// Computes `outputs[m][i] += Σ over rows` of the values that `add_rows` adds for column `i`, with the same bits
    /// for any number of threads.
    ///
    /// `add_rows` receives a range of rows and adds them to `M` partial sums of `width` elements. Like the closure of
    /// [`CpuQueue::for_each_range`], it must be `inlined!`.
    #[inline(always)]
    pub(super) fn add_sum_over_rows<const M: usize>(
        &self,
        rows: usize,
        outputs: [View<'_>; M],
        add_rows: impl Fn(Range<usize>, [&mut [f32]; M]) + Sync,
    ) {
        let width = outputs[0].elements();
        let groups = rows.div_ceil(ROWS_PER_GROUP);
        let partial_elements = groups * M * width;
        if partial_elements == 0 {
            return;
        }
        let scratch = self
            .arena
            .allocate(partial_elements * size_of::<f32>(), MemoryCategory::Workspace)
            .unwrap_or_else(|error| panic!("partial sums of {rows} rows: {error}"));
        let partials = Operand::<f32>::new(scratch.view(DType::F32, 0, [partial_elements]));
        let groups_per_task = if is_parallel(rows * width) { 1 } else { groups };
        self.for_each_range(
            groups,
            groups_per_task,
            inlined!(|task, _| {
                for group in task {
                    let first = group * M * width;
                    // SAFETY: each group belongs to one task, and its `M` slices do not overlap.
                    let mut sums: [&mut [f32]; M] = std::array::from_fn(inlined!(|m| unsafe {
                        partials.write(first + m * width..first + (m + 1) * width)
                    }));
                    for sum in &mut sums {
                        sum.fill(0.0);
                    }
                    add_rows(group * ROWS_PER_GROUP..rows.min((group + 1) * ROWS_PER_GROUP), sums);
                }
            }),
        );
        let outputs = outputs.map(Operand::<f32>::new);
        let columns_per_task = if is_parallel(partial_elements) { BLOCK } else { width };
        self.for_each_range(
            width,
            columns_per_task,
            inlined!(|columns, _| {
                for (m, output) in outputs.iter().enumerate() {
                    for start in columns.clone().step_by(BLOCK) {
                        let n = BLOCK.min(columns.end - start);
                        let mut total = Block::ZERO;
                        for group in 0..groups {
                            let first = (group * M + m) * width + start;
                            // SAFETY: the partial sums are complete, and now only read.
                            let partial = unsafe { partials.read(first..first + n) };
                            add_to(&mut total.0[..n], partial);
                        }
                        // SAFETY: each column belongs to one task, and the outputs do not overlap.
                        add_to(unsafe { output.write(start..start + n) }, &total.0[..n]);
                    }
                }
            }),
        );
    }
}

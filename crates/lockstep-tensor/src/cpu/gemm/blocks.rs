//! Block sizes of a product, and its division into tasks. Block sizes depend on its shape alone, so that neither bits nor scratch
//! depend on the machine. Tasks are parts of C, which change no bit, so their number grows with that of the threads.

use std::ops::Range;

use super::scratch::{COLUMNS_UNITS, MAX_DEPTH, PARTIAL_COLUMNS, PARTIAL_ROWS, ROWS_UNITS};

/// Block sizes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocks {
    /// Units of depth packed at a time.
    pub(super) depth: usize,
    /// Rows of a chunk, completed before the next ones are started.
    pub(super) chunk_rows: usize,
    /// Columns of B packed at a time.
    pub(super) chunk_columns: usize,
    /// Largest number of panels of A of a task.
    most_panels: usize,
    /// Smallest number of panels of A of a task, if there are that many.
    fewest_panels: usize,
    grain: Grain,
}

/// Constraints of the micro-kernel and the types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grain {
    /// Rows of a panel of A.
    pub(super) rows: usize,
    /// Columns of a panel of B.
    pub(super) columns: usize,
    /// Smallest number of rows of a task for which fetching a panel of B pays.
    pub(super) task_rows: usize,
    /// A panel's depth is a multiple of this many units.
    pub(super) depth: usize,
    /// Number of planes of a panel.
    pub(super) planes: usize,
    /// Units of depth to pack at a time, if the operands prefer a number.
    pub(super) block_depth: Option<usize>,
    /// True if a task packs its rows of A; false if it reads them where they lie.
    pub(super) packs_rows: bool,
    /// Number of threads that share the tasks.
    pub(super) threads: usize,
    /// True if sums over blocks of depth need a buffer of their own (C is not f32, or not a matrix).
    pub(super) keeps_partial_sums: bool,
}

impl Blocks {
    /// Largest number of rows of a task: smaller tasks balance better over threads.
    pub(super) const TASK_ROWS: usize = 96;
    /// The number of tasks is a multiple of this, if the shape allows it: few threads share them evenly.
    const FEWEST_TASKS: usize = 16;
    /// Smallest number of columns of a large task, so that packing its rows pays.
    const TASK_COLUMNS: usize = 192;
    /// Smallest number of columns of a small task.
    const SMALL_TASK_COLUMNS: usize = 128;
    /// Largest number of parts of the columns of small tasks.
    const SMALL_COLUMN_PARTS: usize = 4;
    /// Largest number of parts of the columns of small tasks that pack their rows.
    const PACKED_COLUMN_PARTS: usize = 2;
    /// As [`Self::FEWEST_TASKS`], if tasks pack their rows: each part of the columns packs the same rows again.
    const FEWEST_PACKING_TASKS: usize = 4;
    /// Number of tasks of each thread that suffices if tasks pack their rows.
    const PACKING_TASKS_OF_THREAD: usize = 2;

    /// Returns the block sizes of an `m × n` product over `depth` units.
    pub(super) fn new(m: usize, n: usize, depth: usize, grain: Grain) -> Self {
        let most_depth = MAX_DEPTH / grain.planes / grain.depth * grain.depth;
        let (depth_parts, depth) = match grain.block_depth {
            Some(block) => (depth.div_ceil(block), block.next_multiple_of(grain.depth)),
            None => {
                let parts = depth.div_ceil(most_depth).max(1);
                (parts, even_part(depth, parts, grain.depth))
            }
        };
        let column_units = grain.planes * depth.max(1);
        let mut chunk_columns = COLUMNS_UNITS / column_units;
        let mut chunk_rows = m;
        if grain.keeps_partial_sums && depth_parts > 1 {
            chunk_columns = chunk_columns.min(PARTIAL_COLUMNS);
            chunk_rows = chunk_rows.min(PARTIAL_ROWS);
        }
        let chunk_columns = chunk_columns / grain.columns * grain.columns;
        let chunk_columns = even_part(n, n.div_ceil(chunk_columns), grain.columns);
        let most_panels = (ROWS_UNITS / column_units).min(Self::TASK_ROWS) / grain.rows;
        let fewest_panels = (grain.task_rows / grain.rows).clamp(1, most_panels);
        Self { depth, chunk_rows, chunk_columns, most_panels, fewest_panels, grain }
    }

    /// Returns the division of a chunk of `rows × columns` into tasks.
    pub(super) fn tasks(&self, rows: usize, columns: usize) -> Tasks {
        let Self { fewest_panels, most_panels, grain, .. } = *self;
        let even = grain.threads.next_multiple_of(Self::FEWEST_TASKS).max(Self::FEWEST_TASKS);
        let (least, column_parts) = if grain.packs_rows {
            let enough = Self::PACKING_TASKS_OF_THREAD * grain.threads;
            (even.min(enough.next_multiple_of(Self::FEWEST_PACKING_TASKS)), Self::PACKED_COLUMN_PARTS)
        } else {
            (even, Self::SMALL_COLUMN_PARTS)
        };
        let panels = rows.div_ceil(grain.rows);
        // Three quarters of the panels: as many parts as there may be threads, or a multiple of that.
        let small = panels / 4 / fewest_panels;
        let large_panels = panels - small * fewest_panels;
        let large = match large_panels.div_ceil(most_panels) {
            few if few <= least => (large_panels / fewest_panels).clamp(few.max(1), least.max(few)),
            many => many.next_multiple_of(least),
        };
        let parts_of = |smallest: usize| (columns / smallest).max(1);
        // Rows are divided first: each part of the columns reads the same rows again.
        let large_columns = (least / (large + small)).min(parts_of(Self::TASK_COLUMNS)).max(1);
        let small_columns = parts_of(Self::SMALL_TASK_COLUMNS).min(column_parts).max(large_columns);
        Tasks { large, large_panels, large_columns, small, small_columns, grain }
    }
}

/// The division of a chunk into tasks, each some panels of its rows and a part of its columns. Large tasks come first, so
/// that all threads end at about the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tasks {
    /// Number of large parts of the rows.
    large: usize,
    /// Panels of all large parts.
    large_panels: usize,
    /// Number of parts of the columns of a large part.
    large_columns: usize,
    /// Number of small parts of the rows.
    small: usize,
    /// Number of parts of the columns of a small part.
    small_columns: usize,
    grain: Grain,
}

impl Tasks {
    /// Number of tasks.
    pub(super) fn count(&self) -> usize {
        self.large * self.large_columns + self.small_count()
    }

    /// Number of small tasks, the last ones.
    pub(super) fn small_count(&self) -> usize {
        self.small * self.small_columns
    }

    /// Returns the rows and columns of task `index`, of those of the chunk.
    pub(super) fn ranges(
        &self,
        index: usize,
        rows: &Range<usize>,
        columns: &Range<usize>,
    ) -> [Range<usize>; 2] {
        let large_end = (rows.start + self.large_panels * self.grain.rows).min(rows.end);
        let (rows, parts, column_parts, index) = match index.checked_sub(self.large * self.large_columns) {
            None => (rows.start..large_end, self.large, self.large_columns, index),
            Some(index) => (large_end..rows.end, self.small, self.small_columns, index),
        };
        [
            part(&rows, parts, index / column_parts, self.grain.rows),
            part(columns, column_parts, index % column_parts, self.grain.columns),
        ]
    }
}

/// Returns part `index` of `parts` parts of a range, in multiples of `grain`.
fn part(whole: &Range<usize>, parts: usize, index: usize, grain: usize) -> Range<usize> {
    let grains = whole.len().div_ceil(grain);
    let at = |index: usize| (whole.start + index * grains / parts * grain).min(whole.end);
    at(index)..at(index + 1)
}

/// Returns the size of `parts` parts of `whole`, as equal as multiples of `grain` allow.
fn even_part(whole: usize, parts: usize, grain: usize) -> usize {
    whole.div_ceil(parts.max(1)).next_multiple_of(grain).max(grain)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the fraction of the threads' time that is used if a thread that becomes free takes the next task, and a task
    /// takes as long as its part of C is large.
    fn used(m: usize, n: usize, threads: usize, packs_rows: bool) -> f64 {
        let grain = Grain {
            rows: 12,
            columns: 32,
            task_rows: if packs_rows { 48 } else { 24 },
            depth: 1,
            planes: 1,
            block_depth: None,
            packs_rows,
            threads,
            keeps_partial_sums: false,
        };
        let tasks = Blocks::new(m, n, 768, grain).tasks(m, n);
        let mut ends = vec![0; threads];
        for index in 0..tasks.count() {
            let [rows, columns] = tasks.ranges(index, &(0..m), &(0..n));
            *ends.iter_mut().min().unwrap() += rows.len() * columns.len();
        }
        (m * n) as f64 / (threads * ends.iter().max().unwrap()) as f64
    }

    #[test]
    fn many_threads_have_tasks_of_equal_work() {
        for (threads, least) in [(1, 1.0), (2, 0.99), (8, 0.96), (32, 0.88), (64, 0.65), (128, 0.65)] {
            for (m, n) in [(1024, 768), (1024, 1536), (4096, 1536), (8192, 1536)] {
                let used = used(m, n, threads, false);
                assert!(used >= least, "{m} × {n} on {threads} threads use {used:.2} of their time");
            }
        }
    }

    #[test]
    fn tasks_that_pack_rows_keep_threads_busy() {
        for (threads, least) in [(1, 1.0), (2, 0.99), (3, 0.88), (8, 0.99), (16, 0.99)] {
            for (m, n) in [(384, 384), (1536, 384), (384, 1536), (768, 3072), (50304, 768)] {
                let used = used(m, n, threads, true);
                assert!(used >= least, "{m} × {n} on {threads} threads use {used:.2} of their time");
            }
        }
    }

    proptest! {
        #[test]
        fn tasks_cover_every_element_once(
            m in 1_usize..3000,
            n in 1_usize..3000,
            depth in 1_usize..3000,
            shape in prop::sample::select(vec![(12, 32, 24, 1), (12, 32, 48, 1), (8, 48, 24, 1), (6, 16, 12, 1), (4, 8, 8, 1), (32, 32, 96, 16)]),
            first in 0_usize..100,
            packs_rows: bool,
            threads in 1_usize..=128,
        ) {
            let (rows, columns, task_rows, depth_grain) = shape;
            let grain = Grain {
                rows, columns, task_rows, depth: depth_grain, planes: 1, block_depth: None, packs_rows, threads, keeps_partial_sums: false,
            };
            let blocks = Blocks::new(m, n, depth, grain);
            let tasks = blocks.tasks(m, n);
            let (whole_rows, whole_columns) = (first..first + m, first..first + n);
            let mut area = 0;
            for index in 0..tasks.count() {
                let [task_rows, task_columns] = tasks.ranges(index, &whole_rows, &whole_columns);
                prop_assert!((task_rows.start - first).is_multiple_of(rows) && task_rows.end <= first + m);
                prop_assert!((task_columns.start - first).is_multiple_of(columns) && task_columns.end <= first + n);
                prop_assert!(task_rows.len().next_multiple_of(rows) <= Blocks::TASK_ROWS.max(rows), "{task_rows:?}");
                area += task_rows.len() * task_columns.len();
            }
            prop_assert_eq!(area, m * n, "{:?}", tasks);
        }
    }
}

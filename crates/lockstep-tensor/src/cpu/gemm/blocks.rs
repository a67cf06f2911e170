//! Block sizes of a product: they depend on its shape alone, so that neither bits nor scratch depend on the machine.

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
    /// Rows of a task's tile of C.
    pub(super) task_rows: usize,
    /// Columns of a task's tile of C.
    pub(super) task_columns: usize,
}

/// Constraints of the micro-kernel and the types.
#[derive(Debug, Clone, Copy)]
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
    /// True if sums over blocks of depth need a buffer of their own (C is not f32, or not a matrix).
    pub(super) keeps_partial_sums: bool,
}

impl Blocks {
    /// Largest number of rows of a task: smaller tasks balance better over threads.
    pub(super) const TASK_ROWS: usize = 96;
    /// Desired number of tasks, if the shape allows it.
    const TASKS: usize = 16;
    /// Smallest number of columns of a task, so that packing its rows pays.
    const TASK_COLUMNS: usize = 192;

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

        // Rows are split over the tasks first: each column part packs the same rows again.
        let rows_limit = (ROWS_UNITS / column_units).min(Self::TASK_ROWS) / grain.rows * grain.rows;
        let wanted_rows = (chunk_rows / Self::TASKS).clamp(grain.task_rows.min(rows_limit), rows_limit);
        let task_rows = even_part(chunk_rows, chunk_rows.div_ceil(wanted_rows), grain.rows);
        let row_parts = chunk_rows.div_ceil(task_rows);
        let column_parts = (Self::TASKS / row_parts).min(chunk_columns / Self::TASK_COLUMNS).max(1);
        let task_columns = even_part(chunk_columns, column_parts, grain.columns);
        Self { depth, chunk_rows, chunk_columns, task_rows, task_columns }
    }
}

/// Returns the size of `parts` parts of `whole`, as equal as multiples of `grain` allow.
fn even_part(whole: usize, parts: usize, grain: usize) -> usize {
    whole.div_ceil(parts.max(1)).next_multiple_of(grain).max(grain)
}

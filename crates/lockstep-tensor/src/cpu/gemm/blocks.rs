//! How a product is cut: by its shape alone, so that neither bits nor scratch depend on the machine.

use super::scratch::{COLUMNS_UNITS, MAX_DEPTH, PARTIAL_COLUMNS, PARTIAL_ROWS, ROWS_UNITS};

/// Sizes of the parts of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocks {
    /// Units of depth packed at a time.
    pub(super) depth: usize,
    /// Rows worked through before the next ones are begun.
    pub(super) chunk_rows: usize,
    /// Columns of B packed at a time.
    pub(super) chunk_columns: usize,
    /// Rows of a task's tile of C.
    pub(super) task_rows: usize,
    /// Columns of a task's tile of C.
    pub(super) task_columns: usize,
}

/// What the micro-kernel and the types ask for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grain {
    /// Rows of a panel of A.
    pub(super) rows: usize,
    /// Columns of a panel of B.
    pub(super) columns: usize,
    /// Rows of a task, at least, for which a panel of B is worth fetching.
    pub(super) task_rows: usize,
    /// Units that a panel's depth is a multiple of.
    pub(super) depth: usize,
    /// Times that a panel is packed.
    pub(super) planes: usize,
    /// Whether sums over parts of the depth need memory of their own (C is not f32).
    pub(super) keeps_partial_sums: bool,
}

impl Blocks {
    /// Rows of a task, at most: the smaller, the more evenly threads share the work.
    const TASK_ROWS: usize = 96;
    /// Tasks worth having, if the shape gives them.
    const TASKS: usize = 16;
    /// Columns of a task, at least, so that packing its rows pays.
    const TASK_COLUMNS: usize = 192;

    /// The parts of an `m × n` product over `depth` units.
    pub(super) fn new(m: usize, n: usize, depth: usize, grain: Grain) -> Self {
        let most_depth = MAX_DEPTH / grain.planes / grain.depth * grain.depth;
        let depth_parts = depth.div_ceil(most_depth).max(1);
        let depth = even_part(depth, depth_parts, grain.depth);
        let column_units = grain.planes * depth.max(1);
        let mut chunk_columns = COLUMNS_UNITS / column_units;
        let mut chunk_rows = m;
        if grain.keeps_partial_sums && depth_parts > 1 {
            chunk_columns = chunk_columns.min(PARTIAL_COLUMNS);
            chunk_rows = chunk_rows.min(PARTIAL_ROWS);
        }
        let chunk_columns = chunk_columns / grain.columns * grain.columns;
        let chunk_columns = even_part(n, n.div_ceil(chunk_columns), grain.columns);

        // Tasks share out the rows first: each column part would pack the same rows again.
        let rows_limit = (ROWS_UNITS / column_units).min(Self::TASK_ROWS) / grain.rows * grain.rows;
        let wanted_rows = (chunk_rows / Self::TASKS).clamp(grain.task_rows.min(rows_limit), rows_limit);
        let task_rows = even_part(chunk_rows, chunk_rows.div_ceil(wanted_rows), grain.rows);
        let row_parts = chunk_rows.div_ceil(task_rows);
        let column_parts = (Self::TASKS / row_parts).min(chunk_columns / Self::TASK_COLUMNS).max(1);
        let task_columns = even_part(chunk_columns, column_parts, grain.columns);
        Self { depth, chunk_rows, chunk_columns, task_rows, task_columns }
    }
}

/// The size of `parts` parts of `whole`, as even as multiples of `grain` allow.
fn even_part(whole: usize, parts: usize, grain: usize) -> usize {
    whole.div_ceil(parts.max(1)).next_multiple_of(grain).max(grain)
}

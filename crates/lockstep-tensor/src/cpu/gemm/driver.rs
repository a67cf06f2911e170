//! The loops around a micro-kernel. For each block of depth and chunk of columns, B is packed once, by all
//! threads; then tasks, each a tile of C, pack their rows of A and go through the panels.
//!
//! Every element of C is computed by one task in an order that only the shape decides.

use std::{marker::PhantomData, ops::Range};

use super::{
    CpuQueue, Float, Problem, Scratch, Window,
    blocks::{Blocks, Grain},
    kernel::{ColumnPanels, MicroKernel, RowPanels},
    pack::{Factors, Packing},
    scratch::PARTIAL_COLUMNS,
    store::{Finish, Tile, store},
};
use crate::{CpuLevel, Element, Write, cpu::pool::Pool};

/// Products with fewer multiplications are not worth waking threads for.
const SERIAL_MULTIPLICATIONS: usize = 1 << 16;
/// Panels of B that a thread packs at a time.
const PACKED_PANELS: usize = 4;

/// Where a product runs.
#[derive(Clone, Copy)]
enum Threads<'a> {
    Caller,
    Pool(&'a Pool),
}

impl Threads<'_> {
    fn run(self, tasks: usize, task: impl Fn(usize) + Sync) {
        match self {
            Self::Caller => (0..tasks).for_each(task),
            Self::Pool(pool) => pool.run(tasks, task),
        }
    }
}

/// Computes `problem` with the micro-kernel `K` on operands packed as `U`.
pub(super) fn multiply<K: MicroKernel, U: Packing, C: Float>(
    queue: &CpuQueue,
    problem: &Problem<'_, U::Source, C>,
) {
    if problem.m == 0 || problem.n == 0 {
        return;
    }
    // Held for the whole product: callers on other threads take turns.
    let (mut columns, mut partial) = (queue.scratch.columns(), queue.scratch.partial());
    let mut product = Product::<K, U, C> {
        level: queue.level,
        scratch: &queue.scratch,
        threads: Threads::Pool(&queue.pool),
        problem,
        blocks: Blocks::new(problem.m, problem.n, problem.k.div_ceil(U::ELEMENTS), grain::<K, U, C>()),
        partial: Window::new(partial.elements_mut::<f32>().as_mut_ptr(), PARTIAL_COLUMNS),
        kernel: PhantomData,
    };
    let columns = columns.elements_mut();
    let multiplications = problem.m.saturating_mul(problem.n).saturating_mul(problem.k);
    if multiplications <= SERIAL_MULTIPLICATIONS {
        product.threads = Threads::Caller;
    }
    product.run(columns);
}

fn grain<K: MicroKernel, U: Packing, C: Float>() -> Grain {
    Grain {
        rows: K::ROWS,
        columns: K::COLUMNS,
        task_rows: K::TASK_ROWS,
        depth: K::DEPTH,
        planes: U::PLANES,
        keeps_partial_sums: C::DTYPE != f32::DTYPE,
    }
}

/// A product, and how it is cut and run.
struct Product<'a, K, U: Packing, C> {
    level: CpuLevel,
    scratch: &'a Scratch,
    threads: Threads<'a>,
    problem: &'a Problem<'a, U::Source, C>,
    blocks: Blocks,
    partial: Window<f32>,
    kernel: PhantomData<fn(K, U)>,
}

/// A chunk of columns at a block of depth.
struct Chunk<'a> {
    rows: Range<usize>,
    columns: Range<usize>,
    depth: Range<usize>,
    /// Depth of the packed panels.
    units: usize,
    packed_columns: &'a [u32],
}

impl<K: MicroKernel, U: Packing, C: Float> Product<'_, K, U, C> {
    fn run(&self, scratch: &mut [u32]) {
        let Problem { m, n, k, .. } = *self.problem;
        let Blocks { chunk_rows, chunk_columns, .. } = self.blocks;
        let block_depth = self.blocks.depth * U::ELEMENTS;
        for rows in parts(0..m, chunk_rows) {
            for columns in parts(0..n, chunk_columns) {
                // At least once: an empty depth still sets C to the bias or to zero.
                for start in (0..k.max(1)).step_by(block_depth) {
                    let depth = start..(start + block_depth).min(k);
                    let units = depth.len().div_ceil(U::ELEMENTS).next_multiple_of(K::DEPTH);
                    let panels = columns.len().div_ceil(K::COLUMNS);
                    let packed = &mut scratch[..panels * U::panel_units::<ColumnPanels<K>>(units)];
                    self.pack_columns(columns.clone(), depth.clone(), units, packed);
                    let (rows, columns) = (rows.clone(), columns.clone());
                    self.tasks(&Chunk { rows, columns, depth, units, packed_columns: packed });
                }
            }
        }
    }

    fn pack_columns(&self, columns: Range<usize>, depth: Range<usize>, units: usize, packed: &mut [u32]) {
        if packed.is_empty() {
            return;
        }
        let pack_part = |part: usize, packed: &mut [u32]| {
            let start = columns.start + part * PACKED_PANELS * K::COLUMNS;
            let b = &self.problem.b;
            // SAFETY: the queue's level has the kernel's instructions.
            unsafe {
                U::pack::<K::Vector, ColumnPanels<K>>(b, start..columns.end, depth.clone(), units, packed);
            }
        };
        let part_units = PACKED_PANELS * U::panel_units::<ColumnPanels<K>>(units);
        let packed_units = packed.len();
        let packed = Window::new(packed.as_mut_ptr(), packed_units);
        self.threads.run(packed_units.div_ceil(part_units), |part| {
            let start = part * part_units;
            // SAFETY: the parts of the packed columns do not overlap, and each belongs to one task.
            let packed = unsafe { packed.at(0, start).row(0, part_units.min(packed_units - start)) };
            pack_part(part, packed);
        });
    }

    fn tasks(&self, chunk: &Chunk<'_>) {
        let Blocks { task_rows, task_columns, .. } = self.blocks;
        let column_tasks = chunk.columns.len().div_ceil(task_columns);
        let tasks = chunk.rows.len().div_ceil(task_rows) * column_tasks;
        let task = |index: usize| {
            let row = chunk.rows.start + index / column_tasks * task_rows;
            let column = chunk.columns.start + index % column_tasks * task_columns;
            let rows = row..(row + task_rows).min(chunk.rows.end);
            let columns = column..(column + task_columns).min(chunk.columns.end);
            // SAFETY: the queue's level has the kernel's instructions.
            unsafe { K::prepared(|| self.task(chunk, rows, columns)) }
        };
        self.threads.run(tasks, task);
    }

    /// Computes one tile of C, up to `task_rows × task_columns`. The thread is prepared for the kernel.
    fn task(&self, chunk: &Chunk<'_>, rows: Range<usize>, columns: Range<usize>) {
        let units = chunk.units;
        let mut packed_rows = self.scratch.rows();
        let row_panel_units = U::panel_units::<RowPanels<K>>(units);
        let packed_rows =
            &mut packed_rows.elements_mut::<u32>()[..rows.len().div_ceil(K::ROWS) * row_panel_units];
        let Problem { a, b, .. } = self.problem;
        // SAFETY: the queue's level has the kernel's instructions.
        unsafe {
            U::pack::<K::Vector, RowPanels<K>>(a, rows.clone(), chunk.depth.clone(), units, packed_rows)
        };

        let column_panel_units = U::panel_units::<ColumnPanels<K>>(units);
        let mut tile = Tile::zeros();
        for column in columns.clone().step_by(K::COLUMNS) {
            let index = (column - chunk.columns.start) / K::COLUMNS;
            let packed_b = panel(chunk.packed_columns, index, column_panel_units);
            for (index, row) in rows.clone().step_by(K::ROWS).enumerate() {
                let packed_a = panel(packed_rows, index, row_panel_units);
                let (row_end, column_end) =
                    (rows.end.min(row + K::ROWS), columns.end.min(column + K::COLUMNS));
                let factors = || {
                    let (rows, columns, depth) = (row..row_end, column..column_end, chunk.depth.clone());
                    Factors { a, b, rows, columns, depth }
                };
                if U::is_exceptional(packed_b) {
                    U::exceptional_tile(&factors(), &mut tile, K::COLUMNS);
                } else {
                    // SAFETY: the level has the kernel's instructions, the thread is prepared, and both
                    // panels hold `units`, a multiple of the kernel's depth.
                    unsafe { K::tile(units, packed_a.as_ptr(), packed_b.as_ptr(), &mut tile) };
                    if U::is_exceptional(packed_a) {
                        U::exceptional_rows(&factors(), &mut tile, K::COLUMNS);
                    }
                }
                self.store(chunk, &mut tile, (row, column), (row_end - row, column_end - column));
            }
        }
    }

    /// Adds a tile to what earlier blocks of depth left, and finishes it if this block is the last.
    fn store(&self, chunk: &Chunk<'_>, tile: &mut Tile, (row, column): (usize, usize), size: (usize, usize)) {
        let Problem { k, c, bias, write, .. } = *self.problem;
        let (first, last) = (chunk.depth.start == 0, chunk.depth.end == k);
        let bias = bias.filter(|_| last).map(|bias| &bias[column..]);
        let earlier = if first { Write::Overwrite } else { Write::Accumulate };
        // SAFETY: the tile lies in the chunk and the chunk in C; the partial sums hold a chunk. This task
        // alone works on this tile.
        unsafe {
            let target = c.at(row, column);
            if grain::<K, U, C>().keeps_partial_sums && !(first && last) {
                let partial = self.partial.at(row - chunk.rows.start, column - chunk.columns.start);
                if last {
                    let finish = Finish { partial: Some(partial), bias, write };
                    store(self.level, size, tile, K::COLUMNS, &finish, target);
                } else {
                    let finish = Finish { partial: None, bias, write: earlier };
                    store(self.level, size, tile, K::COLUMNS, &finish, partial);
                }
            } else {
                let write = if first { write } else { earlier };
                store(self.level, size, tile, K::COLUMNS, &Finish { partial: None, bias, write }, target);
            }
        }
    }
}

/// Panel `index` of panels of `units` units.
fn panel(panels: &[u32], index: usize, units: usize) -> &[u32] {
    &panels[index * units..][..units]
}

/// The range in parts of `len`; the last may be shorter.
fn parts(whole: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = whole.end;
    whole.step_by(len).map(move |start| start..(start + len).min(end))
}

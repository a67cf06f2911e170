//! Products of quantized weights and int8 activations, `Y = X · Wᵀ`: sums of integers within a run of 32 or 16 elements, and of f32
//! over the runs.
//!
//! An integer sum is exact, and the f32 sum of an element goes along the depth run by run. So a row's bits depend on the row alone, and
//! products of few and of many rows share one kernel: the codes of 16 lines of W are transposed into the cache for a block of depth
//! and multiplied with groups of up to eight rows.

use std::ops::Range;

use super::{
    activations::{CodeForm, GROUP, GROUP_WORDS, RowGroup},
    block_lines::{BlockLines, WordBuffer},
    integer_lanes::{GROUP_UNITS, IntegerLanes},
    interleaved_row::multiply_row,
    packed_lines::{DEPTH, PackedLines, code_form, pack_codes},
    problem::Problem,
    run_products::{ByVectors, RunProducts, TILE_ROWS, TiledLanes},
    scratch::COLUMNS_UNITS,
    store::{Finish, Window, store_rows},
    transpose::SIDE,
};
use crate::{
    BlockLayout, CpuLevel, CpuQueue, Write,
    cpu::simd::{Float, inlined},
};

/// Largest number of rows whose sums stay in registers.
const ROWS: usize = 8;
/// Panels of 16 lines that share the reading of many rows.
const PANELS: usize = 4;
/// Columns of a tile of many rows.
const TILE_COLUMNS: usize = PANELS * SIDE;
/// Largest number of panels of a task of few rows.
const FEW_ROWS_PANELS: usize = 16;
/// Tasks of few rows for each thread, so that all threads end at about the same time.
const FEW_ROWS_TASKS: usize = 8;
/// Largest number of rows that are multiplied with packed lines: their sums are in the scratch memory of a task.
const BLOCK_ROWS: usize = 512;
/// Products with fewer multiplications run on the calling thread: waking others costs more.
const SERIAL_MULTIPLICATIONS: usize = 1 << 18;
/// Rows whose quantization is worth waking other threads for.
const PARALLEL_ROWS: usize = 2 * ROWS;
/// Largest depth: a group of rows must fit the scratch memory.
pub(super) const MOST_DEPTH: usize = COLUMNS_UNITS / (ROWS * GROUP_WORDS) * GROUP;

/// Scratch memory of a task.
#[repr(C, align(64))]
struct TaskScratch {
    words: WordBuffer,
    panels: [PackedLines; PANELS],
    /// Sums `[rows, tile columns]` of the rows of a block. Few rows have wider tiles, of fewer sums.
    sums: [f32; BLOCK_ROWS * TILE_COLUMNS],
}

/// Computes a product with quantized weights by the vectors `V`. Its depth is at most [`MOST_DEPTH`].
pub(super) fn multiply<V: TiledLanes, T: Float, C: Float>(queue: &CpuQueue, problem: &Problem<'_, T, C>) {
    let Problem { m, n, k, ref b, .. } = *problem;
    let Some(lines) = b.block_lines() else { unreachable!("weights are quantized") };
    let form = code_form::<V>(lines.format, V::has_tiles(queue.level));
    let product = Product { problem, lines, form };
    let mut columns = queue.scratch.columns();
    let words = columns.elements_mut::<u32>();
    let row_words = k / GROUP * GROUP_WORDS;
    let block_rows = (words.len() / row_words.max(1) / ROWS * ROWS).clamp(1, BLOCK_ROWS);
    let blocks = m.div_ceil(block_rows).max(1);
    // Equal blocks of whole groups.
    let block_rows = m.div_ceil(blocks).next_multiple_of(ROWS).min(block_rows);
    let is_serial = m * n * k <= SERIAL_MULTIPLICATIONS;
    let run = |tasks: usize, is_serial: bool, run: &(dyn Fn(usize) + Sync)| {
        if is_serial { (0..tasks).for_each(run) } else { queue.pool.run(tasks, run) }
    };
    for start in (0..m).step_by(block_rows) {
        let rows = start..m.min(start + block_rows);
        let groups = rows.len().div_ceil(ROWS);
        let activations = Window::new(words.as_mut_ptr(), ROWS * row_words);
        run(groups, rows.len() < PARALLEL_ROWS, &|group| {
            let first = rows.start + group * ROWS;
            let rows = first..rows.end.min(first + ROWS);
            // SAFETY: the words of each group of rows belong to one task, and the level has the instructions.
            unsafe { product.quantize::<V>(rows, activations.row(group, ROWS * row_words)) };
        });
        let tile = if rows.len() > ROWS { TILE_COLUMNS } else { few_rows_tile(n, queue.pool.threads()) };
        run(n.div_ceil(tile), is_serial, &|index| {
            let columns = index * tile..n.min((index + 1) * tile);
            let mut scratch = queue.scratch.rows();
            let scratch = TaskScratch::of(scratch.elements_mut());
            // SAFETY: the activations are quantized, and each tile belongs to one task; the level has the instructions.
            unsafe {
                let work = || product.tile::<V>(queue.level, rows.clone(), columns, activations, scratch);
                if form.by_rows { V::with_tiles(form.runs, work) } else { work() }
            };
        });
    }
}

/// Returns the columns of a task of few rows. A task of many panels reads memory in order, and shares few cache lines with its neighbours.
fn few_rows_tile(columns: usize, threads: usize) -> usize {
    (columns / SIDE / (threads * FEW_ROWS_TASKS)).clamp(1, FEW_ROWS_PANELS) * SIDE
}

impl TaskScratch {
    fn of(words: &mut [u32]) -> &mut Self {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
        let ahead = bytes.as_ptr().align_offset(align_of::<Self>());
        let bytes = &mut bytes[ahead..][..size_of::<Self>()];
        // SAFETY: aligned, as long as the type, which has only numbers of which any bits are valid.
        unsafe { &mut *bytes.as_mut_ptr().cast() }
    }
}

/// A product, and the form of its weights' codes.
#[derive(Clone, Copy)]
struct Product<'p, 'a, T, C> {
    problem: &'p Problem<'a, T, C>,
    lines: BlockLines<'a>,
    form: CodeForm,
}

/// Runs `$work` with the number of rows as the constant `$ROWS`.
macro_rules! with_rows {
    ($rows:expr, $ROWS:ident => $work:expr) => {{
        macro_rules! of {
            ($count:literal) => {{
                const $ROWS: usize = $count;
                $work
            }};
        }
        match $rows {
            0 => {}
            1 => of!(1),
            2 => of!(2),
            3 => of!(3),
            4 => of!(4),
            5 => of!(5),
            6 => of!(6),
            7 => of!(7),
            _ => of!(8),
        }
    }};
}

impl<T: Float, C: Float> Product<'_, '_, T, C> {
    /// Quantizes a group of rows of the activations.
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`.
    unsafe fn quantize<V: IntegerLanes>(&self, rows: Range<usize>, words: &mut [u32]) {
        let k = self.problem.k;
        let (a, form) = (self.problem.a, self.form);
        with_rows!(rows.len(), COUNT => {
            let words = &mut words[..k / GROUP * GROUP_WORDS * COUNT];
            // SAFETY: the structure is words of which any bits are valid; the caller's promise.
            unsafe {
                let groups: &mut [RowGroup<COUNT>] =
                    std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), k / GROUP);
                V::compiled(inlined!(|| for row in 0..COUNT {
                    let (elements, _) = a.line(rows.start + row).as_chunks();
                    for (group, elements) in groups.iter_mut().zip(elements) {
                        group.quantize(row, elements, form);
                    }
                }));
                if form.by_rows && COUNT == TILE_ROWS {
                    groups.iter_mut().for_each(RowGroup::order_by_rows);
                }
            }
        });
    }

    /// Computes a tile of C.
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`, the activations must hold the rows, and nothing else may use the tile.
    unsafe fn tile<V: TiledLanes>(
        &self,
        level: CpuLevel,
        rows: Range<usize>,
        columns: Range<usize>,
        activations: Window<u32>,
        scratch: &mut TaskScratch,
    ) {
        let k = self.problem.k;
        let panels = columns.len().div_ceil(SIDE);
        let width = panels * SIDE;
        let TaskScratch { words: buffer, panels: packed, sums } = scratch;
        let sums = &mut sums[..rows.len() * width];
        if rows.len() == 1 && self.lines.layout == BlockLayout::Interleaved {
            // SAFETY: the words are groups of one row; the caller's promise.
            unsafe {
                let words = activations.row(0, k / GROUP * GROUP_WORDS);
                multiply_row::<V>(
                    groups_of(words),
                    &self.lines,
                    columns.start / SIDE,
                    sums.as_chunks_mut().0,
                );
                self.finish(level, rows, columns, sums, width);
            }
            return;
        }
        sums.fill(0.0);
        let has_offsets = self.lines.format.has_offsets();
        // Few rows read one panel after the other, as it lies in memory; many rows share the reading of their codes.
        let together = if rows.len() > ROWS { PANELS } else { 1 };
        for first_panel in (0..panels).step_by(together) {
            let packed = &mut packed[..together.min(panels - first_panel)];
            for start in (0..k).step_by(DEPTH) {
                let depth = start..k.min(start + DEPTH);
                for (panel, packed) in (first_panel..).zip(packed.iter_mut()) {
                    let first = columns.start + panel * SIDE;
                    let lines = first..columns.end.min(first + SIDE);
                    // SAFETY: the caller's promise.
                    unsafe { pack_codes::<V>(&self.lines, lines, depth.clone(), buffer, packed) };
                }
                for (group, sums) in sums.chunks_mut(ROWS * width).enumerate() {
                    let count = sums.len() / width;
                    let groups = depth.start / GROUP * GROUP_WORDS * count;
                    // SAFETY: the caller's promise.
                    let words = unsafe { activations.row(group, k / GROUP * GROUP_WORDS * count) };
                    let words = &words[groups..][..depth.len() / GROUP * GROUP_WORDS * count];
                    for (panel, packed) in (first_panel..).zip(packed.iter()) {
                        // SAFETY: the words are groups of as many rows; the caller's promise.
                        unsafe {
                            multiply_group::<V>(
                                (count, words),
                                packed,
                                (self.form, has_offsets),
                                &mut sums[panel * SIDE..],
                                width,
                            );
                        }
                    }
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.finish(level, rows, columns, sums, width) };
    }

    /// Writes the sums of a tile of C, whose rows are `width` apart.
    ///
    /// # Safety
    /// Nothing else may use the tile.
    unsafe fn finish(
        &self,
        level: CpuLevel,
        rows: Range<usize>,
        columns: Range<usize>,
        sums: &mut [f32],
        width: usize,
    ) {
        let Problem { c, bias, .. } = *self.problem;
        let finish =
            Finish { partial: None, bias: bias.map(|bias| &bias[columns.start..]), write: Write::Overwrite };
        // SAFETY: the caller's promise.
        unsafe {
            let target = |row| c.row(rows.start + row, columns.start, columns.len());
            store_rows(level, (rows.len(), columns.len()), sums, width, &finish, &target);
        }
    }
}

/// Adds the products of a group of rows and packed lines to sums, whose rows are `width` apart.
///
/// # Safety
/// The CPU must have the instructions of `V`, and the words must be groups of as many rows in the form.
unsafe fn multiply_group<V: TiledLanes>(
    (rows, words): (usize, &[u32]),
    packed: &PackedLines,
    (form, has_offsets): (CodeForm, bool),
    sums: &mut [f32],
    width: usize,
) {
    // SAFETY: the caller's promises.
    unsafe {
        if form.by_rows && rows == TILE_ROWS {
            let groups = groups_of(words);
            return add_group::<V, V::Tiles, TILE_ROWS>(
                groups,
                packed,
                (form.runs, has_offsets),
                sums,
                width,
            );
        }
        with_rows!(rows, COUNT => {
            let groups = groups_of(words);
            add_group::<V, ByVectors, COUNT>(groups, packed, (form.runs, has_offsets), sums, width);
        });
    }
}

/// Adds the products of `COUNT` rows and packed lines, whose groups have `runs` runs.
///
/// # Safety
/// As [`multiply_group`].
#[inline(always)]
unsafe fn add_group<V: IntegerLanes, P: RunProducts<V, COUNT>, const COUNT: usize>(
    groups: &[RowGroup<COUNT>],
    packed: &PackedLines,
    (runs, has_offsets): (usize, bool),
    sums: &mut [f32],
    width: usize,
) {
    // SAFETY: the caller's promises.
    unsafe {
        match (runs, has_offsets) {
            (1, false) => add_products::<V, P, COUNT, 1, false>(groups, packed, sums, width),
            (1, true) => add_products::<V, P, COUNT, 1, true>(groups, packed, sums, width),
            (_, false) => add_products::<V, P, COUNT, 2, false>(groups, packed, sums, width),
            (_, true) => add_products::<V, P, COUNT, 2, true>(groups, packed, sums, width),
        }
    }
}

/// Returns groups of rows.
///
/// # Safety
/// The words must be groups of as many rows.
unsafe fn groups_of<const COUNT: usize>(words: &[u32]) -> &[RowGroup<COUNT>] {
    // SAFETY: groups are words; the caller's promise.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len() / (GROUP_WORDS * COUNT)) }
}

/// Adds the products of `COUNT` rows and packed lines whose groups have `RUNS_OF_GROUP` runs.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(never)]
unsafe fn add_products<
    V: IntegerLanes,
    P: RunProducts<V, COUNT>,
    const COUNT: usize,
    const RUNS_OF_GROUP: usize,
    const HAS_OFFSETS: bool,
>(
    groups: &[RowGroup<COUNT>],
    packed: &PackedLines,
    sums: &mut [f32],
    width: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        V::compiled(inlined!(|| {
            let mut totals: [V::Floats; COUNT] =
                std::array::from_fn(inlined!(|row: usize| V::floats(sixteen(&sums[row * width..]))));
            for (index, (group, units)) in groups.iter().zip(&packed.units).enumerate() {
                let run_units = GROUP_UNITS / RUNS_OF_GROUP;
                let runs = group.codes.chunks_exact(run_units).zip(units.chunks_exact(run_units));
                for (run, (codes, units)) in runs.enumerate() {
                    let mut products = [V::splat(0); COUNT];
                    for (product, start) in products.iter_mut().zip(&group.starts[run]) {
                        *product = V::splat(*start);
                    }
                    P::add(&mut products, group, run, codes, units);
                    let of_lines = index * RUNS_OF_GROUP + run;
                    let scales = V::floats(&packed.scales[of_lines]);
                    for ((total, product), scale) in totals.iter_mut().zip(products).zip(&group.scales) {
                        *total = V::add_products(*total, product, V::scale(scales, *scale));
                    }
                    if HAS_OFFSETS {
                        let offsets = V::floats(&packed.offsets[of_lines]);
                        for (total, term) in totals.iter_mut().zip(&group.terms[run]) {
                            *total = V::add_scaled(*total, offsets, *term);
                        }
                    }
                }
            }
            for (row, total) in totals.iter().enumerate() {
                let target = sums[row * width..].first_chunk_mut().expect("16 sums");
                V::store(*total, target);
            }
        }));
    }
}

/// Returns the first 16 numbers.
#[inline(always)]
fn sixteen(numbers: &[f32]) -> &[f32; SIDE] {
    numbers.first_chunk().expect("16 numbers")
}

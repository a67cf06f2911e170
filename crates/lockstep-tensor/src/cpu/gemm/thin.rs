//! Products with few rows, `Y = X · Wᵀ`, whose elements have the bits of the packed product of many rows: each is summed
//! along the depth in the same order, by the same instructions.
//!
//! Reading W is the bottleneck, so its lines are read once, from end to end. A few units of depth of a panel of lines are
//! packed into the L1 cache and multiplied at once; the sums of all rows stay in registers.

use std::{ops::Range, ptr};

use super::{
    block_lines::CHUNK,
    kernel::MicroKernel,
    lanes::Lanes,
    operand::{Operand, Order},
    pack::Packing,
    problem::Problem,
    scratch::ROWS_UNITS,
    store::Tile,
    transpose::{SIDE, Square},
    units::PanelShape,
};
use crate::{
    Summation,
    cpu::simd::{Float, inlined, prefetch},
};

/// Largest number of rows, whose sums fit the registers.
const MAX_ROWS: usize = 8;
/// Units of depth of a panel that are packed at a time.
const STEP: usize = 4 * SIDE;
/// Bytes of a line to fetch ahead of packing.
const AHEAD_BYTES: usize = 2048;
/// Approximate number of elements of W that a task reads.
const TASK_ELEMENTS: usize = 1 << 17;
/// Number of tasks to divide a small product into.
const TASKS: usize = 16;

/// A panel of lines of W: as many as one side of a transposed square.
pub(super) struct Lines;

impl PanelShape for Lines {
    const WIDTH: usize = SIDE;
    const ORDER: Order = Order::AcrossDepth;
    const DEPTH: usize = 1;
    const AHEAD_BYTES: Option<usize> = Some(AHEAD_BYTES);
}

/// Returns true if a product has few rows that must have the bits of many, and `K` sums along the depth unit by unit.
pub(super) fn fits<K: MicroKernel, U: Packing, C>(
    problem: &Problem<'_, U::Source, C>,
    summation: Summation,
) -> bool {
    let Problem { m, k, a, b, .. } = problem;
    let has_blocks = b.block_lines().is_some();
    let are_lines = a.is_stored_along_depth() && (b.is_stored_along_depth() || has_blocks);
    let has_room = *m <= MAX_ROWS && m * k.div_ceil(U::ELEMENTS) <= ROWS_UNITS;
    (summation == Summation::ByDepth || has_blocks)
        && are_lines
        && has_room
        && K::IS_IN_PLACE
        && U::MARK_UNITS == 0
}

/// Returns the number of columns of a task, whole panels.
fn task_columns<T, C>(problem: &Problem<'_, T, C>) -> usize {
    let most = problem.n.div_ceil(TASKS * SIDE);
    (TASK_ELEMENTS / problem.k.max(1) / SIDE).clamp(1, most.max(1)) * SIDE
}

/// Returns the number of tasks of `problem`.
pub(super) fn tasks<T, C>(problem: &Problem<'_, T, C>) -> usize {
    problem.n.div_ceil(task_columns(problem))
}

/// Returns the panels of task `index`, each a range of columns.
pub(super) fn panels<T, C>(problem: &Problem<'_, T, C>, index: usize) -> impl Iterator<Item = Range<usize>> {
    let len = task_columns(problem);
    let end = ((index + 1) * len).min(problem.n);
    (index * len..end).step_by(SIDE).map(move |start| start..end.min(start + SIDE))
}

/// Scratch memory of a task.
pub(super) struct ThinScratch<'a> {
    /// f32 sums of a panel over earlier blocks of depth, `[rows, SIDE]`.
    pub(super) partial: &'a mut [f32],
    packed: &'a mut [u32],
    rows: &'a mut [u32],
}

impl<'a> ThinScratch<'a> {
    /// Divides the scratch memory of a thread.
    pub(super) fn new(units: &'a mut [u32]) -> Self {
        let (rows, units) = units.split_at_mut(ROWS_UNITS);
        let (partial, units) = units.split_at_mut(MAX_ROWS * SIDE);
        Self {
            partial: bytemuck::cast_slice_mut(partial),
            packed: &mut units[..STEP.max(CHUNK) * SIDE],
            rows,
        }
    }
}

/// The rows of X as lines of units.
pub(super) struct ThinRows {
    lines: [*const u32; MAX_ROWS],
    count: usize,
}

impl ThinRows {
    /// Reads the rows in place if their elements are units as they are stored; otherwise converts them into the scratch
    /// memory.
    pub(super) fn new<U: Packing>(
        a: &Operand<'_, U::Source>,
        count: usize,
        scratch: &mut ThinScratch<'_>,
    ) -> Self {
        let mut lines = [ptr::null(); MAX_ROWS];
        let mut room = &mut *scratch.rows;
        for (row, line) in lines.iter_mut().enumerate().take(count) {
            let elements = a.line(row);
            let are_units = U::IS_STORED_ALONG && elements.len().is_multiple_of(U::ELEMENTS);
            *line = if are_units {
                elements.as_ptr().cast()
            } else {
                let (units, rest) = room.split_at_mut(elements.len().div_ceil(U::ELEMENTS));
                U::convert(elements, units);
                room = rest;
                units.as_ptr()
            };
        }
        Self { lines, count }
    }
}

/// A panel of lines of W at a block of depth.
pub(super) struct Panel<'p, 'a, T> {
    /// The matrix of the lines.
    pub(super) b: &'p Operand<'a, T>,
    /// The lines.
    pub(super) columns: Range<usize>,
    /// The block of depth, in elements.
    pub(super) depth: Range<usize>,
}

impl<T: Float> Panel<'_, '_, T> {
    /// Writes the products of the rows and the panel to the tile, whose rows are `SIDE` wide.
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`.
    pub(super) unsafe fn multiply<V: Lanes, U: Packing<Source = T>>(
        &self,
        rows: &ThinRows,
        scratch: &mut ThinScratch<'_>,
        tile: &mut Tile,
    ) {
        let packed = &mut *scratch.packed;
        // SAFETY: the caller's promise.
        unsafe {
            V::compiled(inlined!(|| match V::COUNT {
                4 => self.products_of_rows::<V, U, 4>(rows, packed, tile),
                8 => self.products_of_rows::<V, U, 2>(rows, packed, tile),
                _ => self.products_of_rows::<V, U, 1>(rows, packed, tile),
            }));
        }
    }

    /// As [`Panel::multiply`], by `VECTORS` vectors.
    #[inline(always)]
    unsafe fn products_of_rows<V: Lanes, U: Packing<Source = T>, const VECTORS: usize>(
        &self,
        rows: &ThinRows,
        packed: &mut [u32],
        tile: &mut Tile,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match rows.count {
                0 => {}
                1 => self.products::<V, U, 1, VECTORS>(rows, packed, tile),
                2 => self.products::<V, U, 2, VECTORS>(rows, packed, tile),
                3 => self.products::<V, U, 3, VECTORS>(rows, packed, tile),
                4 => self.products::<V, U, 4, VECTORS>(rows, packed, tile),
                5 => self.products::<V, U, 5, VECTORS>(rows, packed, tile),
                6 => self.products::<V, U, 6, VECTORS>(rows, packed, tile),
                7 => self.products::<V, U, 7, VECTORS>(rows, packed, tile),
                _ => self.products::<V, U, MAX_ROWS, VECTORS>(rows, packed, tile),
            }
        }
    }

    #[inline(always)]
    unsafe fn products<V: Lanes, U: Packing<Source = T>, const ROWS: usize, const VECTORS: usize>(
        &self,
        rows: &ThinRows,
        packed: &mut [u32],
        tile: &mut Tile,
    ) {
        let Self { b, columns, depth } = self;
        // SAFETY: the packed lines hold the units of a step, and the tile all sums; the caller's promises.
        unsafe {
            let mut sums = [[V::zero(); VECTORS]; ROWS];
            let mut start = depth.start;
            for (square, ahead_bytes) in self.squares::<U>() {
                for line in 0..SIDE {
                    prefetch(square.first.wrapping_add(line * square.stride).wrapping_byte_add(ahead_bytes));
                }
                V::transpose_into(square, Square { first: packed.as_mut_ptr(), stride: SIDE });
                add_products(&mut sums, rows, start / U::ELEMENTS, packed, SIDE);
                start += SIDE * U::ELEMENTS;
            }
            if let Some(lines) = b.block_lines() {
                // Quantized lines are decoded in whole chunks, of which a block of depth may need a part.
                while start < depth.end {
                    let chunk = start / CHUNK * CHUNK;
                    let (chunk_end, end) = (lines.chunk_end(chunk), depth.end.min(chunk + CHUNK));
                    let units = (chunk_end - chunk) / U::ELEMENTS;
                    U::pack::<V, Lines>(
                        b,
                        columns.clone(),
                        chunk..chunk_end,
                        units,
                        &mut packed[..units * SIDE],
                    );
                    let packed = &packed[(start - chunk) / U::ELEMENTS * SIDE..];
                    add_products(&mut sums, rows, start / U::ELEMENTS, packed, (end - start) / U::ELEMENTS);
                    start = end;
                }
            }
            for start in (start..depth.end).step_by(STEP * U::ELEMENTS) {
                let step = start..depth.end.min(start + STEP * U::ELEMENTS);
                let units = step.len().div_ceil(U::ELEMENTS);
                U::pack::<V, Lines>(b, columns.clone(), step, units, &mut packed[..units * SIDE]);
                add_products(&mut sums, rows, start / U::ELEMENTS, packed, units);
            }
            for (i, row) in sums.iter().enumerate() {
                for (j, sum) in row.iter().enumerate() {
                    sum.store(tile.as_mut_ptr().add(i * SIDE + j * V::COUNT));
                }
            }
        }
    }

    /// Returns the squares of units at the begin of the panel that can be transposed as they are stored, each with the distance
    /// in bytes to the place to fetch: along the line, and from its end on in the next panel.
    #[inline(always)]
    fn squares<U: Packing<Source = T>>(&self) -> impl Iterator<Item = (Square<*const u32>, usize)> {
        let Self { b, columns, depth } = self;
        let line = if b.block_lines().is_some() { &[] } else { b.line(columns.start) };
        let are_units = U::IS_STORED_ALONG && line.len().is_multiple_of(U::ELEMENTS) && columns.len() == SIDE;
        let count = if are_units && !line.is_empty() { depth.len() / U::ELEMENTS / SIDE } else { 0 };
        let first = line.as_ptr().wrapping_add(depth.start).cast::<u32>();
        let stride = line.len() / U::ELEMENTS;
        let (line_bytes, first_byte) = (size_of_val(line), depth.start * size_of::<T>());
        (0..count).map(move |index| {
            let is_of_next = first_byte + index * SIDE * size_of::<u32>() + AHEAD_BYTES >= line_bytes;
            let ahead_bytes = AHEAD_BYTES + if is_of_next { (SIDE - 1) * line_bytes } else { 0 };
            (Square { first: first.wrapping_add(index * SIDE), stride }, ahead_bytes)
        })
    }
}

/// Adds to the sums the products of `units` packed units of depth of the lines and those of the rows from `first` on.
///
/// # Safety
/// The CPU must have the instructions of `V`; the rows and the packed lines must hold the units.
#[inline(always)]
unsafe fn add_products<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    sums: &mut [[V; VECTORS]; ROWS],
    rows: &ThinRows,
    first: usize,
    packed: &[u32],
    units: usize,
) {
    for unit in 0..units {
        // SAFETY: the caller's promise.
        unsafe {
            let mut columns = [V::zero(); VECTORS];
            for (j, column) in columns.iter_mut().enumerate() {
                *column = V::load(packed.as_ptr().add(unit * SIDE + j * V::COUNT));
            }
            for (row, line) in sums.iter_mut().zip(rows.lines) {
                let x = V::splat(line.add(first + unit).read_unaligned());
                for (sum, y) in row.iter_mut().zip(columns) {
                    *sum = V::multiply_add(x, y, *sum);
                }
            }
        }
    }
}

//! Products with few rows, `Y = X · Wᵀ`, whose elements have the bits of the packed product of many rows: each is summed
//! along the depth in the same order, by the same instructions.
//!
//! Reading W is the bottleneck, so its lines are read once, from end to end. A few units of depth of a panel of lines are
//! packed into the L1 cache and multiplied at once. The sums of up to eight rows stay in registers; those of more rows return to
//! the L1 cache after each step.

use std::{ops::Range, ptr};

#[cfg(target_arch = "x86_64")]
use super::kernel::{Avx2, Avx512, Avx512Dot, Avx512Wide};
use super::{
    block_lines::CHUNK,
    kernel::{MicroKernel, Portable},
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
    cpu::simd::{Float, inlined},
};

/// Largest number of rows.
pub(super) const MAX_ROWS: usize = 32;
/// Largest number of rows whose sums fit the registers.
const GROUP: usize = 8;
/// Panels that are multiplied by such a group at once.
const PANELS: usize = 2;
/// Units of the packed lines of a panel.
const PACKED_UNITS: usize = if STEP > CHUNK { STEP * SIDE } else { CHUNK * SIDE };
/// Units of depth of a panel that are packed at a time, but for squares of few rows.
const STEP: usize = 4 * SIDE;
/// Bytes of a line to fetch ahead of packing.
const AHEAD_BYTES: usize = 2048;
/// Approximate number of elements of W that a task reads.
const TASK_ELEMENTS: usize = 1 << 17;
/// Number of tasks to divide a small product into.
const TASKS: usize = 16;

/// A micro-kernel with a way to multiply few rows that gives the bits of its products of panels.
pub(in crate::cpu) trait ThinKernel: MicroKernel {
    /// Largest number of rows; 0 if there is no such way.
    const MOST_ROWS: usize = 0;
    /// True if [`ThinRows`] interleaves the units of the rows, for [`ThinKernel::panel`].
    const INTERLEAVES_ROWS: bool = false;

    /// Runs `work` with the thread in the state that [`ThinKernel::panel`] needs for a number of rows.
    ///
    /// # Safety
    /// The CPU must have the kernel's instructions.
    unsafe fn prepared_for_rows<R>(_: usize, work: impl FnOnce() -> R) -> R {
        work()
    }

    /// Writes the products of the rows and a panel of lines to the tile, whose rows are [`width`] wide.
    ///
    /// # Safety
    /// The CPU must have the kernel's instructions, and the thread must be prepared for the number of rows.
    unsafe fn panel<U: Packing>(
        panel: &Panel<'_, '_, U::Source>,
        rows: &ThinRows,
        scratch: &mut ThinScratch<'_>,
        tile: &mut Tile,
    ) {
        // SAFETY: the caller's promise.
        unsafe { panel.multiply::<Self::Vector, U>(rows, scratch, tile) }
    }
}

impl ThinKernel for Portable {
    const MOST_ROWS: usize = MAX_ROWS;
}

#[cfg(target_arch = "x86_64")]
impl ThinKernel for Avx2 {
    const MOST_ROWS: usize = MAX_ROWS;
}

#[cfg(target_arch = "x86_64")]
impl ThinKernel for Avx512 {
    const MOST_ROWS: usize = MAX_ROWS;
}

#[cfg(target_arch = "x86_64")]
impl ThinKernel for Avx512Wide {
    const MOST_ROWS: usize = MAX_ROWS;
}

#[cfg(target_arch = "x86_64")]
impl ThinKernel for Avx512Dot {
    const MOST_ROWS: usize = MAX_ROWS;
}

/// A panel of lines of W: as many as one side of a transposed square.
pub(super) struct Lines;

impl PanelShape for Lines {
    const WIDTH: usize = SIDE;
    const ORDER: Order = Order::AcrossDepth;
    const DEPTH: usize = 1;
    const AHEAD_BYTES: Option<usize> = Some(AHEAD_BYTES);
}

/// Returns true if a product has few rows that must have the bits of many, and `K` sums along the depth unit by unit.
pub(super) fn fits<K: ThinKernel, U: Packing, C>(
    problem: &Problem<'_, U::Source, C>,
    summation: Summation,
) -> bool {
    let Problem { m, k, a, b, .. } = problem;
    let has_blocks = b.block_lines().is_some();
    let are_lines = a.is_stored_along_depth() && (b.is_stored_along_depth() || has_blocks);
    let units = m * k.div_ceil(U::ELEMENTS);
    let converted = if are_units::<U>(*k) { 0 } else { units };
    let interleaved = if K::INTERLEAVES_ROWS { units } else { 0 };
    let has_room = *m <= K::MOST_ROWS && converted + interleaved <= ROWS_UNITS;
    let reads_lines = !(has_blocks && K::INTERLEAVES_ROWS);
    (summation == Summation::ByDepth || has_blocks)
        && are_lines
        && has_room
        && reads_lines
        && U::MARK_UNITS == 0
}

/// Returns true if a line of `elements` is a line of units as it is stored.
fn are_units<U: Packing>(elements: usize) -> bool {
    U::IS_STORED_ALONG && elements.is_multiple_of(U::ELEMENTS)
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

/// Returns the columns that are multiplied at once, and the elements from one row of a tile to the next: two panels for more rows
/// than the registers hold, so that a broadcast element serves both, if the vectors are as wide as a panel.
pub(super) fn width<V: Lanes>(rows: usize) -> usize {
    if rows > GROUP && V::COUNT == SIDE { PANELS * SIDE } else { SIDE }
}

/// Returns ranges of up to `width` columns of task `index`.
pub(super) fn panels<T, C>(
    problem: &Problem<'_, T, C>,
    index: usize,
    width: usize,
) -> impl Iterator<Item = Range<usize>> {
    let len = task_columns(problem);
    let end = ((index + 1) * len).min(problem.n);
    (index * len..end).step_by(width).map(move |start| start..end.min(start + width))
}

/// Scratch memory of a task.
pub(in crate::cpu) struct ThinScratch<'a> {
    /// f32 sums of the columns at hand over earlier blocks of depth, `[rows, width]`.
    pub(super) partial: &'a mut [f32],
    packed: &'a mut [u32],
    rows: &'a mut [u32],
}

impl<'a> ThinScratch<'a> {
    /// Divides the scratch memory of a thread.
    pub(super) fn new(units: &'a mut [u32]) -> Self {
        let (rows, units) = units.split_at_mut(ROWS_UNITS);
        let (partial, units) = units.split_at_mut(MAX_ROWS * PANELS * SIDE);
        Self { partial: bytemuck::cast_slice_mut(partial), packed: &mut units[..PANELS * PACKED_UNITS], rows }
    }
}

/// The rows of X as lines of units. A last group that is not full repeats its last line.
pub(in crate::cpu) struct ThinRows {
    lines: [*const u32; MAX_ROWS],
    count: usize,
    /// Units of all rows side by side, `[units, count]`, if the micro-kernel reads them so.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only x86's tiles read them so"))]
    interleaved: *const u32,
}

impl ThinRows {
    /// Reads the rows in place if their elements are units as they are stored; otherwise converts them into the scratch
    /// memory.
    pub(super) fn new<K: ThinKernel, U: Packing>(
        a: &Operand<'_, U::Source>,
        count: usize,
        scratch: &mut ThinScratch<'_>,
    ) -> Self {
        let mut lines = [ptr::null(); MAX_ROWS];
        let mut room = &mut *scratch.rows;
        for (row, line) in lines.iter_mut().enumerate().take(count) {
            let elements = a.line(row);
            *line = if are_units::<U>(elements.len()) {
                elements.as_ptr().cast()
            } else {
                let (units, rest) = room.split_at_mut(elements.len().div_ceil(U::ELEMENTS));
                U::convert(elements, units);
                room = rest;
                units.as_ptr()
            };
        }
        if let Some(last) = count.checked_sub(1) {
            let last_line = lines[last];
            lines[count..].fill(last_line);
        }
        // The units of one row are side by side as they are.
        let mut interleaved = lines[0];
        if K::INTERLEAVES_ROWS && count > 1 {
            let units = a.line(0).len().div_ceil(U::ELEMENTS);
            let room = &mut room[..units * count];
            for (unit, target) in room.chunks_exact_mut(count).enumerate() {
                for (target, line) in target.iter_mut().zip(lines) {
                    // SAFETY: each line holds `units`.
                    *target = unsafe { line.add(unit).read_unaligned() };
                }
            }
            interleaved = room.as_ptr();
        }
        Self { lines, count, interleaved }
    }

    /// Number of rows.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns the units of all rows from one unit of depth on, `[units, count]`.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn interleaved(&self, unit: usize) -> *const u32 {
        self.interleaved.wrapping_add(unit * self.count)
    }
}

/// A panel of lines of W, or two, at a block of depth.
pub(in crate::cpu) struct Panel<'p, 'a, T> {
    /// The matrix of the lines.
    pub(super) b: &'p Operand<'a, T>,
    /// The lines.
    pub(super) columns: Range<usize>,
    /// The block of depth, in elements.
    pub(super) depth: Range<usize>,
}

impl<T: Float> Panel<'_, '_, T> {
    /// Writes the products of the rows and the panel to the tile, whose rows are [`width`] wide.
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
                GROUP => self.products::<V, U, GROUP, VECTORS>(rows, packed, tile),
                _ => self.products_of_groups::<V, U, VECTORS>(rows, packed, tile),
            }
        }
    }

    /// The products of rows whose sums stay in registers.
    #[inline(always)]
    unsafe fn products<V: Lanes, U: Packing<Source = T>, const ROWS: usize, const VECTORS: usize>(
        &self,
        rows: &ThinRows,
        packed: &mut [u32],
        tile: &mut Tile,
    ) {
        // SAFETY: the packed lines hold the units of a step, and the tile all sums; the caller's promises.
        unsafe {
            let mut sums = [[[V::zero(); VECTORS]; 1]; ROWS];
            let mut start = self.depth.start;
            // Square by square: the sums wait for each other, and the next square is packed meanwhile.
            for (square, ahead_bytes) in self.squares::<U>() {
                square.fetch(ahead_bytes);
                V::transpose_into(square, Square { first: packed.as_mut_ptr(), stride: SIDE });
                add_products(&mut sums, &rows.lines, (start / U::ELEMENTS, SIDE), [packed.as_ptr()]);
                start += SIDE * U::ELEMENTS;
            }
            for step in self.steps::<U>(start) {
                let at = (step.start / U::ELEMENTS, step.len().div_ceil(U::ELEMENTS));
                let panel = [self.pack_step::<V, U>(self.columns.clone(), step, packed)];
                add_products(&mut sums, &rows.lines, at, panel);
            }
            store_sums(&sums, (tile.as_mut_ptr(), SIDE));
        }
    }

    /// The products of more rows: each step multiplies one group of them after the other.
    #[inline(always)]
    unsafe fn products_of_groups<V: Lanes, U: Packing<Source = T>, const VECTORS: usize>(
        &self,
        rows: &ThinRows,
        packed: &mut [u32],
        tile: &mut Tile,
    ) {
        let middle = self.columns.end.min(self.columns.start + SIDE);
        let [left, right] = [self.columns.start..middle, middle..self.columns.end];
        let (packed_left, packed_right) = packed.split_at_mut(PACKED_UNITS);
        let width = width::<V>(rows.count);
        // SAFETY: the packed lines hold the units of a step, and the tile all sums; the caller's promises.
        unsafe {
            for (index, step) in self.steps::<U>(self.depth.start).enumerate() {
                let at = (step.start / U::ELEMENTS, step.len().div_ceil(U::ELEMENTS));
                let first = self.pack_step::<V, U>(left.clone(), step.clone(), packed_left);
                let second = (!right.is_empty())
                    .then(|| self.pack_step::<V, U>(right.clone(), step.clone(), packed_right));
                for group in (0..rows.count).step_by(GROUP) {
                    let (lines, sums) = (&rows.lines[group..], (tile.as_mut_ptr().add(group * width), width));
                    match second {
                        None => add_to_tile::<V, VECTORS, 1>(sums, index == 0, lines, at, [first]),
                        Some(second) => {
                            add_to_tile::<V, VECTORS, PANELS>(sums, index == 0, lines, at, [first, second]);
                        }
                    }
                }
            }
        }
    }

    /// Returns the steps of the depth from element `start` on; one that is empty if nothing is left. Quantized lines are decoded in
    /// whole chunks.
    #[inline(always)]
    fn steps<U: Packing<Source = T>>(&self, start: usize) -> impl Iterator<Item = Range<usize>> {
        let step = if self.b.block_lines().is_some() { CHUNK } else { STEP * U::ELEMENTS };
        let (end, first) = (self.depth.end, start / step);
        (first..end.div_ceil(step).max(first + 1))
            .map(move |index| start.max(index * step)..end.min((index + 1) * step))
    }

    /// Packs a step of the depth of a panel. Returns its first packed unit.
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`.
    #[inline(always)]
    unsafe fn pack_step<V: Lanes, U: Packing<Source = T>>(
        &self,
        columns: Range<usize>,
        step: Range<usize>,
        packed: &mut [u32],
    ) -> *const u32 {
        let b = self.b;
        if step.is_empty() {
            return packed.as_ptr();
        }
        // SAFETY: the packed lines hold the units of a step; the caller's promise.
        unsafe {
            if let Some(lines) = b.block_lines() {
                // Quantized lines are decoded in whole chunks.
                let chunk = step.start / CHUNK * CHUNK..lines.chunk_end(step.start / CHUNK * CHUNK);
                let units = chunk.len() / U::ELEMENTS;
                U::pack::<V, Lines>(b, columns, chunk.clone(), units, &mut packed[..units * SIDE]);
                return packed[(step.start - chunk.start) / U::ELEMENTS * SIDE..].as_ptr();
            }
            let mut packed_units = 0;
            let panel = Panel { b, columns: columns.clone(), depth: step.clone() };
            for (square, ahead_bytes) in panel.squares::<U>() {
                square.fetch(ahead_bytes);
                let target = packed[packed_units * SIDE..].as_mut_ptr();
                V::transpose_into(square, Square { first: target, stride: SIDE });
                packed_units += SIDE;
            }
            let rest = step.start + packed_units * U::ELEMENTS..step.end;
            if !rest.is_empty() {
                let units = rest.len().div_ceil(U::ELEMENTS);
                U::pack::<V, Lines>(
                    b,
                    columns,
                    rest,
                    units,
                    &mut packed[packed_units * SIDE..][..units * SIDE],
                );
            }
            packed.as_ptr()
        }
    }

    /// Returns up to 16 stored lines from the panel's column `column` on.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn lines<U: Packing<Source = T>>(&self, column: usize) -> PanelLines {
        let first = self.columns.start + column;
        let line = self.b.line(first);
        let part = &line[self.depth.clone()];
        PanelLines {
            first: part.as_ptr().cast(),
            stride: size_of_val(line),
            bytes: size_of_val(part),
            units: part.len().div_ceil(U::ELEMENTS),
            count: SIDE.min(self.columns.end - first),
            first_unit: self.depth.start / U::ELEMENTS,
            first_byte: self.depth.start * size_of::<T>(),
        }
    }

    /// Returns the squares of units at the begin of the panel that can be transposed as they are stored, each with the distance
    /// in bytes to the place to fetch: along the line, and from its end on in the next panel.
    #[inline(always)]
    fn squares<U: Packing<Source = T>>(&self) -> impl Iterator<Item = (Square<*const u32>, usize)> {
        let Self { b, columns, depth } = self;
        let line = if b.block_lines().is_some() { &[] } else { b.line(columns.start) };
        let are_units = are_units::<U>(line.len()) && columns.len() == SIDE;
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

/// Stored lines at a block of depth.
#[cfg(target_arch = "x86_64")]
pub(super) struct PanelLines {
    /// The first line, which may lie at any address.
    pub(super) first: *const u32,
    /// Bytes from one line to the next.
    pub(super) stride: usize,
    /// Bytes of each line at the block of depth.
    pub(super) bytes: usize,
    /// Units of depth; the last one may be a part.
    pub(super) units: usize,
    /// Number of lines, up to 16.
    pub(super) count: usize,
    /// First unit of the block of depth.
    pub(super) first_unit: usize,
    /// First byte of the block of depth in a whole line.
    first_byte: usize,
}

#[cfg(target_arch = "x86_64")]
impl PanelLines {
    /// Returns the distance in bytes from a place in the lines to the one to fetch: along the line, and from its end on in the lines
    /// of the next panel.
    #[inline(always)]
    pub(super) fn ahead_bytes(&self, byte: usize) -> usize {
        let is_of_next = self.first_byte + byte + AHEAD_BYTES >= self.stride;
        AHEAD_BYTES + if is_of_next { (SIDE - 1) * self.stride } else { 0 }
    }
}

/// Writes the sums of rows to a tile, whose rows are `width` apart.
///
/// # Safety
/// The CPU must have the instructions of `V`, and the tile must have the rows.
#[inline(always)]
unsafe fn store_sums<V: Lanes, const ROWS: usize, const VECTORS: usize, const PANELS: usize>(
    sums: &[[[V; VECTORS]; PANELS]; ROWS],
    (tile, width): (*mut f32, usize),
) {
    for (row, sums) in sums.iter().enumerate() {
        for (panel, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { sum.store(tile.add(row * width + panel * SIDE + j * V::COUNT)) };
            }
        }
    }
}

/// Adds products to the sums of a group of rows in a tile, whose rows are `width` apart; the first step overwrites them.
///
/// # Safety
/// As [`add_products`] and [`store_sums`].
#[inline(always)]
unsafe fn add_to_tile<V: Lanes, const VECTORS: usize, const PANELS: usize>(
    (tile, width): (*mut f32, usize),
    is_first: bool,
    lines: &[*const u32],
    depth: (usize, usize),
    packed: [*const u32; PANELS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[[V::zero(); VECTORS]; PANELS]; GROUP];
        if !is_first {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (panel, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum =
                            V::load(tile.add(row * width + panel * SIDE + j * V::COUNT).cast_const().cast());
                    }
                }
            }
        }
        add_products(&mut sums, lines, depth, packed);
        store_sums(&sums, (tile, width));
    }
}

/// Adds to the sums the products of packed panels and of the lines of rows, which hold the same units of depth from `first` on.
///
/// # Safety
/// The CPU must have the instructions of `V`; the lines and the panels must hold the units.
#[inline(always)]
unsafe fn add_products<V: Lanes, const ROWS: usize, const VECTORS: usize, const PANELS: usize>(
    sums: &mut [[[V; VECTORS]; PANELS]; ROWS],
    lines: &[*const u32],
    (first, units): (usize, usize),
    packed: [*const u32; PANELS],
) {
    let lines = &lines[..ROWS];
    for unit in 0..units {
        // SAFETY: the caller's promise.
        unsafe {
            let mut columns = [[V::zero(); VECTORS]; PANELS];
            for (columns, packed) in columns.iter_mut().zip(packed) {
                for (j, column) in columns.iter_mut().enumerate() {
                    *column = V::load(packed.add(unit * SIDE + j * V::COUNT));
                }
            }
            for (sums, line) in sums.iter_mut().zip(lines) {
                let x = V::splat(line.add(first + unit).read_unaligned());
                for (sums, columns) in sums.iter_mut().zip(columns) {
                    for (sum, y) in sums.iter_mut().zip(columns) {
                        *sum = V::multiply_add(x, y, *sum);
                    }
                }
            }
        }
    }
}

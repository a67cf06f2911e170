//! Packing: a block of an operand becomes panels of 32-bit units, in the order in which a micro-kernel reads them.
//! The rest of the GEMM does not depend on layouts and types.
//!
//! Blocks of 16 × 16 units are read in memory order, transposed if the panel has the other order, and written.
//! Padding beyond the operand is zero.

use std::ops::Range;

use bytemuck::Zeroable;
use lockstep_plan::DType;

use super::{
    block_lines::{BlockLines, CHUNK, CHUNK_BYTES, decode_line},
    image,
    lanes::{Lanes, PAIR_LINES},
    operand::{Form, Operand, Order},
    store::Tile,
    transpose::{Block, SIDE, Square},
    units::{PanelShape, Unit, across_unlikely, along_unlikely, blocks},
};
use crate::{
    Element,
    cpu::simd::{CACHE_LINE_BYTES, Float, inlined, prefetch, prefetch_to_l1},
};

/// Prefetch distance, in units of depth, of lines across the depth.
const UNITS_AHEAD: usize = 16;

/// A stored matrix whose lines are `stride` elements apart.
#[derive(Clone, Copy)]
struct Matrix<'a, T> {
    elements: &'a [T],
    stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Returns the elements of one unit of depth, for a matrix that is contiguous across the depth: one line for each
    /// element of a unit. A line at or beyond `end` is empty.
    #[inline(always)]
    fn lines<U: Unit<Source = T>>(&self, outer: Range<usize>, index: usize, end: usize) -> [&'a [T]; 2] {
        let line = |index: usize| &self.elements[index * self.stride..][outer.clone()];
        let second = if U::ELEMENTS == 2 && index + 1 < end { line(index + 1) } else { &[] };
        [if index < end { line(index) } else { &[] }, second]
    }
}

/// The packed format of an operand, for a micro-kernel.
pub(in crate::cpu) trait Packing {
    /// Type of the operand's elements.
    type Source: Float;
    /// Elements of one unit of depth, 1 or 2.
    const ELEMENTS: usize;
    /// Number of planes of a panel, which are packed one after the other.
    const PLANES: usize;
    /// Units of the mark that follows the planes of a panel.
    const MARK_UNITS: usize;
    /// True if an element is a unit as it is stored.
    const IS_STORED: bool = false;
    /// True if neighbours along the depth are units as they are stored.
    const IS_STORED_ALONG: bool = false;
    /// True if an element becomes a unit when it is widened to f32.
    const IS_WIDENED: bool = false;

    /// Packs as [`pack`] does, all planes of a panel before those of the next.
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`.
    unsafe fn pack<V: Lanes, P: PanelShape>(
        operand: &Operand<'_, Self::Source>,
        outer: Range<usize>,
        depth: Range<usize>,
        units: usize,
        panels: &mut [u32],
    );

    /// Converts a line of elements along the depth to units, and fills the rest of `units` with zeros. Only of packings
    /// without marks.
    fn convert(elements: &[Self::Source], units: &mut [u32]);

    /// Returns true if a panel, by its mark, holds values that the micro-kernel cannot multiply.
    fn is_exceptional(panel: &[u32]) -> bool;

    /// Computes the tile `rows × columns` at `depth` if the panel of B is exceptional; the micro-kernel skips it.
    fn exceptional_tile(factors: &Factors<'_, Self::Source>, tile: &mut Tile, tile_columns: usize);

    /// Recomputes the rows of the tile that the micro-kernel got wrong, if the panel of A is exceptional. The other
    /// rows keep their bits, whatever rows are in the same panel.
    fn exceptional_rows(factors: &Factors<'_, Self::Source>, tile: &mut Tile, tile_columns: usize);

    /// Units of a packed panel with its mark.
    fn panel_units<P: PanelShape>(units: usize) -> usize {
        Self::PLANES * P::WIDTH * units + Self::MARK_UNITS
    }
}

/// The operands of a tile of C: a range of rows, columns and depth.
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "exceptional panels come with x86's tiles")
)]
pub(in crate::cpu) struct Factors<'a, T> {
    pub(in crate::cpu) a: &'a Operand<'a, T>,
    pub(in crate::cpu) b: &'a Operand<'a, T>,
    pub(in crate::cpu) rows: Range<usize>,
    pub(in crate::cpu) columns: Range<usize>,
    pub(in crate::cpu) depth: Range<usize>,
}

impl<U: Unit> Packing for U {
    type Source = U::Source;
    const ELEMENTS: usize = U::ELEMENTS;
    const PLANES: usize = 1;
    const MARK_UNITS: usize = 0;
    const IS_STORED: bool = U::IS_STORED;
    const IS_STORED_ALONG: bool = U::IS_STORED_ALONG;
    const IS_WIDENED: bool = U::IS_WIDENED;

    unsafe fn pack<V: Lanes, P: PanelShape>(
        operand: &Operand<'_, U::Source>,
        outer: Range<usize>,
        depth: Range<usize>,
        units: usize,
        panels: &mut [u32],
    ) {
        // SAFETY: the caller's promise.
        unsafe { pack::<V, U, P>(operand, outer, depth, units, panels) }
    }

    fn convert(elements: &[U::Source], units: &mut [u32]) {
        let mut parts = elements.chunks(SIDE * U::ELEMENTS);
        for units in units.chunks_mut(SIDE) {
            let mut block = [0; SIDE];
            U::along(parts.next().unwrap_or_default(), &mut block);
            units.copy_from_slice(&block[..units.len()]);
        }
    }

    fn is_exceptional(_: &[u32]) -> bool {
        false
    }

    fn exceptional_tile(_: &Factors<'_, U::Source>, _: &mut Tile, _: usize) {
        unreachable!("no panel is exceptional")
    }

    fn exceptional_rows(_: &Factors<'_, U::Source>, _: &mut Tile, _: usize) {
        unreachable!("no panel is exceptional")
    }
}

/// Packs `outer` rows of A (or columns of B) at `depth` elements, both inside the operand, into `panels`: panel after
/// panel, each `WIDTH · units` units.
///
/// # Safety
/// The CPU must have the instructions of `V`.
pub(in crate::cpu) unsafe fn pack<V: Lanes, U: Unit, P: PanelShape>(
    operand: &Operand<'_, U::Source>,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    if units == 0 {
        return;
    }
    let elements = operand.elements;
    // SAFETY: the caller's promise.
    unsafe {
        V::compiled(inlined!(|| match operand.form {
            Form::Matrix { stride, order } => {
                pack_matrix::<V, U, P>(Matrix { elements, stride }, order, outer, depth, units, panels);
            }
            Form::Patches(patches, Order::AlongDepth) => {
                image::pack_along::<V, U, P>(elements, patches, outer, depth, units, panels);
            }
            Form::Patches(patches, Order::AcrossDepth) => {
                image::pack_across::<V, U, P>(elements, patches, outer, depth, units, panels);
            }
            Form::Filters(filters) => {
                image::pack_filters::<V, U, P>(elements, filters, outer, depth, units, panels);
            }
            Form::Blocks(lines, Order::AlongDepth) => {
                pack_blocks::<V, U, P>(lines, outer, depth, units, panels);
            }
            Form::Blocks(lines, Order::AcrossDepth) => {
                pack_blocks_across::<V, U, P>(lines, outer, depth, units, panels);
            }
        }));
    }
}

/// Largest number of lines of a panel.
const MOST_LINES: usize = 3 * SIDE;

/// Packs lines of quantized blocks: a chunk of the lines of a panel is decoded, and packed as a stored matrix.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn pack_blocks<V: Lanes, U: Unit, P: PanelShape>(
    lines: BlockLines<'_>,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    const { assert!(P::WIDTH <= MOST_LINES) };
    let are_squares = P::ORDER == Order::AcrossDepth && P::WIDTH.is_multiple_of(SIDE);
    let decodes_pairs = V::MAKES_PAIRS && are_pairs::<U>() && are_squares;
    let mut decoded = [U::Source::zeroed(); MOST_LINES * CHUNK];
    for (index, panel) in panels.chunks_exact_mut(P::WIDTH * units).enumerate() {
        let first = (outer.start + index * P::WIDTH).min(outer.end);
        let own = first..outer.end.min(first + P::WIDTH);
        let (mut start, mut unit) = (depth.start, 0);
        while unit < units {
            let chunk = start / CHUNK * CHUNK;
            let end = depth.end.min(chunk + CHUNK);
            // The last part of a panel has the padding.
            let part_units = if end == depth.end { units - unit } else { (end - start) / U::ELEMENTS };
            let part = &mut panel[unit * P::WIDTH..][..part_units * P::WIDTH];
            for line in own.clone() {
                lines.fetch_ahead(line, chunk, P::WIDTH);
            }
            let is_chunk =
                start == chunk && end == lines.chunk_end(chunk) && end - start == part_units * U::ELEMENTS;
            let is_whole = is_chunk && own.len() == P::WIDTH;
            if decodes_pairs && is_whole {
                for column in (0..P::WIDTH).step_by(SIDE) {
                    let target = Square { first: part[column..].as_mut_ptr(), stride: P::WIDTH };
                    // SAFETY: the part holds the units of all lines of the panel; the caller promises the instructions.
                    unsafe { V::decode_pairs(&lines, first + column, chunk, target) };
                }
            } else {
                // SAFETY: the caller's promise.
                unsafe { decode::<V, _>(&lines, own.clone(), chunk, &mut decoded) };
                let matrix = Matrix { elements: &decoded, stride: CHUNK };
                let depth = start - chunk..end - chunk;
                // SAFETY: the caller's promise.
                unsafe {
                    pack_matrix::<V, U, P>(matrix, Order::AlongDepth, 0..own.len(), depth, part_units, part);
                }
            }
            (start, unit) = (end, unit + part_units);
        }
    }
}

/// Lines across the depth that are decoded at a time: a multiple of the elements of every packed block.
const ACROSS_LINES: usize = 2 * SIDE;
/// Elements of the part of a line that is decoded at a time: a strip of panels and the rest of its first and last block.
const ACROSS_ELEMENTS: usize = 2 * CHUNK;
/// Panels of a strip.
const STRIP_PANELS: usize = 4;

/// Packs lines of quantized blocks across the depth: the blocks of a few lines that hold the elements of a strip of panels are decoded,
/// and packed as a stored matrix.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn pack_blocks_across<V: Lanes, U: Unit, P: PanelShape>(
    lines: BlockLines<'_>,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    const { assert!(P::WIDTH <= MOST_LINES && ACROSS_LINES.is_multiple_of(SIDE * U::ELEMENTS)) };
    let block = lines.format.block_elements();
    for (index, strip) in panels.chunks_mut(STRIP_PANELS * P::WIDTH * units).enumerate() {
        let first = (outer.start + index * STRIP_PANELS * P::WIDTH).min(outer.end);
        let own = first..outer.end.min(first + strip.len() / units);
        let decoded_from = own.start / block * block;
        let stride = own.end.next_multiple_of(block) - decoded_from;
        let mut decoded = [U::Source::zeroed(); ACROSS_LINES * ACROSS_ELEMENTS];
        let (mut start, mut unit) = (depth.start, 0);
        while unit < units {
            let end = depth.end.min(start + ACROSS_LINES);
            // The last part of a panel has the padding.
            let part_units = if end == depth.end { units - unit } else { ACROSS_LINES / U::ELEMENTS };
            // SAFETY: the caller's promise.
            unsafe { decode_part::<V, _>(&lines, start..end, decoded_from, stride, &mut decoded) };
            let matrix = Matrix { elements: &decoded, stride };
            for (index, panel) in strip.chunks_exact_mut(P::WIDTH * units).enumerate() {
                let first = (own.start + index * P::WIDTH).min(own.end);
                let outer = first - decoded_from..own.end.min(first + P::WIDTH) - decoded_from;
                let part = &mut panel[unit * P::WIDTH..][..part_units * P::WIDTH];
                // SAFETY: the caller's promise.
                unsafe {
                    pack_matrix::<V, U, P>(
                        matrix,
                        Order::AcrossDepth,
                        outer,
                        0..end - start,
                        part_units,
                        part,
                    );
                }
            }
            (start, unit) = (end, unit + part_units);
        }
    }
}

/// Decodes `len` elements of some lines from `start` on, whole blocks, to lines of `len`. A function of its own, as [`decode`] is.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(never)]
unsafe fn decode_part<V: Lanes, T: Float>(
    of: &BlockLines<'_>,
    lines: Range<usize>,
    start: usize,
    len: usize,
    values: &mut [T],
) {
    if len == 0 {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        V::compiled(inlined!(|| {
            for (line, values) in lines.zip(values.chunks_exact_mut(len)) {
                decode_line(V::LEVEL, of.format, of.part(line, start..start + len), values);
            }
        }));
    }
}

/// Decodes the elements of some lines from `start` on, a multiple of [`CHUNK`], to lines of `CHUNK`. A function of its own, which
/// is compiled once for each level and not for each product.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(never)]
pub(super) unsafe fn decode<V: Lanes, T: Float>(
    of: &BlockLines<'_>,
    lines: Range<usize>,
    start: usize,
    values: &mut [T],
) {
    // SAFETY: the caller's promise.
    unsafe {
        V::compiled(inlined!(|| {
            let mut buffer = [0; CHUNK_BYTES];
            for (index, values) in lines.zip(values.chunks_exact_mut(CHUNK)) {
                decode_line(V::LEVEL, of.format, of.read(index, start, &mut buffer), values);
            }
        }));
    }
}

/// Packs a stored matrix.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn pack_matrix<V: Lanes, U: Unit, P: PanelShape>(
    matrix: Matrix<'_, U::Source>,
    order: Order,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    match (order, P::ORDER) {
        (Order::AcrossDepth, Order::AcrossDepth) => copy::<U, P>(&matrix, outer, depth, units, panels),
        (Order::AlongDepth, Order::AcrossDepth) if U::IS_STORED_ALONG && P::WIDTH.is_multiple_of(SIDE) => {
            // SAFETY: the caller's promise.
            unsafe { transpose_lines::<V, U, P>(&matrix, outer, depth, units, panels) };
        }
        (Order::AlongDepth, _) => {
            let read = inlined!(|block: &mut Block, outer: Range<usize>, depth: Range<usize>| {
                read_along::<U, P>(&matrix, outer, depth, block);
                if P::ORDER == Order::AcrossDepth {
                    // SAFETY: the caller's promise.
                    unsafe { V::transpose(block) };
                }
            });
            blocks::<P>(outer, depth, units, U::ELEMENTS, panels, read);
        }
        (Order::AcrossDepth, Order::AlongDepth)
            if V::MAKES_PAIRS && are_pairs::<U>() && P::WIDTH == PAIR_LINES && P::DEPTH == SIDE =>
        {
            // SAFETY: the caller's promise.
            unsafe { transpose_pairs::<V, U, P>(&matrix, outer, depth, units, panels) };
        }
        (Order::AcrossDepth, Order::AlongDepth) => {
            let read = inlined!(|block: &mut Block, outer: Range<usize>, depth: Range<usize>| {
                read_across::<U>(&matrix, outer, depth, block);
                // SAFETY: as above.
                unsafe { V::transpose(block) };
            });
            blocks::<P>(outer, depth, units, U::ELEMENTS, panels, read);
        }
    }
}

/// Returns true if units are pairs of bf16.
const fn are_pairs<U: Unit>() -> bool {
    matches!(U::Source::DTYPE, DType::BF16) && U::ELEMENTS == 2
}

/// Packs bf16 that are contiguous across the depth as pairs into panels along it, whole squares from memory to memory.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn transpose_pairs<V: Lanes, U: Unit, P: PanelShape>(
    matrix: &Matrix<'_, U::Source>,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    let Matrix { elements, stride } = *matrix;
    let whole_units = depth.len() / PAIR_LINES * SIDE;
    for (index, panel) in panels.chunks_exact_mut(P::WIDTH * units).enumerate() {
        let first = outer.start + index * P::WIDTH;
        let own = first..outer.end.min(first + P::WIDTH);
        let from = if own.len() == P::WIDTH { whole_units } else { 0 };
        for unit in (0..from).step_by(SIDE) {
            let place = (depth.start + unit * U::ELEMENTS) * stride + first;
            // All lines of the square: the last one ends here.
            let source = &elements[place..][..(PAIR_LINES - 1) * stride + P::WIDTH];
            let target = &mut panel[unit * P::WIDTH..][..SIDE * P::WIDTH];
            for line in PAIR_LINES..2 * PAIR_LINES {
                prefetch_to_l1(source.as_ptr().wrapping_add(line * stride));
            }
            // SAFETY: the lines lie in `source`, their pairs in `target`; the caller promises the instructions.
            unsafe {
                let target = Square { first: target.as_mut_ptr(), stride: SIDE };
                V::transpose_pairs(source.as_ptr().cast(), stride, target);
            }
        }
        if from < units {
            let depth = depth.start + from * U::ELEMENTS..depth.end;
            let read = inlined!(|block: &mut Block, outer: Range<usize>, depth: Range<usize>| {
                read_across::<U>(matrix, outer, depth, block);
                // SAFETY: the caller's promise.
                unsafe { V::transpose(block) };
            });
            blocks::<P>(own, depth, units - from, U::ELEMENTS, &mut panel[from * P::WIDTH..], read);
        }
    }
}

/// Packs an operand that is contiguous across the depth into panels of the same order.
#[inline(always)]
fn copy<U: Unit, P: PanelShape>(
    operand: &Matrix<'_, U::Source>,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    let panel_units = P::WIDTH * units;
    // The panels may end before the operand does.
    let outer = outer.start..outer.end.min(outer.start + panels.len() / panel_units * P::WIDTH);
    let whole_panels = outer.len() / P::WIDTH;
    // The distance between lines is too large for the CPU's own prefetcher.
    let ahead = UNITS_AHEAD * U::ELEMENTS * operand.stride;
    for unit in 0..units {
        let lines = operand.lines::<U>(outer.clone(), depth.start + unit * U::ELEMENTS, depth.end);
        for start in (0..lines[0].len()).step_by(CACHE_LINE_BYTES / size_of::<U::Source>()) {
            prefetch(lines[0].as_ptr().wrapping_add(start + ahead));
            if U::ELEMENTS == 2 {
                prefetch(lines[0].as_ptr().wrapping_add(start + ahead + operand.stride));
            }
        }
        let is_whole = !lines[0].is_empty() && (U::ELEMENTS == 1 || !lines[1].is_empty());
        for index in 0..if is_whole { whole_panels } else { 0 } {
            let at = index * P::WIDTH;
            // SAFETY: the lines hold `WIDTH` elements of each whole panel, and the panels as many units at `unit`: their number
            // is limited above. Constant lengths make the copy a few vector moves.
            unsafe {
                let first = lines[0].get_unchecked(at..at + P::WIDTH);
                let second = if U::ELEMENTS == 1 { &[] } else { lines[1].get_unchecked(at..at + P::WIDTH) };
                let target = index * panel_units + unit * P::WIDTH;
                U::across([first, second], panels.get_unchecked_mut(target..target + P::WIDTH));
            }
        }
        let first_edge = if is_whole { whole_panels } else { 0 };
        for (index, panel) in panels.chunks_exact_mut(panel_units).enumerate().skip(first_edge) {
            let lines = lines.map(|line| line.get(index * P::WIDTH..).unwrap_or_default());
            across_unlikely::<U>(lines, &mut panel[unit * P::WIDTH..][..P::WIDTH]);
        }
    }
}

/// Packs lines of units along the depth into panels of the other order, whole blocks from memory to memory.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn transpose_lines<V: Lanes, U: Unit, P: PanelShape>(
    matrix: &Matrix<'_, U::Source>,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    let Matrix { elements, stride } = *matrix;
    // Lines of units: an odd number of elements would put half a unit between two lines.
    let source_stride = stride / U::ELEMENTS;
    let whole_units =
        if stride.is_multiple_of(U::ELEMENTS) { depth.len() / U::ELEMENTS / SIDE * SIDE } else { 0 };
    for (index, panel) in panels.chunks_exact_mut(P::WIDTH * units).enumerate() {
        let first = outer.start + index * P::WIDTH;
        let lines = first..outer.end.min(first + P::WIDTH);
        let from = if lines.len() == P::WIDTH { whole_units } else { 0 };
        for column in (0..P::WIDTH).step_by(SIDE).filter(|_| from > 0) {
            let place = (first + column) * stride + depth.start;
            let next = elements.as_ptr().wrapping_add(place).wrapping_byte_add(ahead::<U, P>(stride));
            // All lines of the squares: the last one ends here.
            let source = &elements[place..][..(SIDE - 1) * stride + from * U::ELEMENTS];
            for unit in (0..from).step_by(SIDE) {
                let target = &mut panel[unit * P::WIDTH..][..SIDE * P::WIDTH];
                for line in 0..SIDE {
                    prefetch(next.wrapping_add(line * stride + unit * U::ELEMENTS));
                }
                // SAFETY: the square lies in `source`, its transpose in `target`; the caller promises the
                // instructions.
                unsafe {
                    V::transpose_into(
                        Square { first: source.as_ptr().cast::<u32>().add(unit), stride: source_stride },
                        Square { first: target.as_mut_ptr().add(column), stride: P::WIDTH },
                    );
                }
            }
        }
        if from < units {
            let depth = depth.start + from * U::ELEMENTS..depth.end;
            let rest = &mut panel[from * P::WIDTH..];
            blocks::<P>(lines, depth, units - from, U::ELEMENTS, rest, |block, outer, depth| {
                read_along::<U, P>(matrix, outer, depth, block);
                // SAFETY: the caller's promise.
                unsafe { V::transpose(block) };
            });
        }
    }
}

/// Returns the distance in bytes from a place in a line along the depth to the place to fetch: by default the same place of
/// the next panel, because the lines of a panel are too short for the CPU's own prefetcher.
#[inline(always)]
fn ahead<U: Unit, P: PanelShape>(stride: usize) -> usize {
    P::AHEAD_BYTES.unwrap_or(P::WIDTH * stride * size_of::<U::Source>())
}

/// Reads a block from an operand that is contiguous along the depth: lines of the block are lines of the operand.
#[inline(always)]
fn read_along<U: Unit, P: PanelShape>(
    operand: &Matrix<'_, U::Source>,
    outer: Range<usize>,
    depth: Range<usize>,
    block: &mut Block,
) {
    let line = |index: usize| &operand.elements[index * operand.stride..][depth.clone()];
    let ahead = ahead::<U, P>(operand.stride);
    if depth.len() == SIDE * U::ELEMENTS {
        for (row, index) in block.iter_mut().zip(outer) {
            let line = line(index);
            prefetch(line.as_ptr().wrapping_byte_add(ahead));
            U::along(&line[..SIDE * U::ELEMENTS], row);
        }
    } else {
        for (row, index) in block.iter_mut().zip(outer) {
            along_unlikely::<U>(line(index), row);
        }
    }
}

/// Reads a block from an operand that is contiguous across the depth: lines of the block are lines of the operand.
#[inline(always)]
fn read_across<U: Unit>(
    operand: &Matrix<'_, U::Source>,
    outer: Range<usize>,
    depth: Range<usize>,
    block: &mut Block,
) {
    for (row, index) in block.iter_mut().zip(depth.clone().step_by(U::ELEMENTS)) {
        let lines = operand.lines::<U>(outer.clone(), index, depth.end);
        match lines.map(|line| line.first_chunk::<SIDE>()) {
            [Some(first), Some(second)] => U::across([first, second], row),
            _ => across_unlikely::<U>(lines, &mut row[..outer.len()]),
        }
    }
}

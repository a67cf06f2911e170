//! Packing: a block of an operand becomes panels of 32-bit units, in the order in which a micro-kernel reads them.
//! The rest of the GEMM does not depend on layouts and types.
//!
//! A unit is the operand of one lane: an f32, a bf16 or f16 widened to f32, or a pair of bf16 neighbours along the
//! depth. Blocks of 16 × 16 units are read in memory order, transposed if the panel has the other order, and written.
//! Padding beyond the operand is zero.

use std::{marker::PhantomData, ops::Range};

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::{
    lanes::Lanes,
    store::Tile,
    transpose::{Block, SIDE},
};
use crate::cpu::simd::{CACHE_LINE_BYTES, Float, inlined, prefetch};

/// Prefetch distance, in units of depth, of lines across the depth.
const UNITS_AHEAD: usize = 16;

/// The index along which neighbours are contiguous in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cpu) enum Order {
    /// Neighbours along the depth (the summed index) are contiguous.
    AlongDepth,
    /// Neighbours along the other index are contiguous.
    AcrossDepth,
}

/// A matrix of a product, indexed by a row of A or column of B, and the depth.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Operand<'a, T> {
    elements: &'a [T],
    stride: usize,
    order: Order,
}

impl<'a, T> Operand<'a, T> {
    /// Wraps a matrix whose lines, in the given order, are `stride` elements apart.
    pub(in crate::cpu) fn new(elements: &'a [T], stride: usize, order: Order) -> Self {
        Self { elements, stride, order }
    }

    /// Returns the index along which neighbours are contiguous.
    pub(in crate::cpu) fn order(&self) -> Order {
        self.order
    }

    /// Returns line `index` of the matrix as stored.
    pub(in crate::cpu) fn line(&self, index: usize) -> &'a [T] {
        &self.elements[index * self.stride..][..self.stride]
    }

    /// Returns the elements at `depth` of a row of A or column of B.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::cpu) fn along(&self, outer: usize, depth: Range<usize>) -> impl Iterator<Item = &'a T> {
        let (start, step) = match self.order {
            Order::AlongDepth => (outer * self.stride + depth.start, 1),
            Order::AcrossDepth => (depth.start * self.stride + outer, self.stride),
        };
        self.elements.iter().skip(start).step_by(step).take(depth.len())
    }

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

/// The conversion of elements to units.
pub(in crate::cpu) trait Unit {
    /// Type of the operand's elements.
    type Source: Float;
    /// Elements of one unit, 1 or 2.
    const ELEMENTS: usize;
    /// Writes the first of `units` from `elements`, which are neighbours along the depth.
    fn along(elements: &[Self::Source], units: &mut [u32; SIDE]);
    /// Writes all of `units` from neighbours across the depth, one line for each element of a unit. The second line
    /// is empty beyond the operand.
    fn across(lines: [&[Self::Source]; 2], units: &mut [u32]);
}

/// An f32 as a unit.
pub(in crate::cpu) struct Single;

impl Unit for Single {
    type Source = f32;
    const ELEMENTS: usize = 1;

    #[inline(always)]
    fn along(elements: &[f32], units: &mut [u32; SIDE]) {
        units[..elements.len()].copy_from_slice(bytemuck::cast_slice(elements));
    }

    #[inline(always)]
    fn across([line, _]: [&[f32]; 2], units: &mut [u32]) {
        units.copy_from_slice(bytemuck::cast_slice(line));
    }
}

/// A bf16 or f16 widened to f32, for levels without arithmetic in that type.
pub(in crate::cpu) struct Widened<T>(PhantomData<T>);

impl<T: Float> Unit for Widened<T> {
    type Source = T;
    const ELEMENTS: usize = 1;

    #[inline(always)]
    fn along(elements: &[T], units: &mut [u32; SIDE]) {
        Self::across([elements, &[]], &mut units[..elements.len()]);
    }

    #[inline(always)]
    fn across([line, _]: [&[T]; 2], units: &mut [u32]) {
        for (unit, element) in units.iter_mut().zip(line) {
            *unit = element.load().to_bits();
        }
    }
}

/// Two bf16, the one of smaller depth in the lower half.
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) struct BfloatPair;

#[cfg(target_arch = "x86_64")]
impl Unit for BfloatPair {
    type Source = bf16;
    const ELEMENTS: usize = 2;

    #[inline(always)]
    fn along(elements: &[bf16], units: &mut [u32; SIDE]) {
        bytemuck::cast_slice_mut::<u32, bf16>(units)[..elements.len()].copy_from_slice(elements);
    }

    #[inline(always)]
    fn across([first, second]: [&[bf16]; 2], units: &mut [u32]) {
        if second.is_empty() {
            for (unit, first) in units.iter_mut().zip(first) {
                *unit = u32::from(first.to_bits());
            }
        } else {
            for (unit, (first, second)) in units.iter_mut().zip(first.iter().zip(second)) {
                *unit = u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16;
            }
        }
    }
}

/// The panel format that a micro-kernel expects of one operand.
pub(in crate::cpu) trait PanelShape {
    /// Rows of A or columns of B in a panel.
    const WIDTH: usize;
    /// [`Order::AcrossDepth`] if a panel holds `WIDTH` contiguous units for each unit of depth; else it holds, for
    /// each 16 units of depth, `WIDTH` lines of 16.
    const ORDER: Order;
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
    // SAFETY: the caller's promise.
    unsafe {
        V::compiled(inlined!(|| match (operand.order, P::ORDER) {
            (Order::AcrossDepth, Order::AcrossDepth) => {
                copy::<U, P>(operand, outer, depth, units, panels)
            }
            (Order::AlongDepth, _) => {
                blocks::<P>(outer, depth, units, U::ELEMENTS, panels, |block, outer, depth| {
                    read_along::<U, P>(operand, outer, depth, block);
                    if P::ORDER == Order::AcrossDepth {
                        V::transpose(block);
                    }
                })
            }
            (Order::AcrossDepth, Order::AlongDepth) => {
                blocks::<P>(outer, depth, units, U::ELEMENTS, panels, |block, outer, depth| {
                    read_across::<U>(operand, outer, depth, block);
                    V::transpose(block);
                });
            }
        }));
    }
}

/// Packs an operand that is contiguous across the depth into panels of the same order.
#[inline(always)]
fn copy<U: Unit, P: PanelShape>(
    operand: &Operand<'_, U::Source>,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    let panel_units = P::WIDTH * units;
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
        let mut panels = panels.chunks_exact_mut(panel_units);
        for (index, panel) in panels.by_ref().take(whole_panels).enumerate() {
            let target = &mut panel[unit * P::WIDTH..][..P::WIDTH];
            let lines = lines.map(|line| line.get(index * P::WIDTH..).unwrap_or_default());
            // A constant length makes the copy a few vector moves.
            if U::ELEMENTS == 1 {
                U::across([&lines[0][..P::WIDTH], &[]], target);
            } else if lines[1].is_empty() {
                across_unlikely::<U>(lines, target);
            } else {
                U::across([&lines[0][..P::WIDTH], &lines[1][..P::WIDTH]], target);
            }
        }
        if let Some(panel) = panels.next() {
            let lines = lines.map(|line| line.get(whole_panels * P::WIDTH..).unwrap_or_default());
            across_unlikely::<U>(lines, &mut panel[unit * P::WIDTH..][..P::WIDTH]);
        }
    }
}

/// Runs [`Unit::across`] at an edge, with zero padding. A function of its own, so that the common case has constant
/// lengths.
#[cold]
#[inline(never)]
fn across_unlikely<U: Unit>(lines: [&[U::Source]; 2], units: &mut [u32]) {
    units.fill(0);
    let len = units.len().min(lines[0].len());
    U::across(lines.map(|line| &line[..len.min(line.len())]), &mut units[..len]);
}

/// Runs [`Unit::along`] at an edge.
#[cold]
#[inline(never)]
fn along_unlikely<U: Unit>(elements: &[U::Source], units: &mut [u32; SIDE]) {
    U::along(elements, units);
}

/// Packs block by block. `read` fills a zeroed block, in the order of the panel, from a range across the depth and
/// one along it.
#[inline(always)]
fn blocks<P: PanelShape>(
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    unit_elements: usize,
    panels: &mut [u32],
    read: impl Fn(&mut Block, Range<usize>, Range<usize>),
) {
    for (index, panel) in panels.chunks_exact_mut(P::WIDTH * units).enumerate() {
        for column in (0..P::WIDTH).step_by(SIDE) {
            let first = outer.start + index * P::WIDTH + column;
            let lanes = SIDE.min(P::WIDTH - column);
            let outer = first.min(outer.end)..(first + lanes).min(outer.end);
            for unit in (0..units).step_by(SIDE) {
                let start = depth.start + unit * unit_elements;
                let end = (start + SIDE * unit_elements).min(depth.end);
                let mut block = [[0; SIDE]; SIDE];
                read(&mut block, outer.clone(), start.min(end)..end);
                write::<P>(&block, &mut panel[unit * P::WIDTH..], column);
            }
        }
    }
}

/// Writes a block at `column` of a panel, which may end before the block does.
#[inline(always)]
fn write<P: PanelShape>(block: &Block, panel: &mut [u32], column: usize) {
    let rest = P::WIDTH % SIDE;
    match P::ORDER {
        Order::AcrossDepth if column + SIDE <= P::WIDTH => {
            for (line, row) in panel.chunks_exact_mut(P::WIDTH).zip(block) {
                line[column..column + SIDE].copy_from_slice(row);
            }
        }
        Order::AcrossDepth => {
            for (line, row) in panel.chunks_exact_mut(P::WIDTH).zip(block) {
                line[P::WIDTH - rest..].copy_from_slice(&row[..rest]);
            }
        }
        Order::AlongDepth => panel[column * SIDE..][..SIDE * SIDE].copy_from_slice(block.as_flattened()),
    }
}

/// Reads a block from an operand that is contiguous along the depth: lines of the block are lines of the operand.
#[inline(always)]
fn read_along<U: Unit, P: PanelShape>(
    operand: &Operand<'_, U::Source>,
    outer: Range<usize>,
    depth: Range<usize>,
    block: &mut Block,
) {
    let line = |index: usize| &operand.elements[index * operand.stride..][depth.clone()];
    let next_panel = P::WIDTH * operand.stride;
    if depth.len() == SIDE * U::ELEMENTS {
        for (row, index) in block.iter_mut().zip(outer) {
            let line = line(index);
            // The same place of the next panel: the lines are too short for the CPU's own prefetcher.
            prefetch(line.as_ptr().wrapping_add(next_panel));
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
    operand: &Operand<'_, U::Source>,
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

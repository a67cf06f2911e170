//! Units and panels: the operands of a lane, and the order in which a micro-kernel reads them.
//!
//! A unit is an f32, a bf16 or f16 widened to f32, or a pair of bf16 neighbours along the depth.

use std::{marker::PhantomData, ops::Range};

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use half::bf16;

use super::{
    operand::Order,
    transpose::{Block, SIDE},
};
use crate::cpu::simd::Float;

/// The conversion of elements to units.
pub(in crate::cpu) trait Unit {
    /// Type of the operand's elements.
    type Source: Float;
    /// Elements of one unit, 1 or 2.
    const ELEMENTS: usize;
    /// True if an element is a unit as it is stored.
    const IS_STORED: bool = false;
    /// True if neighbours along the depth are units as they are stored.
    const IS_STORED_ALONG: bool = Self::IS_STORED;
    /// True if an element becomes a unit when it is widened to f32.
    const IS_WIDENED: bool = false;
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
    const IS_STORED: bool = true;

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
    const IS_WIDENED: bool = true;

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
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(in crate::cpu) struct BfloatPair;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl Unit for BfloatPair {
    type Source = bf16;
    const ELEMENTS: usize = 2;
    // The element of smaller depth has the lower address.
    const IS_STORED_ALONG: bool = cfg!(target_endian = "little");

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
            return;
        }
        let len = units.len().min(first.len()).min(second.len());
        let (blocks, rest) = units[..len].as_chunks_mut::<PAIRS>();
        let ((first, first_rest), (second, second_rest)) =
            (first[..len].as_chunks(), second[..len].as_chunks());
        for (block, (first, second)) in blocks.iter_mut().zip(first.iter().zip(second)) {
            interleave(first, second, block);
        }
        for (unit, (first, second)) in rest.iter_mut().zip(first_rest.iter().zip(second_rest)) {
            *unit = pair(*first, *second);
        }
    }
}

/// Pairs that [`interleave`] makes at a time.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const PAIRS: usize = 8;

/// Returns a unit of two neighbours.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
fn pair(first: bf16, second: bf16) -> u32 {
    u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16
}

/// Makes units of neighbours in two lines.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn interleave(first: &[bf16; PAIRS], second: &[bf16; PAIRS], units: &mut [u32; PAIRS]) {
    *units = std::array::from_fn(|index| pair(first[index], second[index]));
}

/// Makes units of neighbours in two lines. By instructions that every x86-64 CPU has: the compiler makes scalar code of a loop of so
/// few elements.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn interleave(first: &[bf16; PAIRS], second: &[bf16; PAIRS], units: &mut [u32; PAIRS]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi16, _mm_unpacklo_epi16};
    // SAFETY: each line is one vector of 16 bytes, and the units are two.
    unsafe {
        let (first, second) =
            (_mm_loadu_si128(first.as_ptr().cast()), _mm_loadu_si128(second.as_ptr().cast()));
        let (low, high) = units.split_at_mut(PAIRS / 2);
        _mm_storeu_si128(low.as_mut_ptr().cast(), _mm_unpacklo_epi16(first, second));
        _mm_storeu_si128(high.as_mut_ptr().cast(), _mm_unpackhi_epi16(first, second));
    }
}

/// The panel format that a micro-kernel expects of one operand.
pub(in crate::cpu) trait PanelShape {
    /// Rows of A or columns of B in a panel.
    const WIDTH: usize;
    /// [`Order::AcrossDepth`] if a panel holds `WIDTH` contiguous units for each unit of depth; else it holds, for
    /// each `DEPTH` units of depth, `WIDTH` lines of `DEPTH`.
    const ORDER: Order;
    /// Units of the lines of [`Order::AlongDepth`]; divides [`SIDE`].
    const DEPTH: usize;
    /// Bytes from a place in a line of an operand to the one that is needed next, if lines are packed from end to end before
    /// the next panel.
    const AHEAD_BYTES: Option<usize> = None;
}

/// Runs [`Unit::across`] at an edge, with zero padding. A function of its own, so that the common case has constant
/// lengths.
#[cold]
#[inline(never)]
pub(super) fn across_unlikely<U: Unit>(lines: [&[U::Source]; 2], units: &mut [u32]) {
    units.fill(0);
    let len = units.len().min(lines[0].len());
    U::across(lines.map(|line| &line[..len.min(line.len())]), &mut units[..len]);
}

/// Runs [`Unit::along`] at an edge.
#[cold]
#[inline(never)]
pub(super) fn along_unlikely<U: Unit>(elements: &[U::Source], units: &mut [u32; SIDE]) {
    U::along(elements, units);
}

/// Packs block by block. `read` fills a zeroed block, in the order of the panel, from a range across the depth and
/// one along it.
#[inline(always)]
pub(super) fn blocks<P: PanelShape>(
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
        Order::AlongDepth if P::DEPTH == SIDE => {
            panel[column * SIDE..][..SIDE * SIDE].copy_from_slice(block.as_flattened());
        }
        Order::AlongDepth => {
            let steps = panel.chunks_exact_mut(P::WIDTH * P::DEPTH).take(SIDE / P::DEPTH);
            for (index, step) in steps.enumerate() {
                let lines = step[column * P::DEPTH..].chunks_exact_mut(P::DEPTH);
                for (line, row) in lines.zip(block) {
                    line.copy_from_slice(&row[index * P::DEPTH..][..P::DEPTH]);
                }
            }
        }
    }
}

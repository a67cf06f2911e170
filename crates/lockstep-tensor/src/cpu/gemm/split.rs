//! f32 products by bf16 tiles: `x = x₀ + x₁ + x₂`, where each part is the bf16 nearest to the remainder of the parts
//! before (Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
//! Computations", 2019).
//!
//! Three parts of 8 bits hold the 24 bits of an f32, so the split is exact. Of the nine products of parts, the six
//! largest are summed. The others are below 2^-26 of the whole, less than the rounding error of one f32 addition.
//!
//! Some values cannot be split: not finite, 2^127 and more, nonzero below 2^-100 (parts would overflow or vanish).
//! Panels with such values are marked as exceptional during packing, and multiplied by vector FMA.

use std::ops::Range;

use half::bf16;

use super::{
    kernel::{Avx512, ColumnPanels, Columns, MicroKernel, RowPanels, Rows},
    lanes::Lanes,
    operand::Operand,
    pack::{Factors, Packing, pack},
    store::Tile,
    transpose::SIDE,
    units::{PanelShape, Single, Unit},
};
use crate::cpu::simd::{Float, inlined};

/// Range of the magnitudes that can be split, as bits of bf16: `2^-100 <= |x| < 2^127`; 0 can be split too.
const SPLIT_BITS: Range<u16> = bf16_bits(-100)..bf16_bits(127);
/// Stands for a nonzero value that is too small to split: a subnormal.
const TINY: u16 = 1;
/// Units of a panel's mark: a cache line, whose first unit is nonzero if the panel is exceptional.
const MARK_UNITS: usize = 16;
/// Depth of the slices in which exceptional panels are multiplied.
const SLICE: usize = 128;

/// Returns the bits of the bf16 2^`exponent`.
const fn bf16_bits(exponent: i32) -> u16 {
    ((exponent + 127) as u16) << 7
}

/// Packs the three parts of f32 values as planes of pairs of bf16.
pub(super) struct ThreeParts;

/// The unit that holds part `RANK` of a pair of f32.
struct Part<const RANK: usize>;

impl<const RANK: usize> Unit for Part<RANK> {
    type Source = f32;
    const ELEMENTS: usize = 2;

    #[inline(always)]
    fn along(elements: &[f32], units: &mut [u32; SIDE]) {
        let parts = bytemuck::cast_slice_mut::<u32, u16>(units);
        for (part, x) in parts.iter_mut().zip(elements) {
            *part = part_of(*x, RANK);
        }
    }

    #[inline(always)]
    fn across([first, second]: [&[f32]; 2], units: &mut [u32]) {
        if second.is_empty() {
            for (unit, first) in units.iter_mut().zip(first) {
                *unit = u32::from(part_of(*first, RANK));
            }
        } else {
            for (unit, (first, second)) in units.iter_mut().zip(first.iter().zip(second)) {
                *unit = u32::from(part_of(*first, RANK)) | u32::from(part_of(*second, RANK)) << 16;
            }
        }
    }
}

/// Returns the bits of a part of `x`. If `x` cannot be split, its first part lies outside of [`SPLIT_BITS`].
#[inline(always)]
fn part_of(x: f32, rank: usize) -> u16 {
    let mut rest = x;
    for _ in 0..rank {
        rest -= bf16::store(rest).load();
    }
    let part = bf16::store(rest).to_bits();
    let is_tiny = rank == 0 && x != 0.0 && part & 0x7fff < SPLIT_BITS.start;
    if is_tiny { TINY } else { part }
}

/// Returns true if a packed first part belongs to a value that cannot be split.
#[inline(always)]
fn is_exceptional(part: u16) -> bool {
    let magnitude = part & 0x7fff;
    magnitude != 0 && !SPLIT_BITS.contains(&magnitude)
}

impl Packing for ThreeParts {
    type Source = f32;
    const ELEMENTS: usize = 2;
    const PLANES: usize = 3;
    const MARK_UNITS: usize = MARK_UNITS;

    unsafe fn pack<V: Lanes, P: PanelShape>(
        operand: &Operand<'_, f32>,
        outer: Range<usize>,
        depth: Range<usize>,
        units: usize,
        panels: &mut [u32],
    ) {
        for (index, panel) in panels.chunks_exact_mut(Self::panel_units::<P>(units)).enumerate() {
            let first = outer.start + index * P::WIDTH;
            let lines = || first..outer.end.min(first + P::WIDTH);
            let (planes, mark) = panel.split_at_mut(3 * P::WIDTH * units);
            mark.fill(0);
            if planes.is_empty() {
                continue;
            }
            let (first_part, rest) = planes.split_at_mut(P::WIDTH * units);
            let (second_part, third_part) = rest.split_at_mut(P::WIDTH * units);
            // SAFETY: the caller's promise.
            unsafe {
                pack::<V, Part<0>, P>(operand, lines(), depth.clone(), units, first_part);
                pack::<V, Part<1>, P>(operand, lines(), depth.clone(), units, second_part);
                pack::<V, Part<2>, P>(operand, lines(), depth.clone(), units, third_part);
                mark[0] = V::compiled(inlined!(|| {
                    let parts = bytemuck::cast_slice::<u32, u16>(first_part).iter();
                    u32::from(parts.fold(false, |found, part| found | is_exceptional(*part)))
                }));
            }
        }
    }

    fn convert(_: &[f32], _: &mut [u32]) {
        unreachable!("panels of three parts have marks")
    }

    fn is_exceptional(panel: &[u32]) -> bool {
        panel[panel.len() - MARK_UNITS] != 0
    }

    fn exceptional_rows(factors: &Factors<'_, f32>, tile: &mut Tile, tile_columns: usize) {
        let mut product = Tile::zeros();
        Self::exceptional_tile(factors, &mut product, tile_columns);
        for (index, row) in factors.rows.clone().enumerate() {
            let mut elements = factors.a.along(row, factors.depth.clone());
            if elements.any(|x| is_exceptional(part_of(x, 0))) {
                tile.copy_row(index, &product, tile_columns);
            }
        }
    }

    fn exceptional_tile(factors: &Factors<'_, f32>, tile: &mut Tile, tile_columns: usize) {
        const ROW_PANELS: usize = 3;
        const { assert!(Avx512::COLUMNS == 32) };
        let Factors { a, b, rows, columns, depth } = factors;
        let (a, b) = (*a, *b);
        assert!(rows.len() <= ROW_PANELS * Avx512::ROWS && columns.len() <= Avx512::COLUMNS);
        let mut packed_a = [0; ROW_PANELS * Avx512::ROWS * SLICE];
        let mut packed_b = [0; Avx512::COLUMNS * SLICE];
        let mut product = Tile::zeros();
        tile.clear();
        for start in depth.clone().step_by(SLICE) {
            let depth = start..depth.end.min(start + SLICE);
            let units = depth.len();
            let row_panels = rows.len().div_ceil(Avx512::ROWS);
            let packed_a = &mut packed_a[..row_panels * Avx512::ROWS * units];
            let packed_b = &mut packed_b[..Avx512::COLUMNS * units];
            // SAFETY: every level with tiles has AVX-512, and the panels hold `units`.
            unsafe {
                type Vector = <Avx512 as MicroKernel>::Vector;
                pack::<Vector, Single, RowPanels<Avx512>>(a, rows.clone(), depth.clone(), units, packed_a);
                pack::<Vector, Single, ColumnPanels<Avx512>>(
                    b,
                    columns.clone(),
                    depth.clone(),
                    units,
                    packed_b,
                );
                for (index, panel) in packed_a.chunks_exact(Avx512::ROWS * units).enumerate() {
                    let (a, b) = (Rows::Packed(panel.as_ptr()), Columns::cached(packed_b.as_ptr()));
                    Avx512::tile(units, a, b, &mut product);
                    let first = index * Avx512::ROWS;
                    let count = Avx512::ROWS.min(rows.len() - first);
                    tile.add_rows(first, &product, count, tile_columns);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value(part: u16) -> f32 {
        f32::from_bits(u32::from(part) << 16)
    }

    proptest! {
        #[test]
        fn three_parts_hold_every_value_that_is_split(bits: u32) {
            let x = f32::from_bits(bits);
            let parts = [0, 1, 2].map(|rank| part_of(x, rank));
            if is_exceptional(parts[0]) {
                prop_assert!(
                    !x.is_finite() || x.abs() >= 2.0_f32.powi(126) || x.abs() <= 2.0_f32.powi(-100),
                    "{x:e} could be split"
                );
            } else {
                prop_assert_eq!(value(parts[0]) + (value(parts[1]) + value(parts[2])), x, "parts {:x?}", parts);
                prop_assert!(parts.iter().all(|part| !value(*part).is_subnormal()), "{:e}: {:x?}", x, parts);
            }
        }
    }

    #[test]
    fn what_cannot_be_split_is_marked() {
        let (tiny, huge) = (2.0_f32.powi(-100), 2.0_f32.powi(127));
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, huge, -huge] {
            assert!(is_exceptional(part_of(x, 0)), "{x:e}");
        }
        for x in [f32::from_bits(1), -f32::MIN_POSITIVE, tiny / 2.0, -tiny / 1.01] {
            assert!(is_exceptional(part_of(x, 0)), "{x:e}");
        }
        for x in [0.0, -0.0, tiny, -tiny, huge / 2.0, 1.0, -1.0] {
            assert!(!is_exceptional(part_of(x, 0)), "{x:e}");
        }
    }
}

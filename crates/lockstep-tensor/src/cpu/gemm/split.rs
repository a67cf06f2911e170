//! f32 products by bf16 tiles: `x = x₀ + x₁ + x₂`, where each part is the bf16 nearest to the remainder of the parts
//! before (Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
//! Computations", 2019).
//!
//! Three parts of 8 bits hold the 24 bits of an f32, so the split is exact. Of the nine products of parts, the six
//! largest are summed. The others are below 2^-26 of the whole, less than the rounding error of one f32 addition.
//!
//! Some values cannot be split: not finite, 2^127 and more, nonzero below 2^-100 (parts would overflow or vanish).
//! Panels with such values are marked as exceptional during packing, and multiplied by vector FMA.

use std::{arch::x86_64::*, ops::Range};

use super::{
    kernel::{Avx512, ColumnPanels, Columns, MicroKernel, RowPanels, Rows},
    lanes::Lanes,
    operand::{Form, Operand, Order},
    pack::{Factors, Packing, pack},
    store::Tile,
    transpose::{SIDE, transpose_vectors},
    units::{PanelShape, Single},
};
use crate::cpu::simd::{prefetch, prefetch_to_l1};

/// Number of parts.
const PARTS: usize = 3;
/// Magnitudes that can be split, as bits: `2^-100 <= |x| < 2^127`. So can 0.
const SPLIT_BITS: Range<u32> = power_bits(-100)..power_bits(127);
/// Elements of a unit, a pair of bf16.
const ELEMENTS: usize = 2;
/// Elements of 16 units.
const SIDE_ELEMENTS: usize = ELEMENTS * SIDE;
/// The half of a word that is a bf16.
const HIGH_HALF: u32 = 0xffff_0000;
/// Units of a panel's mark: a cache line, whose first unit is nonzero if the panel is exceptional.
const MARK_UNITS: usize = 16;
/// Depth of the slices in which exceptional panels are multiplied.
const SLICE: usize = 128;
/// Distance in elements between the place that is packed and the one that is fetched, in lines along the depth.
const ELEMENTS_AHEAD: usize = 2 * SIDE_ELEMENTS;

/// Returns the bits of the f32 2^`exponent`.
const fn power_bits(exponent: i32) -> u32 {
    ((exponent + 127) as u32) << 23
}

/// Returns true if a value cannot be split.
fn is_exceptional(x: f32) -> bool {
    let magnitude = x.abs().to_bits();
    magnitude != 0 && !SPLIT_BITS.contains(&magnitude)
}

/// Packs the three parts of f32 values as planes of pairs of bf16. Only stored matrices are packed.
pub(super) struct ThreeParts;

impl Packing for ThreeParts {
    type Source = f32;
    const ELEMENTS: usize = ELEMENTS;
    const PLANES: usize = PARTS;
    const MARK_UNITS: usize = MARK_UNITS;

    unsafe fn pack<V: Lanes, P: PanelShape>(
        operand: &Operand<'_, f32>,
        outer: Range<usize>,
        depth: Range<usize>,
        units: usize,
        panels: &mut [u32],
    ) {
        let Form::Matrix { stride, order } = operand.form else {
            unreachable!("only stored matrices are split")
        };
        let matrix = Matrix { elements: operand.elements, stride, order };
        for (index, panel) in panels.chunks_exact_mut(Self::panel_units::<P>(units)).enumerate() {
            let first = (outer.start + index * P::WIDTH).min(outer.end);
            let lines = first..outer.end.min(first + P::WIDTH);
            let (planes, mark) = panel.split_at_mut(PARTS * P::WIDTH * units);
            mark.fill(0);
            // SAFETY: the caller promises the instructions of the vectors, which include these.
            let is_exceptional = unsafe { pack_panel::<P>(matrix, lines, depth.clone(), units, planes) };
            mark[0] = u32::from(is_exceptional);
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
            if elements.any(is_exceptional) {
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

/// A stored matrix whose lines are `stride` elements apart.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    elements: &'a [f32],
    stride: usize,
    order: Order,
}

/// The parts of 16 × 16 units. A vector holds 16 units of a line if the matrix is stored along the depth, else a unit of 16 lines.
type Squares = [[__m512i; SIDE]; PARTS];

/// Packs lines of a panel. Returns true if one of their values is exceptional.
///
/// # Safety
/// The CPU must have the instructions.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pack_panel<P: PanelShape>(
    matrix: Matrix<'_>,
    lines: Range<usize>,
    depth: Range<usize>,
    units: usize,
    planes: &mut [u32],
) -> bool {
    const {
        assert!(P::WIDTH.is_multiple_of(SIDE) && (P::DEPTH == SIDE || matches!(P::ORDER, Order::AcrossDepth)))
    };
    assert!(units.is_multiple_of(SIDE) && planes.len() == PARTS * P::WIDTH * units);
    let mut squares = [[_mm512_setzero_si512(); SIDE]; PARTS];
    let mut exceptional = 0;
    for unit in (0..units).step_by(SIDE) {
        let start = (depth.start + unit * ELEMENTS).min(depth.end);
        let depth = start..depth.end.min(start + SIDE_ELEMENTS);
        for column in (0..P::WIDTH).step_by(SIDE) {
            let first = (lines.start + column).min(lines.end);
            let lines = first..lines.end.min(first + SIDE);
            exceptional |= matrix.split(lines, depth.clone(), &mut squares);
            for (plane, vectors) in planes.chunks_exact_mut(P::WIDTH * units).zip(&mut squares) {
                if P::ORDER != matrix.order {
                    transpose_vectors(vectors);
                }
                let (place, stride) = match P::ORDER {
                    Order::AcrossDepth => (unit * P::WIDTH + column, P::WIDTH),
                    Order::AlongDepth => (unit * P::WIDTH + column * SIDE, SIDE),
                };
                let target = &mut plane[place..][..(SIDE - 1) * stride + SIDE];
                for (index, vector) in vectors.iter().enumerate() {
                    // SAFETY: the 16 lines lie in `target`.
                    unsafe { _mm512_storeu_si512(target.as_mut_ptr().add(index * stride).cast(), *vector) };
                }
            }
        }
    }
    exceptional != 0
}

impl Matrix<'_> {
    /// Splits up to 16 lines of 32 elements, and fills up with zeros. Returns a bit for each exceptional value.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn split(&self, lines: Range<usize>, depth: Range<usize>, squares: &mut Squares) -> __mmask16 {
        if lines.len() < SIDE || depth.len() < SIDE_ELEMENTS {
            return self.split_edge(lines, depth, squares);
        }
        let (outer, inner) = self.by_place(lines, depth);
        let place = outer.start * self.stride + inner.start;
        let source = &self.elements[place..][..(outer.len() - 1) * self.stride + inner.len()];
        // SAFETY: all elements lie in `source`.
        unsafe {
            match self.order {
                Order::AlongDepth => split_along(source.as_ptr(), self.stride, squares),
                Order::AcrossDepth => split_across(source.as_ptr(), self.stride, squares),
            }
        }
    }

    /// Splits fewer lines or elements, copied to a padded matrix.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn split_edge(&self, lines: Range<usize>, depth: Range<usize>, squares: &mut Squares) -> __mmask16 {
        let mut padded = [0.0; SIDE * SIDE_ELEMENTS];
        let stride = if self.order == Order::AlongDepth { SIDE_ELEMENTS } else { SIDE };
        let (outer, inner) = self.by_place(lines, depth);
        for (padded, line) in padded.chunks_exact_mut(stride).zip(outer) {
            padded[..inner.len()].copy_from_slice(&self.elements[line * self.stride..][inner.clone()]);
        }
        Matrix { elements: &padded, stride, order: self.order }.split(0..SIDE, 0..SIDE_ELEMENTS, squares)
    }

    /// Returns the indices of the stored lines, and of their elements.
    fn by_place(&self, lines: Range<usize>, depth: Range<usize>) -> (Range<usize>, Range<usize>) {
        match self.order {
            Order::AlongDepth => (lines, depth),
            Order::AcrossDepth => (depth, lines),
        }
    }
}

/// Splits 16 lines of 32 neighbours along the depth, `stride` apart: a vector for each line. Returns a bit for each
/// exceptional value.
///
/// # Safety
/// The elements must lie in memory.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_along(first: *const f32, stride: usize, squares: &mut Squares) -> __mmask16 {
    // 64-bit words of two vectors whose lanes were packed in turn.
    let in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    let mut found = 0;
    let places = (0..SIDE).map(|line| first.wrapping_add(line * stride));
    for (line, place) in places.enumerate() {
        prefetch(place.wrapping_add(ELEMENTS_AHEAD));
        prefetch(place.wrapping_add(ELEMENTS_AHEAD + SIDE));
        // SAFETY: the caller's promise.
        let (low, high) = unsafe { (_mm512_loadu_ps(place), _mm512_loadu_ps(place.add(SIDE))) };
        found |= exceptional(low) | exceptional(high);
        let (low, high) = (parts(low), parts(high));
        for rank in 0..PARTS {
            let [low, high] = [_mm512_srli_epi32::<16>(low[rank]), _mm512_srli_epi32::<16>(high[rank])];
            squares[rank][line] = _mm512_permutexvar_epi64(in_order, _mm512_packus_epi32(low, high));
        }
    }
    found
}

/// Splits 32 lines of 16 neighbours across the depth, `stride` apart: a vector for each pair of lines. Returns a bit for each
/// exceptional value.
///
/// # Safety
/// The elements must lie in memory.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_across(first: *const f32, stride: usize, squares: &mut Squares) -> __mmask16 {
    let high_halves = _mm512_set1_epi32(HIGH_HALF.cast_signed());
    let mut found = 0;
    let pairs = (0..SIDE).map(|unit| first.wrapping_add(2 * unit * stride));
    for (unit, line) in pairs.enumerate() {
        let next = line.wrapping_add(SIDE_ELEMENTS * stride);
        prefetch_to_l1(next);
        prefetch_to_l1(next.wrapping_add(stride));
        // SAFETY: the caller's promise.
        let (low, high) = unsafe { (_mm512_loadu_ps(line), _mm512_loadu_ps(line.add(stride))) };
        found |= exceptional(low) | exceptional(high);
        let (low, high) = (parts(low), parts(high));
        for rank in 0..PARTS {
            let low = _mm512_srli_epi32::<16>(low[rank]);
            // `low | high & mask`: what is left of an exceptional value may have a lower half.
            squares[rank][unit] = _mm512_ternarylogic_epi32::<0xf8>(low, high[rank], high_halves);
        }
    }
    found
}

/// Returns the parts of 16 numbers: bf16 in the high halves of words, whose low halves are zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn parts(x: __m512) -> [__m512i; PARTS] {
    let first = rounded(x);
    let rest = _mm512_sub_ps(x, first);
    let second = rounded(rest);
    // At most eight bits are left, which are a bf16.
    let third = _mm512_sub_ps(rest, second);
    [_mm512_castps_si512(first), _mm512_castps_si512(second), _mm512_castps_si512(third)]
}

/// Rounds to the nearest bf16, ties to even.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512) -> __m512 {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let high_halves = _mm512_set1_epi32(HIGH_HALF.cast_signed());
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(bits, half), high_halves))
}

/// Returns a bit for each number that cannot be split.
#[inline]
#[target_feature(enable = "avx512f")]
fn exceptional(x: __m512) -> __mmask16 {
    let magnitude = _mm512_castps_si512(_mm512_abs_ps(x));
    let above = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(SPLIT_BITS.start.cast_signed()));
    let range = _mm512_set1_epi32((SPLIT_BITS.end - SPLIT_BITS.start).cast_signed());
    _mm512_mask_cmpge_epu32_mask(_mm512_test_epi32_mask(magnitude, magnitude), above, range)
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::{gemm::lanes::F32x16, simd::Float};

    /// Returns the parts of a value, the definition.
    fn parts_of(x: f32) -> [bf16; PARTS] {
        let mut rest = x;
        [(); PARTS].map(|()| {
            let part = bf16::store(rest);
            rest -= part.load();
            part
        })
    }

    proptest! {
        #[test]
        fn three_parts_hold_every_value_that_is_split(bits: u32) {
            let x = f32::from_bits(bits);
            if !is_exceptional(x) {
                let parts = parts_of(x).map(f32::from);
                prop_assert_eq!(parts[0] + (parts[1] + parts[2]), x, "parts {:?}", parts);
                prop_assert!(parts.iter().all(|part| !part.is_subnormal()), "{:e}: {:?}", x, parts);
            }
        }
    }

    #[test]
    fn what_cannot_be_split_is_exceptional() {
        let (tiny, huge) = (2.0_f32.powi(-100), 2.0_f32.powi(127));
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, huge, -huge] {
            assert!(is_exceptional(x), "{x:e}");
        }
        for x in [f32::from_bits(1), -f32::MIN_POSITIVE, tiny / 2.0, -tiny / 1.01] {
            assert!(is_exceptional(x), "{x:e}");
        }
        for x in [0.0, -0.0, tiny, -tiny, huge / 2.0, 1.0, -1.0] {
            assert!(!is_exceptional(x), "{x:e}");
        }
    }

    /// Checks each part of each packed element, the padding, and the mark.
    fn check<P: PanelShape>(
        order: Order,
        lines: usize,
        depth: usize,
        mut elements: Vec<f32>,
        exceptional: Option<f32>,
    ) {
        let (skipped, stride) = (3, if order == Order::AlongDepth { depth + 5 } else { lines + 7 });
        let place = |line: usize, index: usize| match order {
            Order::AlongDepth => line * stride + skipped + index,
            Order::AcrossDepth => (skipped + index) * stride + line,
        };
        if let Some(value) = exceptional {
            elements[place(lines - 1, depth - 1)] = value;
        }
        let operand = Operand::new(&elements, stride, order);
        let units = depth.div_ceil(SIDE_ELEMENTS) * SIDE;
        let panel_units = ThreeParts::panel_units::<P>(units);
        let mut panels = vec![7; lines.div_ceil(P::WIDTH) * panel_units];
        // SAFETY: the caller has detected the instructions.
        unsafe {
            ThreeParts::pack::<F32x16, P>(&operand, 0..lines, skipped..skipped + depth, units, &mut panels)
        };
        for (index, panel) in panels.chunks_exact(panel_units).enumerate() {
            let is_last = (index + 1) * P::WIDTH >= lines;
            assert_eq!(
                ThreeParts::is_exceptional(panel),
                is_last && exceptional.is_some(),
                "mark of panel {index}"
            );
            for (rank, plane) in panel.chunks_exact(P::WIDTH * units).take(PARTS).enumerate() {
                for (column, element) in
                    (0..P::WIDTH).flat_map(|column| (0..2 * units).map(move |element| (column, element)))
                {
                    let line = index * P::WIDTH + column;
                    let (unit, half) = (element / 2, element % 2);
                    let at = match P::ORDER {
                        Order::AcrossDepth => unit * P::WIDTH + column,
                        Order::AlongDepth => unit / SIDE * SIDE * P::WIDTH + column * SIDE + unit % SIDE,
                    };
                    let found = (plane[at] >> (16 * half)) as u16;
                    let x =
                        if line < lines && element < depth { elements[place(line, element)] } else { 0.0 };
                    if !is_exceptional(x) {
                        let expected = parts_of(x)[rank].to_bits();
                        assert_eq!(
                            found, expected,
                            "{order:?}: part {rank} of {x:e}, line {line}, element {element}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn packed_parts_are_those_of_the_definition() {
        type A = RowPanels<crate::cpu::gemm::amx::SplitTiles>;
        type B = ColumnPanels<crate::cpu::gemm::amx::SplitTiles>;
        if !is_x86_feature_detected!("avx512bw") {
            println!("skipped: parts are packed by AVX-512, which this CPU lacks");
            return;
        }
        let mut state = 1_u32;
        let mut random = || {
            state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
            // Magnitudes that can be split, and zeros of both signs.
            let (sign, zero) = (state & 1 << 31, state.is_multiple_of(37));
            let bits = SPLIT_BITS.start + (state >> 1) % (SPLIT_BITS.end - SPLIT_BITS.start);
            f32::from_bits(sign | if zero { 0 } else { bits })
        };
        for (lines, depth) in [(32, 64), (33, 31), (70, 100), (1, 1), (16, 33)] {
            let elements: Vec<f32> = (0..(lines + 10) * (depth + 10)).map(|_| random()).collect();
            for order in [Order::AlongDepth, Order::AcrossDepth] {
                for value in [None, Some(f32::NAN), Some(1e-38), Some(-3e38)] {
                    check::<A>(order, lines, depth, elements.clone(), value);
                    check::<B>(order, lines, depth, elements.clone(), value);
                }
            }
        }
    }
}

//! Packing: a block of an operand becomes panels of 32-bit units in the order in which a micro-kernel
//! reads them. Layouts and types differ only here.
//!
//! A unit is what one lane multiplies at once: an f32, a bf16 widened to f32, or a pair of bf16 neighbours
//! along the depth. Blocks of 16 × 16 units are read the way they lie in memory, transposed if the panel
//! wants them the other way, and written; what lies beyond the operand is zero.

use half::bf16;

use super::{CpuLevel, Float};

/// Side of the blocks that are read, transposed and written at once.
const SIDE: usize = 16;

type Block = [[u32; SIDE]; SIDE];

/// Which neighbours lie side by side in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// Neighbours along the depth (the summed index).
    AlongDepth,
    /// Neighbours along the other index.
    AcrossDepth,
}

/// A matrix of a product, indexed by a row of A or column of B, and the depth.
pub(super) struct Operand<'a, T> {
    elements: &'a [T],
    stride: usize,
    order: Order,
}

impl<'a, T> Operand<'a, T> {
    /// A matrix whose lines, in the given order, are `stride` elements apart.
    pub(super) fn new(elements: &'a [T], stride: usize, order: Order) -> Self {
        Self { elements, stride, order }
    }

    /// Which neighbours lie side by side.
    pub(super) fn order(&self) -> Order {
        self.order
    }

    /// Line `index` of the matrix as stored.
    pub(super) fn line(&self, index: usize) -> &'a [T] {
        &self.elements[index * self.stride..][..self.stride]
    }
}

/// How elements become units.
pub(super) trait Unit {
    /// Type of the operand's elements.
    type Source: Float;
    /// Elements of one unit.
    const ELEMENTS: usize;
    /// The units of up to `SIDE · ELEMENTS` neighbours along the depth.
    fn along(elements: &[Self::Source]) -> [u32; SIDE];
    /// The units of up to `SIDE` neighbours across the depth: `lines` holds them at successive depths, one
    /// to `ELEMENTS` lines.
    fn across(lines: [&[Self::Source]; 2]) -> [u32; SIDE];
}

/// An f32.
pub(super) struct Single;

impl Unit for Single {
    type Source = f32;
    const ELEMENTS: usize = 1;

    #[inline(always)]
    fn along(elements: &[f32]) -> [u32; SIDE] {
        let mut units = [0; SIDE];
        units[..elements.len()].copy_from_slice(bytemuck::cast_slice(elements));
        units
    }

    #[inline(always)]
    fn across([line, _]: [&[f32]; 2]) -> [u32; SIDE] {
        Self::along(line)
    }
}

/// A bf16 as f32, for levels without bf16 arithmetic.
pub(super) struct Widened;

impl Unit for Widened {
    type Source = bf16;
    const ELEMENTS: usize = 1;

    #[inline(always)]
    fn along(elements: &[bf16]) -> [u32; SIDE] {
        let mut units = [0; SIDE];
        for (unit, element) in units.iter_mut().zip(elements) {
            *unit = u32::from(element.to_bits()) << 16;
        }
        units
    }

    #[inline(always)]
    fn across([line, _]: [&[bf16]; 2]) -> [u32; SIDE] {
        Self::along(line)
    }
}

/// Two bf16, the one of smaller depth in the lower half.
pub(super) struct BfloatPair;

impl Unit for BfloatPair {
    type Source = bf16;
    const ELEMENTS: usize = 2;

    #[inline(always)]
    fn along(elements: &[bf16]) -> [u32; SIDE] {
        let mut units = [0; SIDE];
        bytemuck::cast_slice_mut::<u32, bf16>(&mut units)[..elements.len()].copy_from_slice(elements);
        units
    }

    #[inline(always)]
    fn across([first, second]: [&[bf16]; 2]) -> [u32; SIDE] {
        let mut units = [0; SIDE];
        for (unit, element) in units.iter_mut().zip(first) {
            *unit = u32::from(element.to_bits());
        }
        for (unit, element) in units.iter_mut().zip(second) {
            *unit |= u32::from(element.to_bits()) << 16;
        }
        units
    }
}

/// Where panels go: panel after panel, each `width · depth` units.
pub(super) struct Panels<'a> {
    /// The panels' memory.
    pub(super) units: &'a mut [u32],
    /// Rows of A or columns of B in a panel.
    pub(super) width: usize,
    /// Depth of a panel in units.
    pub(super) depth: usize,
    /// Whether a panel holds `width` units side by side for each unit of depth, or, for each 16 units
    /// of depth, `width` lines of 16.
    pub(super) order: Order,
}

/// Packs `outer` rows of A (or columns of B) at `depth` elements. Both ranges must lie in the operand.
#[inline(always)]
pub(super) fn pack<U: Unit>(
    level: CpuLevel,
    operand: &Operand<'_, U::Source>,
    outer: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
    panels: Panels<'_>,
) {
    level.run(|| {
        let Panels { units, width, depth: panel_depth, order } = panels;
        for unit in (0..panel_depth).step_by(SIDE) {
            let start = (depth.start + unit * U::ELEMENTS).min(depth.end);
            let end = (start + SIDE * U::ELEMENTS).min(depth.end);
            let count = SIDE.min(panel_depth - unit);
            for (index, panel) in units.chunks_exact_mut(width * panel_depth).enumerate() {
                for column in (0..width).step_by(SIDE) {
                    let lanes = SIDE.min(width - column);
                    let first = (outer.start + index * width + column).min(outer.end);
                    let last = (first + lanes).min(outer.end);
                    let mut block = read::<U>(operand, first..last, start..end, lanes);
                    if operand.order != order {
                        transpose(level, &mut block);
                    }
                    match order {
                        Order::AcrossDepth => {
                            let target = &mut panel[unit * width..][..count * width];
                            for (line, row) in target.chunks_exact_mut(width).zip(&block) {
                                line[column..column + lanes].copy_from_slice(&row[..lanes]);
                            }
                        }
                        Order::AlongDepth => {
                            let target = &mut panel[unit * width + column * SIDE..][..lanes * SIDE];
                            target.copy_from_slice(block[..lanes].as_flattened());
                        }
                    }
                }
            }
        }
    });
}

/// The block's units, lines as they lie in the operand. `lanes` is the usual length of `outer`.
#[inline(always)]
fn read<U: Unit>(
    operand: &Operand<'_, U::Source>,
    outer: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
    lanes: usize,
) -> Block {
    let mut block = [[0; SIDE]; SIDE];
    let Operand { elements, stride, order } = operand;
    match order {
        Order::AlongDepth => {
            for (row, line) in block.iter_mut().zip(outer) {
                let line = &elements[line * stride..][depth.clone()];
                // A constant length makes the copy a few vector moves.
                *row = match line.first_chunk::<{ 2 * SIDE }>() {
                    Some(line) if U::ELEMENTS == 2 => U::along(line),
                    _ => match line.first_chunk::<SIDE>() {
                        Some(line) if U::ELEMENTS == 1 => U::along(line),
                        _ => U::along(line),
                    },
                };
            }
        }
        Order::AcrossDepth => {
            let width = outer.len();
            let line = |index: usize| {
                if index < depth.end { &elements[index * stride + outer.start..][..width] } else { &[] }
            };
            for (row, index) in block.iter_mut().zip(depth.clone().step_by(U::ELEMENTS)) {
                let (first, second) = (line(index), if U::ELEMENTS == 2 { line(index + 1) } else { &[] });
                *row = if width == lanes && second.len() == if U::ELEMENTS == 2 { lanes } else { 0 } {
                    U::across([&first[..lanes], if U::ELEMENTS == 2 { &second[..lanes] } else { &[] }])
                } else {
                    U::across([first, second])
                };
            }
        }
    }
    block
}

#[inline(always)]
fn transpose(level: CpuLevel, block: &mut Block) {
    #[cfg(target_arch = "x86_64")]
    {
        if level >= CpuLevel::Avx512 {
            // SAFETY: the level says that the CPU has these instructions.
            return unsafe { x86::transpose_avx512(block) };
        }
        if level >= CpuLevel::Avx2 {
            // SAFETY: as above.
            return unsafe { x86::transpose_avx2(block) };
        }
    }
    let source = *block;
    for (i, row) in block.iter_mut().enumerate() {
        for (j, unit) in row.iter_mut().enumerate() {
            *unit = source[j][i];
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Transposition by interleaving units, pairs of units, and quarters or halves of vectors.

    use std::arch::x86_64::*;

    use super::{Block, SIDE};

    #[target_feature(enable = "avx512f")]
    pub(super) fn transpose_avx512(block: &mut Block) {
        let zero = _mm512_setzero_si512();
        let mut rows = [zero; SIDE];
        for (row, units) in rows.iter_mut().zip(&*block) {
            // SAFETY: a line of the block is 16 units.
            *row = unsafe { _mm512_loadu_si512(units.as_ptr().cast()) };
        }
        // Quarter q of `quads[4 i + j]` holds column 4 q + j of rows 4 i to 4 i + 3.
        let mut quads = [zero; SIDE];
        for i in (0..SIDE).step_by(4) {
            let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
            let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            quads[i] = _mm512_unpacklo_epi64(ab_low, cd_low);
            quads[i + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
            quads[i + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
            quads[i + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
        }
        for j in 0..4 {
            let [a, b, c, d] = [quads[j], quads[4 + j], quads[8 + j], quads[12 + j]];
            let ab_even = _mm512_shuffle_i32x4::<0x88>(a, b);
            let ab_odd = _mm512_shuffle_i32x4::<0xdd>(a, b);
            let cd_even = _mm512_shuffle_i32x4::<0x88>(c, d);
            let cd_odd = _mm512_shuffle_i32x4::<0xdd>(c, d);
            rows[j] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
            rows[4 + j] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
            rows[8 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even);
            rows[12 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
        }
        for (row, units) in rows.iter().zip(block) {
            // SAFETY: a line of the block is 16 units.
            unsafe { _mm512_storeu_si512(units.as_mut_ptr().cast(), *row) };
        }
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn transpose_avx2(block: &mut Block) {
        let source = *block;
        for (row, column) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            let zero = _mm256_setzero_si256();
            let mut rows = [zero; 8];
            for (vector, units) in rows.iter_mut().zip(&source[row..]) {
                // SAFETY: eight units lie there, as `column` is 0 or 8.
                *vector = unsafe { _mm256_loadu_si256(units[column..].as_ptr().cast()) };
            }
            // Half h of `quads[4 i + j]` holds column 4 h + j of rows 4 i to 4 i + 3.
            let mut quads = [zero; 8];
            for i in [0, 4] {
                let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
                let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                quads[i] = _mm256_unpacklo_epi64(ab_low, cd_low);
                quads[i + 1] = _mm256_unpackhi_epi64(ab_low, cd_low);
                quads[i + 2] = _mm256_unpacklo_epi64(ab_high, cd_high);
                quads[i + 3] = _mm256_unpackhi_epi64(ab_high, cd_high);
            }
            for j in 0..4 {
                rows[j] = _mm256_permute2x128_si256::<0x20>(quads[j], quads[4 + j]);
                rows[4 + j] = _mm256_permute2x128_si256::<0x31>(quads[j], quads[4 + j]);
            }
            for (vector, units) in rows.iter().zip(&mut block[column..]) {
                // SAFETY: eight units lie there, as `row` is 0 or 8.
                unsafe { _mm256_storeu_si256(units[row..].as_mut_ptr().cast(), *vector) };
            }
        }
    }
}

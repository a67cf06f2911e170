//! The vectors and micro-kernels of AArch64: NEON for f32, and the bf16 products of FEAT_BF16.
//!
//! Both kernels hold a tile of 12 × 8 sums in 24 of 32 registers. Sums of bf16 products round to odd, which errs by less than
//! one unit in the last place, and subnormal numbers count as zero (Arm ARM, `BFDotAdd` and `BFMatMulAdd`). Rust has no stable intrinsics for
//! them, so they are inline assembly, one instruction at a time: the compiler allocates the registers.

use std::arch::{aarch64::*, asm};

use half::{bf16, f16};

use super::{
    kernel::{
        Columns, MicroKernel, Place, Rows, fetch, finish, outer_products_in_place, outer_products_of_lines,
    },
    lanes::{Dot, Lanes, dot, vector},
    operand::Order,
    store::Tile,
    thin::{MAX_ROWS, ThinKernel},
    transpose::{Block, SIDE, Square},
};

/// Rows of a tile.
const ROWS: usize = 12;
/// Columns of a tile.
const COLUMNS: usize = 8;

vector!(
    /// Four f32 lanes of NEON.
    F32x4(float32x4_t), Neon, "neon", 4, vdupq_n_f32(0.0),
    |units| vld1q_f32(units.cast()),
    |unit| vdupq_n_f32(f32::from_bits(unit)),
    |x, y, sums| vfmaq_f32(sums.0, x.0, y.0),
    vaddq_f32, vst1q_f32, transpose, transpose_square
);

vector!(
    /// Four lanes of FEAT_BF16, each summing the products of a pair of bf16.
    Bf16Dots(float32x4_t), NeonBf16, "neon,bf16", 4, vdupq_n_f32(0.0),
    |units| vld1q_f32(units.cast()),
    |unit| vdupq_n_f32(f32::from_bits(unit)),
    |x, y, sums| dot_products(sums.0, x.0, y.0),
    vaddq_f32, vst1q_f32, transpose, transpose_square
);

dot! {
    F32x4: f32, 1, |elements| Self::load(elements.cast());
    F32x4: bf16, 1, |elements| {
        Self(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(elements.cast()))))
    };
    F32x4: f16, 1, |elements| Self(widen_f16(vld1_u16(elements.cast())));
    Bf16Dots: bf16, 2, |elements| Self::load(elements.cast());
}

/// Adds to each sum the products of a pair of bf16.
///
/// # Safety
/// The CPU must have FEAT_BF16.
#[inline(always)]
unsafe fn dot_products(mut sums: float32x4_t, x: float32x4_t, y: float32x4_t) -> float32x4_t {
    // SAFETY: the caller promises the instruction, which touches registers only.
    unsafe {
        // The assembler may meet it in a copy of a loop that is not inlined into `Lanes::compiled`.
        asm!(
            ".arch_extension bf16",
            "bfdot {sums:v}.4s, {x:v}.8h, {y:v}.8h",
            sums = inout(vreg) sums,
            x = in(vreg) x,
            y = in(vreg) y,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Adds the product of a 2 × 4 matrix of bf16 and the transpose of another one to a 2 × 2 matrix of sums. All are row by row.
#[inline]
#[target_feature(enable = "neon,bf16")]
fn matrix_product(mut sums: float32x4_t, x: uint32x4_t, y: uint32x4_t) -> float32x4_t {
    // SAFETY: the instruction touches registers only.
    unsafe {
        asm!(
            "bfmmla {sums:v}.4s, {x:v}.8h, {y:v}.8h",
            sums = inout(vreg) sums,
            x = in(vreg) x,
            y = in(vreg) y,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Widens four f16 to f32.
#[inline(always)]
pub(super) fn widen_f16(elements: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: every AArch64 CPU has the instruction, which touches registers only.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {elements:v}.4h",
            wide = out(vreg) wide,
            elements = in(vreg) elements,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

/// Transposes a block in place.
#[inline(always)]
unsafe fn transpose(block: &mut Block) {
    let source = *block;
    let target = Square { first: block.as_mut_ptr().cast(), stride: SIDE };
    // SAFETY: both are squares.
    unsafe { transpose_square(Square { first: source.as_ptr().cast(), stride: SIDE }, target) };
}

/// Transposes a square into another place, 4 × 4 units at a time.
///
/// # Safety
/// Both squares must lie in memory that the caller may read and write, and must not overlap.
#[inline(always)]
unsafe fn transpose_square(source: Square<*const u32>, target: Square<*mut u32>) {
    for (row, column) in (0..SIDE * SIDE / 16).map(|square| (square / 4 * 4, square % 4 * 4)) {
        // SAFETY: four units lie at each of the places, as `row` and `column` are at most 12.
        unsafe {
            let from = source.first.add(row * source.stride + column);
            let to = target.first.add(column * target.stride + row);
            let rows = std::array::from_fn(|i| vld1q_u32(from.add(i * source.stride)));
            for (j, column) in transpose_four(rows).into_iter().enumerate() {
                vst1q_u32(to.add(j * target.stride), column);
            }
        }
    }
}

/// Transposes 4 × 4 units: interleaves pairs of lines, then pairs of pairs.
#[inline(always)]
pub(super) fn transpose_four([a, b, c, d]: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
    // SAFETY: NEON is the baseline of AArch64.
    unsafe {
        let (ac_low, ac_high) = (vzip1q_u32(a, c), vzip2q_u32(a, c));
        let (bd_low, bd_high) = (vzip1q_u32(b, d), vzip2q_u32(b, d));
        [
            vzip1q_u32(ac_low, bd_low),
            vzip2q_u32(ac_low, bd_low),
            vzip1q_u32(ac_high, bd_high),
            vzip2q_u32(ac_high, bd_high),
        ]
    }
}

/// f32 by NEON. An instruction multiplies a vector of B by one lane of a vector of A, so A needs no broadcast.
pub(super) struct Neon;

impl ThinKernel for Neon {
    const MOST_ROWS: usize = MAX_ROWS;
}

impl MicroKernel for Neon {
    type Vector = F32x4;
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;
    const TASK_ROWS: usize = 2 * ROWS;
    const DEPTH: usize = 1;
    const A_ORDER: Order = Order::AcrossDepth;
    const IS_IN_PLACE: bool = true;

    unsafe fn tile(depth: usize, a: Rows, b: Columns, tile: &mut Tile) {
        // SAFETY: the caller's promise; the tile has room for the sums.
        unsafe { Self::finished_tile(depth, a, b, &Place::whole(tile, COLUMNS)) }
    }

    unsafe fn finished_tile(depth: usize, a: Rows, b: Columns, place: &Place) {
        // SAFETY: the caller's promise.
        unsafe {
            match a {
                Rows::Packed(a) => lane_products(depth, a.cast(), b.units.cast(), place),
                Rows::Lines(first, stride) => {
                    outer_products_in_place::<F32x4, ROWS, { COLUMNS / 4 }>(depth, (first, stride), b, place);
                }
            }
        }
    }

    unsafe fn tile_of_lines(elements: *const u32, lines: &[u64], b: *const u32, tile: &mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { outer_products_of_lines::<F32x4, ROWS, { COLUMNS / 4 }>(elements, lines, b, tile) }
    }
}

/// Computes a tile of [`Neon`] of packed panels.
///
/// # Safety
/// As [`MicroKernel::finished_tile`].
#[inline(always)]
unsafe fn lane_products(depth: usize, mut a: *const f32, mut b: *const f32, place: &Place) {
    fetch::<ROWS>(place, COLUMNS);
    // SAFETY: the panels hold `depth` steps of `ROWS` and `COLUMNS` numbers; the caller promises room for the sums.
    unsafe {
        let mut sums = [[F32x4::zero(); COLUMNS / 4]; ROWS];
        for _ in 0..depth {
            let columns = [vld1q_f32(b), vld1q_f32(b.add(4))];
            for (index, rows) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let x = vld1q_f32(a.add(4 * index));
                for (j, y) in columns.into_iter().enumerate() {
                    rows[0][j].0 = vfmaq_laneq_f32::<0>(rows[0][j].0, y, x);
                    rows[1][j].0 = vfmaq_laneq_f32::<1>(rows[1][j].0, y, x);
                    rows[2][j].0 = vfmaq_laneq_f32::<2>(rows[2][j].0, y, x);
                    rows[3][j].0 = vfmaq_laneq_f32::<3>(rows[3][j].0, y, x);
                }
            }
            (a, b) = (a.add(ROWS), b.add(COLUMNS));
        }
        finish(sums, place);
    }
}

/// bf16 by matrix products: an instruction adds the product of two rows and two columns, four elements deep.
pub(in crate::cpu) struct NeonBf16;

impl ThinKernel for NeonBf16 {}

impl MicroKernel for NeonBf16 {
    type Vector = Bf16Dots;
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;
    const TASK_ROWS: usize = 2 * ROWS;
    const DEPTH: usize = 2;
    const A_ORDER: Order = Order::AlongDepth;
    const B_ORDER: Order = Order::AlongDepth;

    unsafe fn tile(depth: usize, a: Rows, b: Columns, tile: &mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { matrix_products(depth, a.panel(), b.units, tile) }
    }
}

/// Computes a tile of [`NeonBf16`].
///
/// # Safety
/// As [`MicroKernel::tile`].
#[target_feature(enable = "neon,bf16")]
unsafe fn matrix_products(depth: usize, mut a: *const u32, mut b: *const u32, tile: &mut Tile) {
    // SAFETY: the panels hold `depth / 2` steps of `ROWS` and `COLUMNS` pairs of units, and the tile is large enough.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); COLUMNS / 2]; ROWS / 2];
        for _ in 0..depth / NeonBf16::DEPTH {
            let columns: [uint32x4_t; COLUMNS / 2] = std::array::from_fn(|j| vld1q_u32(b.add(4 * j)));
            for (i, row) in sums.iter_mut().enumerate() {
                let x = vld1q_u32(a.add(4 * i));
                for (sum, y) in row.iter_mut().zip(columns) {
                    *sum = matrix_product(*sum, x, y);
                }
            }
            (a, b) = (a.add(2 * ROWS), b.add(2 * COLUMNS));
        }
        let out = tile.as_mut_ptr();
        for (i, row) in sums.iter().enumerate() {
            // A matrix of sums holds two columns of two rows.
            for (j, pair) in row.as_chunks::<2>().0.iter().enumerate() {
                let [left, right] = pair.map(|sums| vreinterpretq_f64_f32(sums));
                let (upper, lower) = (vzip1q_f64(left, right), vzip2q_f64(left, right));
                vst1q_f32(out.add(2 * i * COLUMNS + 4 * j), vreinterpretq_f32_f64(upper));
                vst1q_f32(out.add((2 * i + 1) * COLUMNS + 4 * j), vreinterpretq_f32_f64(lower));
            }
        }
    }
}

//! Vectors of integer products by NEON: `sdot` of FEAT_DotProd where the CPU has it, else widening products, and for eight rows `smmla` of
//! FEAT_I8MM.
//!
//! These products are of signed bytes, so that the codes of weights are made signed as they are loaded. Rust has no stable intrinsics for
//! `sdot` and `smmla`: they are inline assembly, one instruction at a time, and the compiler allocates the registers.

use std::arch::{aarch64::*, asm};

use super::{
    activations::RowGroup,
    integer_lanes::{GROUP_UNITS, IntegerLanes},
    neon_words::{LINES, NeonWords, VECTORS},
    run_products::{ByVectors, RunProducts, TILE_ROWS, TiledLanes},
    transpose::SIDE,
    word_lanes::WordLanes,
};
use crate::CpuLevel;

/// Vectors of NEON, with the dot products of FEAT_DotProd if `HAS_DOTS`. All give the same bits.
pub(super) struct NeonIntegers<const HAS_DOTS: bool>;

/// Makes codes of weights signed.
#[inline(always)]
fn signed(words: uint32x4_t) -> int8x16_t {
    // SAFETY: NEON is the baseline of AArch64.
    unsafe { vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_u32(words), vdupq_n_u8(0x80))) }
}

/// Adds to each sum the products of four codes of a line and the four codes in lane `LANE`.
///
/// # Safety
/// The CPU must have FEAT_DotProd.
#[inline(always)]
unsafe fn dot_products<const LANE: i32>(mut sums: int32x4_t, unit: int8x16_t, codes: int32x4_t) -> int32x4_t {
    // SAFETY: the caller promises the instruction, which touches registers only.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sums:v}.4s, {unit:v}.16b, {codes:v}.4b[{lane}]",
            sums = inout(vreg) sums,
            unit = in(vreg) unit,
            codes = in(vreg) codes,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Computes what [`dot_products`] does by products of 16 bits. Two of them fit 16 bits, as codes of activations are -127 at least.
#[inline(always)]
fn wide_products<const LANE: i32>(sums: int32x4_t, unit: int8x16_t, codes: int32x4_t) -> int32x4_t {
    // SAFETY: NEON is the baseline of AArch64.
    unsafe {
        let codes = vreinterpretq_s8_s32(vdupq_laneq_s32::<LANE>(codes));
        let low = vmull_s8(vget_low_s8(unit), vget_low_s8(codes));
        vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(unit, codes)))
    }
}

/// Adds the product of a 2 × 8 matrix of codes and the transpose of another one to a 2 × 2 matrix of sums. All are row by row.
///
/// # Safety
/// The CPU must have FEAT_I8MM.
#[inline(always)]
unsafe fn matrix_product(mut sums: int32x4_t, rows: int8x16_t, lines: int8x16_t) -> int32x4_t {
    // SAFETY: the caller promises the instruction, which touches registers only.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sums:v}.4s, {rows:v}.16b, {lines:v}.16b",
            sums = inout(vreg) sums,
            rows = in(vreg) rows,
            lines = in(vreg) lines,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

impl<const HAS_DOTS: bool> NeonIntegers<HAS_DOTS> {
    /// Adds to each sum the products of four codes of a line and the four codes in lane `LANE`.
    ///
    /// # Safety
    /// The CPU must have the instructions.
    #[inline(always)]
    unsafe fn dot_lane<const LANE: i32>(sums: int32x4_t, unit: int8x16_t, codes: int32x4_t) -> int32x4_t {
        if HAS_DOTS {
            // SAFETY: the caller's promise.
            unsafe { dot_products::<LANE>(sums, unit, codes) }
        } else {
            wide_products::<LANE>(sums, unit, codes)
        }
    }

    /// Adds the products of a run and of the lines of `COUNT` registers from `first` on, whose sums stay in registers. Each instruction
    /// takes the codes of one row from a register with those of four.
    ///
    /// # Safety
    /// The CPU must have the instructions.
    #[inline(always)]
    unsafe fn add_lines<const ROWS: usize, const COUNT: usize>(
        products: &mut [[int32x4_t; VECTORS]; ROWS],
        first: usize,
        codes: &[[i32; ROWS]],
        units: &[[u32; SIDE]],
    ) {
        let mut sums: [[int32x4_t; COUNT]; ROWS] =
            std::array::from_fn(|row| std::array::from_fn(|index| products[row][first + index]));
        for (codes, words) in codes.iter().zip(units) {
            // SAFETY: a unit is four registers, and four codes are one; the caller's promise.
            unsafe {
                let unit: [int8x16_t; COUNT] = std::array::from_fn(|index| {
                    signed(vld1q_u32(words.as_ptr().add((first + index) * LINES)))
                });
                let (fours, rest) = codes.as_chunks::<4>();
                let (sums, sums_of_rest) = sums.as_chunks_mut::<4>();
                for (sums, codes) in sums.iter_mut().zip(fours) {
                    let codes = vld1q_s32(codes.as_ptr());
                    for (index, unit) in unit.into_iter().enumerate() {
                        sums[0][index] = Self::dot_lane::<0>(sums[0][index], unit, codes);
                        sums[1][index] = Self::dot_lane::<1>(sums[1][index], unit, codes);
                        sums[2][index] = Self::dot_lane::<2>(sums[2][index], unit, codes);
                        sums[3][index] = Self::dot_lane::<3>(sums[3][index], unit, codes);
                    }
                }
                for (sums, codes) in sums_of_rest.iter_mut().zip(rest) {
                    let codes = vdupq_n_s32(*codes);
                    for (sums, unit) in sums.iter_mut().zip(unit) {
                        *sums = Self::dot_lane::<0>(*sums, unit, codes);
                    }
                }
            }
        }
        for (products, sums) in products.iter_mut().zip(&sums) {
            products[first..first + COUNT].copy_from_slice(sums);
        }
    }
}

impl<const HAS_DOTS: bool> IntegerLanes for NeonIntegers<HAS_DOTS> {
    const SHIFT: i32 = 128;
    type Words = NeonWords;
    type Unit = [int8x16_t; VECTORS];
    type Integers = [int32x4_t; VECTORS];
    type Floats = [float32x4_t; VECTORS];

    #[inline(always)]
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn unit(words: &[u32; SIDE]) -> Self::Unit {
        // SAFETY: NEON is the baseline of AArch64, here and below.
        unsafe { Self::unit_of(NeonWords::load(words)) }
    }

    #[inline(always)]
    unsafe fn unit_of(words: NeonWords) -> Self::Unit {
        words.0.map(signed)
    }

    #[inline(always)]
    unsafe fn decoded(numbers: [float32x4_t; VECTORS]) -> Self::Floats {
        numbers
    }

    #[inline(always)]
    unsafe fn splat(integer: i32) -> Self::Integers {
        // SAFETY: as above.
        unsafe { [vdupq_n_s32(integer); VECTORS] }
    }

    #[inline(always)]
    unsafe fn dot(mut sums: Self::Integers, unit: Self::Unit, codes: i32) -> Self::Integers {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = vdupq_n_s32(codes);
            for (sums, unit) in sums.iter_mut().zip(unit) {
                *sums = Self::dot_lane::<0>(*sums, unit, codes);
            }
        }
        sums
    }

    /// Sums of more than four rows and all lines would take all registers: of those rows half of the lines are taken at a time.
    #[inline(always)]
    unsafe fn add_run<const ROWS: usize>(
        products: &mut [Self::Integers; ROWS],
        codes: &[[i32; ROWS]],
        units: &[[u32; SIDE]],
    ) {
        const HALF: usize = VECTORS / 2;
        // SAFETY: the caller's promise.
        unsafe {
            if ROWS <= 4 {
                Self::add_lines::<ROWS, VECTORS>(products, 0, codes, units);
            } else {
                Self::add_lines::<ROWS, HALF>(products, 0, codes, units);
                Self::add_lines::<ROWS, HALF>(products, HALF, codes, units);
            }
        }
    }

    #[inline(always)]
    unsafe fn floats(numbers: &[f32; SIDE]) -> Self::Floats {
        // SAFETY: 16 numbers.
        std::array::from_fn(|index| unsafe { vld1q_f32(numbers.as_ptr().add(index * LINES)) })
    }

    #[inline(always)]
    unsafe fn scale(numbers: Self::Floats, factor: f32) -> Self::Floats {
        // SAFETY: as above.
        numbers.map(|numbers| unsafe { vmulq_n_f32(numbers, factor) })
    }

    #[inline(always)]
    unsafe fn add_scaled(mut sums: Self::Floats, numbers: Self::Floats, factor: f32) -> Self::Floats {
        for (sums, numbers) in sums.iter_mut().zip(numbers) {
            // SAFETY: as above.
            *sums = unsafe { vfmaq_n_f32(*sums, numbers, factor) };
        }
        sums
    }

    #[inline(always)]
    unsafe fn add_products(
        mut sums: Self::Floats,
        integers: Self::Integers,
        factors: Self::Floats,
    ) -> Self::Floats {
        for (sums, (integers, factors)) in sums.iter_mut().zip(integers.into_iter().zip(factors)) {
            // SAFETY: as above.
            *sums = unsafe { vfmaq_f32(*sums, vcvtq_f32_s32(integers), factors) };
        }
        sums
    }

    #[inline(always)]
    unsafe fn store(numbers: Self::Floats, target: &mut [f32; SIDE]) {
        // SAFETY: room for 16 numbers; NEON is the baseline.
        unsafe { NeonWords::store_floats(numbers, target) };
    }
}

impl TiledLanes for NeonIntegers<false> {
    type Tiles = ByVectors;
}

impl TiledLanes for NeonIntegers<true> {
    type Tiles = ByMatrices;

    fn has_tiles(level: CpuLevel) -> bool {
        matches!(level, CpuLevel::Neon | CpuLevel::NeonBf16)
            && std::arch::is_aarch64_feature_detected!("i8mm")
    }
}

/// Products by the matrices of FEAT_I8MM, whose groups have the codes of one row after the other.
pub(super) struct ByMatrices;

/// Pairs of rows of a group, and pairs of lines that are multiplied with it at a time: their matrices of sums fill half of the registers.
const PAIRS: usize = TILE_ROWS / 2;

impl RunProducts<NeonIntegers<true>, TILE_ROWS> for ByMatrices {
    #[inline(always)]
    unsafe fn add(
        products: &mut [[int32x4_t; VECTORS]; TILE_ROWS],
        group: &RowGroup<TILE_ROWS>,
        run: usize,
        _: &[[i32; TILE_ROWS]],
        units: &[[u32; SIDE]],
    ) {
        let codes = &group.codes.as_flattened()[run * units.len()..];
        for half in 0..2 {
            // SAFETY: eight rows of eight words, of which the run begins at a whole word; the caller's promise.
            let sums = unsafe { matrix_sums(codes, units, half * 2 * PAIRS) };
            for (rows, sums) in products.as_chunks_mut::<2>().0.iter_mut().zip(&sums) {
                let sums = sums.as_chunks::<2>().0;
                for (index, pair) in (half * sums.len()..).zip(sums) {
                    for (row, sums) in rows.iter_mut().zip(rows_of(*pair)) {
                        // SAFETY: NEON is the baseline of AArch64.
                        row[index] = unsafe { vaddq_s32(row[index], sums) };
                    }
                }
            }
        }
    }
}

/// Returns the sums of each of two rows and four lines, from their matrices with two of the lines each.
#[inline(always)]
fn rows_of(pair: [int32x4_t; 2]) -> [int32x4_t; 2] {
    // SAFETY: NEON is the baseline of AArch64.
    unsafe {
        let [left, right] = pair.map(|sums| vreinterpretq_s64_s32(sums));
        [vzip1q_s64(left, right), vzip2q_s64(left, right)].map(|sums| vreinterpretq_s32_s64(sums))
    }
}

/// Returns the sums of a run of eight rows and eight lines from `first` on: of each pair of rows a matrix for each pair of lines. The words
/// of a row are [`GROUP_UNITS`] apart from those of the next one.
///
/// # Safety
/// The CPU must have FEAT_I8MM, and the rows as many words as there are units, a multiple of four.
#[inline(always)]
unsafe fn matrix_sums(codes: &[i32], units: &[[u32; SIDE]], first: usize) -> [[int32x4_t; PAIRS]; PAIRS] {
    // SAFETY: NEON is the baseline of AArch64.
    let mut sums = [[unsafe { vdupq_n_s32(0) }; PAIRS]; PAIRS];
    for (step, units) in units.as_chunks::<4>().0.iter().enumerate() {
        // SAFETY: the caller's promises.
        unsafe {
            // Of each pair of rows, eight codes of both, and the next eight.
            let rows: [[int64x2_t; 2]; PAIRS] = std::array::from_fn(|pair| {
                let of_row = |row: usize| {
                    vreinterpretq_s64_s32(vld1q_s32(codes.as_ptr().add(row * GROUP_UNITS + 4 * step)))
                };
                let (upper, lower) = (of_row(2 * pair), of_row(2 * pair + 1));
                [vzip1q_s64(upper, lower), vzip2q_s64(upper, lower)]
            });
            for (half, [left, right]) in units.as_chunks::<2>().0.iter().enumerate() {
                for quad in 0..PAIRS / 2 {
                    let [left, right] =
                        [left, right].map(|unit| vld1q_u32(unit.as_ptr().add(first + quad * LINES)));
                    // Eight codes of two lines each.
                    let lines = [vzip1q_u32(left, right), vzip2q_u32(left, right)].map(signed);
                    for (rows, sums) in rows.iter().zip(&mut sums) {
                        let rows = vreinterpretq_s8_s64(rows[half]);
                        for (sums, lines) in sums[2 * quad..].iter_mut().zip(lines) {
                            *sums = matrix_product(*sums, rows, lines);
                        }
                    }
                }
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use std::arch::is_aarch64_feature_detected;

    use lockstep_plan::random::Philox;

    use super::{super::integer_lanes::PlainIntegers, *};

    /// Codes of a group of activations, of which each row is a column, and units of weights.
    type Codes<const ROWS: usize> = ([[i32; ROWS]; GROUP_UNITS], [[u32; SIDE]; GROUP_UNITS]);

    /// Returns random codes of activations, -127 to 127, and of weights.
    fn codes<const ROWS: usize>(seed: u64) -> Codes<ROWS> {
        let philox = Philox::new(seed);
        let mut next = 0..;
        let mut random = |count: f64| {
            let counter = next.next().unwrap();
            (philox.uniform(counter) * count) as u8
        };
        let mut signed = || i32::from_le_bytes([(); 4].map(|()| random(255.0).wrapping_sub(127)));
        let activations = [(); GROUP_UNITS].map(|()| [(); ROWS].map(|()| signed()));
        let weights = [(); GROUP_UNITS].map(|()| [(); SIDE].map(|()| [(); 4].map(|()| random(256.0))));
        (activations, weights.map(|unit| unit.map(u32::from_le_bytes)))
    }

    /// Returns sums that begin with the number of their row.
    fn starts<V: IntegerLanes, const ROWS: usize>() -> [V::Integers; ROWS] {
        // SAFETY: every CPU has the instructions.
        std::array::from_fn(|row| unsafe { V::splat(row as i32) })
    }

    fn integers<const ROWS: usize>(sums: [[int32x4_t; VECTORS]; ROWS]) -> [[i32; SIDE]; ROWS] {
        sums.map(|sums| {
            let mut integers = [0; SIDE];
            for (target, sums) in integers.as_chunks_mut::<LINES>().0.iter_mut().zip(sums) {
                // SAFETY: room for four integers.
                unsafe { vst1q_s32(target.as_mut_ptr(), sums) };
            }
            integers
        })
    }

    /// Compares runs of `ROWS` rows with plain arithmetic, whose weights are unsigned.
    fn compare_vectors<const HAS_DOTS: bool, const ROWS: usize>() {
        for run_units in [4, GROUP_UNITS] {
            let (codes, units) = codes::<ROWS>(ROWS as u64);
            let (codes, units) = (&codes[..run_units], &units[..run_units]);
            let mut found = starts::<NeonIntegers<HAS_DOTS>, ROWS>();
            let mut expected = starts::<PlainIntegers, ROWS>();
            // SAFETY: the caller has seen that the CPU has the instructions.
            unsafe {
                NeonIntegers::<HAS_DOTS>::add_run(&mut found, codes, units);
                PlainIntegers::add_run(&mut expected, codes, units);
            }
            for (row, expected) in expected.iter_mut().enumerate() {
                let sum: i32 = codes
                    .iter()
                    .flat_map(|codes| codes[row].to_le_bytes())
                    .map(|code| i32::from(code.cast_signed()))
                    .sum();
                for expected in expected {
                    *expected -= NeonIntegers::<HAS_DOTS>::SHIFT * sum;
                }
            }
            assert_eq!(
                integers(found),
                expected,
                "{ROWS} rows, runs of {run_units}, dot products: {HAS_DOTS}"
            );
        }
    }

    #[test]
    fn products_of_a_run_are_those_of_plain_arithmetic() {
        macro_rules! compare {
            ($($rows:literal)*) => {$(
                compare_vectors::<false, $rows>();
                if is_aarch64_feature_detected!("dotprod") {
                    compare_vectors::<true, $rows>();
                }
            )*};
        }
        compare!(1 2 3 4 5 6 7 8);
    }

    #[test]
    fn matrices_give_the_sums_of_vectors() {
        if !is_aarch64_feature_detected!("i8mm") {
            return;
        }
        for (seed, run_units) in (0..20).flat_map(|seed| [(seed, 4), (seed, GROUP_UNITS)]) {
            let (codes, units) = codes::<TILE_ROWS>(seed);
            let zeros = [[0.0; TILE_ROWS]; 2];
            let mut group = RowGroup { codes, scales: zeros[0], starts: [[0; TILE_ROWS]; 2], terms: zeros };
            group.order_by_rows();
            for run in 0..GROUP_UNITS / run_units {
                let words = run * run_units..(run + 1) * run_units;
                let mut found = starts::<NeonIntegers<true>, TILE_ROWS>();
                let mut expected = found;
                // SAFETY: the CPU has the instructions, and the codes are ordered by rows.
                unsafe {
                    ByMatrices::add(&mut found, &group, run, &[], &units[words.clone()]);
                    NeonIntegers::<true>::add_run(&mut expected, &codes[words.clone()], &units[words]);
                }
                assert_eq!(
                    integers(found),
                    integers(expected),
                    "run {run} of {run_units} units, seed {seed}"
                );
            }
        }
    }
}

//! Transposition of a block of 16 × 16 units: interleaves units, then pairs of units, then quarters or halves of
//! vectors.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use half::bf16;

use crate::cpu::simd::prefetch;

/// Side of the blocks that are read, transposed and written at once.
pub(in crate::cpu) const SIDE: usize = 16;

/// A square of units.
pub(in crate::cpu) type Block = [[u32; SIDE]; SIDE];

/// A square of units in memory: the address of the first line, and the units from one line to the next.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Square<P> {
    pub(in crate::cpu) first: P,
    pub(in crate::cpu) stride: usize,
}

impl Square<*const u32> {
    /// Fetches the lines of the square that lies `bytes` further into the cache.
    #[inline(always)]
    pub(super) fn fetch(self, bytes: usize) {
        for line in 0..SIDE {
            prefetch(self.first.wrapping_add(line * self.stride).wrapping_byte_add(bytes));
        }
    }
}

/// Transposes in portable code.
#[inline(always)]
pub(super) fn transpose(block: &mut Block) {
    let source = *block;
    for (i, row) in block.iter_mut().enumerate() {
        for (j, unit) in row.iter_mut().enumerate() {
            *unit = source[j][i];
        }
    }
}

/// Transposes a square into another place in portable code.
///
/// # Safety
/// Both squares must lie in memory that the caller may read and write, and must not overlap.
#[inline(always)]
pub(super) unsafe fn transpose_square(source: Square<*const u32>, target: Square<*mut u32>) {
    for i in 0..SIDE {
        for j in 0..SIDE {
            // SAFETY: the caller's promise.
            unsafe {
                let unit = source.first.add(i * source.stride + j).read_unaligned();
                target.first.add(j * target.stride + i).write(unit);
            }
        }
    }
}

/// Transposes by AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_avx512(block: &mut Block) {
    let square = Square { first: block.as_mut_ptr().cast::<u32>(), stride: SIDE };
    // SAFETY: the block is a square, which is read before it is written.
    unsafe { transpose_square_avx512(Square { first: square.first.cast_const(), stride: SIDE }, square) };
}

/// Transposes a square into another place, or the same, by AVX-512.
///
/// # Safety
/// Both squares must lie in memory that the caller may read and write.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose_square_avx512(source: Square<*const u32>, target: Square<*mut u32>) {
    let mut rows = [_mm512_setzero_si512(); SIDE];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: a line of the square is 16 units.
        *row = unsafe { _mm512_loadu_si512(source.first.add(i * source.stride).cast()) };
    }
    transpose_vectors(&mut rows);
    for (i, row) in rows.iter().enumerate() {
        // SAFETY: a line of the square is 16 units.
        unsafe { _mm512_storeu_si512(target.first.add(i * target.stride).cast(), *row) };
    }
}

/// Transposes lines of bf16 as [`Lanes::transpose_pairs`](super::lanes::Lanes::transpose_pairs) does. Pairs are made by instructions that
/// work on each quarter of a vector, so that the two halves of a line's quarters are transposed apart.
///
/// # Safety
/// The CPU must have the instructions, the lines 32 elements each, and the target room for 32 lines of 16 units.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn transpose_pairs_avx512(lines: *const bf16, stride: usize, target: Square<*mut u32>) {
    let zero = _mm512_setzero_si512();
    let (mut low, mut high) = ([zero; SIDE], [zero; SIDE]);
    for (unit, (low, high)) in low.iter_mut().zip(&mut high).enumerate() {
        // SAFETY: a line is 32 elements.
        let [first, second] = [2 * unit, 2 * unit + 1]
            .map(|line| unsafe { _mm512_loadu_si512(lines.add(line * stride).cast()) });
        *low = _mm512_unpacklo_epi16(first, second);
        *high = _mm512_unpackhi_epi16(first, second);
    }
    for (half, mut rows) in [low, high].into_iter().enumerate() {
        transpose_vectors(&mut rows);
        for (column, row) in rows.iter().enumerate() {
            let element = column / 4 * 8 + half * 4 + column % 4;
            // SAFETY: the target has a line of 16 units for each element.
            unsafe { _mm512_storeu_si512(target.first.add(element * target.stride).cast(), *row) };
        }
    }
}

/// Transposes 16 vectors of 16 units.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_vectors(rows: &mut [__m512i; SIDE]) {
    // Quarter q of `quads[4 i + j]` holds column 4 q + j of rows 4 i to 4 i + 3.
    let mut quads = [_mm512_setzero_si512(); SIDE];
    for i in (0..SIDE).step_by(4) {
        let quad = transpose_quarters([rows[i], rows[i + 1], rows[i + 2], rows[i + 3]]);
        quads[i..i + 4].copy_from_slice(&quad);
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
}

/// Transposes 4 × 4 units in each quarter of four vectors.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_quarters([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab_low, cd_low),
        _mm512_unpackhi_epi64(ab_low, cd_low),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// Transposes by AVX2.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn transpose_avx2(block: &mut Block) {
    let source = *block;
    let target = Square { first: block.as_mut_ptr().cast(), stride: SIDE };
    // SAFETY: both are squares.
    unsafe { transpose_square_avx2(Square { first: source.as_ptr().cast(), stride: SIDE }, target) };
}

/// Transposes a square into another place by AVX2.
///
/// # Safety
/// Both squares must lie in memory that the caller may read and write, and must not overlap.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn transpose_square_avx2(source: Square<*const u32>, target: Square<*mut u32>) {
    for (row, column) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
        let zero = _mm256_setzero_si256();
        let mut rows = [zero; 8];
        for (i, vector) in rows.iter_mut().enumerate() {
            // SAFETY: eight units lie there, as `row` and `column` are 0 or 8.
            let units = unsafe { source.first.add((row + i) * source.stride + column) };
            // SAFETY: as above.
            *vector = unsafe { _mm256_loadu_si256(units.cast()) };
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
        for (i, vector) in rows.iter().enumerate() {
            // SAFETY: eight units lie there, as `row` and `column` are 0 or 8.
            let units = unsafe { target.first.add((column + i) * target.stride + row) };
            // SAFETY: as above.
            unsafe { _mm256_storeu_si256(units.cast(), *vector) };
        }
    }
}

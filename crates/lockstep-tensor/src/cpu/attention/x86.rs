//! The registers of AVX-512 and AVX2 with FMA: each operation of [`Lanes`] in the intrinsics of its level.
//!
//! A value can only be made on a CPU that has the level, so its methods may use the level's instructions.

use std::arch::x86_64::*;

use lockstep_plan::random::Philox;

use super::lanes::{BLOCK, EXP2, Lanes, ROWS};
use crate::{
    CpuLevel,
    cpu::simd::{self, inlined},
};

/// Spreads the bits of each word's mask to every fourth bit: bit `g` of `words[i]` becomes bit `4g + i`.
#[inline(always)]
unsafe fn interleave(words: [u64; 4]) -> u64 {
    const EVERY_FOURTH: u64 = 0x1111_1111_1111_1111;
    // SAFETY: both levels have BMI2.
    unsafe {
        _pdep_u64(words[0], EVERY_FOURTH)
            | _pdep_u64(words[1], EVERY_FOURTH << 1)
            | _pdep_u64(words[2], EVERY_FOURTH << 2)
            | _pdep_u64(words[3], EVERY_FOURTH << 3)
    }
}

/// Implements the operations of [`Lanes`] that are one intrinsic on both levels.
macro_rules! arithmetic {
    (splat: $splat:ident, load: $load:ident, store: $store:ident, mul_add: $mul_add:ident,
     add: $add:ident, sub: $sub:ident, mul: $mul:ident, div: $div:ident, max: $max:ident) => {
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: the caller promises the level.
            Self(unsafe { $splat(x) })
        }

        #[inline(always)]
        unsafe fn load(pointer: *const f32) -> Self {
            // SAFETY: the caller promises the level and readable memory.
            Self(unsafe { $load(pointer) })
        }

        #[inline(always)]
        unsafe fn store(self, pointer: *mut f32) {
            // SAFETY: a value exists only on a CPU of the level; the caller promises writable memory.
            unsafe { $store(pointer, self.0) }
        }

        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: a value exists only on a CPU of the level.
            Self(unsafe { $mul_add(self.0, b.0, c.0) })
        }

        #[inline(always)]
        fn add(self, b: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { $add(self.0, b.0) })
        }

        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { $sub(self.0, b.0) })
        }

        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { $mul(self.0, b.0) })
        }

        #[inline(always)]
        fn div(self, b: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { $div(self.0, b.0) })
        }

        #[inline(always)]
        fn max(self, b: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { $max(b.0, self.0) })
        }
    };
}

/// Sixteen lanes of AVX-512.
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

impl Lanes for Avx512 {
    const LEVEL: CpuLevel = CpuLevel::Avx512;
    const LANES: usize = 16;
    const TILE_REGISTERS: usize = 4;

    #[inline(always)]
    fn run<R>(work: impl FnOnce() -> R) -> R {
        // SAFETY: a queue chooses these lanes only if the CPU has the level.
        unsafe { simd::avx512(work) }
    }

    arithmetic! {
        splat: _mm512_set1_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps, mul_add: _mm512_fmadd_ps,
        add: _mm512_add_ps, sub: _mm512_sub_ps, mul: _mm512_mul_ps, div: _mm512_div_ps,
        max: _mm512_max_ps
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        // SAFETY: as above.
        unsafe {
            // The maximum returns its second operand if either is NaN. The lower limit keeps `r` finite.
            let x = _mm512_max_ps(_mm512_set1_ps(-200.0), self.0);
            let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let r = _mm512_sub_ps(x, n);
            let mut p = _mm512_set1_ps(EXP2[5]);
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2[4]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2[3]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2[2]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2[1]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2[0]));
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
            Self(_mm512_scalef_ps(p, n))
        }
    }

    #[inline(always)]
    fn select(self, bits: u64, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_mask_mov_ps(other.0, bits as __mmask16, self.0) })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as above.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }

    #[inline(always)]
    fn maximum(self) -> f32 {
        // SAFETY: as above.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }

    #[inline(always)]
    fn sums(registers: &[Self; ROWS]) -> [f32; ROWS] {
        // SAFETY: as above.
        reduce_512(registers, inlined!(|a, b| unsafe { _mm512_add_ps(a, b) }))
    }

    #[inline(always)]
    fn maximums(registers: &[Self; ROWS]) -> [f32; ROWS] {
        // SAFETY: as above.
        reduce_512(registers, inlined!(|a, b| unsafe { _mm512_max_ps(a, b) }))
    }

    #[inline(always)]
    unsafe fn transpose(source: *const f32, row: usize, target: *mut f32) {
        // SAFETY: the caller promises the level and the squares.
        unsafe {
            // Pairs, then quadruples of rows inside each 128-bit quarter, then the quarters themselves.
            let x: [__m512; 16] = std::array::from_fn(inlined!(|i| _mm512_loadu_ps(source.add(i * row))));
            let mut y = x;
            for i in (0..16).step_by(2) {
                y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
                y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
            }
            let mut z = y;
            for i in (0..16).step_by(4) {
                let y: [__m512d; 4] = std::array::from_fn(inlined!(|j| _mm512_castps_pd(y[i + j])));
                z[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(y[0], y[2]));
                z[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(y[0], y[2]));
                z[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(y[1], y[3]));
                z[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(y[1], y[3]));
            }
            for j in 0..4 {
                // `z[4a + j]` holds rows 4a.. of columns j, 4 + j, 8 + j, 12 + j, one to a quarter.
                let even01 = _mm512_shuffle_f32x4::<0b10_00_10_00>(z[j], z[4 + j]);
                let odd01 = _mm512_shuffle_f32x4::<0b11_01_11_01>(z[j], z[4 + j]);
                let even23 = _mm512_shuffle_f32x4::<0b10_00_10_00>(z[8 + j], z[12 + j]);
                let odd23 = _mm512_shuffle_f32x4::<0b11_01_11_01>(z[8 + j], z[12 + j]);
                let columns = [
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(even01, even23),
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(odd01, odd23),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(even01, even23),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(odd01, odd23),
                ];
                for (quarter, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_ps(target.add((4 * quarter + j) * BLOCK), column);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn keep_bits(key: [u32; 2], counter: [u32; 4], threshold: u32) -> u64 {
        // SAFETY: the caller promises the level.
        unsafe {
            let m0 = _mm512_set1_epi32(Philox::MULTIPLIERS[0] as i32);
            let m1 = _mm512_set1_epi32(Philox::MULTIPLIERS[1] as i32);
            let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let mut c = counter.map(|word| _mm512_set1_epi32(word as i32));
            c[2] = _mm512_add_epi32(c[2], lane);
            let mut k = key;
            for _ in 0..10 {
                let (high0, low0) = multiply_512(c[0], m0);
                let (high1, low1) = multiply_512(c[2], m1);
                // 0x96 is the three-way exclusive or.
                let c0 = _mm512_ternarylogic_epi32::<0x96>(high1, c[1], _mm512_set1_epi32(k[0] as i32));
                let c2 = _mm512_ternarylogic_epi32::<0x96>(high0, c[3], _mm512_set1_epi32(k[1] as i32));
                c = [c0, low1, c2, low0];
                k = [k[0].wrapping_add(Philox::WEYL[0]), k[1].wrapping_add(Philox::WEYL[1])];
            }
            let threshold = _mm512_set1_epi32(threshold as i32);
            interleave(c.map(|word| u64::from(_mm512_cmpge_epu32_mask(word, threshold))))
        }
    }
}

/// Reduces each register, in the order of `_mm512_reduce_add_ps`: the halves of a register, then the halves of those.
/// A step takes two registers at a time and leaves half as many.
#[inline(always)]
fn reduce_512(registers: &[Avx512; ROWS], operation: impl Fn(__m512, __m512) -> __m512) -> [f32; ROWS] {
    // SAFETY: a value exists only on a CPU of the level.
    unsafe {
        // Two quarters of each of two rows, `i` and `i + 4`.
        let halves: [__m512; 8] = std::array::from_fn(inlined!(|i| {
            let row = i % 4 + i / 4 * 8;
            let (a, b) = (registers[row].0, registers[row + 4].0);
            let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
            operation(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b))
        }));
        // One quarter of each of the rows `i`, `i + 4`, `i + 8` and `i + 12`.
        let quarters: [__m512; 4] = std::array::from_fn(inlined!(|i| {
            let (a, b) = (halves[i], halves[i + 4]);
            let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
            operation(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
        }));
        // Two lanes of each row.
        let pairs: [__m512; 2] = std::array::from_fn(inlined!(|i| {
            let a = _mm512_castps_pd(quarters[2 * i]);
            let b = _mm512_castps_pd(quarters[2 * i + 1]);
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            operation(low, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
        }));
        let even = _mm512_shuffle_ps::<0b10_00_10_00>(pairs[0], pairs[1]);
        let reduced = operation(even, _mm512_shuffle_ps::<0b11_01_11_01>(pairs[0], pairs[1]));
        let mut rows = [0.0; ROWS];
        _mm512_storeu_ps(rows.as_mut_ptr(), reduced);
        rows
    }
}

/// Returns the high and low halves of the 64-bit products of each lane.
#[inline(always)]
unsafe fn multiply_512(a: __m512i, b: __m512i) -> (__m512i, __m512i) {
    // SAFETY: called from `Avx512::keep_bits` only.
    unsafe {
        let even = _mm512_mul_epu32(a, b);
        let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(a), b);
        (
            _mm512_mask_shuffle_epi32::<0b11_11_01_01>(odd, 0x5555, even),
            _mm512_mask_shuffle_epi32::<0b10_10_00_00>(even, 0xAAAA, odd),
        )
    }
}

/// Eight lanes of AVX2 with FMA.
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256);

impl Lanes for Avx2 {
    const LEVEL: CpuLevel = CpuLevel::Avx2;
    const LANES: usize = 8;
    const TILE_REGISTERS: usize = 2;

    #[inline(always)]
    fn run<R>(work: impl FnOnce() -> R) -> R {
        // SAFETY: a queue chooses these lanes only if the CPU has the level.
        unsafe { simd::avx2(work) }
    }

    arithmetic! {
        splat: _mm256_set1_ps, load: _mm256_loadu_ps, store: _mm256_storeu_ps, mul_add: _mm256_fmadd_ps,
        add: _mm256_add_ps, sub: _mm256_sub_ps, mul: _mm256_mul_ps, div: _mm256_div_ps,
        max: _mm256_max_ps
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        // SAFETY: as above.
        unsafe {
            let x = _mm256_max_ps(_mm256_set1_ps(-127.0), self.0);
            let x = _mm256_min_ps(_mm256_set1_ps(128.0), x);
            let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let r = _mm256_sub_ps(x, n);
            let mut p = _mm256_set1_ps(EXP2[5]);
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP2[4]));
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP2[3]));
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP2[2]));
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP2[1]));
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP2[0]));
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0));
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            Self(_mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))))
        }
    }

    #[inline(always)]
    fn select(self, bits: u64, other: Self) -> Self {
        // SAFETY: as above.
        unsafe {
            let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let chosen = _mm256_and_si256(_mm256_set1_epi32(bits as i32), lane);
            let mask = _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, lane));
            Self(_mm256_blendv_ps(other.0, self.0, mask))
        }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as above.
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }

    #[inline(always)]
    fn maximum(self) -> f32 {
        // SAFETY: as above.
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }

    #[inline(always)]
    unsafe fn transpose(source: *const f32, row: usize, target: *mut f32) {
        // SAFETY: the caller promises the level and the squares.
        unsafe {
            // As for AVX-512, with two halves instead of four quarters.
            let x: [__m256; 8] = std::array::from_fn(inlined!(|i| _mm256_loadu_ps(source.add(i * row))));
            let mut y = x;
            for i in (0..8).step_by(2) {
                y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
                y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
            }
            let mut z = y;
            for i in (0..8).step_by(4) {
                z[i] = _mm256_shuffle_ps::<0b01_00_01_00>(y[i], y[i + 2]);
                z[i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(y[i], y[i + 2]);
                z[i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(y[i + 1], y[i + 3]);
                z[i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(y[i + 1], y[i + 3]);
            }
            for j in 0..4 {
                let low = _mm256_permute2f128_ps::<0x20>(z[j], z[4 + j]);
                let high = _mm256_permute2f128_ps::<0x31>(z[j], z[4 + j]);
                _mm256_storeu_ps(target.add(j * BLOCK), low);
                _mm256_storeu_ps(target.add((4 + j) * BLOCK), high);
            }
        }
    }

    #[inline(always)]
    unsafe fn keep_bits(key: [u32; 2], counter: [u32; 4], threshold: u32) -> u64 {
        // SAFETY: the caller promises the level.
        unsafe {
            let m0 = _mm256_set1_epi32(Philox::MULTIPLIERS[0] as i32);
            let m1 = _mm256_set1_epi32(Philox::MULTIPLIERS[1] as i32);
            let threshold = _mm256_set1_epi32(threshold as i32);
            let mut words = [0; 4];
            for half in 0..2 {
                let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let mut c = counter.map(|word| _mm256_set1_epi32(word as i32));
                c[2] = _mm256_add_epi32(_mm256_add_epi32(c[2], lane), _mm256_set1_epi32(8 * half));
                let mut k = key;
                for _ in 0..10 {
                    let (high0, low0) = multiply_256(c[0], m0);
                    let (high1, low1) = multiply_256(c[2], m1);
                    let k0 = _mm256_set1_epi32(k[0] as i32);
                    let k1 = _mm256_set1_epi32(k[1] as i32);
                    let c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c[1]), k0);
                    let c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c[3]), k1);
                    c = [c0, low1, c2, low0];
                    k = [k[0].wrapping_add(Philox::WEYL[0]), k[1].wrapping_add(Philox::WEYL[1])];
                }
                for (bits, word) in words.iter_mut().zip(c) {
                    // Unsigned word >= threshold: the larger of the two is the word.
                    let kept = _mm256_cmpeq_epi32(_mm256_max_epu32(word, threshold), word);
                    *bits |= (_mm256_movemask_ps(_mm256_castsi256_ps(kept)) as u64) << (8 * half);
                }
            }
            interleave(words)
        }
    }
}

/// Returns the high and low halves of the 64-bit products of each lane.
#[inline(always)]
unsafe fn multiply_256(a: __m256i, b: __m256i) -> (__m256i, __m256i) {
    // SAFETY: called from `Avx2::keep_bits` only.
    unsafe {
        let even = _mm256_mul_epu32(a, b);
        let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(a), b);
        (
            _mm256_blend_epi32::<0xAA>(_mm256_srli_epi64::<32>(even), odd),
            _mm256_blend_epi32::<0xAA>(even, _mm256_slli_epi64::<32>(odd)),
        )
    }
}

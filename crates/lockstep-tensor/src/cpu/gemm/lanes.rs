//! One vector of a CPU level for the micro-kernels: the same loops are compiled for each level.
//!
//! A lane holds an f32 sum. A *unit* is the operand of one lane: 32 bits, an f32 or a pair of bf16.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::decode_pairs;
use super::{
    block_lines::BlockLines,
    transpose,
    transpose::{Block, SIDE, Square},
};
use crate::{CpuLevel, cpu::simd::Float};

/// Lines that [`Lanes::transpose_pairs`] transposes at a time, and elements of each.
pub(super) const PAIR_LINES: usize = 2 * SIDE;

/// A vector of [`Lanes::COUNT`] lanes.
///
/// The methods are unsafe because they may be called only if the CPU has the vector's instructions. They are fast
/// only inside [`Lanes::compiled`].
pub(in crate::cpu) trait Lanes: Copy {
    /// The lowest level that has the vector's instructions.
    const LEVEL: CpuLevel;
    /// Number of lanes of a vector.
    const COUNT: usize;
    /// Runs `work`, and all code inlined into it, compiled for the vector's instructions.
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R;
    /// Returns sums of zero.
    unsafe fn zero() -> Self;
    /// Loads `COUNT` units from any address.
    unsafe fn load(units: *const u32) -> Self;
    /// Returns one unit in all lanes.
    unsafe fn splat(unit: u32) -> Self;
    /// Computes `sums + x · y`, lane by lane.
    unsafe fn multiply_add(x: Self, y: Self, sums: Self) -> Self;
    /// Returns the sums `self + other`, lane by lane.
    unsafe fn add(self, other: Self) -> Self;
    /// Transposes a block of 32-bit words in place.
    unsafe fn transpose(block: &mut Block);
    /// Transposes a square of 32-bit words into another place. The lines of the source may lie at any address.
    unsafe fn transpose_into(source: Square<*const u32>, target: Square<*mut u32>);
    /// True if the units are pairs of bf16, and [`Lanes::decode_pairs`] and [`Lanes::transpose_pairs`] can be called.
    const MAKES_PAIRS: bool = false;

    /// Decodes the chunk from element `start` on of 16 lines from `first` on as pairs of bf16: unit `u` of line `l` goes to
    /// `target[u · stride + l]`.
    unsafe fn decode_pairs(lines: &BlockLines<'_>, first: usize, start: usize, target: Square<*mut u32>) {
        let _ = (lines, first, start, target);
        unreachable!("these vectors make no pairs")
    }

    /// Transposes [`PAIR_LINES`] lines of as many bf16, which are `stride` elements apart: the pair of the elements `e` of lines `2 u` and
    /// `2 u + 1` goes to `target[e · stride + u]`.
    unsafe fn transpose_pairs(lines: *const bf16, stride: usize, target: Square<*mut u32>) {
        let _ = (lines, stride, target);
        unreachable!("these vectors make no pairs")
    }

    /// Writes the sums to any address.
    unsafe fn store(self, sums: *mut f32);

    /// Returns the sum over all lanes, in a fixed order.
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        let mut lanes = [0.0; 16];
        // SAFETY: the array holds the largest vector; the caller promises the instructions.
        unsafe { self.store(lanes.as_mut_ptr()) };
        let mut width = Self::COUNT;
        while width > 1 {
            width /= 2;
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }
}

/// Eight f32 lanes of plain arithmetic, which the compiler maps to the baseline of the CPU.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Plain([f32; 8]);

impl Lanes for Plain {
    const LEVEL: CpuLevel = CpuLevel::Portable;
    const COUNT: usize = 8;

    #[inline(never)]
    unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 8])
    }

    #[inline(always)]
    unsafe fn load(units: *const u32) -> Self {
        // SAFETY: the caller has eight units there.
        Self(unsafe { units.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn splat(unit: u32) -> Self {
        Self([f32::from_bits(unit); 8])
    }

    #[inline(always)]
    unsafe fn multiply_add(x: Self, y: Self, sums: Self) -> Self {
        Self(std::array::from_fn(|i| x.0[i] * y.0[i] + sums.0[i]))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }

    #[inline(always)]
    unsafe fn transpose(block: &mut Block) {
        transpose::transpose(block);
    }

    #[inline(always)]
    unsafe fn transpose_into(source: Square<*const u32>, target: Square<*mut u32>) {
        // SAFETY: the caller's promise.
        unsafe { transpose::transpose_square(source, target) }
    }

    #[inline(always)]
    unsafe fn store(self, sums: *mut f32) {
        // SAFETY: the caller has room for eight sums there.
        unsafe { sums.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
}

/// Implements [`Lanes`] by intrinsics.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! vector {
    ($(#[$doc:meta])* $name:ident($vector:ty), $level:ident, $features:literal, $count:literal, $zero:expr, |$units:ident| $load:expr,
     |$unit:ident| $splat:expr, |$x:ident, $y:ident, $sums:ident| $multiply_add:expr, $add:ident, $store:ident,
     $transpose:path, $transpose_into:path $(, $decoding:ident)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(in crate::cpu) struct $name($vector);

        impl Lanes for $name {
            const LEVEL: $crate::CpuLevel = $crate::CpuLevel::$level;
            const COUNT: usize = $count;

            #[target_feature(enable = $features)]
            unsafe fn compiled<R>(work: impl FnOnce() -> R) -> R {
                work()
            }

            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: the caller promises the instructions, here and below.
                Self(unsafe { $zero })
            }

            #[inline(always)]
            unsafe fn load($units: *const u32) -> Self {
                // SAFETY: the caller has a vector of units there.
                Self(unsafe { $load })
            }

            #[inline(always)]
            unsafe fn splat($unit: u32) -> Self {
                // SAFETY: as above.
                Self(unsafe { $splat })
            }

            #[inline(always)]
            unsafe fn multiply_add($x: Self, $y: Self, $sums: Self) -> Self {
                // SAFETY: as above.
                Self(unsafe { $multiply_add })
            }

            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: as above.
                Self(unsafe { $add(self.0, other.0) })
            }

            #[inline(always)]
            unsafe fn transpose(block: &mut Block) {
                // SAFETY: as above.
                unsafe { $transpose(block) }
            }

            #[inline(always)]
            unsafe fn transpose_into(source: Square<*const u32>, target: Square<*mut u32>) {
                // SAFETY: as above.
                unsafe { $transpose_into(source, target) }
            }

            $(
                const MAKES_PAIRS: bool = true;

                #[inline(always)]
                unsafe fn decode_pairs(lines: &BlockLines<'_>, first: usize, start: usize, target: Square<*mut u32>) {
                    // SAFETY: the caller's promise.
                    unsafe { $decoding::decode_pairs(lines, first, start, target) }
                }

                #[inline(always)]
                unsafe fn transpose_pairs(lines: *const bf16, stride: usize, target: Square<*mut u32>) {
                    // SAFETY: the caller's promise.
                    unsafe { transpose::transpose_pairs_avx512(lines, stride, target) }
                }
            )?

            #[inline(always)]
            unsafe fn store(self, sums: *mut f32) {
                // SAFETY: the caller has room for a vector of sums there.
                unsafe { $store(sums, self.0) }
            }
        }
    };
}
#[cfg(target_arch = "aarch64")]
pub(super) use vector;

#[cfg(target_arch = "x86_64")]
vector!(
    /// Eight f32 lanes of AVX2 with fused multiply-add.
    F32x8(__m256), Avx2, "avx2,fma", 8, _mm256_setzero_ps(),
    |units| _mm256_loadu_ps(units.cast()),
    |unit| _mm256_set1_ps(f32::from_bits(unit)),
    |x, y, sums| _mm256_fmadd_ps(x.0, y.0, sums.0),
    _mm256_add_ps, _mm256_storeu_ps,
    transpose::transpose_avx2, transpose::transpose_square_avx2
);

#[cfg(target_arch = "x86_64")]
vector!(
    /// Sixteen f32 lanes of AVX-512.
    F32x16(__m512), Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma", 16, _mm512_setzero_ps(),
    |units| _mm512_loadu_ps(units.cast()),
    |unit| _mm512_set1_ps(f32::from_bits(unit)),
    |x, y, sums| _mm512_fmadd_ps(x.0, y.0, sums.0),
    _mm512_add_ps, _mm512_storeu_ps,
    transpose::transpose_avx512, transpose::transpose_square_avx512
);

#[cfg(target_arch = "x86_64")]
vector!(
    /// Sixteen lanes of AVX512-BF16, each summing the products of a pair of bf16. Subnormals count as zero.
    Bf16Pairs(__m512), Avx512Bf16, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma", 16, _mm512_setzero_ps(),
    |units| _mm512_loadu_ps(units.cast()),
    |unit| _mm512_castsi512_ps(_mm512_set1_epi32(unit.cast_signed())),
    |x, y, sums| _mm512_dpbf16_ps(sums.0, bits(x.0), bits(y.0)),
    _mm512_add_ps, _mm512_storeu_ps,
    transpose::transpose_avx512, transpose::transpose_square_avx512, decode_pairs
);

/// Casts 512 bits to the operand type of the dot product.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn bits(vector: __m512) -> __m512bh {
    // SAFETY: both are 512 bits without invalid values.
    unsafe { std::mem::transmute(vector) }
}

/// A vector that loads elements directly from an operand, for dot products along the depth.
pub(in crate::cpu) trait Dot<T>: Lanes {
    /// Number of elements of a vector.
    const ELEMENTS: usize;
    /// Loads `ELEMENTS` elements from any address.
    unsafe fn load_elements(elements: *const T) -> Self;
}

/// Implements [`Dot`] for elements that are units, or parts of units.
macro_rules! dot {
    ($($vector:ty: $element:ty, $per_lane:literal, |$elements:ident| $load:expr;)*) => {$(
        impl Dot<$element> for $vector {
            const ELEMENTS: usize = $per_lane * Self::COUNT;

            #[inline(always)]
            unsafe fn load_elements($elements: *const $element) -> Self {
                // SAFETY: the caller has the elements there, and the instructions.
                unsafe { $load }
            }
        }
    )*};
}
#[cfg(target_arch = "aarch64")]
pub(super) use dot;

dot! {
    Plain: f32, 1, |elements| Self::load(elements.cast());
    Plain: bf16, 1, |elements| Self(elements.cast::<[bf16; 8]>().read_unaligned().map(Float::load));
    Plain: f16, 1, |elements| Self(elements.cast::<[f16; 8]>().read_unaligned().map(Float::load));
}

#[cfg(target_arch = "x86_64")]
dot! {
    F32x8: f32, 1, |elements| Self::load(elements.cast());
    F32x8: bf16, 1, |elements| {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(elements.cast()));
        Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
    };
    F32x16: f32, 1, |elements| Self::load(elements.cast());
    F32x16: bf16, 1, |elements| {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(elements.cast()));
        Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
    };
    F32x8: f16, 1, |elements| {
        Self::load(elements.cast::<[f16; 8]>().read_unaligned().map(Float::load).as_ptr().cast())
    };
    F32x16: f16, 1, |elements| Self(_mm512_cvtph_ps(_mm256_loadu_si256(elements.cast())));
    Bf16Pairs: bf16, 2, |elements| Self::load(elements.cast());
}

//! Float storage types: their conversion to and from f32, in forms that vectorize.

use half::{bf16, f16};

use super::Isa;
use crate::Element;

/// A float storage type. Arithmetic is in f32.
pub(crate) trait Float: Element {
    /// Returns the value as f32.
    fn load(self) -> f32;
    /// Returns the value nearest to `x`, ties to even.
    fn store(x: f32) -> Self;

    /// Stores each number as [`Float::store`] does. Numbers below the normal range may become zero.
    #[inline(always)]
    fn store_all(isa: Isa, from: &[f32], to: &mut [Self]) {
        let _ = isa;
        store_each(from, to);
    }

    /// Stores the first `rows × columns` of numbers, whose rows are `width` apart, as [`Float::store_all`] does: to rows that begin
    /// at an address and are a number of elements apart.
    ///
    /// # Safety
    /// Nothing else may use these rows meanwhile.
    #[inline(always)]
    unsafe fn store_rows(isa: Isa, from: &[f32], width: usize, size: (usize, usize), to: (*mut Self, usize)) {
        // SAFETY: the caller's promise.
        unsafe { store_each_row(isa, from, width, size, to) }
    }
}

/// Stores rows as [`Float::store_rows`] does, by a call for each.
///
/// # Safety
/// As [`Float::store_rows`].
#[inline(always)]
unsafe fn store_each_row<T: Float>(
    isa: Isa,
    from: &[f32],
    width: usize,
    (rows, columns): (usize, usize),
    (to, stride): (*mut T, usize),
) {
    for (i, from) in from.chunks_exact(width).take(rows).enumerate() {
        // SAFETY: the caller's promise.
        let to = unsafe { std::slice::from_raw_parts_mut(to.add(i * stride), columns) };
        T::store_all(isa, &from[..columns], to);
    }
}

#[inline(always)]
fn store_each<T: Float>(from: &[f32], to: &mut [T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = T::store(*from);
    }
}

impl Float for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        x
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // A NaN whose fraction lies in the lower half must not round to infinity.
        let bits = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
        Self::from_bits((bits >> 16) as u16)
    }

    #[inline(always)]
    fn store_all(isa: Isa, from: &[f32], to: &mut [Self]) {
        if isa.bf16 {
            // SAFETY: the level has the instruction.
            return unsafe { round_to_bf16(from, to) };
        }
        store_each(from, to);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store_rows(isa: Isa, from: &[f32], width: usize, size: (usize, usize), to: (*mut Self, usize)) {
        // SAFETY: if so, the level has the instruction; the caller's promise.
        unsafe {
            match isa.bf16 {
                true => round_rows_to_bf16(from.chunks_exact(width).take(size.0), size.1, to),
                false => store_each_row(isa, from, width, size, to),
            }
        }
    }
}

// Uses integer arithmetic, because a call of the conversion instruction would not be vectorized.
impl Float for f16 {
    #[inline(always)]
    fn load(self) -> f32 {
        let bits = u32::from(self.to_bits());
        // Moving the exponent by a multiplication is exact and handles subnormal numbers too.
        let finite = f32::from_bits((bits & 0x7fff) << 13) * TWO_POW_112;
        let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits(finite.to_bits() | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        let sign = x.to_bits() >> 16 & 0x8000;
        let magnitude = x.to_bits() & 0x7fff_ffff;
        let rounded = magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1));
        let normal = (rounded.wrapping_sub(112 << 23) >> 13).min(0x7c00);
        // The unit in the last place of 0.5 is 2^-24, f16's smallest number: the sum rounds to it.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
        let bits = if magnitude > 0x7f80_0000 { 0x7e00 } else { finite };
        Self::from_bits((bits | sign) as u16)
    }
}

/// The difference of the exponent biases of f32 and f16, as a factor.
const TWO_POW_112: f32 = f32::from_bits((127 + 112) << 23);

/// Calls `$body` with `$T` bound to the float type of a view's dtype.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            lockstep_plan::DType::F32 => {
                type $T = f32;
                $body
            }
            lockstep_plan::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            lockstep_plan::DType::F16 => {
                type $T = half::f16;
                $body
            }
            other => panic!("this kernel works on f32, bf16 and f16, not on {other}"),
        }
    };
}
pub(crate) use with_float;

/// Rounds the first `columns` numbers of each row, to rows that begin at an address and are a number of elements apart. One call for
/// all rows: a call for each would take longer than its work.
///
/// # Safety
/// Nothing else may use these rows meanwhile.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn round_rows_to_bf16<'a>(
    rows: impl Iterator<Item = &'a [f32]>,
    columns: usize,
    (to, stride): (*mut bf16, usize),
) {
    for (i, from) in rows.enumerate() {
        // SAFETY: the caller's promise.
        let to = unsafe { std::slice::from_raw_parts_mut(to.add(i * stride), columns) };
        round_to_bf16(&from[..columns], to);
    }
}

/// Rounds as many numbers as the shorter slice has.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn round_to_bf16(from: &[f32], to: &mut [bf16]) {
    use std::arch::x86_64::*;
    const COUNT: usize = 16;
    const PAIR: usize = 2 * COUNT;
    let whole = from.len().min(to.len()) / PAIR * PAIR;
    let ((pairs, from), (target_pairs, to)) = (from.split_at(whole), to.split_at_mut(whole));
    for (from, to) in pairs.as_chunks::<PAIR>().0.iter().zip(target_pairs.as_chunks_mut::<PAIR>().0) {
        // SAFETY: the arrays hold the two vectors that are read and the one that is written, of the same 512 bits.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from[COUNT..].as_ptr()));
            let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), rounded);
        }
    }
    for (from, to) in from.chunks(COUNT).zip(to.chunks_mut(COUNT)) {
        let present: __mmask16 = __mmask16::MAX >> (COUNT - from.len().min(to.len()));
        // SAFETY: only elements of the slices are read and written; the two vectors are the same 256 bits.
        unsafe {
            let rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(present, from.as_ptr()));
            _mm256_mask_storeu_epi16(
                to.as_mut_ptr().cast(),
                present,
                std::mem::transmute::<__m256bh, __m256i>(rounded),
            );
        }
    }
}

/// Rounds as many numbers as the shorter slice has.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,bf16")]
fn round_to_bf16(from: &[f32], to: &mut [bf16]) {
    use std::arch::{aarch64::*, asm};
    const COUNT: usize = 8;
    let len = from.len().min(to.len());
    let (from, to) = (&from[..len], &mut to[..len]);
    let (from, from_rest) = from.as_chunks::<COUNT>();
    let (to, to_rest) = to.as_chunks_mut::<COUNT>();
    for (from, to) in from.iter().zip(to) {
        // SAFETY: the arrays hold the two vectors that are read and the one that is written.
        unsafe {
            let (low, high) = (vld1q_f32(from.as_ptr()), vld1q_f32(from[4..].as_ptr()));
            let rounded: uint16x8_t;
            asm!(
                "bfcvtn {rounded:v}.4h, {low:v}.4s",
                "bfcvtn2 {rounded:v}.8h, {high:v}.4s",
                rounded = out(vreg) rounded,
                low = in(vreg) low,
                high = in(vreg) high,
                options(pure, nomem, nostack, preserves_flags)
            );
            vst1q_u16(to.as_mut_ptr().cast(), rounded);
        }
    }
    store_each(from_rest, to_rest);
}

/// There is no such instruction: no level has it.
///
/// # Safety
/// Must not be called.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn round_to_bf16(_: &[f32], _: &mut [bf16]) {
    unreachable!("no level rounds vectors to bf16")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuLevel, cpu::simd::inlined};

    #[test]
    fn f16_converts_exactly_and_rounds_to_nearest_even() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            let (ours, reference) = (Float::load(x), x.to_f32());
            assert!(
                ours.to_bits() == reference.to_bits() || (ours.is_nan() && reference.is_nan()),
                "{bits:#x} gives {ours}, expected {reference}"
            );
        }
        let border = (0..=0x7bff_u16).flat_map(|bits| {
            // The value, the point halfway to the next one, and the neighbours of that point: where rounding changes
            // direction.
            let (a, b) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
            let half = if b.is_finite() { (a + b) / 2.0 } else { 65_520.0 };
            [a, half, f32::from_bits(half.to_bits() - 1), f32::from_bits(half.to_bits() + 1)]
        });
        let spread = (0..=u32::MAX).step_by(99_991).map(f32::from_bits);
        for x in border.chain(spread).flat_map(|x| [x, -x]) {
            let (ours, reference) = (<f16 as Float>::store(x), f16::from_f32(x));
            assert!(
                ours.to_bits() == reference.to_bits() || (x.is_nan() && ours.is_nan()),
                "{x:e} gives {ours}, expected {reference}"
            );
        }
    }

    #[test]
    fn vectors_round_to_bf16_as_single_numbers_do_at_every_level() {
        let special =
            [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-40];
        let spread = (0..=u32::MAX).step_by(99_991).map(f32::from_bits);
        let halfway = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x8000));
        let numbers: Vec<f32> = special.into_iter().chain(spread).chain(halfway).collect();
        for level in CpuLevel::available() {
            for (len, from) in (0..70).cycle().zip(numbers.chunks(70)) {
                let from = &from[..len.min(from.len())];
                // One element more than there are numbers: it must stay.
                let mut to = vec![bf16::from_bits(0x1234); from.len() + 1];
                level.run_with_isa(inlined!(|isa| bf16::store_all(isa, from, &mut to)));
                assert_eq!(to[from.len()].to_bits(), 0x1234, "{level}, {len} numbers");
                for (x, rounded) in from.iter().zip(&to) {
                    let expected = <bf16 as Float>::store(*x);
                    let same = rounded.to_bits() == expected.to_bits() || (x.is_nan() && rounded.is_nan());
                    let is_flushed = x.is_subnormal() && Float::load(*rounded) == 0.0;
                    assert!(same || is_flushed, "{level}: {x:e} gives {rounded}, expected {expected}");
                }
            }
        }
    }

    #[test]
    fn bf16_converts_exactly_and_rounds_to_nearest_even() {
        let spread = (0..=u32::MAX).step_by(99_991);
        let border = (0..=u16::MAX).flat_map(|bits| {
            // The value (NaN and infinity included), its neighbour, the point halfway to the next one, and the
            // neighbours of that point.
            let value = u32::from(bits) << 16;
            [value, value + 1, value + 0x7fff, value + 0x8000, value + 0x8001, value + 0xffff]
        });
        for x in border.chain(spread).map(f32::from_bits) {
            let (ours, reference) = (<bf16 as Float>::store(x), bf16::from_f32(x));
            assert!(
                ours.to_bits() == reference.to_bits() || (x.is_nan() && ours.is_nan()),
                "{x:e} ({:#x}) gives {ours}, expected {reference}",
                x.to_bits()
            );
            assert_eq!(Float::load(ours).to_bits(), u32::from(ours.to_bits()) << 16);
        }
    }
}

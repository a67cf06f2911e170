//! Decoding of quantized weights to pairs of bf16 by AVX-512. A lane is a line, so that the scales of 16 lines are one vector.

use std::arch::x86_64::*;

use lockstep_plan::{
    block_format::{BlockCodec, PART, RUN, RUNS, UNITS},
    with_block_codec,
};

use super::{
    block_lines::{BlockLines, WordBuffer},
    transpose::Square,
    word_lanes::Words512,
};
use crate::cpu::simd::inlined;

/// Decodes as [`Lanes::decode_pairs`](super::lanes::Lanes::decode_pairs) does. A function of its own, so that the formats are compiled
/// once.
///
/// # Safety
/// The CPU must have the instructions, the lines the chunk, and the target must hold its units.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn decode_pairs(
    lines: &BlockLines<'_>,
    first: usize,
    start: usize,
    target: Square<*mut u32>,
) {
    let chunk = lines.chunk(first..first + 16, start);
    with_block_codec!(lines.format, Codec => {
        let mut buffer = WordBuffer::ZEROS;
        for block in 0..(lines.chunk_end(start) - start) / Codec::ELEMENTS {
            // SAFETY: the caller's promises, here and below.
            let words = unsafe { buffer.read::<Words512, Codec>(&chunk, block) };
            let mut runs = [(_mm512_setzero_ps(), _mm512_setzero_ps()); RUNS];
            Codec::scales(words,  inlined!(|run: usize, [scales]: [__m512; 1], offsets: Option<[__m512; 1]>| {
                runs[run] = (scales, offsets.map_or(scales, inlined!(|[offsets]: [__m512; 1]| offsets)));
            }));
            for part in 0..Codec::ELEMENTS / PART {
                for unit in 0..UNITS {
                    let (scales, offsets) = runs[(part * PART + unit / (UNITS / 2) * RUN) / Codec::RUN_ELEMENTS];
                    let [codes] = Codec::unit(words, part, unit).0;
                    let pairs = pairs_of::<Codec>(codes, scales, offsets);
                    let at = (block * Codec::ELEMENTS + part * PART) / 2 + 2 * unit;
                    for (index, pair) in pairs.into_iter().enumerate() {
                        // SAFETY: as above.
                        unsafe { _mm512_storeu_si512(target.first.add((at + index) * target.stride).cast(), pair) };
                    }
                }
            }
        }
    });
}

/// Returns two pairs of bf16 of each line: four codes times the scales, plus the offsets.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn pairs_of<C: BlockCodec>(words: __m512i, scales: __m512, offsets: __m512) -> [__m512i; 2] {
    // The low half of a vector of bf16 and its high half, by turns.
    let alternate = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18,
        2, 17, 1, 16, 0,
    );
    let (zero, low_byte) = (_mm512_set1_epi32(i32::from(C::ZERO)), _mm512_set1_epi32(0xff));
    let byte = |index: usize| match index {
        0 => _mm512_and_si512(words, low_byte),
        1 => _mm512_and_si512(_mm512_srli_epi32::<8>(words), low_byte),
        2 => _mm512_and_si512(_mm512_srli_epi32::<16>(words), low_byte),
        _ => _mm512_srli_epi32::<24>(words),
    };
    let decoded = |index: usize| {
        if !C::HAS_INTEGER_CODES {
            let [values] = C::value(Words512([words]), index);
            return _mm512_mul_ps(values, scales);
        }
        let numbers = _mm512_cvtepi32_ps(_mm512_sub_epi32(byte(index), zero));
        if C::HAS_OFFSETS {
            _mm512_fmadd_ps(numbers, scales, offsets)
        } else {
            _mm512_mul_ps(numbers, scales)
        }
    };
    let pair = |first: usize, second: usize| {
        // SAFETY: the same 512 bits.
        let halves = unsafe {
            std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(decoded(second), decoded(first)))
        };
        _mm512_permutexvar_epi16(alternate, halves)
    };
    [pair(0, 1), pair(2, 3)]
}

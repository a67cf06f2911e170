//! MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats (E2M1) with a power of two for each 32 of them, in the blocks of GGUF files (ggml:
//! `block_mxfp4`).
//!
//! ```text
//! u8 exponent | 16 bytes of codes, the first 16 in the low halves        element = 2^(exponent - 128) · (2 · E2M1[code])
//! ```
//!
//! Twice a number of the format is an integer, so products with int8 activations sum integers. A negative zero is decoded as zero.

use super::decode::{BlockCodec, BlockSource, BlockWords, Words, halves_of_words};

/// Byte of zero among [`CODES`].
const ZERO: u8 = 12;
/// Twice the E2M1 numbers, plus [`ZERO`].
const CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// The sign of a code.
const NEGATIVE: u8 = 8;
/// Power of two of the largest E2M1 number.
const LARGEST_POWER: u8 = 2;

/// Codec of [`BlockFormat::Mxfp4`](super::BlockFormat::Mxfp4).
#[derive(Debug, Clone, Copy)]
pub struct Mxfp4Codec;

impl Mxfp4Codec {
    /// Writes a block. A byte of `pairs` has two neighbouring codes, the first one in the low half.
    ///
    /// # Panics
    /// If `pairs` or `block` have another size than a block.
    pub fn pack(exponent: u8, pairs: &[u8], block: &mut [u8]) {
        assert_eq!((pairs.len(), block.len()), (Self::ELEMENTS / 2, Self::BYTES), "bytes of a block");
        block[0] = exponent;
        let (first, last) = pairs.split_at(Self::ELEMENTS / 4);
        for (bytes, (first, last)) in block[1..].chunks_exact_mut(2).zip(first.iter().zip(last)) {
            bytes[0] = first & 0x0f | last << 4;
            bytes[1] = first >> 4 | last & 0xf0;
        }
    }
}

/// Returns 2^(exponent + bias - 127), of exponents that make it a normal number.
#[inline(always)]
fn powers<W: Words>(exponents: W, bias: u32) -> W::Floats {
    exponents.sub(exponents.and(0).xor(bias.wrapping_neg())).shl(23).floats()
}

impl BlockCodec for Mxfp4Codec {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 17;
    const HAS_OFFSETS: bool = false;
    const ZERO: u8 = ZERO;
    const WORDS: BlockWords = BlockWords { first_byte: 1, count: 4 };
    const EXTRA: Option<usize> = Some(0);

    #[inline(always)]
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        // 2^(exponent - 128) may be below the normal range; two powers of half the exponent are not.
        let exponents = words.extra().and(0xff);
        let halves = exponents.shr(1);
        run(0, W::products(powers(halves, 64), powers(exponents.sub(halves), 62)), None);
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, _: usize, unit: usize) -> W {
        halves_of_words(words, 0, unit).lookup_bytes(&CODES)
    }
}

/// Encodes a block with the largest exponent at which its largest number is within a factor of two of the format's (gguf-py:
/// `quants.py`).
pub(super) fn encode(values: &[f32], block: &mut [u8]) {
    let largest = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let exponent = ((largest.to_bits() >> 23) as u8).saturating_sub(LARGEST_POWER);
    let scale = f32::from_bits(if exponent == 0 { 1 << 22 } else { u32::from(exponent) << 23 });
    let code = |x: f32| {
        let magnitude = x.abs() / scale;
        let doubled = |code: u8| f32::from(CODES[usize::from(code)] - ZERO);
        let error = |code: u8| (doubled(code) / 2.0 - magnitude).abs();
        let nearest = (1..NEGATIVE).fold(0, |best, code| if error(code) < error(best) { code } else { best });
        if x < 0.0 && nearest > 0 { nearest | NEGATIVE } else { nearest }
    };
    let pairs: Vec<u8> = values.chunks_exact(2).map(|pair| code(pair[0]) | code(pair[1]) << 4).collect();
    Mxfp4Codec::pack(exponent, &pairs, block);
}

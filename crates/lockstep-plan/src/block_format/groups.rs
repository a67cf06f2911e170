//! Groups of integers with an f32 scale: the form into which GPTQ, AWQ, compressed-tensors and bitsandbytes weights are repacked.
//!
//! ```text
//! int4   u8 zero point | f32 scale | N/2 bytes of codes, 16 bytes for each 32 elements      element = scale · (code - zero point)
//! int8   f32 scale | N signed codes                                                      element = scale · code
//! ```
//!
//! In a part of 32 elements, the low halves of its 16 bytes are the first 16 codes.

use super::decode::{BlockCodec, BlockWords, PART, Words, halves_of_words};

/// Bytes of a scale.
const SCALE_BYTES: usize = 4;
/// Bytes before the codes of an int4 block: zero point and scale.
const INT4_HEAD_BYTES: usize = 1 + SCALE_BYTES;
/// Largest code of 4 bits.
const LARGEST_INT4: f32 = 15.0;
/// Largest magnitude of a code of 8 bits that is chosen here.
const LARGEST_INT8: f32 = 127.0;
/// The high bit of each byte.
const HIGH_BITS: u32 = 0x8080_8080;

/// Codec of blocks of `N` codes of 4 bits, such as [`BlockFormat::Int4G64`](super::BlockFormat::Int4G64). The zero point is part of the
/// codes, so that there are no offsets.
#[derive(Debug, Clone, Copy)]
pub struct Int4Codec<const N: usize>;

impl<const N: usize> Int4Codec<N> {
    /// Writes a block. Codes are 0 to 15, and the zero point is 0 to 16.
    ///
    /// # Panics
    /// If `codes` or `block` have another size than a block.
    pub fn pack(scale: f32, zero_point: u8, codes: &[u8], block: &mut [u8]) {
        assert_eq!((codes.len(), block.len()), (N, Self::BYTES), "codes and bytes of a block");
        block[0] = zero_point;
        block[1..INT4_HEAD_BYTES].copy_from_slice(&scale.to_le_bytes());
        let parts = block[INT4_HEAD_BYTES..].chunks_exact_mut(PART / 2);
        for (bytes, codes) in parts.zip(codes.chunks_exact(PART)) {
            let (first, last) = codes.split_at(PART / 2);
            for (byte, (low, high)) in bytes.iter_mut().zip(first.iter().zip(last)) {
                *byte = low | high << 4;
            }
        }
    }
}

impl<const N: usize> BlockCodec for Int4Codec<N> {
    const ELEMENTS: usize = N;
    const BYTES: usize = INT4_HEAD_BYTES + N / 2;
    const HAS_OFFSETS: bool = false;
    const ZERO: u8 = 128;
    const WORDS: BlockWords = BlockWords { first_byte: 1, count: 1 + N / 8 };
    const EXTRA: Option<usize> = Some(0);

    #[inline(always)]
    fn scales<W: Words>(words: &[W], mut run: impl FnMut(usize, W::Floats, Option<W::Floats>)) {
        for index in 0..N / PART {
            run(index, words[0].floats(), None);
        }
    }

    #[inline(always)]
    fn unit<W: Words>(words: &[W], part: usize, unit: usize) -> W {
        let zero_point = words[Self::WORDS.count].and(0xff);
        let two = zero_point.or(zero_point.shl(8));
        halves_of_words(&words[1 + PART / 8 * part..], unit).xor(HIGH_BITS).sub(two.or(two.shl(16)))
    }
}

/// Codec of blocks of `N` codes of 8 bits, such as [`BlockFormat::Int8G128`](super::BlockFormat::Int8G128).
#[derive(Debug, Clone, Copy)]
pub struct Int8Codec<const N: usize>;

impl<const N: usize> Int8Codec<N> {
    /// Writes a block.
    ///
    /// # Panics
    /// If `codes` or `block` have another size than a block.
    pub fn pack(scale: f32, codes: &[i8], block: &mut [u8]) {
        assert_eq!((codes.len(), block.len()), (N, Self::BYTES), "codes and bytes of a block");
        block[..SCALE_BYTES].copy_from_slice(&scale.to_le_bytes());
        for (byte, code) in block[SCALE_BYTES..].iter_mut().zip(codes) {
            *byte = code.cast_unsigned();
        }
    }
}

impl<const N: usize> BlockCodec for Int8Codec<N> {
    const ELEMENTS: usize = N;
    const BYTES: usize = SCALE_BYTES + N;
    const HAS_OFFSETS: bool = false;
    const ZERO: u8 = 128;
    const WORDS: BlockWords = BlockWords { first_byte: 0, count: 1 + N / 4 };

    #[inline(always)]
    fn scales<W: Words>(words: &[W], mut run: impl FnMut(usize, W::Floats, Option<W::Floats>)) {
        for index in 0..N / PART {
            run(index, words[0].floats(), None);
        }
    }

    #[inline(always)]
    fn unit<W: Words>(words: &[W], part: usize, unit: usize) -> W {
        words[1 + PART / 4 * part + unit].xor(HIGH_BITS)
    }
}

/// Ends of the range of a group that are tried, as fractions of the largest and the smallest element; the best in squared error is kept.
const RANGES: [f32; 8] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72];

/// Quantizes a group to codes of 4 bits: writes them, and returns the scale and the zero point, 0 to 15. `round` rounds the scale to the
/// type in which it is stored.
pub fn int4_group(values: &[f32], round: impl Fn(f32) -> f32, codes: &mut [u8]) -> (f32, u8) {
    let (least, most) =
        values.iter().fold((0.0_f32, 0.0_f32), |(least, most), &x| (least.min(x), most.max(x)));
    let code = |x: f32, inverse: f32, zero: f32| (x * inverse + zero).round().clamp(0.0, LARGEST_INT4);
    let (mut best, mut least_error) = ((0.0, 0.0), f64::INFINITY);
    for range in RANGES {
        let scale = round((most - least) * range / LARGEST_INT4);
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let zero = (-least * range * inverse).round().clamp(0.0, LARGEST_INT4);
        let error = |&x: &f32| f64::from((code(x, inverse, zero) - zero) * scale - x).powi(2);
        let error: f64 = values.iter().map(error).sum();
        if error < least_error {
            (best, least_error) = ((scale, zero), error);
        }
    }
    let (scale, zero) = best;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    for (of_value, &x) in codes.iter_mut().zip(values) {
        *of_value = code(x, inverse, zero) as u8;
    }
    (scale, zero as u8)
}

/// Quantizes a group to signed codes of 8 bits, -127 to 127: writes them, and returns the scale. `round` rounds it as in [`int4_group`].
pub fn int8_group(values: &[f32], round: impl Fn(f32) -> f32, codes: &mut [i8]) -> f32 {
    let most = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let scale = round(most / LARGEST_INT8);
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    for (code, x) in codes.iter_mut().zip(values) {
        *code = (x * inverse).round().clamp(-LARGEST_INT8, LARGEST_INT8) as i8;
    }
    scale
}

/// Encodes a block of 4-bit codes.
pub(super) fn encode_int4(values: &[f32], block: &mut [u8]) {
    fn encode<const N: usize>(values: &[f32], block: &mut [u8]) {
        let mut codes = [0; N];
        let (scale, zero_point) = int4_group(values, |scale| scale, &mut codes);
        Int4Codec::<N>::pack(scale, zero_point, &codes, block);
    }
    match values.len() {
        32 => encode::<32>(values, block),
        64 => encode::<64>(values, block),
        _ => encode::<128>(values, block),
    }
}

/// Encodes a block of 8-bit codes.
pub(super) fn encode_int8(values: &[f32], block: &mut [u8]) {
    fn encode<const N: usize>(values: &[f32], block: &mut [u8]) {
        let mut codes = [0; N];
        let scale = int8_group(values, |scale| scale, &mut codes);
        Int8Codec::<N>::pack(scale, &codes, block);
    }
    match values.len() {
        32 => encode::<32>(values, block),
        _ => encode::<128>(values, block),
    }
}

//! Groups with an f32 scale: the forms into which the weights of safetensors files are repacked. GPTQ, AWQ and compressed-tensors become
//! int4 and int8, bitsandbytes int8 and nf4, FP8 checkpoints fp8.
//!
//! ```text
//! int4   u8 zero point | f32 scale | N/2 bytes of codes, 16 bytes for each 32 elements      element = scale · (code - zero point)
//! int8   f32 scale | N signed codes                                                      element = scale · code
//! fp8    f32 scale · 2^8 | 128 E4M3 numbers                                              element = scale · number
//! nf4    f32 scale | 32 bytes of codes, as those of int4                                 element = scale · NF4[code]
//! ```
//!
//! In a part of 32 elements, the low halves of its 16 bytes are the first 16 codes.

use super::{
    decode::{BlockCodec, BlockSource, BlockWords, PART, Words, halves_of_words},
    rounding::nearest,
};

/// Bytes of a scale.
const SCALE_BYTES: usize = 4;
/// Bytes before the codes of an int4 block: zero point and scale.
const INT4_HEAD_BYTES: usize = 1 + SCALE_BYTES;
/// Largest code of 4 bits.
const LARGEST_INT4: f32 = 15.0;
/// Largest magnitude of a code of 8 bits that is chosen here.
const LARGEST_INT8: f32 = 127.0;
/// Largest E4M3 number, and its code.
const LARGEST_FP8: f32 = 448.0;
const LARGEST_FP8_CODE: u8 = 0x7e;

/// Values of the codes of NF4 (QLoRA, arXiv 2305.14314, appendix E; bitsandbytes: `functional.py`).
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
/// The high bit of each byte.
const HIGH_BITS: u32 = 0x8080_8080;

/// Writes codes of 4 bits.
fn put_halves(codes: &[u8], bytes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact_mut(PART / 2).zip(codes.chunks_exact(PART)) {
        let (first, last) = codes.split_at(PART / 2);
        for (byte, (low, high)) in bytes.iter_mut().zip(first.iter().zip(last)) {
            *byte = low | high << 4;
        }
    }
}

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
        put_halves(codes, &mut block[INT4_HEAD_BYTES..]);
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
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        for index in 0..N / PART {
            run(index, words.word(0).floats(), None);
        }
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, part: usize, unit: usize) -> W {
        let zero_point = words.extra().and(0xff);
        let two = zero_point.or(zero_point.shl(8));
        halves_of_words(words, 1 + PART / 8 * part, unit).xor(HIGH_BITS).sub(two.or(two.shl(16)))
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
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        for index in 0..N / PART {
            run(index, words.word(0).floats(), None);
        }
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, part: usize, unit: usize) -> W {
        words.word(1 + PART / 4 * part + unit).xor(HIGH_BITS)
    }
}

/// Codec of [`BlockFormat::Fp8G128`](super::BlockFormat::Fp8G128).
#[derive(Debug, Clone, Copy)]
pub struct Fp8Codec;

impl Fp8Codec {
    /// Writes a block of numbers, none of which is NaN.
    ///
    /// # Panics
    /// If `numbers` or `block` have another size than a block.
    pub fn pack(scale: f32, numbers: &[u8], block: &mut [u8]) {
        assert_eq!((numbers.len(), block.len()), (Self::ELEMENTS, Self::BYTES), "bytes of a block");
        block[..SCALE_BYTES].copy_from_slice(&(scale * SMALL_HALVES).to_le_bytes());
        block[SCALE_BYTES..].copy_from_slice(numbers);
    }
}

/// Returns the E4M3 number in the low byte, as an f16 that is 2^8 times smaller: both formats have its exponent and mantissa side by
/// side.
#[inline(always)]
fn small_halves<W: Words>(numbers: W) -> W::Floats {
    numbers.and(0x80).shl(8).or(numbers.and(0x7f).shl(7)).halves()
}

/// Number by which [`small_halves`] are too small.
const SMALL_HALVES: f32 = 256.0;

/// Returns the value of an E4M3 number; 480 for NaN.
pub fn fp8_value(number: u8) -> f32 {
    small_halves(u32::from(number)) * SMALL_HALVES
}

impl BlockCodec for Fp8Codec {
    const ELEMENTS: usize = 128;
    const BYTES: usize = SCALE_BYTES + 128;
    const HAS_OFFSETS: bool = false;
    const HAS_INTEGER_CODES: bool = false;
    const ZERO: u8 = 0;
    const WORDS: BlockWords = BlockWords { first_byte: 0, count: 33 };

    #[inline(always)]
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        for index in 0..Self::ELEMENTS / PART {
            run(index, words.word(0).floats(), None);
        }
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, part: usize, unit: usize) -> W {
        words.word(1 + part * (PART / 4) + unit)
    }

    #[inline(always)]
    fn value<W: Words>(unit: W, index: usize) -> W::Floats {
        small_halves(unit.shr(8 * index))
    }
}

/// Codec of [`BlockFormat::Nf4G64`](super::BlockFormat::Nf4G64).
#[derive(Debug, Clone, Copy)]
pub struct Nf4Codec;

impl Nf4Codec {
    /// Writes a block.
    ///
    /// # Panics
    /// If `codes` or `block` have another size than a block.
    pub fn pack(scale: f32, codes: &[u8], block: &mut [u8]) {
        assert_eq!((codes.len(), block.len()), (Self::ELEMENTS, Self::BYTES), "codes and bytes of a block");
        block[..SCALE_BYTES].copy_from_slice(&scale.to_le_bytes());
        put_halves(codes, &mut block[SCALE_BYTES..]);
    }
}

impl BlockCodec for Nf4Codec {
    const ELEMENTS: usize = 64;
    const BYTES: usize = SCALE_BYTES + 32;
    const HAS_OFFSETS: bool = false;
    const HAS_INTEGER_CODES: bool = false;
    const ZERO: u8 = 0;
    const WORDS: BlockWords = BlockWords { first_byte: 0, count: 9 };

    #[inline(always)]
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        for index in 0..Self::ELEMENTS / PART {
            run(index, words.word(0).floats(), None);
        }
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, part: usize, unit: usize) -> W {
        halves_of_words(words, 1 + PART / 8 * part, unit)
    }

    #[inline(always)]
    fn value<W: Words>(unit: W, index: usize) -> W::Floats {
        unit.shr(8 * index).lookup(&NF4)
    }
}

/// Ends of the range of a group that are tried, as fractions of the largest and the smallest element; the best in squared error is kept.
const RANGES: [f32; 8] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72];

/// Quantizes a group to codes of 4 bits: writes them, and returns the scale and the zero point, 0 to 15. `round` rounds the scale to the
/// type in which it is stored.
pub fn int4_group(values: &[f32], round: impl Fn(f32) -> f32, codes: &mut [u8]) -> (f32, u8) {
    let (least, most) =
        values.iter().fold((0.0_f32, 0.0_f32), |(least, most), &x| (least.min(x), most.max(x)));
    let code = |x: f32, inverse: f32, zero: f32| nearest(x * inverse + zero, 0.0, LARGEST_INT4);
    let (mut best, mut least_error) = ((0.0, 0.0), f64::INFINITY);
    for range in RANGES {
        let scale = round((most - least) * range / LARGEST_INT4);
        let inverse = reciprocal(scale);
        let zero = nearest(-least * range * inverse, 0.0, LARGEST_INT4);
        let error = squares(values, |x| (code(x, inverse, zero) - zero) * scale - x);
        if error < least_error {
            (best, least_error) = ((scale, zero), error);
        }
    }
    let (scale, zero) = best;
    let inverse = reciprocal(scale);
    for (of_value, &x) in codes.iter_mut().zip(values) {
        *of_value = code(x, inverse, zero) as u8;
    }
    (scale, zero as u8)
}

/// Returns the sum of the squares of the errors of elements, in lanes that are added at the end.
fn squares(values: &[f32], error: impl Fn(f32) -> f32) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0_f64; LANES];
    for values in values.chunks(LANES) {
        for (sum, &x) in sums.iter_mut().zip(values) {
            let error = f64::from(error(x));
            *sum += error * error;
        }
    }
    sums.iter().sum()
}

/// Quantizes a group to signed codes of 8 bits, -127 to 127: writes them, and returns the scale. `round` rounds it as in [`int4_group`].
pub fn int8_group(values: &[f32], round: impl Fn(f32) -> f32, codes: &mut [i8]) -> f32 {
    let scale = round(largest(values) / LARGEST_INT8);
    let inverse = reciprocal(scale);
    for (code, x) in codes.iter_mut().zip(values) {
        *code = nearest(x * inverse, -LARGEST_INT8, LARGEST_INT8) as i8;
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

/// Returns the reciprocal, or zero for zero.
fn reciprocal(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// Returns the largest magnitude.
fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0_f32, |most, x| most.max(x.abs()))
}

/// Encodes a block of E4M3 numbers.
pub(super) fn encode_fp8(values: &[f32], block: &mut [u8]) {
    let scale = largest(values) / LARGEST_FP8;
    let inverse = reciprocal(scale);
    // Magnitudes in ascending order are those of codes in ascending order.
    let magnitudes: [f32; LARGEST_FP8_CODE as usize + 1] = std::array::from_fn(|code| fp8_value(code as u8));
    let nearest = |x: f32| {
        let above =
            magnitudes.partition_point(|&magnitude| magnitude < x).clamp(1, LARGEST_FP8_CODE as usize);
        let is_below = x - magnitudes[above - 1] <= magnitudes[above] - x;
        if is_below { above as u8 - 1 } else { above as u8 }
    };
    let code = |x: f32| nearest((x * inverse).abs()) | if x < 0.0 { 0x80 } else { 0 };
    let numbers: Vec<u8> = values.iter().map(|&x| code(x)).collect();
    Fp8Codec::pack(scale, &numbers, block);
}

/// Returns the code whose value is nearest.
fn nf4_code(x: f32) -> u8 {
    let above = NF4.partition_point(|&value| value < x).clamp(1, 15);
    let is_below = x - NF4[above - 1] <= NF4[above] - x;
    if is_below { above as u8 - 1 } else { above as u8 }
}

/// Encodes a block of NF4 codes.
pub(super) fn encode_nf4(values: &[f32], block: &mut [u8]) {
    let scale = largest(values);
    let inverse = reciprocal(scale);
    let codes: Vec<u8> = values.iter().map(|&x| nf4_code(x * inverse)).collect();
    Nf4Codec::pack(scale, &codes, block);
}

//! Decoding of blocks: the layout of each format, as arithmetic on the 32-bit words of several lines at once.
//!
//! A caller transposes the words of the blocks of some lines, so that a word of each line lies in one vector. The same code
//! decodes a single block, whose words are numbers.

use super::half::widen;

/// Elements that share a scale: the smallest number of all formats.
pub const RUN: usize = 16;
/// Runs of the longest block.
pub const RUNS: usize = 16;
/// Codes that are unpacked at a time: a part of a block.
pub const PART: usize = 32;
/// Words of the codes of a part, four each.
pub const UNITS: usize = PART / 4;
/// Words of the longest block.
pub const MOST_WORDS: usize = 53;

/// A word of each line. Methods are inlined into their callers and compiled for the caller's instructions.
pub trait Words: Copy {
    /// An f32 of each line.
    type Floats: Copy;

    /// Returns the bits that are set in the mask as well.
    fn and(self, mask: u32) -> Self;
    /// Returns the bits that are set in either word.
    fn or(self, other: Self) -> Self;
    /// Returns the words with the bits of the mask inverted.
    fn xor(self, mask: u32) -> Self;
    /// Subtracts words from words.
    fn sub(self, other: Self) -> Self;
    /// Shifts towards the high bits.
    fn shl(self, bits: usize) -> Self;
    /// Shifts towards the low bits, and fills up with zeros.
    fn shr(self, bits: usize) -> Self;
    /// Shifts towards the low bits, and fills up with the highest one.
    fn shr_signed(self, bits: usize) -> Self;
    /// Returns the words, which are signed integers, as f32.
    fn numbers(self) -> Self::Floats;
    /// Returns the f32 with the bits of each word.
    fn floats(self) -> Self::Floats;
    /// Returns the number of a table that the low four bits of each word name.
    fn lookup(self, table: &[f32; 16]) -> Self::Floats;
    /// Returns the bytes of a table that the bytes of each word name, which are 0 to 15.
    fn lookup_bytes(self, table: &[u8; 16]) -> Self;
    /// Returns the f16 in the low half of each word.
    fn halves(self) -> Self::Floats;
    /// Multiplies numbers.
    fn products(first: Self::Floats, second: Self::Floats) -> Self::Floats;
    /// Negates numbers.
    fn negatives(numbers: Self::Floats) -> Self::Floats;

    /// Returns byte `index` of each word, unsigned.
    #[inline(always)]
    fn bytes(self, index: usize) -> Self::Floats {
        self.shr(8 * index).and(0xff).numbers()
    }
}

/// One line.
impl Words for u32 {
    type Floats = f32;

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        self & mask
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        self | other
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        self ^ mask
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.wrapping_sub(other)
    }

    #[inline(always)]
    fn shl(self, bits: usize) -> Self {
        self << bits
    }

    #[inline(always)]
    fn shr(self, bits: usize) -> Self {
        self >> bits
    }

    #[inline(always)]
    fn shr_signed(self, bits: usize) -> Self {
        (self.cast_signed() >> bits).cast_unsigned()
    }

    #[inline(always)]
    fn numbers(self) -> f32 {
        self.cast_signed() as f32
    }

    #[inline(always)]
    fn floats(self) -> f32 {
        f32::from_bits(self)
    }

    #[inline(always)]
    fn lookup(self, table: &[f32; 16]) -> f32 {
        table[(self & 15) as usize]
    }

    #[inline(always)]
    fn lookup_bytes(self, table: &[u8; 16]) -> Self {
        u32::from_le_bytes(self.to_le_bytes().map(|byte| table[usize::from(byte & 15)]))
    }

    #[inline(always)]
    fn halves(self) -> f32 {
        widen(self as u16)
    }

    #[inline(always)]
    fn products(first: f32, second: f32) -> f32 {
        first * second
    }

    #[inline(always)]
    fn negatives(number: f32) -> f32 {
        -number
    }
}

/// The words of a block of some lines.
pub trait BlockSource<W: Words>: Copy {
    /// Returns word `index`.
    fn word(self, index: usize) -> W;
    /// Returns the word with [`BlockCodec::EXTRA`].
    fn extra(self) -> W;
}

/// Words, with the extra one at the end.
impl<W: Words> BlockSource<W> for &[W] {
    #[inline(always)]
    fn word(self, index: usize) -> W {
        self[index]
    }

    #[inline(always)]
    fn extra(self) -> W {
        self[self.len() - 1]
    }
}

/// Words of a block that are read as such.
#[derive(Debug, Clone, Copy)]
pub struct BlockWords {
    /// Byte of the first word.
    pub first_byte: usize,
    /// Number of words.
    pub count: usize,
}

/// Layout of the blocks of a format. An element is `scale · (code - ZERO) + offset`, with the scale and the offset of its run; or, of codes
/// that are no integers, `scale · value(code)`.
pub trait BlockCodec {
    /// Elements of a block, a multiple of 32.
    const ELEMENTS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// True if offsets may differ from zero.
    const HAS_OFFSETS: bool;
    /// True if codes are integers; if not, products decode them with [`BlockCodec::value`].
    const HAS_INTEGER_CODES: bool = true;
    /// Elements that share a scale: [`RUN`] or 32.
    const RUN_ELEMENTS: usize = PART;
    /// The unsigned code that stands for zero.
    const ZERO: u8;
    /// The words.
    const WORDS: BlockWords;
    /// Byte of up to 16 bits outside of the words. They are the low half of a word of their own, [`BlockSource::extra`].
    const EXTRA: Option<usize> = None;

    /// Passes the index of each run, its scale and, if the format has any, its offset.
    fn scales<W: Words>(words: impl BlockSource<W>, run: impl FnMut(usize, W::Floats, Option<W::Floats>));

    /// Returns codes `4 · unit` to `4 · unit + 3` of a part of 32 elements, the first one in the low byte.
    fn unit<W: Words>(words: impl BlockSource<W>, part: usize, unit: usize) -> W;

    /// Returns the value of code `index` of a unit, in formats without integer codes.
    #[inline(always)]
    fn value<W: Words>(unit: W, index: usize) -> W::Floats {
        unit.bytes(index)
    }
}

/// Returns the number of words of a block, with the one of [`BlockCodec::EXTRA`].
pub const fn all_words<C: BlockCodec>() -> usize {
    C::WORDS.count + C::EXTRA.is_some() as usize
}

/// Decodes whole blocks. A caller may compile it for any vector instructions.
#[inline(always)]
pub fn dequantize<C: BlockCodec>(bytes: &[u8], values: &mut [f32]) {
    let (mut scales, mut offsets) = ([0.0; RUNS], [0.0; RUNS]);
    for (block, values) in bytes.chunks_exact(C::BYTES).zip(values.chunks_exact_mut(C::ELEMENTS)) {
        let mut words = [0; MOST_WORDS];
        let stored = block[C::WORDS.first_byte..][..4 * C::WORDS.count].chunks_exact(4);
        for (word, bytes) in words.iter_mut().zip(stored) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        if let Some(at) = C::EXTRA {
            words[C::WORDS.count] = u32::from(u16::from_le_bytes([block[at], block[at + 1]]));
        }
        let words: &[u32] = &words[..all_words::<C>()];
        C::scales(words, |run, scale, offset| {
            scales[run] = scale;
            offsets[run] = offset.unwrap_or(0.0);
        });
        for (part, values) in values.chunks_exact_mut(PART).enumerate() {
            if !C::HAS_INTEGER_CODES {
                for (index, value) in values.iter_mut().enumerate() {
                    let unit = C::unit(words, part, index / 4);
                    *value = scales[(part * PART + index) / C::RUN_ELEMENTS] * C::value(unit, index % 4);
                }
                continue;
            }
            let mut codes = [0; PART];
            for (unit, codes) in codes.chunks_exact_mut(4).enumerate() {
                codes.copy_from_slice(&C::unit(words, part, unit).to_le_bytes());
            }
            for (index, (value, code)) in values.iter_mut().zip(codes).enumerate() {
                let run = (part * PART + index) / C::RUN_ELEMENTS;
                *value = scales[run] * (i32::from(code) - i32::from(C::ZERO)) as f32;
                if C::HAS_OFFSETS {
                    *value += offsets[run];
                }
            }
        }
    }
}

/// Low half of each byte.
pub(super) const LOW: u32 = 0x0f0f_0f0f;

/// Returns a unit of the low halves of the 16 bytes in the words from `first` on, then of the high halves.
#[inline(always)]
pub(super) fn halves_of_words<W: Words>(words: impl BlockSource<W>, first: usize, unit: usize) -> W {
    words.word(first + unit % 4).shr(unit / 4 * 4).and(LOW)
}

/// Codec of [`BlockFormat::Q8_0`](super::BlockFormat::Q8_0): f16 scale, 32 signed codes.
#[derive(Debug, Clone, Copy)]
pub struct Q8_0Codec;

impl BlockCodec for Q8_0Codec {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;
    const HAS_OFFSETS: bool = false;
    const ZERO: u8 = 128;
    const WORDS: BlockWords = BlockWords { first_byte: 2, count: 8 };
    const EXTRA: Option<usize> = Some(0);

    #[inline(always)]
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        run(0, words.extra().halves(), None);
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, _: usize, unit: usize) -> W {
        words.word(unit).xor(0x8080_8080)
    }
}

/// Codec of [`BlockFormat::Q4_0`](super::BlockFormat::Q4_0): f16 scale, 16 bytes whose low halves are the first 16 codes; 8 is zero.
#[derive(Debug, Clone, Copy)]
pub struct Q4_0Codec;

impl BlockCodec for Q4_0Codec {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const HAS_OFFSETS: bool = false;
    const ZERO: u8 = 8;
    const WORDS: BlockWords = BlockWords { first_byte: 2, count: 4 };
    const EXTRA: Option<usize> = Some(0);

    #[inline(always)]
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        run(0, words.extra().halves(), None);
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, _: usize, unit: usize) -> W {
        halves_of_words(words, 0, unit)
    }
}

/// Codec of [`BlockFormat::Q4_1`](super::BlockFormat::Q4_1): f16 scale, f16 minimum, codes as in Q4_0 from zero on.
#[derive(Debug, Clone, Copy)]
pub struct Q4_1Codec;

impl BlockCodec for Q4_1Codec {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;
    const HAS_OFFSETS: bool = true;
    const ZERO: u8 = 0;
    const WORDS: BlockWords = BlockWords { first_byte: 0, count: 5 };

    #[inline(always)]
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        run(0, words.word(0).halves(), Some(words.word(0).shr(16).halves()));
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, _: usize, unit: usize) -> W {
        halves_of_words(words, 1, unit)
    }
}

/// Writes the scales of Q4_K or Q5_K blocks: f16 factors of the scales and of the minima, and 12 bytes of 6-bit pairs. The pairs of the
/// last four runs are split: four bits in the last four bytes, two bits in the high bits of the first eight.
#[inline(always)]
fn six_bit_scales<W: Words>(
    words: impl BlockSource<W>,
    mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
) {
    const SIX: u32 = 0x3f3f_3f3f;
    let (factors, factors_of_minima) = (words.word(0).halves(), words.word(0).shr(16).halves());
    let [first, second, third] = [words.word(1), words.word(2), words.word(3)];
    let first_high = first.shr(6).and(0x0303_0303).shl(4);
    let second_high = second.shr(6).and(0x0303_0303).shl(4);
    let scales = [first.and(SIX), third.and(LOW).or(first_high)];
    let minima = [second.and(SIX), third.shr(4).and(LOW).or(second_high)];
    for index in 0..8 {
        let minimum = W::products(factors_of_minima, minima[index / 4].bytes(index % 4));
        run(index, W::products(factors, scales[index / 4].bytes(index % 4)), Some(W::negatives(minimum)));
    }
}

/// Codec of [`BlockFormat::Q4K`](super::BlockFormat::Q4K). Of two parts, the first one has the low halves of 32 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Q4KCodec;

impl BlockCodec for Q4KCodec {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;
    const HAS_OFFSETS: bool = true;
    const ZERO: u8 = 0;
    const WORDS: BlockWords = BlockWords { first_byte: 0, count: 36 };

    #[inline(always)]
    fn scales<W: Words>(words: impl BlockSource<W>, run: impl FnMut(usize, W::Floats, Option<W::Floats>)) {
        six_bit_scales(words, run);
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, part: usize, unit: usize) -> W {
        words.word(4 + part / 2 * UNITS + unit).shr(part % 2 * 4).and(LOW)
    }
}

/// Codec of [`BlockFormat::Q5K`](super::BlockFormat::Q5K): as Q4_K, with the fifth bits in 32 bytes of their own.
#[derive(Debug, Clone, Copy)]
pub struct Q5KCodec;

impl BlockCodec for Q5KCodec {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;
    const HAS_OFFSETS: bool = true;
    const ZERO: u8 = 0;
    const WORDS: BlockWords = BlockWords { first_byte: 0, count: 44 };

    #[inline(always)]
    fn scales<W: Words>(words: impl BlockSource<W>, run: impl FnMut(usize, W::Floats, Option<W::Floats>)) {
        six_bit_scales(words, run);
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, part: usize, unit: usize) -> W {
        let high = words.word(4 + unit).shr(part).and(0x0101_0101).shl(4);
        words.word(12 + part / 2 * UNITS + unit).shr(part % 2 * 4).and(LOW).or(high)
    }
}

/// Codec of [`BlockFormat::Q6K`](super::BlockFormat::Q6K): 128 bytes of low bits, 64 bytes of high bits, 16 signed scales and their f16
/// factor; 32 is zero.
#[derive(Debug, Clone, Copy)]
pub struct Q6KCodec;

impl BlockCodec for Q6KCodec {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;
    const HAS_OFFSETS: bool = false;
    const RUN_ELEMENTS: usize = RUN;
    const ZERO: u8 = 32;
    const WORDS: BlockWords = BlockWords { first_byte: 0, count: 52 };
    const EXTRA: Option<usize> = Some(208);

    #[inline(always)]
    fn scales<W: Words>(
        words: impl BlockSource<W>,
        mut run: impl FnMut(usize, W::Floats, Option<W::Floats>),
    ) {
        let factors = words.extra().halves();
        for index in 0..RUNS {
            let signed = words.word(48 + index / 4).shl(24 - index % 4 * 8).shr_signed(24);
            run(index, W::products(factors, signed.numbers()), None);
        }
    }

    #[inline(always)]
    fn unit<W: Words>(words: impl BlockSource<W>, part: usize, unit: usize) -> W {
        // Half of the block, and the quarter in it.
        let (half, quarter) = (part / 4, part % 4);
        let high = words.word(32 + UNITS * half + unit).shr(2 * quarter).and(0x0303_0303).shl(4);
        words.word(16 * half + quarter % 2 * UNITS + unit).shr(quarter / 2 * 4).and(LOW).or(high)
    }
}

//! Decoding of blocks.

use super::half::widen;

/// Elements that share a scale: the smallest number of all formats.
pub const RUN: usize = 16;
/// Runs of the longest block.
pub const RUNS: usize = 16;
/// Codes that are unpacked at a time.
pub const CODES: usize = 32;

/// Scale and offset of each run of [`RUN`] elements of a block; a block of 32 elements uses the first two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunScales {
    /// Factors of the codes.
    pub scales: [f32; RUNS],
    /// Terms that are added to the products; negative zero, which changes no number, in formats without a minimum.
    pub offsets: [f32; RUNS],
}

/// Layout of the blocks of a format.
pub trait BlockCodec {
    /// Elements of a block: 32, 64, 128 or 256.
    const ELEMENTS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// True if offsets may differ from zero.
    const HAS_OFFSETS: bool;

    /// Returns the scales of a block of `BYTES` bytes.
    fn scales(block: &[u8]) -> RunScales;

    /// Returns the codes of elements `32 · part` to `32 · part + 31` of a block.
    fn codes(block: &[u8], part: usize) -> [i8; CODES];

    /// Writes the scales of the blocks of `LINES` lines, line by line within each run.
    #[inline(always)]
    fn scales_of_lines<const LINES: usize>(blocks: &[&[u8]; LINES], runs: &mut LineScales<LINES>) {
        for (line, block) in blocks.iter().enumerate() {
            let RunScales { scales, offsets } = Self::scales(block);
            for run in 0..RUNS {
                runs.scales[run][line] = scales[run];
                runs.offsets[run][line] = offsets[run];
            }
        }
    }
}

/// Scales and offsets of the blocks of several lines, by run.
#[derive(Debug, Clone, Copy)]
pub struct LineScales<const LINES: usize> {
    /// Factors of the codes.
    pub scales: [[f32; LINES]; RUNS],
    /// Terms that are added to the products.
    pub offsets: [[f32; LINES]; RUNS],
}

impl<const LINES: usize> LineScales<LINES> {
    /// Zeros.
    pub const ZERO: Self = Self { scales: [[0.0; LINES]; RUNS], offsets: [[0.0; LINES]; RUNS] };
}

/// Returns the f16 at byte `at` of each block, by arithmetic that vectorizes over the blocks.
#[inline(always)]
fn halves<const LINES: usize>(blocks: &[&[u8]; LINES], at: usize) -> [f32; LINES] {
    let mut bits = [0; LINES];
    for (bits, block) in bits.iter_mut().zip(blocks) {
        *bits = u16::from_le_bytes([block[at], block[at + 1]]);
    }
    let mut halves = [0.0; LINES];
    for (half, bits) in halves.iter_mut().zip(bits) {
        *half = widen(bits);
    }
    halves
}

/// Decodes whole blocks. A caller may compile it for any vector instructions.
#[inline(always)]
pub fn dequantize<C: BlockCodec>(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.chunks_exact(C::BYTES).zip(values.chunks_exact_mut(C::ELEMENTS)) {
        let RunScales { scales, offsets } = C::scales(block);
        for (part, values) in values.chunks_exact_mut(CODES).enumerate() {
            let codes = C::codes(block, part);
            for (index, (value, code)) in values.iter_mut().zip(codes).enumerate() {
                let run = part * (CODES / RUN) + index / RUN;
                *value = scales[run] * f32::from(code) + offsets[run];
            }
        }
    }
}

/// Returns the f16 at byte `at`.
#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    widen(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Returns the same scale and offset for all runs.
#[inline(always)]
pub(super) fn same(scale: f32, offset: f32) -> RunScales {
    RunScales { scales: [scale; RUNS], offsets: [offset; RUNS] }
}

/// Returns the low half of each of 16 bytes, then the high half of each, less `zero`.
#[inline(always)]
pub(super) fn halves_of_bytes(bytes: &[u8], zero: i8) -> [i8; CODES] {
    let bytes: &[u8; CODES / 2] = bytes[..CODES / 2].try_into().expect("16 bytes");
    let mut codes = [0; CODES];
    for (index, byte) in bytes.iter().enumerate() {
        codes[index] = (byte & 15).cast_signed().wrapping_sub(zero);
        codes[index + CODES / 2] = (byte >> 4).cast_signed().wrapping_sub(zero);
    }
    codes
}

/// Codec of [`BlockFormat::Q8_0`](super::BlockFormat::Q8_0): f16 scale, 32 signed codes.
#[derive(Debug, Clone, Copy)]
pub struct Q8_0Codec;

impl BlockCodec for Q8_0Codec {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;
    const HAS_OFFSETS: bool = false;

    #[inline(always)]
    fn scales(block: &[u8]) -> RunScales {
        same(half(block, 0), -0.0)
    }

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [i8; CODES] {
        signed(&block[2..])
    }

    #[inline(always)]
    fn scales_of_lines<const LINES: usize>(blocks: &[&[u8]; LINES], runs: &mut LineScales<LINES>) {
        runs.scales[..2].fill(halves(blocks, 0));
    }
}

/// Codec of [`BlockFormat::Q4_0`](super::BlockFormat::Q4_0): f16 scale, 16 bytes whose low halves are the first 16 codes; 8 is zero.
#[derive(Debug, Clone, Copy)]
pub struct Q4_0Codec;

impl BlockCodec for Q4_0Codec {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const HAS_OFFSETS: bool = false;

    #[inline(always)]
    fn scales(block: &[u8]) -> RunScales {
        same(half(block, 0), -0.0)
    }

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [i8; CODES] {
        halves_of_bytes(&block[2..], 8)
    }

    #[inline(always)]
    fn scales_of_lines<const LINES: usize>(blocks: &[&[u8]; LINES], runs: &mut LineScales<LINES>) {
        runs.scales[..2].fill(halves(blocks, 0));
    }
}

/// Codec of [`BlockFormat::Q4_1`](super::BlockFormat::Q4_1): f16 scale, f16 minimum, codes as in Q4_0 from zero on.
#[derive(Debug, Clone, Copy)]
pub struct Q4_1Codec;

impl BlockCodec for Q4_1Codec {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;
    const HAS_OFFSETS: bool = true;

    #[inline(always)]
    fn scales(block: &[u8]) -> RunScales {
        same(half(block, 0), half(block, 2))
    }

    #[inline(always)]
    fn codes(block: &[u8], _: usize) -> [i8; CODES] {
        halves_of_bytes(&block[4..], 0)
    }

    #[inline(always)]
    fn scales_of_lines<const LINES: usize>(blocks: &[&[u8]; LINES], runs: &mut LineScales<LINES>) {
        runs.scales[..2].fill(halves(blocks, 0));
        runs.offsets[..2].fill(halves(blocks, 2));
    }
}

/// Returns the scales of a Q4_K or Q5_K block: f16 factors of the scales and of the minima, and 12 bytes of 6-bit pairs.
#[inline(always)]
fn six_bit_scales(block: &[u8]) -> RunScales {
    let (factor, factor_of_minima) = (half(block, 0), half(block, 2));
    let packed = &block[4..16];
    let mut runs = same(0.0, 0.0);
    for pair in 0..8_usize {
        let (scale, minimum) = match pair.checked_sub(4) {
            None => (packed[pair] & 63, packed[pair + 4] & 63),
            Some(low) => (
                packed[pair + 4] & 15 | packed[low] >> 6 << 4,
                packed[pair + 4] >> 4 | packed[pair] >> 6 << 4,
            ),
        };
        for run in [2 * pair, 2 * pair + 1] {
            runs.scales[run] = factor * f32::from(scale);
            runs.offsets[run] = -(factor_of_minima * f32::from(minimum));
        }
    }
    runs
}

/// Returns 4 bits of each of the 32 bytes that hold part `part`: the low half for an even part, the high half for an odd one.
#[inline(always)]
fn halves_of_parts(bytes: &[u8], part: usize) -> [u8; CODES] {
    let mut halves = [0; CODES];
    for (half, byte) in halves.iter_mut().zip(&bytes[part / 2 * CODES..][..CODES]) {
        *half = byte >> (part % 2 * 4) & 15;
    }
    halves
}

/// Returns the first 32 bytes as signed codes. A loop, here and above: `map` of an array is not compiled for the caller's instructions.
#[inline(always)]
pub(super) fn signed(bytes: &[u8]) -> [i8; CODES] {
    let mut codes = [0; CODES];
    for (code, byte) in codes.iter_mut().zip(&bytes[..CODES]) {
        *code = byte.cast_signed();
    }
    codes
}

/// Codec of [`BlockFormat::Q4K`](super::BlockFormat::Q4K).
#[derive(Debug, Clone, Copy)]
pub struct Q4KCodec;

impl BlockCodec for Q4KCodec {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;
    const HAS_OFFSETS: bool = true;

    #[inline(always)]
    fn scales(block: &[u8]) -> RunScales {
        six_bit_scales(block)
    }

    #[inline(always)]
    fn codes(block: &[u8], part: usize) -> [i8; CODES] {
        signed(&halves_of_parts(&block[16..144], part))
    }
}

/// Codec of [`BlockFormat::Q5K`](super::BlockFormat::Q5K): as Q4_K, with the fifth bits in 32 bytes of their own.
#[derive(Debug, Clone, Copy)]
pub struct Q5KCodec;

impl BlockCodec for Q5KCodec {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;
    const HAS_OFFSETS: bool = true;

    #[inline(always)]
    fn scales(block: &[u8]) -> RunScales {
        six_bit_scales(block)
    }

    #[inline(always)]
    fn codes(block: &[u8], part: usize) -> [i8; CODES] {
        let mut codes = halves_of_parts(&block[48..176], part);
        for (code, high) in codes.iter_mut().zip(&block[16..48]) {
            *code |= (high >> part & 1) << 4;
        }
        signed(&codes)
    }
}

/// Codec of [`BlockFormat::Q6K`](super::BlockFormat::Q6K): 128 bytes of low bits, 64 bytes of high bits, 16 signed scales and their f16 factor;
/// 32 is zero.
#[derive(Debug, Clone, Copy)]
pub struct Q6KCodec;

impl BlockCodec for Q6KCodec {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;
    const HAS_OFFSETS: bool = false;

    #[inline(always)]
    fn scales(block: &[u8]) -> RunScales {
        let factor = half(block, 208);
        let mut runs = same(0.0, -0.0);
        for (scale, byte) in runs.scales.iter_mut().zip(&block[192..208]) {
            *scale = factor * f32::from(byte.cast_signed());
        }
        runs
    }

    #[inline(always)]
    fn codes(block: &[u8], part: usize) -> [i8; CODES] {
        // Half of the block, and the quarter in it.
        let (half, quarter) = (part / 4, part % 4);
        let low: &[u8; CODES] =
            block[64 * half + quarter % 2 * CODES..][..CODES].try_into().expect("32 bytes");
        let high: &[u8; CODES] = block[128 + CODES * half..][..CODES].try_into().expect("32 bytes");
        let (low_shift, high_shift) = (quarter / 2 * 4, 2 * quarter);
        let mut codes = [0; CODES];
        for (code, (low, high)) in codes.iter_mut().zip(low.iter().zip(high)) {
            *code = (low >> low_shift & 15 | (high >> high_shift & 3) << 4).cast_signed().wrapping_sub(32);
        }
        codes
    }
}

//! Block formats of GGUF files that no kernel reads (llama.cpp: `ggml-common.h`, `ggml-quants.c`). A matrix is repacked into blocks with
//! the same values as it is loaded, or decoded if no format of kernels has them.
//!
//! ```text
//! q5_0    f16 d | 32 high bits | 16 bytes of low halves            d · (code - 16)              as q8_0
//! q5_1    f16 d | f16 m | 32 high bits | 16 bytes of low halves    d · code + m                 decoded
//! q2_k    16 bytes: scale s, minimum t of 4 bits | 64 bytes of codes | f16 d | f16 e
//!                                                                  d · s · code - e · t         decoded
//! q3_k    32 bytes of high bits | 64 bytes of low bits | 12 bytes of scales | f16 d
//!                                                                  d · (s - 32) · (code - 4)    as q6_k
//! iq4_nl  f16 d | 16 bytes of codes                                d · LEVELS[code]             as q8_0
//! iq4_xs  f16 d | 16 high bits of scales, 2 each | 4 bytes of low halves of scales | 128 bytes of codes
//!                                                                  d · (s - 32) · LEVELS[code]  as int8_g32
//! ```

use lockstep_plan::{
    BlockFormat,
    block_format::{BlockCodec, Int8Codec, Q6KCodec, Q8_0Codec, widen},
};

/// Elements of a superblock.
const SUPERBLOCK: usize = 256;
/// Elements that share a scale, except in q2_k and q3_k.
const RUN: usize = 32;
/// Elements that share a scale in q2_k and q3_k.
const SHORT_RUN: usize = 16;
/// Values of the codes of iq4 formats.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Largest size of the blocks that replace one, in bytes.
const MOST_REPACKED_BYTES: usize = SUPERBLOCK / RUN * Int8Codec::<RUN>::BYTES;

/// Block format of a GGUF file that is not a format of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ForeignFormat {
    /// 32 integers of 5 bits and a scale.
    Q5_0,
    /// 32 integers of 5 bits, a scale and a minimum.
    Q5_1,
    /// 256 integers of 2 bits with a scale and a minimum for each run of 16.
    Q2K,
    /// 256 integers of 3 bits with a scale for each run of 16.
    Q3K,
    /// 32 codes of 4 bits for uneven levels, and a scale.
    Iq4Nl,
    /// 256 codes of 4 bits for uneven levels, with a scale for each run of 32.
    Iq4Xs,
}

impl ForeignFormat {
    /// Formats by their number in files.
    pub(super) const IN_FILES: [(u32, Self); 6] = [
        (6, Self::Q5_0),
        (7, Self::Q5_1),
        (10, Self::Q2K),
        (11, Self::Q3K),
        (20, Self::Iq4Nl),
        (23, Self::Iq4Xs),
    ];

    /// Returns the number of elements of a block.
    pub(crate) const fn block_elements(self) -> usize {
        match self {
            Self::Q5_0 | Self::Q5_1 | Self::Iq4Nl => RUN,
            Self::Q2K | Self::Q3K | Self::Iq4Xs => SUPERBLOCK,
        }
    }

    /// Returns the number of bytes of a block.
    pub(crate) const fn block_bytes(self) -> usize {
        match self {
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Iq4Nl => 18,
            Self::Iq4Xs => 136,
        }
    }

    /// Returns the format of blocks that have the same values; `None` if there is none.
    pub(crate) const fn repacked(self) -> Option<BlockFormat> {
        match self {
            Self::Q5_0 | Self::Iq4Nl => Some(BlockFormat::Q8_0),
            Self::Q3K => Some(BlockFormat::Q6K),
            Self::Iq4Xs => Some(BlockFormat::Int8G32),
            Self::Q5_1 | Self::Q2K => None,
        }
    }

    /// Returns the reason why blocks without a format of [`ForeignFormat::repacked`] are decoded.
    pub(crate) const fn reason_to_decode(self) -> &'static str {
        match self {
            Self::Q2K => "no kernel reads q2_k, and no other format has its values",
            _ => "no kernel reads q5_1, and no other format has its values",
        }
    }

    /// Repacks blocks into those of [`ForeignFormat::repacked`], which have the same number of elements.
    ///
    /// # Panics
    /// If there is no such format.
    pub(crate) fn repack(self, blocks: &[u8], out: &mut [u8]) {
        let format = self.repacked().expect("a format with these values");
        let bytes = self.block_elements() / format.block_elements() * format.block_bytes();
        for (block, out) in blocks.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(bytes)) {
            match self {
                Self::Q5_0 => Q8_0Codec::pack([block[0], block[1]], &q5_codes(&block[2..], 16), out),
                Self::Iq4Nl => Q8_0Codec::pack([block[0], block[1]], &levels(&block[2..]), out),
                Self::Q3K => repack_q3_k(block, out),
                Self::Iq4Xs => repack_iq4_xs(block, out),
                Self::Q5_1 | Self::Q2K => unreachable!("no format has these values"),
            }
        }
    }

    /// Decodes blocks to `out`.
    pub(crate) fn dequantize(self, blocks: &[u8], out: &mut [f32]) {
        let blocks = blocks.chunks_exact(self.block_bytes());
        for (block, out) in blocks.zip(out.chunks_exact_mut(self.block_elements())) {
            match self.repacked() {
                Some(format) => {
                    let mut repacked = [0; MOST_REPACKED_BYTES];
                    let bytes = out.len() / format.block_elements() * format.block_bytes();
                    self.repack(block, &mut repacked[..bytes]);
                    format.dequantize(&repacked[..bytes], out);
                }
                None if self == Self::Q5_1 => decode_q5_1(block, out),
                None => decode_q2_k(block, out),
            }
        }
    }
}

impl std::fmt::Display for ForeignFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q2K => "q2_k",
            Self::Q3K => "q3_k",
            Self::Iq4Nl => "iq4_nl",
            Self::Iq4Xs => "iq4_xs",
        })
    }
}

/// Returns the f16 at a byte.
fn half(block: &[u8], at: usize) -> f32 {
    widen(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Returns the codes of 5 bits, less `zero`, in 4 bytes of high bits and 16 of low halves.
fn q5_codes(bytes: &[u8], zero: i8) -> [i8; RUN] {
    let high = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    std::array::from_fn(|index| {
        let low = bytes[4 + index % 16] >> (4 * (index / 16)) & 15;
        let code = low | ((high >> index & 1) as u8) << 4;
        code.cast_signed() - zero
    })
}

/// Returns the levels of the codes in 16 bytes.
fn levels(bytes: &[u8]) -> [i8; RUN] {
    std::array::from_fn(|index| LEVELS[usize::from(bytes[index % 16] >> (4 * (index / 16)) & 15)])
}

/// Returns the two bits of an element of a superblock in 64 bytes: four elements at a distance of 32 share a byte.
fn two_bits(bytes: &[u8], element: usize) -> u8 {
    let (half, rest) = (element / 128, element % 128);
    bytes[half * 32 + rest % 32] >> (2 * (rest / 32)) & 3
}

fn repack_q3_k(block: &[u8], out: &mut [u8]) {
    let (high, rest) = block.split_at(32);
    let (low, rest) = rest.split_at(64);
    let (scales, scale) = rest.split_at(12);
    let code = |element: usize| {
        let is_high = high[element % 32] >> (element / 32) & 1;
        (two_bits(low, element) | is_high << 2).cast_signed() - 4
    };
    // The low halves of 16 scales are in 8 bytes, the others in 4.
    let scale_of = |run: usize| {
        let low = scales[run % 8] >> (4 * (run / 8)) & 15;
        let high = scales[8 + run % 4] >> (2 * (run / 4)) & 3;
        (low | high << 4).cast_signed() - 32
    };
    let scale = [scale[0], scale[1]];
    Q6KCodec::pack(scale, &std::array::from_fn(scale_of), &std::array::from_fn(code), out);
}

fn repack_iq4_xs(block: &[u8], out: &mut [u8]) {
    let factor = half(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    let runs = block[8..].chunks_exact(RUN / 2).zip(out.chunks_exact_mut(Int8Codec::<RUN>::BYTES));
    for (run, (codes, out)) in runs.enumerate() {
        let low = block[4 + run / 2] >> (4 * (run % 2)) & 15;
        let scale = (low | ((high >> (2 * run) & 3) as u8) << 4).cast_signed() - 32;
        Int8Codec::<RUN>::pack(factor * f32::from(scale), &levels(codes), out);
    }
}

fn decode_q5_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half(block, 0), half(block, 2));
    for (out, code) in out.iter_mut().zip(q5_codes(&block[4..], 0)) {
        *out = scale * f32::from(code) + minimum;
    }
}

fn decode_q2_k(block: &[u8], out: &mut [f32]) {
    let (runs, codes) = block.split_at(16);
    let (scale, minimum) = (half(codes, 64), half(codes, 66));
    for (element, out) in out.iter_mut().enumerate() {
        let run = runs[element / SHORT_RUN];
        let code = f32::from(two_bits(codes, element));
        *out = scale * f32::from(run & 15) * code - minimum * f32::from(run >> 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of a file that `tests/fixtures/make_gguf.py` has made.
    macro_rules! fixture {
        ($name:literal) => {
            include_bytes!(concat!("../../../../tests/fixtures/gguf/blocks/", $name)).as_slice()
        };
    }

    #[test]
    fn blocks_of_every_format_are_read_with_the_bits_of_gguf_py() {
        for (format, bytes, expected) in [
            (ForeignFormat::Q5_0, fixture!("q5_0.bytes"), fixture!("q5_0.values")),
            (ForeignFormat::Q5_1, fixture!("q5_1.bytes"), fixture!("q5_1.values")),
            (ForeignFormat::Q2K, fixture!("q2_k.bytes"), fixture!("q2_k.values")),
            (ForeignFormat::Q3K, fixture!("q3_k.bytes"), fixture!("q3_k.values")),
            (ForeignFormat::Iq4Nl, fixture!("iq4_nl.bytes"), fixture!("iq4_nl.values")),
            (ForeignFormat::Iq4Xs, fixture!("iq4_xs.bytes"), fixture!("iq4_xs.values")),
        ] {
            let expected = expected.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            let mut values = vec![f32::NAN; expected.len()];
            format.dequantize(bytes, &mut values);
            for (index, (value, expected)) in values.iter().zip(expected).enumerate() {
                assert_eq!(
                    value.to_bits(),
                    expected.to_bits(),
                    "{format} element {index}: {value} for {expected}"
                );
            }
        }
    }
}

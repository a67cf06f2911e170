//! Block formats of quantized weights: those of GGUF files (llama.cpp: `ggml-common.h`, `ggml-quants.c`), and those into which packed
//! tensors of safetensors files are repacked.
//!
//! A row of a matrix is a sequence of blocks of 32, 64, 128 or 256 neighbours along the columns. An element is `scale · code + offset`,
//! with one scale and offset for each run of 16 or 32 elements. The product is exact in f32 for scales of 16 bits, so that a value is
//! rounded once, in the sum. Decoding here is plain arithmetic on arrays that a caller can compile for any vector instructions.

mod decode;
mod encode;
mod groups;
mod half;
mod mxfp4;
mod rounding;

pub use decode::{
    BlockCodec, BlockSource, BlockWords, MOST_WORDS, PART, Q4_0Codec, Q4_1Codec, Q4KCodec, Q5KCodec,
    Q6KCodec, Q8_0Codec, RUN, RUNS, UNITS, Words, all_words, dequantize,
};
pub use groups::{Fp8Codec, Int4Codec, Int8Codec, NF4, Nf4Codec, fp8_value, int4_group, int8_group};
pub use half::widen;
pub use mxfp4::Mxfp4Codec;

use crate::named_enum::named_enum;

named_enum! {
    /// Block format of a quantized matrix.
    #[derive(PartialOrd, Ord)]
    pub enum BlockFormat {
        /// 32 integers of 8 bits and a scale: 8.5 bits per weight.
        Q8_0 = "q8_0",
        /// 32 integers of 4 bits and a scale: 4.5 bits per weight.
        Q4_0 = "q4_0",
        /// 32 integers of 4 bits, a scale and a minimum: 5 bits per weight.
        Q4_1 = "q4_1",
        /// 256 integers of 4 bits with a scale and a minimum of 6 bits for each run of 32: 4.5 bits per weight.
        Q4K = "q4_k",
        /// 256 integers of 5 bits with a scale and a minimum of 6 bits for each run of 32: 5.5 bits per weight.
        Q5K = "q5_k",
        /// 256 integers of 6 bits with a scale of 8 bits for each run of 16: 6.5625 bits per weight.
        Q6K = "q6_k",
        /// 32 integers of 4 bits, an f32 scale and a zero point: 5.25 bits per weight.
        Int4G32 = "int4_g32",
        /// 64 integers of 4 bits, an f32 scale and a zero point: 4.625 bits per weight.
        Int4G64 = "int4_g64",
        /// 128 integers of 4 bits, an f32 scale and a zero point: 4.3125 bits per weight.
        Int4G128 = "int4_g128",
        /// 32 integers of 8 bits and an f32 scale: 9 bits per weight.
        Int8G32 = "int8_g32",
        /// 128 integers of 8 bits and an f32 scale: 8.25 bits per weight.
        Int8G128 = "int8_g128",
        /// 128 floats of 8 bits (E4M3) and an f32 scale: 8.25 bits per weight.
        Fp8G128 = "fp8_g128",
        /// 64 codes of 4 bits for quantiles of the normal distribution, and an f32 scale: 4.5 bits per weight.
        Nf4G64 = "nf4_g64",
        /// 32 floats of 4 bits (E2M1) and a power of two: 4.25 bits per weight.
        Mxfp4 = "mxfp4",
    }
}

/// Calls `$body` with `$Codec` bound to the [`BlockCodec`] of a format.
#[macro_export]
macro_rules! with_block_codec {
    ($format:expr, $Codec:ident => $body:expr) => {
        match $format {
            $crate::BlockFormat::Q8_0 => {
                type $Codec = $crate::block_format::Q8_0Codec;
                $body
            }
            $crate::BlockFormat::Q4_0 => {
                type $Codec = $crate::block_format::Q4_0Codec;
                $body
            }
            $crate::BlockFormat::Q4_1 => {
                type $Codec = $crate::block_format::Q4_1Codec;
                $body
            }
            $crate::BlockFormat::Q4K => {
                type $Codec = $crate::block_format::Q4KCodec;
                $body
            }
            $crate::BlockFormat::Q5K => {
                type $Codec = $crate::block_format::Q5KCodec;
                $body
            }
            $crate::BlockFormat::Q6K => {
                type $Codec = $crate::block_format::Q6KCodec;
                $body
            }
            $crate::BlockFormat::Int4G32 => {
                type $Codec = $crate::block_format::Int4Codec<32>;
                $body
            }
            $crate::BlockFormat::Int4G64 => {
                type $Codec = $crate::block_format::Int4Codec<64>;
                $body
            }
            $crate::BlockFormat::Int4G128 => {
                type $Codec = $crate::block_format::Int4Codec<128>;
                $body
            }
            $crate::BlockFormat::Int8G32 => {
                type $Codec = $crate::block_format::Int8Codec<32>;
                $body
            }
            $crate::BlockFormat::Int8G128 => {
                type $Codec = $crate::block_format::Int8Codec<128>;
                $body
            }
            $crate::BlockFormat::Fp8G128 => {
                type $Codec = $crate::block_format::Fp8Codec;
                $body
            }
            $crate::BlockFormat::Nf4G64 => {
                type $Codec = $crate::block_format::Nf4Codec;
                $body
            }
            $crate::BlockFormat::Mxfp4 => {
                type $Codec = $crate::block_format::Mxfp4Codec;
                $body
            }
        }
    };
}

impl BlockFormat {
    /// Formats of GGUF files.
    pub const OF_GGUF: [Self; 7] =
        [Self::Q8_0, Self::Q4_0, Self::Q4_1, Self::Q4K, Self::Q5K, Self::Q6K, Self::Mxfp4];

    /// Returns the number of elements of a block.
    pub const fn block_elements(self) -> usize {
        with_block_codec!(self, Codec => <Codec as BlockCodec>::ELEMENTS)
    }

    /// Returns the number of bytes of a block.
    pub const fn block_bytes(self) -> usize {
        with_block_codec!(self, Codec => <Codec as BlockCodec>::BYTES)
    }

    /// Returns the number of bytes of a block in interleaved rows: its words, and 16 bits if the format has more than words.
    pub const fn interleaved_block_bytes(self) -> usize {
        with_block_codec!(self, Codec => 4 * Codec::WORDS.count + 2 * Codec::EXTRA.is_some() as usize)
    }

    /// Returns true if codes are integers, which can be multiplied with integers.
    pub const fn has_integer_codes(self) -> bool {
        with_block_codec!(self, Codec => Codec::HAS_INTEGER_CODES)
    }

    /// Returns true if runs have offsets besides their scales.
    pub const fn has_offsets(self) -> bool {
        with_block_codec!(self, Codec => Codec::HAS_OFFSETS)
    }

    /// Returns the number of bytes of `elements` elements; `None` if they are not whole blocks or are too many.
    pub const fn bytes(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// Decodes whole blocks.
    ///
    /// # Panics
    /// If `bytes` are not the blocks of as many elements as `values` has.
    pub fn dequantize(self, bytes: &[u8], values: &mut [f32]) {
        assert_eq!(self.bytes(values.len()), Some(bytes.len()), "bytes of {} {self} elements", values.len());
        with_block_codec!(self, Codec => dequantize::<Codec>(bytes, values));
    }

    /// Encodes whole blocks. Q8_0, Q4_0, Q4_1 and MXFP4 have the bits of the reference (gguf-py: `quants.py`); the others choose scales by
    /// least squares.
    ///
    /// # Panics
    /// As for [`BlockFormat::dequantize`].
    pub fn quantize(self, values: &[f32], bytes: &mut [u8]) {
        assert_eq!(self.bytes(values.len()), Some(bytes.len()), "bytes of {} {self} elements", values.len());
        let values = values.chunks_exact(self.block_elements());
        for (values, block) in values.zip(bytes.chunks_exact_mut(self.block_bytes())) {
            match self {
                Self::Q8_0 => encode::q8_0(values, block),
                Self::Q4_0 => encode::q4_0(values, block),
                Self::Q4_1 => encode::q4_1(values, block),
                Self::Q4K => encode::with_minima(values, block, 15),
                Self::Q5K => encode::with_minima(values, block, 31),
                Self::Q6K => encode::q6_k(values, block),
                Self::Int4G32 | Self::Int4G64 | Self::Int4G128 => groups::encode_int4(values, block),
                Self::Int8G32 | Self::Int8G128 => groups::encode_int8(values, block),
                Self::Fp8G128 => groups::encode_fp8(values, block),
                Self::Nf4G64 => groups::encode_nf4(values, block),
                Self::Mxfp4 => mxfp4::encode(values, block),
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! Block-quantized weights as an operand of products: lines of blocks, which are decoded while they are packed.

use std::ops::Range;

use lockstep_plan::{
    BlockFormat,
    block_format::{BlockCodec, MOST_WORDS, all_words, dequantize},
    with_block_codec,
};

use super::{transpose::SIDE, word_lanes::WordLanes};
use crate::cpu::simd::{CACHE_LINE_BYTES, Float, prefetch};

/// Elements of a line that are decoded at a time: whole blocks of every format.
pub(super) const CHUNK: usize = 256;
/// Bytes of a line to fetch ahead of decoding.
const AHEAD_BYTES: usize = 2048;

/// Lines of blocks, one after the other.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct BlockLines<'a> {
    pub(super) format: BlockFormat,
    pub(super) bytes: &'a [u8],
    pub(super) line_bytes: usize,
    /// Elements of a line.
    pub(super) columns: usize,
}

impl<'a> BlockLines<'a> {
    /// Returns the blocks of line `index` that hold elements from `start` on, the first one of a chunk.
    #[inline(always)]
    pub(super) fn blocks(&self, index: usize, start: usize) -> &'a [u8] {
        let at = |element: usize| element / self.format.block_elements() * self.format.block_bytes();
        let line = &self.bytes[index * self.line_bytes..][..self.line_bytes];
        &line[at(start)..at(self.chunk_end(start))]
    }

    /// Returns the end of the chunk that begins at element `start`.
    #[inline(always)]
    pub(super) fn chunk_end(&self, start: usize) -> usize {
        self.columns.min(start + CHUNK)
    }

    /// Fetches what is needed after the blocks of a line from element `start` on: further along the line, and from its end on in the
    /// lines that are `lines` later.
    #[inline(always)]
    pub(super) fn fetch_ahead(&self, index: usize, start: usize, lines: usize) {
        let blocks = self.blocks(index, start);
        let first = start / self.format.block_elements() * self.format.block_bytes();
        let is_of_later = first + blocks.len() + AHEAD_BYTES > self.line_bytes;
        let ahead = AHEAD_BYTES + if is_of_later { (lines - 1) * self.line_bytes } else { 0 };
        for byte in (0..blocks.len()).step_by(CACHE_LINE_BYTES) {
            prefetch(blocks.as_ptr().wrapping_add(byte + ahead));
        }
    }

    /// Returns one element.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn element<T: Float>(&self, index: usize, depth: usize) -> T {
        let start = depth / CHUNK * CHUNK;
        let mut values = [T::zeroed(); CHUNK];
        with_block_codec!(self.format, Codec => decode_line::<Codec, T>(self.blocks(index, start), &mut values));
        values[depth - start]
    }

    /// Returns the chunk from element `start` on of up to 16 lines. Of fewer lines the last one is repeated.
    #[inline(always)]
    pub(super) fn chunk(&self, lines: Range<usize>, start: usize) -> Chunk {
        let last = self.blocks(lines.end - 1, start);
        let mut addresses = [last.as_ptr(); SIDE];
        for (address, lines_before_last) in addresses.iter_mut().zip((0..lines.len()).rev()) {
            *address = last.as_ptr().wrapping_sub(lines_before_last * self.line_bytes);
        }
        Chunk { addresses, bytes: last.len(), elements: self.chunk_end(start) - start }
    }

    /// Fetches what is needed after a chunk: further along its lines, and from their end on in the next 16 lines.
    #[inline(always)]
    pub(super) fn fetch_after(&self, chunk: &Chunk, start: usize) {
        let first = start / self.format.block_elements() * self.format.block_bytes();
        let is_of_later = first + chunk.bytes + AHEAD_BYTES > self.line_bytes;
        let ahead = AHEAD_BYTES + if is_of_later { (SIDE - 1) * self.line_bytes } else { 0 };
        for address in chunk.addresses {
            for byte in (0..chunk.bytes).step_by(CACHE_LINE_BYTES) {
                prefetch(address.wrapping_add(byte + ahead));
            }
        }
    }
}

/// A chunk of 16 lines.
pub(super) struct Chunk {
    /// Address of each line's first block.
    pub(super) addresses: [*const u8; SIDE],
    /// Bytes of each line.
    bytes: usize,
    /// Elements of each line.
    pub(super) elements: usize,
}

/// Memory for the words of a block of 16 lines.
#[repr(C, align(64))]
pub(super) struct WordBuffer([[u32; SIDE]; MOST_WORDS]);

impl WordBuffer {
    /// Zeros.
    #[cfg(target_arch = "x86_64")]
    pub(super) const ZEROS: Self = Self([[0; SIDE]; MOST_WORDS]);

    /// Reads block `block` of lines. Returns all its words.
    ///
    /// # Safety
    /// The lines must have the block, and the CPU the instructions of `W`.
    #[inline(always)]
    pub(super) unsafe fn read<W: WordLanes, C: BlockCodec>(
        &mut self,
        lines: &[*const u8; SIDE],
        block: usize,
    ) -> &[W] {
        const { assert!(size_of::<W>() == 4 * SIDE && align_of::<W>() <= align_of::<Self>()) };
        // SAFETY: words of a line each, of which any bits are valid.
        let words: &mut [W] =
            unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), all_words::<C>()) };
        let mut addresses = *lines;
        for address in &mut addresses {
            *address = address.wrapping_add(block * C::BYTES + C::WORDS.first_byte);
        }
        // SAFETY: the caller's promises.
        unsafe { W::transpose(&addresses, &mut words[..C::WORDS.count]) };
        if let Some(at) = C::EXTRA {
            let mut halves = [0; SIDE];
            for (half, line) in halves.iter_mut().zip(lines) {
                // SAFETY: the caller's promise.
                let bytes = unsafe { line.add(block * C::BYTES + at).cast::<u16>().read_unaligned() };
                *half = u32::from(u16::from_le(bytes));
            }
            // SAFETY: the caller's promise.
            words[C::WORDS.count] = unsafe { W::load(&halves) };
        }
        words
    }
}

/// Decodes whole blocks, and rounds to the type.
#[inline(always)]
pub(in crate::cpu) fn decode_line<C: BlockCodec, T: Float>(blocks: &[u8], values: &mut [T]) {
    for (blocks, values) in blocks.chunks(CHUNK / C::ELEMENTS * C::BYTES).zip(values.chunks_mut(CHUNK)) {
        let mut wide = [0.0; CHUNK];
        let wide = &mut wide[..blocks.len() / C::BYTES * C::ELEMENTS];
        dequantize::<C>(blocks, wide);
        for (value, wide) in values.iter_mut().zip(wide) {
            *value = T::store(*wide);
        }
    }
}

//! Block-quantized weights as an operand of products: lines of blocks, which are decoded while they are packed.

use std::ops::Range;

use lockstep_plan::{
    BlockFormat,
    block_format::{BlockCodec, CODES, LineScales, RUN, dequantize},
    with_block_codec,
};

#[cfg(target_arch = "x86_64")]
use super::lanes::Plain;
use super::{
    activations::{CodeForm, GROUP},
    integer::PackedLines,
    integer_lanes::IntegerLanes,
    lanes::Lanes,
    transpose::{SIDE, Square},
};
use crate::cpu::simd::{CACHE_LINE_BYTES, Float, inlined, prefetch};

/// Elements of a line that are decoded at a time: whole blocks of every format.
pub(super) const CHUNK: usize = 256;
/// Bytes of a line to fetch ahead of decoding.
const AHEAD_BYTES: usize = 2048;

/// Lines of blocks, one after the other.
#[derive(Clone, Copy)]
pub(super) struct BlockLines<'a> {
    pub(super) format: BlockFormat,
    pub(super) bytes: &'a [u8],
    pub(super) line_bytes: usize,
    /// Elements of a line.
    pub(super) columns: usize,
}

impl<'a> BlockLines<'a> {
    /// Returns the blocks of line `index` that hold elements from `start` on, the first one of a chunk.
    #[inline(always)]
    fn blocks(&self, index: usize, start: usize) -> &'a [u8] {
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
        // SAFETY: every CPU has the instructions of plain arithmetic.
        unsafe { self.decode::<Plain, T>(index..index + 1, start, &mut values) };
        values[depth - start]
    }

    /// Decodes the elements of some lines from `start` on, a multiple of [`CHUNK`], to lines of `CHUNK`. A function of its own, so that
    /// the formats are compiled once for each level and not for each product.
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`.
    #[inline(never)]
    pub(super) unsafe fn decode<V: Lanes, T: Float>(
        &self,
        lines: Range<usize>,
        start: usize,
        values: &mut [T],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            V::compiled(inlined!(|| with_block_codec!(self.format, Codec => {
                for (index, values) in lines.zip(values.chunks_exact_mut(CHUNK)) {
                    decode_line::<Codec, T>(self.blocks(index, start), values);
                }
            })));
        }
    }

    /// Decodes the chunk from element `start` on of 16 lines from `first` on as pairs of bf16: unit `u` of line `l` goes to
    /// `target[u · stride + l]`. A function of its own, as [`BlockLines::decode`].
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`, which decodes pairs, and the target must hold the units.
    #[inline(never)]
    pub(super) unsafe fn decode_pairs<V: Lanes>(&self, first: usize, start: usize, target: Square<*mut u32>) {
        // SAFETY: the caller's promise.
        unsafe { V::compiled(inlined!(|| self.decode_pairs_inlined::<V>(first, start, target))) }
    }

    /// Returns the form of the codes of this format for the vectors `V`.
    pub(super) fn code_form<V: IntegerLanes>(&self) -> CodeForm {
        let run = with_block_codec!(self.format, Codec => Codec::RUN_ELEMENTS);
        CodeForm { bias: V::BIAS, runs: GROUP / run.min(GROUP) }
    }

    /// Packs the codes, scales and offsets of up to 16 lines at a block of depth, which begins with a chunk. Of fewer lines the last one is
    /// repeated.
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`.
    #[inline(never)]
    pub(super) unsafe fn pack_codes<V: IntegerLanes>(
        &self,
        lines: Range<usize>,
        depth: Range<usize>,
        packed: &mut PackedLines,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            V::compiled(inlined!(|| with_block_codec!(self.format, Codec => {
                for start in depth.clone().step_by(CHUNK) {
                    for line in lines.clone() {
                        self.fetch_ahead(line, start, SIDE);
                    }
                    let mut blocks: [&[u8]; SIDE] = [&[]; SIDE];
                    for (index, blocks) in blocks.iter_mut().enumerate() {
                        *blocks = self.blocks((lines.start + index).min(lines.end - 1), start);
                    }
                    pack_chunk::<V, Codec>(&blocks, (start - depth.start) / GROUP, packed);
                }
            })));
        }
    }

    /// As [`BlockLines::decode_pairs`], within a function that is compiled for `V`.
    #[inline(always)]
    unsafe fn decode_pairs_inlined<V: Lanes>(&self, first: usize, start: usize, target: Square<*mut u32>) {
        with_block_codec!(self.format, Codec => {
            // Loops in place of closures, which would not be compiled for the instructions of `V`.
            let mut lines: [&[u8]; SIDE] = [&[]; SIDE];
            for (index, line) in lines.iter_mut().enumerate() {
                *line = self.blocks(first + index, start);
            }
            let blocks = lines[0].len() / Codec::BYTES;
            let mut runs = LineScales::<SIDE>::ZERO;
            let mut codes = [[0; CODES]; SIDE];
            for block in 0..blocks {
                let mut of_lines: [&[u8]; SIDE] = [&[]; SIDE];
                for (of_line, line) in of_lines.iter_mut().zip(&lines) {
                    *of_line = &line[block * Codec::BYTES..][..Codec::BYTES];
                }
                Codec::scales_of_lines(&of_lines, &mut runs);
                for part in 0..Codec::ELEMENTS / CODES {
                    for (codes, of_line) in codes.iter_mut().zip(&of_lines) {
                        *codes = Codec::codes(of_line, part);
                    }
                    let unit = (block * Codec::ELEMENTS + part * CODES) / 2;
                    let run = part * (CODES / RUN);
                    // SAFETY: the caller's promise.
                    unsafe {
                        V::decode_pairs(
                            &codes,
                            [&runs.scales[run], &runs.scales[run + 1]],
                            Codec::HAS_OFFSETS.then_some([&runs.offsets[run], &runs.offsets[run + 1]]),
                            Square { first: target.first.add(unit * target.stride), stride: target.stride },
                        );
                    }
                }
            }
        });
    }
}

/// Packs the blocks of a chunk of 16 lines from group `first` of the packed lines on.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn pack_chunk<V: IntegerLanes, C: BlockCodec>(
    lines: &[&[u8]; SIDE],
    first: usize,
    packed: &mut PackedLines,
) {
    let mut runs = LineScales::<SIDE>::ZERO;
    let mut codes = [[0; CODES]; SIDE];
    for block in 0..lines[0].len() / C::BYTES {
        // Loops in place of closures, which would not be compiled for the instructions of `V`.
        let mut of_lines: [&[u8]; SIDE] = [&[]; SIDE];
        for (of_line, line) in of_lines.iter_mut().zip(lines) {
            *of_line = &line[block * C::BYTES..][..C::BYTES];
        }
        C::scales_of_lines(&of_lines, &mut runs);
        for part in 0..C::ELEMENTS / CODES {
            for (codes, of_line) in codes.iter_mut().zip(&of_lines) {
                *codes = C::codes(of_line, part);
            }
            let group = first + block * (C::ELEMENTS / CODES) + part;
            // SAFETY: the caller's promise.
            unsafe { V::transpose(&codes, &mut packed.units[group]) };
            let runs_of_group = GROUP / C::RUN_ELEMENTS;
            for run in 0..runs_of_group {
                let (to, from) = (group * runs_of_group + run, part * (CODES / RUN) + run);
                packed.scales[to] = runs.scales[from];
                if C::HAS_OFFSETS {
                    packed.offsets[to] = runs.offsets[from];
                }
            }
        }
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

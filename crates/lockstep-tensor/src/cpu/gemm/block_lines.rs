//! Block-quantized weights as an operand of products: lines of blocks, which are decoded while they are packed.
//!
//! Lines lie one after the other, as files store them, or 16 of them are interleaved word by word ([`BlockLayout::Interleaved`]).

use std::ops::Range;

use lockstep_plan::{
    BlockFormat,
    block_format::{BlockCodec, BlockSource, MOST_WORDS, all_words, dequantize},
    with_block_codec,
};

use super::{transpose::SIDE, word_lanes::WordLanes};
use crate::{
    BlockLayout, BlockMatrix, CpuLevel,
    cpu::simd::{CACHE_LINE_BYTES, Float, inlined, prefetch},
    kernels::interleaved_bytes,
};

/// Elements of a line that are decoded at a time: whole blocks of every format.
pub(super) const CHUNK: usize = 256;
/// Bytes of a line to fetch ahead of decoding.
const AHEAD_BYTES: usize = 2048;

/// Bytes of 16 interleaved lines to fetch ahead of decoding.
const PANEL_AHEAD_BYTES: usize = 16 << 10;

/// Most bytes of a line's chunk.
pub(super) const CHUNK_BYTES: usize = {
    let (mut most, mut index) = (0, 0);
    while index < BlockFormat::ALL.len() {
        let format = BlockFormat::ALL[index];
        let bytes = CHUNK / format.block_elements() * format.block_bytes();
        most = if bytes > most { bytes } else { most };
        index += 1;
    }
    most
};

/// Lines of blocks.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct BlockLines<'a> {
    pub(super) format: BlockFormat,
    pub(super) layout: BlockLayout,
    bytes: &'a [u8],
    /// Bytes of a line.
    line_bytes: usize,
    /// Elements of a line.
    pub(super) columns: usize,
}

impl<'a> BlockLines<'a> {
    /// Returns the rows of a matrix.
    ///
    /// # Safety
    /// Nothing may write the matrix for `'a`.
    pub(in crate::cpu) unsafe fn new(matrix: &BlockMatrix<'a>) -> Self {
        let [_, columns] = matrix.shape();
        let format = matrix.format();
        // SAFETY: the caller's promise.
        let bytes = unsafe { matrix.bytes().slice::<u8>() };
        let line_bytes = columns / format.block_elements() * format.block_bytes();
        Self { format, layout: matrix.layout(), bytes, line_bytes, columns }
    }

    /// Returns the blocks of line `index` that hold elements from `start` on, the first one of a chunk. Those of an interleaved line are
    /// gathered in `buffer`.
    #[inline(always)]
    pub(super) fn read<'b>(&self, index: usize, start: usize, buffer: &'b mut [u8; CHUNK_BYTES]) -> &'b [u8]
    where
        'a: 'b,
    {
        match self.layout {
            BlockLayout::Rows => self.blocks(index, start),
            BlockLayout::Interleaved => self.gather(index, start, buffer),
        }
    }

    #[inline(always)]
    fn blocks(&self, index: usize, start: usize) -> &'a [u8] {
        self.part(index, start..self.chunk_end(start))
    }

    /// Returns the blocks of elements of line `index`, which is not interleaved.
    #[inline(always)]
    pub(super) fn part(&self, index: usize, elements: Range<usize>) -> &'a [u8] {
        let at = |element: usize| element / self.format.block_elements() * self.format.block_bytes();
        let line = &self.bytes[index * self.line_bytes..][..self.line_bytes];
        &line[at(elements.start)..at(elements.end)]
    }

    /// Gathers the blocks of an interleaved line.
    #[inline(never)]
    fn gather<'b>(&self, index: usize, start: usize, buffer: &'b mut [u8; CHUNK_BYTES]) -> &'b [u8] {
        with_block_codec!(self.format, Codec => {
            let panel = self.panel(index / SIDE);
            let lane = index % SIDE;
            let blocks = start / Codec::ELEMENTS..self.chunk_end(start) / Codec::ELEMENTS;
            let target = &mut buffer[..blocks.len() * Codec::BYTES];
            for (block, target) in blocks.zip(target.chunks_exact_mut(Codec::BYTES)) {
                let words = &panel.words[block * Codec::WORDS.count * 4 * SIDE..];
                let stored = target[Codec::WORDS.first_byte..].chunks_exact_mut(4);
                for (stored, words) in stored.zip(words.chunks_exact(4 * SIDE)).take(Codec::WORDS.count) {
                    stored.copy_from_slice(&words[4 * lane..][..4]);
                }
                if let Some(at) = Codec::EXTRA {
                    let half = &panel.halves[(block * SIDE + lane) * 2..];
                    let bytes = Codec::BYTES - 4 * Codec::WORDS.count;
                    target[at..at + bytes].copy_from_slice(&half[..bytes]);
                }
            }
            target
        })
    }

    /// Returns 16 interleaved lines.
    #[inline(always)]
    pub(super) fn panel(&self, index: usize) -> Panel<'a> {
        let bytes = interleaved_bytes(self.format, self.columns);
        let blocks = self.columns / self.format.block_elements();
        let words = with_block_codec!(self.format, Codec => Codec::WORDS.count) * blocks * 4 * SIDE;
        let (words, halves) = self.bytes[index * bytes..][..bytes].split_at(words);
        Panel { words, halves }
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
        if self.layout == BlockLayout::Interleaved {
            return;
        }
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
        self.decode(CpuLevel::Portable, index, start, &mut values);
        values[depth - start]
    }

    /// Decodes a chunk of line `index`, which begins at element `start`.
    #[inline(always)]
    fn decode<T: Float>(&self, level: CpuLevel, index: usize, start: usize, values: &mut [T]) {
        let mut buffer = [0; CHUNK_BYTES];
        decode_line(level, self.format, self.read(index, start, &mut buffer), values);
    }

    /// Decodes line `index` by the instructions of `level`, for which the caller is compiled.
    #[inline(always)]
    pub(in crate::cpu) fn decode_whole<T: Float>(&self, level: CpuLevel, index: usize, values: &mut [T]) {
        for (chunk, values) in values.chunks_mut(CHUNK).enumerate() {
            self.decode(level, index, chunk * CHUNK, values);
        }
    }

    /// Returns the chunk from element `start` on of up to 16 lines. Of fewer lines the last one is repeated. Interleaved lines are whole
    /// panels.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn chunk(&self, lines: Range<usize>, start: usize) -> Chunk<'a> {
        if self.layout == BlockLayout::Interleaved {
            debug_assert!(lines.start.is_multiple_of(SIDE) && lines.len() == SIDE, "{lines:?} are no panel");
            let first_block = start / self.format.block_elements();
            return Chunk::Interleaved { panel: self.panel(lines.start / SIDE), first_block };
        }
        Chunk::Rows(self.rows_chunk(lines, start))
    }

    /// Returns the chunk from element `start` on of up to 16 lines that lie one after the other. Of fewer lines the last one is repeated.
    #[inline(always)]
    pub(super) fn rows_chunk(&self, lines: Range<usize>, start: usize) -> RowsChunk {
        let last = self.blocks(lines.end - 1, start);
        let mut addresses = [last.as_ptr(); SIDE];
        for (address, lines_before_last) in addresses.iter_mut().zip((0..lines.len()).rev()) {
            *address = last.as_ptr().wrapping_sub(lines_before_last * self.line_bytes);
        }
        RowsChunk { addresses, bytes: last.len() }
    }

    /// Fetches what is needed after a chunk: further along its lines, and from their end on in the next 16 lines.
    #[inline(always)]
    pub(super) fn fetch_after(&self, chunk: &RowsChunk, start: usize) {
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
#[cfg(target_arch = "x86_64")]
pub(super) enum Chunk<'a> {
    /// Lines one after the other.
    Rows(RowsChunk),
    /// The panel, and the first block in it.
    Interleaved { panel: Panel<'a>, first_block: usize },
}

/// A chunk of 16 lines that lie one after the other.
pub(super) struct RowsChunk {
    /// Address of each line's first block.
    addresses: [*const u8; SIDE],
    /// Bytes of each line.
    pub(super) bytes: usize,
}

/// 16 interleaved lines.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    /// Words of 16 lines each, block by block.
    words: &'a [u8],
    /// 16 bits of each line, block by block, of formats with an extra word.
    halves: &'a [u8],
}

impl<'a> Panel<'a> {
    /// Returns the words of a block.
    ///
    /// # Panics
    /// If the panel has no such block.
    #[inline(always)]
    pub(super) fn block<C: BlockCodec>(&self, block: usize) -> InterleavedBlock<'a> {
        let bytes = C::WORDS.count * 4 * SIDE;
        let words = &self.words[block * bytes..][..bytes];
        let halves = match C::EXTRA {
            Some(_) => &self.halves[block * 2 * SIDE..][..2 * SIDE],
            None => &[],
        };
        InterleavedBlock { words, halves }
    }
}

impl Panel<'_> {
    /// Fetches what is needed after a block. Formats read the words of a block in an order that the CPU does not foresee.
    #[inline(always)]
    pub(super) fn fetch_after<C: BlockCodec>(&self, block: usize) {
        let bytes = C::WORDS.count * 4 * SIDE;
        for byte in (block * bytes..(block + 1) * bytes).step_by(CACHE_LINE_BYTES) {
            prefetch(self.words.as_ptr().wrapping_add(byte + PANEL_AHEAD_BYTES));
        }
    }
}

/// The words of a block of 16 interleaved lines.
#[derive(Clone, Copy)]
pub(super) struct InterleavedBlock<'a> {
    words: &'a [u8],
    halves: &'a [u8],
}

impl<W: WordLanes> BlockSource<W> for InterleavedBlock<'_> {
    #[inline(always)]
    fn word(self, index: usize) -> W {
        let words = self.words[index * 4 * SIDE..].first_chunk().expect("16 words");
        // SAFETY: codecs call it with words of a level whose instructions the CPU has; see `WordLanes`.
        unsafe { W::load_bytes(words) }
    }

    #[inline(always)]
    fn extra(self) -> W {
        // SAFETY: as above.
        unsafe { W::load_halves(self.halves.first_chunk().expect("16 halves")) }
    }
}

/// Memory for the words of a block of 16 lines.
#[repr(C, align(64))]
pub(super) struct WordBuffer([[u32; SIDE]; MOST_WORDS]);

impl WordBuffer {
    /// Zeros.
    pub(super) const ZEROS: Self = Self([[0; SIDE]; MOST_WORDS]);

    /// Reads block `block` of a chunk. Returns all its words.
    ///
    /// # Safety
    /// The chunk must have the block, and the CPU the instructions of `W`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) unsafe fn read<W: WordLanes, C: BlockCodec>(
        &mut self,
        chunk: &Chunk<'_>,
        block: usize,
    ) -> &[W] {
        match chunk {
            // SAFETY: the caller's promises.
            Chunk::Rows(chunk) => unsafe { self.transpose::<W, C>(chunk, block) },
            Chunk::Interleaved { panel, first_block } => {
                let source = panel.block::<C>(first_block + block);
                let words = self.words::<W, C>();
                for (index, word) in words[..C::WORDS.count].iter_mut().enumerate() {
                    *word = source.word(index);
                }
                if C::EXTRA.is_some() {
                    words[C::WORDS.count] = source.extra();
                }
                words
            }
        }
    }

    /// Transposes block `block` of lines that lie one after the other. Returns all its words.
    ///
    /// # Safety
    /// The chunk must have the block, and the CPU the instructions of `W`.
    #[inline(always)]
    pub(super) unsafe fn transpose<W: WordLanes, C: BlockCodec>(
        &mut self,
        chunk: &RowsChunk,
        block: usize,
    ) -> &[W] {
        let words = self.words::<W, C>();
        let mut addresses = chunk.addresses;
        for address in &mut addresses {
            *address = address.wrapping_add(block * C::BYTES + C::WORDS.first_byte);
        }
        // SAFETY: the caller's promises.
        unsafe { W::transpose(&addresses, &mut words[..C::WORDS.count]) };
        if let Some(at) = C::EXTRA {
            let mut halves = [0; SIDE];
            for (half, line) in halves.iter_mut().zip(&chunk.addresses) {
                // SAFETY: the caller's promise.
                let bytes = unsafe { line.add(block * C::BYTES + at).cast::<u16>().read_unaligned() };
                *half = u32::from(u16::from_le(bytes));
            }
            // SAFETY: the caller's promise.
            words[C::WORDS.count] = unsafe { W::load(&halves) };
        }
        words
    }

    /// Returns the memory as words of a block.
    #[inline(always)]
    fn words<W: WordLanes, C: BlockCodec>(&mut self) -> &mut [W] {
        const { assert!(size_of::<W>() == 4 * SIDE && align_of::<W>() <= align_of::<Self>()) };
        // SAFETY: words of a line each, of which any bits are valid.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), all_words::<C>()) }
    }
}

/// Decodes whole blocks by the instructions of `level`, and rounds to the type.
#[inline(always)]
pub(super) fn decode_line<T: Float>(level: CpuLevel, format: BlockFormat, blocks: &[u8], values: &mut [T]) {
    let chunk_bytes = CHUNK / format.block_elements() * format.block_bytes();
    for (blocks, values) in blocks.chunks(chunk_bytes).zip(values.chunks_mut(CHUNK)) {
        let mut wide = [0.0; CHUNK];
        decode_chunk(level, format, blocks, &mut wide);
        for (value, wide) in values.iter_mut().zip(&wide) {
            *value = T::store(*wide);
        }
    }
}

/// Decodes the blocks of a chunk. A function of its own, so that the formats are compiled once for each level.
#[inline(never)]
fn decode_chunk(level: CpuLevel, format: BlockFormat, blocks: &[u8], values: &mut [f32; CHUNK]) {
    with_block_codec!(format, Codec => level.run(inlined!(|| dequantize::<Codec>(blocks, values))));
}

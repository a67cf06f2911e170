//! Pages of a key-value cache: the vectors of 64 tokens, in the order in which the forward reads them. So keys and values are
//! packed once, when they are written, and not again for each token that attends to them.
//!
//! A page is a block of keys of the forward. It holds its key heads one after the other: the elements of a head, then the
//! scales of its tokens if the cache has a type with scales.

use lockstep_plan::CachePlace;

use super::{
    lanes::{BLOCK, Lanes, prefetch},
    page_codes::{decode, decode_rows},
    page_format::{PageFormat, PageLayout},
};
use crate::{CachedVectors, PAGE_TOKENS, cpu::simd::Float};

const _: () = assert!(PAGE_TOKENS == BLOCK);

/// The table of the pages of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageTable<'a> {
    pub(super) entries: &'a [u32],
    pub(super) format: PageFormat,
    pub(super) key_value_heads: usize,
    /// The rank's place among those that have pages of the sequence; entries are those of this rank.
    pub(super) place: CachePlace,
}

impl PageTable<'_> {
    /// Returns the number of this rank's pages of a sequence of `blocks` blocks.
    pub(super) fn entries_of(&self, blocks: usize) -> usize {
        (blocks + self.place.ranks - 1 - self.place.rank) / self.place.ranks
    }

    /// Returns the byte at which the keys (0) or values (1) of a key head start, in the page of block `block`.
    #[inline(always)]
    pub(super) fn start(&self, operand: usize, key_head: usize, block: usize) -> usize {
        // A block beyond the last page is asked for by prefetches of no keys.
        let page = self.entries.get(block / self.place.ranks).map_or(0, |&page| page as usize);
        (page * self.key_value_heads + key_head) * self.format.head_bytes()[operand]
    }
}

/// The pages of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages<'a> {
    pub(super) table: PageTable<'a>,
    /// All pages of keys and of values, which are the same ones if a token has one vector.
    pub(super) bytes: [&'a [u8]; 2],
}

/// The keys and values of a block as right operands of the forward.
#[derive(Clone, Copy)]
pub(super) struct CachedBlock<'a> {
    pub(super) operands: [&'a [f32]; 2],
    /// Factors on the keys and on the values, which the products leave out.
    pub(super) scales: Option<[&'a [f32]; 2]>,
}

/// The scales of vectors that were decoded without them.
#[derive(Clone, Copy)]
pub(super) struct Decoded<'a> {
    /// Factors on the keys and on the values; `None` of a type without scales.
    pub(super) scales: Option<[&'a [f32]; 2]>,
}

impl<'a> Pages<'a> {
    /// Returns the elements of the pages if they are vectors of type `T`, else nothing: the forward reads blocks.
    pub(super) fn vectors<T: Float>(&self) -> [&'a [T]; 2] {
        match self.is_of_blocks() || self.table.format.is_encoded {
            true => [&[]; 2],
            false => self.bytes.map(bytemuck::cast_slice),
        }
    }

    /// Returns true if the pages hold right operands, or codes in their order, rather than vectors.
    #[inline(always)]
    pub(super) fn is_of_blocks(&self) -> bool {
        !matches!(self.table.format.layout, PageLayout::Rows { .. })
    }

    /// Returns true if a token has one vector, which is its key and its value.
    #[inline(always)]
    pub(super) fn are_shared(&self) -> bool {
        self.table.format.vectors == CachedVectors::Shared
    }

    /// Decodes the vectors of a block, without their scales, into rows of `width` elements, padded with zeros. `None` if
    /// the pages hold vectors of the type of the computation, or right operands.
    #[inline(always)]
    pub(super) fn decode_vectors<V: Lanes, T: Float>(
        &self,
        key_head: usize,
        block: usize,
        (rows, width): (&mut [T], usize),
    ) -> Option<Decoded<'a>> {
        let format = self.table.format;
        let PageLayout::Rows { head_dim } = format.layout else { return None };
        if !format.is_encoded {
            return None;
        }
        let start = self.table.start(0, key_head, block);
        let bytes = &self.bytes[0][start..start + format.head_bytes()[0]];
        let (codes, scales) = bytes.split_at(format.element_bytes()[0]);
        decode_rows::<V, T>(format.stored, (codes, head_dim), (rows, width));
        let has_scales = format.stored.scale_bytes() > 0;
        Some(Decoded { scales: has_scales.then(|| [bytemuck::cast_slice(scales); 2]) })
    }

    /// Returns the keys and values of a block, which are decoded into scratch if they are encoded.
    #[inline(always)]
    pub(super) fn block<'s, V: Lanes>(
        &self,
        key_head: usize,
        block: usize,
        [keys, values]: [&'s mut [f32]; 2],
    ) -> CachedBlock<'s>
    where
        'a: 's,
    {
        let format = self.table.format;
        let [keys_part, values_part] = [0, 1].map(|operand| {
            let start = self.table.start(operand, key_head, block);
            let bytes = &self.bytes[operand][start..start + format.head_bytes()[operand]];
            bytes.split_at(format.element_bytes()[operand])
        });
        if !format.is_encoded {
            let operands = [keys_part.0, values_part.0].map(bytemuck::cast_slice);
            return CachedBlock { operands, scales: None };
        }
        let operands = [decode::<V>(format, keys_part.0, keys), decode::<V>(format, values_part.0, values)];
        let has_scales = format.stored.scale_bytes() > 0;
        let scales = has_scales.then(|| [keys_part.1, values_part.1].map(bytemuck::cast_slice));
        CachedBlock { operands, scales }
    }

    /// Prefetches the keys (0) or values (1) of a block.
    #[inline(always)]
    pub(super) fn prefetch(&self, operand: usize, key_head: usize, block: usize) {
        let start = self.table.start(operand, key_head, block);
        prefetch(self.bytes[operand], start..start + self.table.format.head_bytes()[operand]);
    }
}

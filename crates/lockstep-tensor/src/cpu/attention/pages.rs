//! Pages of a key-value cache: the vectors of 64 tokens, in the order in which the forward reads them. So keys and values are
//! packed once, when they are written, and not again for each token that attends to them.
//!
//! A page is a block of keys of the forward. It holds its key heads one after the other: the elements of a head, then the
//! scales of its tokens if the cache has a type with scales.

use lockstep_plan::KvCacheType;

use super::{
    block::prefetch,
    lanes::{BLOCK, Lanes, padded},
    page_codes::decode,
};
use crate::{PAGE_TOKENS, cpu::simd::Float};

const _: () = assert!(PAGE_TOKENS == BLOCK);

/// The order of elements in a key head's part of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) enum PageLayout {
    /// Vectors, `[64, head_dim]`, which are converted for each product.
    Rows {
        /// Elements of a vector.
        head_dim: usize,
    },
    /// f32 keys `[padded_dim, 64]` and values `[64, padded_dim]`.
    Transposed {
        /// Elements of a vector.
        head_dim: usize,
    },
    /// bf16 keys and values as right operands of a micro-kernel.
    Panels(PanelLayout),
}

/// The panels of a right operand: units of two elements, as `ColumnPanels` orders them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) struct PanelLayout {
    pub(super) head_dim: usize,
    /// Units of depth of a vector.
    pub(super) head_units: usize,
    /// Columns of a panel.
    pub(super) width: usize,
    /// Contiguous units of a column.
    pub(super) line: usize,
}

/// The elements of a page: their order and their type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PageFormat {
    pub(super) layout: PageLayout,
    pub(super) stored: KvCacheType,
    /// True if the elements have another type than the computation, so that a block is decoded before it is multiplied.
    pub(super) is_encoded: bool,
}

impl PageFormat {
    /// Returns the bytes of the elements of a key head's keys and values in a page.
    pub(super) fn element_bytes(self) -> [usize; 2] {
        self.layout.head_elements().map(|elements| elements * self.stored.element_bytes())
    }

    /// Returns the bytes of a key head's keys and values in a page, scales included.
    pub(super) fn head_bytes(self) -> [usize; 2] {
        self.element_bytes().map(|bytes| bytes + BLOCK * self.stored.scale_bytes())
    }
}

impl PageLayout {
    /// Returns the elements of a key head's keys and values in a page.
    fn head_elements(self) -> [usize; 2] {
        match self {
            Self::Rows { head_dim } => [BLOCK * head_dim; 2],
            Self::Transposed { head_dim } => [BLOCK * padded(head_dim); 2],
            Self::Panels(PanelLayout { head_dim, head_units, width, .. }) => {
                [2 * BLOCK * head_units, head_dim.next_multiple_of(width) * BLOCK]
            }
        }
    }
}

impl PanelLayout {
    /// Writes a column along the depth of a right operand of `units` of depth.
    pub(super) fn write_column<T: Copy>(self, units: usize, column: usize, vector: &[T], panels: &mut [T]) {
        let Self { width, line, .. } = self;
        let first = column / width * width * units + column % width * line;
        for (index, elements) in vector.chunks(2 * line).enumerate() {
            let at = 2 * (first + index * width * line);
            panels[at..at + elements.len()].copy_from_slice(elements);
        }
    }

    /// Writes a line across the columns of a right operand of `units` of depth: element `depth` of each column.
    pub(super) fn write_across<T: Copy>(self, units: usize, depth: usize, vector: &[T], panels: &mut [T]) {
        let Self { width, line, .. } = self;
        let (unit, half) = (depth / 2, depth % 2);
        let first = unit / line * width * line + unit % line;
        for (elements, panel) in vector.chunks(width).zip(panels.chunks_exact_mut(2 * width * units)) {
            for (index, &element) in elements.iter().enumerate() {
                panel[2 * (first + index * line) + half] = element;
            }
        }
    }
}

/// The table of the pages of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageTable<'a> {
    pub(super) entries: &'a [u32],
    pub(super) format: PageFormat,
    pub(super) key_value_heads: usize,
}

impl PageTable<'_> {
    /// Returns the byte at which the keys (0) or values (1) of a key head start, in the page of block `block`.
    #[inline(always)]
    pub(super) fn start(&self, operand: usize, key_head: usize, block: usize) -> usize {
        // A block beyond the last page is asked for by prefetches of no keys.
        let page = self.entries.get(block).map_or(0, |&page| page as usize);
        (page * self.key_value_heads + key_head) * self.format.head_bytes()[operand]
    }
}

/// The pages of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages<'a> {
    pub(super) table: PageTable<'a>,
    /// All pages of keys and of values.
    pub(super) bytes: [&'a [u8]; 2],
}

/// The keys and values of a block as right operands of the forward.
#[derive(Clone, Copy)]
pub(super) struct CachedBlock<'a> {
    pub(super) operands: [&'a [f32]; 2],
    /// Factors on the keys and on the values, which the products leave out.
    pub(super) scales: Option<[&'a [f32]; 2]>,
}

impl<'a> Pages<'a> {
    /// Returns the elements of the pages if they are vectors of type `T`, else nothing: the forward reads blocks.
    pub(super) fn vectors<T: Float>(&self) -> [&'a [T]; 2] {
        match self.is_of_blocks() {
            true => [&[]; 2],
            false => self.bytes.map(bytemuck::cast_slice),
        }
    }

    /// Returns true if the pages hold right operands, or codes in their order, rather than vectors.
    #[inline(always)]
    pub(super) fn is_of_blocks(&self) -> bool {
        !matches!(self.table.format.layout, PageLayout::Rows { .. })
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

//! Pages of a key-value cache: the vectors of 64 tokens, in the order in which the forward reads them. So keys and values are
//! packed once, when they are written, and not again for each token that attends to them.
//!
//! A page is a block of keys of the forward. It holds its key heads one after the other.

use super::lanes::{BLOCK, padded};
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

impl PageLayout {
    /// Returns the elements of a key head's keys and values in a page.
    pub(in crate::cpu) fn head_elements(self) -> [usize; 2] {
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

/// The pages of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages<'a> {
    pub(super) table: &'a [u32],
    pub(super) layout: PageLayout,
    pub(super) key_value_heads: usize,
}

impl Pages<'_> {
    /// Returns the element at which the keys (0) or values (1) of a key head start, in the page of block `block`.
    #[inline(always)]
    pub(super) fn start(&self, operand: usize, key_head: usize, block: usize) -> usize {
        // A block beyond the last page is asked for by prefetches of no keys.
        let page = self.table.get(block).map_or(0, |&page| page as usize);
        (page * self.key_value_heads + key_head) * self.layout.head_elements()[operand]
    }

    /// Returns the keys and values of a block as right operands; `None` if the layout is one of vectors.
    #[inline(always)]
    pub(super) fn operands<'k, T: Float>(
        &self,
        key_head: usize,
        block: usize,
        caches: [&'k [T]; 2],
    ) -> Option<[&'k [f32]; 2]> {
        if matches!(self.layout, PageLayout::Rows { .. }) {
            return None;
        }
        let elements = self.layout.head_elements();
        Some([0, 1].map(|operand| {
            let start = self.start(operand, key_head, block);
            bytemuck::cast_slice(&caches[operand][start..start + elements[operand]])
        }))
    }
}

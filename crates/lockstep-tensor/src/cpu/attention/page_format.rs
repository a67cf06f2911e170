//! Format of the pages of a key-value cache: the order of the elements of a key head, and their type.

use lockstep_plan::KvCacheType;

use super::lanes::{BLOCK, padded};
use crate::CachedVectors;

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
    pub(super) vectors: CachedVectors,
    pub(super) stored: KvCacheType,
    /// True if the elements have another type than the computation, so that a block is decoded before it is multiplied.
    pub(super) is_encoded: bool,
}

impl PageFormat {
    /// Returns the bytes of the elements of a key head's keys and values in a page.
    pub(super) fn element_bytes(self) -> [usize; 2] {
        self.of_operands(self.layout.head_elements().map(|elements| elements * self.stored.element_bytes()))
    }

    /// Returns the bytes of a key head's keys and values in a page, scales included.
    pub(super) fn head_bytes(self) -> [usize; 2] {
        self.of_operands(self.element_bytes().map(|bytes| bytes + BLOCK * self.stored.scale_bytes()))
    }

    /// Returns bytes of keys and of values; no values if the keys are the values as well.
    fn of_operands(self, [keys, values]: [usize; 2]) -> [usize; 2] {
        match self.vectors {
            CachedVectors::KeyAndValue => [keys, values],
            CachedVectors::Shared => [keys, 0],
        }
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

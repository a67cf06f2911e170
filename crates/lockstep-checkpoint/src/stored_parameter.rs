//! Location of a parameter that can be used where it is stored.

use std::path::Path;

use crate::gguf::StoredElements;

/// A parameter, or a piece of one, whose elements are stored in a file in a form that kernels read.
#[derive(Debug, Clone)]
pub struct StoredParameter<'a> {
    /// Canonical name.
    pub name: &'a str,
    /// The file.
    pub file: &'a Path,
    /// Byte of the file at which the first element lies.
    pub offset: usize,
    /// Storage of the elements.
    pub stored: StoredElements,
    /// Order of the rows.
    pub order: RowOrder,
    /// Number of elements.
    pub elements: usize,
    /// Index of the first of them in the parameter; 0 unless it is stored in pieces.
    pub first_element: usize,
}

impl StoredParameter<'_> {
    /// Returns true if the first element lies at a multiple of its size, as kernels read numbers.
    pub fn is_aligned(&self) -> bool {
        match self.stored {
            StoredElements::Dense(dtype) => self.offset.is_multiple_of(dtype.size_bytes()),
            StoredElements::Blocks(_) => true,
        }
    }
}

/// Order of the rows of a stored matrix, relative to the parameter's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// The parameter's own order.
    Same,
    /// The two halves of each head are stored in alternate rows: GGUF files of the architecture `llama`.
    InterleavedHeads {
        /// Rows of a head.
        head_dim: usize,
    },
}

impl RowOrder {
    /// Returns the stored row that holds row `row` of the parameter.
    pub fn stored_row(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::InterleavedHeads { head_dim } => {
                let (head, place) = (row / head_dim, row % head_dim);
                let (half, pair) = (place / (head_dim / 2), place % (head_dim / 2));
                head * head_dim + 2 * pair + half
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_halves_of_a_head_are_stored_in_alternate_rows() {
        let order = RowOrder::InterleavedHeads { head_dim: 6 };
        let stored: Vec<usize> = (0..12).map(|row| order.stored_row(row)).collect();
        assert_eq!(stored, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}

//! Layouts of a parameter's elements in a tensor of a Hugging Face checkpoint.
//!
//! One layout is a range of columns of a stored matrix, transposed: GPT-2's Conv1D weights are stored `[in, out]`,
//! the fused `c_attn` holds three parameters side by side, and a fused bias is a matrix of one row. gpt-oss stacks such
//! matrices, with two parameters in alternate columns. Another layout is a range of rows of each head. Elements are moved and never computed with, so both directions are exact for every
//! dtype.

use std::ops::Range;

/// The relation between a stored tensor and a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HfTransform {
    /// Both hold the same elements in the same order.
    Same,
    /// Column `columns.start + i` of the stored matrix `[rows, stored_columns]` is row `i` of the parameter
    /// `[columns.len(), rows]`.
    Columns {
        /// Range of columns of the stored matrix.
        columns: Range<usize>,
        /// Number of columns of the stored matrix.
        stored_columns: usize,
    },
    /// The stored matrix consists of `blocks` blocks of `of` rows, usually heads; the parameter has `rows` of each block.
    Rows {
        /// Range of rows within a block.
        rows: Range<usize>,
        /// Number of rows of a block.
        of: usize,
        /// Number of blocks.
        blocks: usize,
    },
    /// The stored tensor consists of `blocks` matrices of `stored_columns` columns, one for each block of the parameter. Row
    /// `i` of a block of the parameter is column `first + i · step` of its matrix.
    StackedColumns {
        /// First column of a matrix.
        first: usize,
        /// Distance between columns.
        step: usize,
        /// Number of columns of each matrix.
        stored_columns: usize,
        /// Number of matrices.
        blocks: usize,
    },
}

/// Edge of the square tiles in which a matrix is transposed; both tiles stay in the cache.
const TILE: usize = 32;

impl HfTransform {
    /// Returns the number of elements of the parameter, given that of the stored tensor.
    pub(crate) fn parameter_elements(&self, stored_elements: usize) -> usize {
        match self {
            Self::Same => stored_elements,
            Self::Columns { columns, stored_columns } => stored_elements / stored_columns * columns.len(),
            Self::Rows { rows, of, .. } => stored_elements / of * rows.len(),
            Self::StackedColumns { first, step, stored_columns, .. } => {
                stored_elements / stored_columns * (stored_columns - first).div_ceil(*step)
            }
        }
    }

    /// Copies the parameter's elements out of the stored tensor. The caller checks the lengths.
    pub(crate) fn read<T: Copy>(&self, stored: &[T], parameter: &mut [T]) {
        match self {
            Self::Same => parameter.copy_from_slice(stored),
            Self::Columns { .. } | Self::StackedColumns { .. } => {
                self.for_each_pair(stored.len(), |in_stored, in_parameter| {
                    parameter[in_parameter] = stored[in_stored]
                });
            }
            Self::Rows { rows, of, blocks } => {
                let (stored_len, len) = (stored.len() / blocks, parameter.len() / blocks);
                let first = stored_len / of * rows.start;
                for (stored, parameter) in stored.chunks(stored_len).zip(parameter.chunks_mut(len)) {
                    parameter.copy_from_slice(&stored[first..first + len]);
                }
            }
        }
    }

    /// Copies the parameter's elements into the stored tensor, and leaves its other elements alone.
    pub(crate) fn write<T: Copy>(&self, parameter: &[T], stored: &mut [T]) {
        match self {
            Self::Same => stored.copy_from_slice(parameter),
            Self::Columns { .. } | Self::StackedColumns { .. } => {
                self.for_each_pair(stored.len(), |in_stored, in_parameter| {
                    stored[in_stored] = parameter[in_parameter]
                });
            }
            Self::Rows { rows, of, blocks } => {
                let (stored_len, len) = (stored.len() / blocks, parameter.len() / blocks);
                let first = stored_len / of * rows.start;
                for (stored, parameter) in stored.chunks_mut(stored_len).zip(parameter.chunks(len)) {
                    stored[first..first + len].copy_from_slice(parameter);
                }
            }
        }
    }

    /// Calls `visit` with (index in the stored tensor, index in the parameter) of each element of a layout by columns, matrix
    /// by matrix and tile by tile.
    fn for_each_pair(&self, stored_elements: usize, mut visit: impl FnMut(usize, usize)) {
        let (first, step, end, stored_columns, blocks) = match *self {
            Self::Columns { ref columns, stored_columns } => {
                (columns.start, 1, columns.end, stored_columns, 1)
            }
            Self::StackedColumns { first, step, stored_columns, blocks } => {
                (first, step, stored_columns, stored_columns, blocks)
            }
            Self::Same | Self::Rows { .. } => return,
        };
        let (rows, columns) = (stored_elements / stored_columns / blocks, (end - first).div_ceil(step));
        for block in 0..blocks {
            let (stored, parameter) = (block * rows * stored_columns, block * rows * columns);
            for first_row in (0..rows).step_by(TILE) {
                for first_column in (0..columns).step_by(TILE) {
                    for column in first_column..columns.min(first_column + TILE) {
                        for row in first_row..rows.min(first_row + TILE) {
                            let in_stored = stored + row * stored_columns + first + column * step;
                            visit(in_stored, parameter + column * rows + row);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_rows() {
        let stored = [1, 2, 3, 4, 5, 6]; // [2, 3]
        let mut parameter = [0; 4];
        HfTransform::Columns { columns: 1..3, stored_columns: 3 }.read(&stored, &mut parameter);
        assert_eq!(parameter, [2, 5, 3, 6]); // [2, 2]
    }

    #[test]
    fn parts_of_heads_are_rows_of_each() {
        let stored = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]; // [2 heads, 3, 2]
        let transform = HfTransform::Rows { rows: 1..3, of: 3, blocks: 2 };
        let mut parameter = [0; 8];
        transform.read(&stored, &mut parameter);
        assert_eq!(parameter, [3, 4, 5, 6, 9, 10, 11, 12]);
        let mut back = [0; 12];
        transform.write(&parameter, &mut back);
        assert_eq!(back, [0, 0, 3, 4, 5, 6, 0, 0, 9, 10, 11, 12]);
    }

    #[test]
    fn alternate_columns_of_each_matrix_become_its_rows() {
        let stored = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]; // [2, 2, 4]
        let transform = HfTransform::StackedColumns { first: 1, step: 2, stored_columns: 4, blocks: 2 };
        let mut parameter = [0; 8]; // [2, 2, 2]
        transform.read(&stored, &mut parameter);
        assert_eq!(parameter, [2, 6, 4, 8, 10, 14, 12, 16]);
        assert_eq!(transform.parameter_elements(16), 8);
        let mut back = [0; 16];
        transform.write(&parameter, &mut back);
        assert_eq!(back, [0, 2, 0, 4, 0, 6, 0, 8, 0, 10, 0, 12, 0, 14, 0, 16]);
    }

    #[test]
    fn a_vector_is_a_matrix_of_one_row() {
        let mut stored = [9; 6];
        HfTransform::Columns { columns: 2..4, stored_columns: 6 }.write(&[1, 2], &mut stored);
        assert_eq!(stored, [9, 9, 1, 2, 9, 9]);
    }

    #[test]
    fn tiles_meet_without_gap_or_overlap() {
        let (rows, stored_columns) = (TILE + 5, 2 * TILE + 3);
        let transform = HfTransform::Columns { columns: 1..stored_columns, stored_columns };
        let stored: Vec<usize> = (0..rows * stored_columns).collect();
        let mut parameter = vec![usize::MAX; rows * (stored_columns - 1)];
        transform.read(&stored, &mut parameter);
        for (index, &value) in parameter.iter().enumerate() {
            assert_eq!(value, index % rows * stored_columns + index / rows + 1, "element {index}");
        }
    }
}

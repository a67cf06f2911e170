//! Products of heads with matrices of their own, which take the queries of multi-head latent attention into the space of its latents,
//! and its outputs back (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.2).
//!
//! ```text
//! NN  y_h = x_h · W_h     W_h [a, b] is the right operand as it is
//! NT  y_h = x_h · W_hᵀ    W_h [b, a] is transposed
//! ```
//!
//! A task owns up to [`TASK_ROWS`] rows of one head, and converts or decodes the head's matrix to f32, each line once. Each element
//! is summed in f32 in the order of the depth, whatever rows it is computed with.

use std::ops::Range;

use super::{
    block::{pack, take, transpose},
    lanes::{BLOCK, Lanes, padded},
    product::{Left, Output, Right, Start, multiply},
    worker::{Worker, run},
};
use crate::{
    CpuQueue, GemmLayout, HeadProduct, Matrix,
    cpu::{
        gemm::BlockLines,
        operands::{Operand, check_disjoint},
        simd::{Float, Isa, inlined, with_float},
    },
};

/// Maximum rows of a task: enough that the conversion of the matrix takes little of its time.
const TASK_ROWS: usize = 128;

/// The lines of a matrix.
#[derive(Clone, Copy)]
enum Lines<'a, T> {
    Dense(&'a [T]),
    Blocks(BlockLines<'a>),
}

/// Operands of a product of heads.
struct Work<'a, T> {
    layout: GemmLayout,
    rows: usize,
    heads: usize,
    /// Elements of a head of `x`, and of a head of `y`.
    widths: [usize; 2],
    /// Summed elements.
    depth: usize,
    x: &'a [T],
    lines: Lines<'a, T>,
    y: Operand<'a, T>,
}

/// Computes a product of heads.
///
/// # Panics
/// If the shapes or types do not fit each other, or the layout is `TN`.
pub(in crate::cpu) fn multiply_heads(queue: &CpuQueue, product: HeadProduct<'_>) {
    let HeadProduct { layout, x, weight, y } = product;
    let (&[rows, heads, x_width], &[y_rows, y_heads, y_width]) = (x.shape().dims(), y.shape().dims()) else {
        panic!("products of heads need [rows, heads, elements of a head]: x {x:?}, y {y:?}")
    };
    let (bytes, [height, width]) = match weight {
        Matrix::Dense(numbers) => (numbers, numbers.shape().as_matrix().into()),
        Matrix::Blocks(blocks) => (blocks.bytes(), blocks.shape()),
    };
    assert!(heads > 0 && height.is_multiple_of(heads), "{heads} heads with a matrix of {height} rows");
    let (depth, columns) = match layout {
        GemmLayout::NN => (height / heads, width),
        GemmLayout::NT => (width, height / heads),
        GemmLayout::TN => panic!("no TN product of heads"),
    };
    assert!(
        [y_rows, y_heads, y_width] == [rows, heads, columns] && depth <= x_width && x.dtype() == y.dtype(),
        "the shapes of a {layout:?} product of heads do not fit: x {x:?}, a matrix [{height}, {width}], y {y:?}"
    );
    check_disjoint(&[y], &[x, bytes]);
    with_float!(x.dtype(), T => {
        // SAFETY: the output overlaps no other operand, as just checked.
        let lines = unsafe {
            match weight {
                Matrix::Dense(numbers) => Lines::Dense(numbers.slice::<T>()),
                Matrix::Blocks(blocks) => Lines::Blocks(BlockLines::new(&blocks)),
            }
        };
        // SAFETY: as above.
        let x = unsafe { x.slice::<T>() };
        let (widths, y) = ([x_width, y_width], Operand::new(y));
        run(queue, &Work { layout, rows, heads, widths, depth, x, lines, y });
    });
}

impl<T: Float> Work<'_, T> {
    fn row_parts(&self) -> usize {
        self.rows.div_ceil(TASK_ROWS)
    }

    /// Elements of a line of a matrix.
    fn line(&self) -> usize {
        if self.layout == GemmLayout::NN { self.widths[1] } else { self.depth }
    }

    /// Columns of the output that are computed at once: all if lines run along them.
    fn part(&self) -> usize {
        if self.layout == GemmLayout::NN { padded(self.widths[1]) } else { BLOCK }
    }

    /// Elements of the lines that are transposed.
    fn transposed(&self) -> usize {
        if self.layout == GemmLayout::NN { 0 } else { BLOCK * padded(self.depth) }
    }

    /// Converts lines of the matrix to rows of f32, padded with zeros.
    fn convert<V: Lanes>(&self, lines: Range<usize>, rows: &mut [f32]) {
        let line = self.line();
        V::run(inlined!(|| {
            for (row, index) in rows.chunks_exact_mut(padded(line)).zip(lines) {
                let (numbers, padding) = row.split_at_mut(line);
                match self.lines {
                    Lines::Dense(elements) => {
                        let elements = &elements[index * line..][..line];
                        numbers.iter_mut().zip(elements).for_each(|(number, x)| *number = x.load());
                    }
                    Lines::Blocks(lines) => lines.decode_whole(V::LEVEL, index, numbers),
                }
                padding.fill(0.0);
            }
        }));
    }

    /// Writes the right operand of a head for `columns` of the output, `[depth, part]`, to `right`.
    fn right<V: Lanes>(&self, head: usize, columns: Range<usize>, right: &mut [f32], transposed: &mut [f32]) {
        if self.layout == GemmLayout::NN {
            return self.convert::<V>(head * self.depth..(head + 1) * self.depth, right);
        }
        let first = head * self.widths[1];
        self.convert::<V>(first + columns.start..first + columns.end, transposed);
        transpose::<V>(transposed, padded(self.depth), columns.len(), right);
    }
}

impl<T: Float> Worker for Work<'_, T> {
    fn tasks(&self) -> usize {
        self.heads * self.row_parts()
    }

    fn scratch_elements(&self) -> usize {
        let depth = padded(self.depth);
        let rows = self.rows.min(TASK_ROWS);
        // Rows of x, the right operand, its transpose, and the products.
        rows * depth + self.part() * depth + self.transposed() + rows * self.part()
    }

    fn run<V: Lanes>(&self, task: usize, mut scratch: &mut [f32]) {
        let (head, part) = (task / self.row_parts(), task % self.row_parts());
        let rows = part * TASK_ROWS..self.rows.min((part + 1) * TASK_ROWS);
        let (depth, [x_width, y_width]) = (padded(self.depth), self.widths);
        let most = self.rows.min(TASK_ROWS);
        let mut next = |len| take(&mut scratch, len);
        let width = self.part();
        let [left, right, transposed, products] =
            [most * depth, width * depth, self.transposed(), most * width].map(&mut next);
        let of_x = rows.clone().map(|row| {
            let start = (row * self.heads + head) * x_width;
            start..start + self.depth
        });
        pack::<V, T>(self.x, of_x, 1.0, left, depth);
        for start in (0..y_width).step_by(width) {
            let columns = start..y_width.min(start + width);
            self.right::<V>(head, columns.clone(), right, transposed);
            multiply::<V>(
                Start::Zero,
                (0..rows.len(), 0..self.depth, 0..columns.len().next_multiple_of(V::LANES)),
                Left { data: left, row: depth, inner: 1 },
                Right { data: right, row: width },
                Output { data: products, row: width },
            );
            for (row, products) in rows.clone().zip(products.chunks_exact(width)) {
                let first = (row * self.heads + head) * y_width;
                // SAFETY: a task has rows of a head of its own.
                let y = unsafe { self.y.write(first + columns.start..first + columns.end) };
                V::run(inlined!(|| T::store_all(Isa::PLAIN, &products[..columns.len()], y)));
            }
        }
    }
}

//! Products of small blocks, `C = A · B` or `C += A · B`, with a tile of C in registers.
//!
//! B and C are read along their rows, a register at a time. Elements of A are broadcast, so A may be read in either
//! direction and its transpose needs no copy.

use std::ops::Range;

use super::lanes::Lanes;
use crate::cpu::simd::inlined;

/// Number of rows of a tile of accumulators. With [`Lanes::TILE_REGISTERS`] registers each, they fill most of the register
/// file, so that each load serves many products.
pub(super) const TILE_ROWS: usize = 6;

/// The sums that a product is added to.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    /// Zero: the output is overwritten.
    Zero,
    /// The elements of the output.
    Output,
    /// The elements of the output, each times the factor of its row.
    Scaled(&'a [f32]),
}

/// The left operand: element `(i, p)` is `data[i * row + p * inner]`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) data: &'a [f32],
    pub(super) row: usize,
    pub(super) inner: usize,
}

/// The right operand: element `(p, j)` is `data[p * row + j]`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub(super) data: &'a [f32],
    pub(super) row: usize,
}

/// The output: element `(i, j)` is `data[i * row + j]`.
pub(super) struct Output<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) row: usize,
}

/// Multiplies rows `rows` of A by columns `columns` of B, over inner indices `inner`, into the same rows and columns
/// of C. The bounds of `columns` are multiples of the register's lanes.
pub(super) fn multiply<V: Lanes>(
    start: Start<'_>,
    (rows, inner, columns): (Range<usize>, Range<usize>, Range<usize>),
    a: Left<'_>,
    b: Right<'_>,
    c: Output<'_>,
) {
    if rows.is_empty() || columns.is_empty() || (inner.is_empty() && !matches!(start, Start::Zero)) {
        return;
    }
    assert!(!inner.is_empty() && columns.start % V::LANES == 0 && columns.end % V::LANES == 0);
    assert!((rows.end - 1) * a.row + (inner.end - 1) * a.inner < a.data.len());
    assert!((inner.end - 1) * b.row + columns.end <= b.data.len());
    assert!((rows.end - 1) * c.row + columns.end <= c.data.len());
    if let Start::Scaled(factors) = start {
        assert!(rows.end <= factors.len());
    }
    V::run(inlined!(|| {
        let mut column = columns.start;
        while column < columns.end {
            let registers = ((columns.end - column) / V::LANES).min(V::TILE_REGISTERS);
            let mut row = rows.start;
            while row < rows.end {
                let height = (rows.end - row).min(TILE_ROWS);
                let tile = Tile {
                    inner: inner.len(),
                    // SAFETY: the offsets are those of elements inside the slices, as asserted above.
                    a: unsafe { a.data.as_ptr().add(row * a.row + inner.start * a.inner) },
                    a_row: a.row,
                    a_inner: a.inner,
                    // SAFETY: as above.
                    b: unsafe { b.data.as_ptr().add(inner.start * b.row + column) },
                    b_row: b.row,
                    // SAFETY: as above.
                    c: unsafe { c.data.as_mut_ptr().add(row * c.row + column) },
                    c_row: c.row,
                    start: match start {
                        Start::Scaled(factors) => Start::Scaled(&factors[row..row + height]),
                        start => start,
                    },
                };
                // SAFETY: the tile lies inside the asserted bounds, and this runs in `V::run`, which the
                // queue detected in the CPU before it chose `V`.
                unsafe {
                    match registers {
                        4 => tile.of_height::<V, 4>(height),
                        3 => tile.of_height::<V, 3>(height),
                        2 => tile.of_height::<V, 2>(height),
                        _ => tile.of_height::<V, 1>(height),
                    }
                }
                row += height;
            }
            column += registers * V::LANES;
        }
    }));
}

/// One tile of C: the addresses of its operands and the strides of their rows.
#[derive(Clone, Copy)]
struct Tile<'a> {
    inner: usize,
    a: *const f32,
    a_row: usize,
    a_inner: usize,
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    start: Start<'a>,
}

impl Tile<'_> {
    /// Computes a tile of up to [`TILE_ROWS`] rows and `N` registers.
    ///
    /// # Safety
    /// As [`Self::run`].
    #[inline(always)]
    unsafe fn of_height<V: Lanes, const N: usize>(self, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match rows {
                6 => self.run::<V, 6, N>(),
                5 => self.run::<V, 5, N>(),
                4 => self.run::<V, 4, N>(),
                3 => self.run::<V, 3, N>(),
                2 => self.run::<V, 2, N>(),
                _ => self.run::<V, 1, N>(),
            }
        }
    }

    /// Computes a tile of `M` rows and `N` registers.
    ///
    /// # Safety
    /// The CPU must have `V::LEVEL`. `M` rows and `inner` columns of A, `inner` rows and `N` registers of B, and `M`
    /// rows and `N` registers of C must be valid memory.
    #[inline(always)]
    unsafe fn run<V: Lanes, const M: usize, const N: usize>(self) {
        // SAFETY: the caller promises that all offsets lie in the operands.
        unsafe {
            let mut sums = [[V::splat(0.0); N]; M];
            if !matches!(self.start, Start::Zero) {
                for (i, row) in sums.iter_mut().enumerate() {
                    for (j, sum) in row.iter_mut().enumerate() {
                        *sum = V::load(self.c.add(i * self.c_row + j * V::LANES));
                    }
                }
            }
            if let Start::Scaled(factors) = self.start {
                for (row, factor) in sums.iter_mut().zip(factors) {
                    let factor = V::splat(*factor);
                    for sum in row {
                        *sum = sum.mul(factor);
                    }
                }
            }
            let (mut a, mut b) = (self.a, self.b);
            for _ in 0..self.inner {
                let right: [V; N] = std::array::from_fn(inlined!(|j| V::load(b.add(j * V::LANES))));
                for (i, row) in sums.iter_mut().enumerate() {
                    let left = V::splat(*a.add(i * self.a_row));
                    for (sum, right) in row.iter_mut().zip(right) {
                        *sum = left.mul_add(right, *sum);
                    }
                }
                a = a.wrapping_add(self.a_inner);
                b = b.wrapping_add(self.b_row);
            }
            for (i, row) in sums.into_iter().enumerate() {
                for (j, sum) in row.into_iter().enumerate() {
                    sum.store(self.c.add(i * self.c_row + j * V::LANES));
                }
            }
        }
    }
}

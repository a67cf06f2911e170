//! The epilogue of a tile of sums: earlier sums, bias and C are added, and the result is rounded once.

use super::patches::{Filters, Grid};
use crate::{
    CpuLevel, Write,
    cpu::simd::{Float, inlined},
};

/// A tile of f32 sums, the output of a micro-kernel.
#[repr(align(64))]
pub(in crate::cpu) struct Tile([f32; Self::ELEMENTS]);

impl Tile {
    /// Elements of the largest tile of any micro-kernel, 32 × 32.
    pub(in crate::cpu) const ELEMENTS: usize = 1024;

    /// Creates a tile of zeros.
    pub(in crate::cpu) fn zeros() -> Self {
        Self([0.0; Self::ELEMENTS])
    }

    /// Sets all elements to zero.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::cpu) fn clear(&mut self) {
        self.0.fill(0.0);
    }

    /// Adds the first `count` rows of `other` to the rows from `first` on, all `columns` wide.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::cpu) fn add_rows(&mut self, first: usize, other: &Self, count: usize, columns: usize) {
        let rows = &mut self.0[first * columns..][..count * columns];
        rows.iter_mut().zip(&other.0).for_each(|(sum, x)| *sum += x);
    }

    /// Overwrites a row with that of `other`, both `columns` wide.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::cpu) fn copy_row(&mut self, row: usize, other: &Self, columns: usize) {
        let range = row * columns..(row + 1) * columns;
        self.0[range.clone()].copy_from_slice(&other.0[range]);
    }

    /// Returns the rows, `columns` wide.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(in crate::cpu) fn rows(&self, columns: usize) -> impl Iterator<Item = &[f32]> {
        self.0.chunks_exact(columns)
    }

    /// Returns an element.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn element_mut(&mut self, index: usize) -> &mut f32 {
        &mut self.0[index]
    }

    /// Returns all elements.
    pub(super) fn elements_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }

    /// Returns the address that a micro-kernel writes to.
    pub(in crate::cpu) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr()
    }
}

/// A matrix whose disjoint parts several tasks write.
pub(in crate::cpu) struct Window<C> {
    pointer: *mut C,
    row_stride: usize,
}

impl<C> Clone for Window<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Window<C> {}

// SAFETY: a window is an address and a stride; using the address is unsafe and requires disjointness.
unsafe impl<C: Send> Send for Window<C> {}
// SAFETY: as above.
unsafe impl<C: Send> Sync for Window<C> {}

impl<C> Window<C> {
    /// Wraps a matrix with rows `row_stride` elements apart.
    pub(in crate::cpu) fn new(pointer: *mut C, row_stride: usize) -> Self {
        Self { pointer, row_stride }
    }

    /// Returns the window that starts at an element of this one.
    ///
    /// # Safety
    /// The element must lie in the matrix.
    pub(in crate::cpu) unsafe fn at(self, row: usize, column: usize) -> Self {
        // SAFETY: the caller's promise.
        Self { pointer: unsafe { self.pointer.add(row * self.row_stride + column) }, ..self }
    }

    /// Returns the address of the first element.
    pub(in crate::cpu) fn pointer(self) -> *mut C {
        self.pointer
    }

    /// Returns the elements from one row to the next.
    pub(in crate::cpu) fn row_stride(self) -> usize {
        self.row_stride
    }

    /// Returns the first `len` elements of a row.
    ///
    /// # Safety
    /// They must lie in the matrix, and nothing else may use them while the slice lives.
    pub(in crate::cpu) unsafe fn row<'a>(self, row: usize, len: usize) -> &'a mut [C] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(row * self.row_stride), len) }
    }
}

/// The output of a product.
pub(super) enum Target<'a, C> {
    /// A matrix whose rows are equally far apart.
    Matrix(Window<C>),
    /// A matrix whose rows are the pixels of a grid. The window has rows of one element.
    Grid(Window<C>, &'a Grid),
    /// Filters: row `k` and column `l` is the filters' element `k` of lane `l`. The window has rows of one element.
    Filters(Window<C>, &'a Filters),
}

impl<C> Clone for Target<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Target<'_, C> {}

impl<C> Target<'_, C> {
    /// Returns `len` elements of a row from `column` on, unless the output is filters.
    ///
    /// # Safety
    /// They must lie in the output, and nothing else may use them while the slice lives.
    #[inline(always)]
    pub(super) unsafe fn row<'c>(self, row: usize, column: usize, len: usize) -> &'c mut [C] {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Matrix(window) => window.at(row, column).row(0, len),
                Self::Grid(window, grid) => window.row(grid.offset(row) + column, len),
                Self::Filters(..) => unreachable!("neighbouring lanes of filters are not contiguous"),
            }
        }
    }
}

/// The terms that are added to a tile of sums before it is stored.
pub(in crate::cpu) struct Finish<'a, T> {
    /// Sums over earlier blocks of the depth.
    pub(in crate::cpu) partial: Option<Window<f32>>,
    /// Bias of the tile's columns.
    pub(in crate::cpu) bias: Option<&'a [T]>,
    /// Overwrite or accumulate into the target.
    pub(in crate::cpu) write: Write,
}

impl<T: Float> Finish<'_, T> {
    /// Adds the earlier sums and the bias to the sums of row `row`.
    ///
    /// # Safety
    /// The partial sums must hold the row, and no other thread may use it meanwhile.
    #[inline(always)]
    unsafe fn add_to(&self, row: usize, sums: &mut [f32]) {
        if let Some(partial) = self.partial {
            // SAFETY: the caller's promise.
            add(sums, unsafe { partial.row(row, sums.len()) });
        }
        if let Some(bias) = self.bias {
            add(sums, &bias[..sums.len()]);
        }
    }
}

/// Writes the first `rows × columns` elements of a tile, whose rows are `tile_columns` apart, to a part of a matrix.
///
/// # Safety
/// The partial sums and the matrix must hold a part of this size, and no other thread may use these parts meanwhile.
pub(in crate::cpu) unsafe fn store<T: Float, C: Float>(
    level: CpuLevel,
    (rows, columns): (usize, usize),
    tile: &mut Tile,
    tile_columns: usize,
    finish: &Finish<'_, T>,
    target: Window<C>,
) {
    let accumulates = finish.write == Write::Accumulate;
    level.run_with_isa(inlined!(|isa| {
        if finish.partial.is_some() || finish.bias.is_some() || accumulates {
            for (i, sums) in tile.0.chunks_exact_mut(tile_columns).take(rows).enumerate() {
                let sums = &mut sums[..columns];
                // SAFETY: the caller's promise, here and below.
                unsafe {
                    finish.add_to(i, sums);
                    if accumulates {
                        add(sums, target.row(i, columns));
                    }
                }
            }
        }
        let to = (target.pointer, target.row_stride);
        // SAFETY: as above.
        unsafe { C::store_rows(isa, &tile.0, tile_columns, (rows, columns), to) }
    }));
}

/// Writes the first `rows × columns` sums, whose rows are `width` apart; `target` returns a row of the output. It is called once
/// for a row, so that all products of the types share the loop.
///
/// # Safety
/// The partial sums must hold a part of this size, and no other thread may use that part meanwhile.
pub(super) unsafe fn store_rows<'t, T: Float, C: Float>(
    level: CpuLevel,
    (rows, columns): (usize, usize),
    sums: &mut [f32],
    width: usize,
    finish: &Finish<'_, T>,
    target: &dyn Fn(usize) -> &'t mut [C],
) {
    level.run_with_isa(inlined!(|isa| {
        for (i, sums) in sums.chunks_exact_mut(width).take(rows).enumerate() {
            let sums = &mut sums[..columns];
            // SAFETY: the caller's promise.
            unsafe { finish.add_to(i, sums) };
            let target = target(i);
            if finish.write == Write::Accumulate {
                add(sums, target);
            }
            C::store_all(isa, sums, target);
        }
    }));
}

/// Writes a tile as [`store`] does, into an output whose rows have elements `stride` apart. `target` returns the
/// window that starts at a row's first element.
///
/// # Safety
/// As [`store`], and `target` must return rows that no other thread uses meanwhile.
pub(super) unsafe fn scatter<T: Float, C: Float>(
    (rows, columns): (usize, usize),
    tile: &mut Tile,
    tile_columns: usize,
    finish: &Finish<'_, T>,
    target: impl Fn(usize) -> Window<C>,
    stride: usize,
) {
    for (i, sums) in tile.0.chunks_exact_mut(tile_columns).take(rows).enumerate() {
        let sums = &mut sums[..columns];
        // SAFETY: the caller's promise.
        unsafe { finish.add_to(i, sums) };
        let target = target(i);
        for (j, sum) in sums.iter().enumerate() {
            // SAFETY: the caller's promise.
            let element = unsafe { &mut target.at(0, j * stride).row(0, 1)[0] };
            let earlier = if finish.write == Write::Accumulate { element.load() } else { 0.0 };
            *element = C::store(sum + earlier);
        }
    }
}

#[inline(always)]
fn add<T: Float>(sums: &mut [f32], terms: &[T]) {
    for (sum, term) in sums.iter_mut().zip(terms) {
        *sum += term.load();
    }
}

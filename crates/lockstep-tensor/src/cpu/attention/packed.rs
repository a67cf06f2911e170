//! Packed operands of the bf16 matrix instructions, and products of them by the micro-kernels of the GEMM.

use std::{marker::PhantomData, ops::Range};

use half::bf16;

pub(super) use super::page_layout::LEVEL;
use super::{
    block::PREFETCH_ROWS,
    geometry::{Geometry, columns_of, rows_with},
    lanes::{BLOCK, Lanes, prefetch},
    page_layout::head_units,
    product::Start,
};
use crate::{
    Write,
    cpu::{
        gemm::panels::{
            BfloatPair, ColumnPanels, Columns, MicroKernel, Operand, Order, Place, RowPanels, Rows, Tile,
            pack,
        },
        simd::{Float, inlined},
    },
};

/// Units of depth of a block of keys or rows: pairs.
pub(super) const BLOCK_UNITS: usize = BLOCK / 2;

/// Sizes of packed operands in units, for a given head size and the micro-kernel `K`.
pub(super) struct Sizes<K> {
    pub(super) head_dim: usize,
    /// Units of depth of a head's vector.
    pub(super) head_units: usize,
    kernel: PhantomData<fn(K)>,
}

impl<K> Clone for Sizes<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Sizes<K> {}

impl<K: MicroKernel> Sizes<K> {
    pub(super) fn new(geometry: &Geometry<'_>) -> Self {
        Self::of(geometry.head_dim)
    }

    pub(super) fn of(head_dim: usize) -> Self {
        const { assert!(BLOCK_UNITS.is_multiple_of(K::DEPTH) && BLOCK.is_multiple_of(K::COLUMNS)) };
        let head_units = head_units::<K>(head_dim);
        Self { head_dim, head_units, kernel: PhantomData }
    }

    /// Units of a block of vectors as the left operand, summed over the head's elements.
    pub(super) fn left(self) -> usize {
        BLOCK.next_multiple_of(K::ROWS) * self.head_units
    }

    /// Units of a block of vectors as the right operand, summed over the head's elements.
    pub(super) fn right(self) -> usize {
        BLOCK * self.head_units
    }

    /// Units of a block of vectors as the right operand, summed over the vectors.
    pub(super) fn right_across(self) -> usize {
        self.head_dim.next_multiple_of(K::COLUMNS) * BLOCK_UNITS
    }

    /// Units of a block of scores, rounded to bf16.
    pub(super) fn rounded() -> usize {
        BLOCK * BLOCK / 2
    }

    /// Units of a block of scores as the left operand.
    pub(super) fn scores() -> usize {
        BLOCK.next_multiple_of(K::ROWS) * BLOCK_UNITS
    }

    /// Units of a block of contiguous vectors.
    pub(super) fn staged(self) -> usize {
        (BLOCK * self.head_dim).div_ceil(2).next_multiple_of(16)
    }
}

/// Packing of blocks. All methods need a thread that is prepared for `K`, on a CPU that has its instructions.
impl<K: MicroKernel> Sizes<K> {
    /// Copies vectors into a contiguous buffer.
    #[inline]
    pub(super) fn stage<'s>(
        self,
        source: &[bf16],
        vectors: impl Iterator<Item = Range<usize>> + Clone,
        staged: &'s mut [f32],
    ) -> Operands<'s> {
        let rows = bytemuck::cast_slice_mut::<f32, bf16>(staged);
        let mut count = 0;
        let mut later = vectors.clone().skip(PREFETCH_ROWS);
        for (row, vector) in rows.chunks_exact_mut(self.head_dim).zip(vectors) {
            if let Some(later) = later.next() {
                prefetch(source, later);
            }
            row.copy_from_slice(&source[vector]);
            count += 1;
        }
        Operands { vectors: &rows[..count * self.head_dim], count, head_dim: self.head_dim }
    }

    /// Returns the first `count` vectors of a buffer of contiguous ones.
    pub(super) fn staged_vectors(self, staged: &[f32], count: usize) -> Operands<'_> {
        let vectors = &bytemuck::cast_slice::<f32, bf16>(staged)[..count * self.head_dim];
        Operands { vectors, count, head_dim: self.head_dim }
    }

    /// # Safety
    /// See above.
    #[inline]
    pub(super) unsafe fn pack_left(self, vectors: &Operands<'_>, packed: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            left::<K>(&vectors.along(), vectors.rows(), self.elements(), self.head_units, packed);
        }
    }

    /// # Safety
    /// See above.
    #[inline]
    pub(super) unsafe fn pack_right(self, vectors: &Operands<'_>, packed: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            right::<K>(&vectors.along(), vectors.rows(), self.elements(), self.head_units, packed);
        }
    }

    /// # Safety
    /// See above.
    #[inline]
    pub(super) unsafe fn pack_right_across(self, vectors: &Operands<'_>, packed: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            right::<K>(&vectors.across(), self.elements(), vectors.rows(), BLOCK_UNITS, packed);
        }
    }

    fn elements(self) -> Range<usize> {
        0..self.head_dim
    }
}

/// Contiguous vectors of a head.
pub(super) struct Operands<'a> {
    vectors: &'a [bf16],
    count: usize,
    head_dim: usize,
}

impl<'a> Operands<'a> {
    fn rows(&self) -> Range<usize> {
        0..self.count
    }

    fn along(&self) -> Operand<'a, bf16> {
        Operand::new(self.vectors, self.head_dim, Order::AlongDepth)
    }

    fn across(&self) -> Operand<'a, bf16> {
        Operand::new(self.vectors, self.head_dim, Order::AcrossDepth)
    }
}

/// Packs `rows` of a left operand.
///
/// # Safety
/// The CPU must have the instructions of `K`.
#[inline]
pub(super) unsafe fn left<K: MicroKernel>(
    operand: &Operand<'_, bf16>,
    rows: Range<usize>,
    depth: Range<usize>,
    units: usize,
    packed: &mut [f32],
) {
    let packed = &mut bytemuck::cast_slice_mut(packed)[..rows.len().next_multiple_of(K::ROWS) * units];
    // SAFETY: the caller's promise.
    unsafe { pack::<K::Vector, BfloatPair, RowPanels<K>>(operand, rows, depth, units, packed) }
}

/// Packs `columns` of a right operand.
///
/// # Safety
/// As [`left`].
#[inline]
unsafe fn right<K: MicroKernel>(
    operand: &Operand<'_, bf16>,
    columns: Range<usize>,
    depth: Range<usize>,
    units: usize,
    packed: &mut [f32],
) {
    let packed = &mut bytemuck::cast_slice_mut(packed)[..columns.len().next_multiple_of(K::COLUMNS) * units];
    // SAFETY: the caller's promise.
    unsafe { pack::<K::Vector, BfloatPair, ColumnPanels<K>>(operand, columns, depth, units, packed) }
}

/// Rounds rows of a block of scores to bf16. Returns the block; its other rows are those of earlier calls.
#[inline]
pub(super) fn round<'r>(scores: &[f32], rounded: &'r mut [f32]) -> &'r [bf16] {
    let rounded = bytemuck::cast_slice_mut::<f32, bf16>(rounded);
    let target = &mut rounded[..scores.len()];
    // Matrix instructions for bf16 are chosen only if the CPU has this level.
    LEVEL.run_with_isa(inlined!(|isa| bf16::store_all(isa, scores, target)));
    rounded
}

/// The output of a product: `rows × columns`, rows `stride` elements apart.
pub(super) struct Target<'a> {
    sums: &'a mut [f32],
    rows: usize,
    columns: usize,
    stride: usize,
    start: Start<'a>,
    /// Factor on the product.
    factor: f32,
}

impl<'a> Target<'a> {
    /// Creates the target of a block of scores, which `factor` times the product overwrites.
    pub(super) fn scores(sums: &'a mut [f32], rows: usize, factor: f32) -> Self {
        Self { sums, rows, columns: BLOCK, stride: BLOCK, start: Start::Zero, factor }
    }

    /// Creates the target of vectors of a head, to which the product is added.
    pub(super) fn vectors(
        sums: &'a mut [f32],
        rows: usize,
        geometry: &Geometry<'_>,
        start: Start<'a>,
    ) -> Self {
        let (columns, stride) = (geometry.head_dim, geometry.padded_dim);
        Self { sums, rows, columns, stride, start, factor: 1.0 }
    }
}

/// The parts of a product that the visible scores of a block need. The rest is not computed.
#[derive(Clone, Copy)]
pub(super) enum Needed<'a> {
    /// The product is the scores themselves: the keys that each row sees.
    Scores(&'a [u64]),
    /// The left operand is scores: the keys that each row sees.
    Keys(&'a [u64]),
    /// The left operand is the transpose of scores: the rows that see each key.
    Rows(&'a [u64]),
}

impl Needed<'_> {
    /// Returns the columns and the units of depth that some of the product's rows need. Both may be empty.
    #[inline(always)]
    fn by<K: MicroKernel>(self, rows: Range<usize>, units: usize) -> (Range<usize>, Range<usize>) {
        let depth = match self {
            Self::Scores(visible) => return (columns_of(&visible[rows]), 0..units),
            Self::Keys(visible) => columns_of(&visible[rows]),
            Self::Rows(visible) => rows_with(visible, u64::MAX >> (BLOCK - rows.len()) << rows.start),
        };
        let first = depth.start / (2 * K::DEPTH) * K::DEPTH;
        (0..usize::MAX, first..units.min(depth.end.div_ceil(2).next_multiple_of(K::DEPTH)))
    }
}

/// The left operand of a product.
#[derive(Clone, Copy)]
pub(super) enum Left<'a> {
    /// Panels in the order of the micro-kernel.
    Packed(&'a [f32]),
    /// Rows of scores, rounded to bf16, that the micro-kernel reads where they lie.
    Scores(&'a [bf16]),
}

/// Returns rows of scores as a left operand, packed if the micro-kernel cannot read them where they lie.
///
/// # Safety
/// As [`left`].
#[inline]
pub(super) unsafe fn score_rows<'a, K: MicroKernel>(
    scores: &'a [bf16],
    rows: usize,
    keys: usize,
    packed: &'a mut [f32],
) -> Left<'a> {
    if K::READS_LINES {
        return Left::Scores(scores);
    }
    let along = Operand::new(scores, BLOCK, Order::AlongDepth);
    // SAFETY: the caller's promise.
    unsafe { left::<K>(&along, 0..rows, 0..keys, BLOCK_UNITS, packed) };
    Left::Packed(packed)
}

impl Left<'_> {
    /// Returns the rows of a tile from a unit of depth on. Reading `ROWS` of them is valid.
    #[inline(always)]
    fn rows<K: MicroKernel>(self, row: usize, units: usize, first_unit: usize) -> Rows {
        match self {
            Self::Packed(a) => {
                let panel = &bytemuck::cast_slice::<f32, u32>(a)[row * units..][..K::ROWS * units];
                Rows::Packed(panel[first_unit * K::ROWS..].as_ptr())
            }
            Self::Scores(scores) => {
                let lines = &bytemuck::cast_slice::<bf16, u32>(scores)[row * BLOCK_UNITS..];
                assert!(units == BLOCK_UNITS && lines.len() >= K::ROWS * BLOCK_UNITS);
                Rows::Lines(lines[first_unit..].as_ptr(), BLOCK * size_of::<bf16>())
            }
        }
    }
}

/// Multiplies operands of `units` of depth into `target`, at least as much as is needed.
///
/// # Safety
/// The CPU must have the instructions of `K` and of `V`, the thread must be prepared for `K`, and the operands must
/// hold the rows and columns of the target.
#[inline]
pub(super) unsafe fn multiply<V: Lanes, K: MicroKernel>(
    units: usize,
    a: Left<'_>,
    b: &[f32],
    needed: Needed<'_>,
    target: Target<'_>,
) {
    let b = bytemuck::cast_slice::<f32, u32>(b);
    let Target { sums, rows, columns, stride, start, factor } = target;
    let in_place = match start {
        Start::Zero if factor == 1.0 => Some(Write::Overwrite),
        Start::Output if factor == 1.0 => Some(Write::Accumulate),
        _ => None,
    };
    let in_place = in_place.filter(|_| K::FINISHES_TILES);
    let mut tile = Tile::zeros();
    for row in (0..rows).step_by(K::ROWS) {
        let rows = row..rows.min(row + K::ROWS);
        let (needed, depth) = needed.by::<K>(rows.clone(), units);
        if depth.is_empty() {
            continue;
        }
        let a = a.rows::<K>(row, units, depth.start);
        for (column, b) in (0..columns).step_by(K::COLUMNS).zip(b.chunks_exact(K::COLUMNS * units)) {
            let columns = column..columns.min(column + K::COLUMNS);
            if columns.end <= needed.start || needed.end <= columns.start {
                continue;
            }
            let b = Columns::cached(b[depth.start * K::COLUMNS..].as_ptr());
            if let Some(write) = in_place.filter(|_| rows.len() == K::ROWS && columns.len() == K::COLUMNS) {
                assert!((rows.end - 1) * stride + columns.end <= sums.len());
                let first = sums[row * stride + column..].as_mut_ptr();
                // SAFETY: the caller's promise; both operands hold the depth, and the place lies in the sums.
                unsafe { K::finished_tile(depth.len(), a, b, &Place::new(first, stride, write)) };
                continue;
            }
            // SAFETY: as above, with the tile as the place.
            unsafe {
                K::tile(depth.len(), a, b, &mut tile);
            }
            V::run(inlined!(|| {
                let targets = sums[rows.start * stride..].chunks_mut(stride).take(rows.len());
                for ((target, products), row) in targets.zip(tile.rows(K::COLUMNS)).zip(rows.clone()) {
                    let keep = match start {
                        Start::Zero => None,
                        Start::Output => Some(1.0),
                        Start::Scaled(factors) => Some(factors[row]),
                    };
                    // SAFETY: this runs in `V::run`.
                    unsafe { put::<V>(&mut target[columns.clone()], products, factor, keep) };
                }
            }));
        }
    }
}

/// Computes `sums = products · factor`, plus the old sums times `keep`. The loop over whole vectors is explicit: the
/// compiler does not know that the two slices are different memory.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn put<V: Lanes>(sums: &mut [f32], products: &[f32], factor: f32, keep: Option<f32>) {
    let whole = sums.len() - sums.len() % V::LANES;
    let products = &products[..sums.len()];
    // SAFETY: whole vectors lie below `whole`; the caller promises the instructions.
    unsafe {
        let factor = V::splat(factor);
        for i in (0..whole).step_by(V::LANES) {
            let (product, sum) = (V::load(products.as_ptr().add(i)), sums.as_mut_ptr().add(i));
            match keep {
                None => product.mul(factor).store(sum),
                Some(keep) => product.mul_add(factor, V::load(sum).mul(V::splat(keep))).store(sum),
            }
        }
    }
    for (sum, product) in sums[whole..].iter_mut().zip(&products[whole..]) {
        *sum = product * factor + keep.map_or(0.0, |keep| *sum * keep);
    }
}

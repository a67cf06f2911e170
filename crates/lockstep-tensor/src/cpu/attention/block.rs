//! Block operations of the forward and the backward: packing rows into scratch as f32, transposing, scoring, and
//! dropout masks.
//!
//! Scratch rows are contiguous and padded with zeros to whole registers, whatever the strides of the source.

use std::ops::Range;

use lockstep_plan::DType;

use super::{
    geometry::{Bits, Geometry, Pair, columns_of},
    lanes::{BLOCK, Lanes, prefetch},
    product::{Left, Output, Right, Start, TILE_ROWS, multiply},
};
use crate::cpu::simd::{Float, inlined};

/// Distance in rows between a loop over rows and its prefetch.
pub(super) const PREFETCH_ROWS: usize = 16;

/// Splits the first `len` elements off a slice.
pub(super) fn take<'a>(scratch: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(scratch).split_at_mut(len);
    *scratch = rest;
    taken
}

/// Copies vectors, times `factor`, into rows of `width` elements, padded with zeros.
pub(super) fn pack<V: Lanes, T: Float>(
    source: &[T],
    vectors: impl Iterator<Item = Range<usize>> + Clone,
    factor: f32,
    packed: &mut [f32],
    width: usize,
) {
    V::run(inlined!(|| {
        let mut later = vectors.clone().skip(PREFETCH_ROWS);
        for (row, vector) in packed.chunks_exact_mut(width).zip(vectors) {
            if let Some(later) = later.next() {
                prefetch(source, later);
            }
            let vector = &source[vector];
            let (elements, padding) = row.split_at_mut(vector.len());
            let whole = vector.len() / V::LANES * V::LANES;
            for lane in (0..whole).step_by(V::LANES) {
                // SAFETY: the register lies in both slices, as just split and sliced; this runs in `V::run`.
                unsafe {
                    let values = load::<V, T>(vector.as_ptr().add(lane));
                    values.mul(V::splat(factor)).store(elements.as_mut_ptr().add(lane));
                }
            }
            for (element, value) in elements[whole..].iter_mut().zip(&vector[whole..]) {
                *element = value.load() * factor;
            }
            padding.fill(0.0);
        }
    }));
}

/// Loads a register of elements.
///
/// # Safety
/// As [`Lanes::load`].
#[inline(always)]
unsafe fn load<V: Lanes, T: Float>(elements: *const T) -> V {
    // SAFETY: the caller's promise; the array holds the largest register.
    unsafe {
        if T::DTYPE == DType::F32 {
            return V::load(elements.cast());
        }
        let mut values = [0.0; 16];
        for (i, value) in values.iter_mut().take(V::LANES).enumerate() {
            *value = elements.add(i).read().load();
        }
        V::load(values.as_ptr())
    }
}

/// Writes the transpose of `rows` packed rows as rows of a block's width, padded with zeros to whole registers.
/// Clears the packed rows between `rows` and the next multiple of a register.
pub(super) fn transpose<V: Lanes>(packed: &mut [f32], width: usize, rows: usize, transposed: &mut [f32]) {
    let padded_rows = rows.next_multiple_of(V::LANES);
    packed[rows * width..padded_rows * width].fill(0.0);
    assert!(width.is_multiple_of(V::LANES) && padded_rows <= BLOCK && transposed.len() >= width * BLOCK);
    V::run(inlined!(|| {
        for row in (0..padded_rows).step_by(V::LANES) {
            for column in (0..width).step_by(V::LANES) {
                // SAFETY: both squares lie in their slices, as asserted and as the fill checked; this runs in
                // `V::run`.
                unsafe {
                    let source = packed.as_ptr().add(row * width + column);
                    V::transpose(source, width, transposed.as_mut_ptr().add(column * BLOCK + row));
                }
            }
        }
    }));
}

/// Computes `scores [rows, 64] = left [rows, head_dim] · right [head_dim, 64]`, at least where `visible` is set.
pub(super) fn score<V: Lanes>(
    geometry: &Geometry<'_>,
    visible: &[u64],
    left: &[f32],
    right: &[f32],
    scores: &mut [f32],
) {
    for (strip, bits) in visible.chunks(TILE_ROWS).enumerate() {
        let columns = columns_of(bits);
        let columns = columns.start / V::LANES * V::LANES..columns.end.next_multiple_of(V::LANES);
        let first = strip * TILE_ROWS;
        multiply::<V>(
            Start::Zero,
            (first..first + bits.len(), 0..geometry.head_dim, columns),
            Left { data: left, row: geometry.padded_dim, inner: 1 },
            Right { data: right, row: BLOCK },
            Output { data: scores, row: BLOCK },
        );
    }
}

/// Adds the products `weights [rows, 64] · vectors [64, padded_dim]`, over the keys that each row sees, to what `sums
/// [rows, padded_dim]` start from. Sums of rows that see no key are left as they are.
pub(super) fn gather<V: Lanes>(
    geometry: &Geometry<'_>,
    visible: &[u64],
    weights: &[f32],
    vectors: &[f32],
    start: Start<'_>,
    sums: &mut [f32],
) {
    let width = geometry.padded_dim;
    for (strip, bits) in visible.chunks(TILE_ROWS).enumerate() {
        let first = strip * TILE_ROWS;
        multiply::<V>(
            start,
            (first..first + bits.len(), columns_of(bits), 0..width),
            Left { data: weights, row: BLOCK, inner: 1 },
            Right { data: vectors, row: width },
            Output { data: sums, row: width },
        );
    }
}

/// The dropout of a block of scores.
pub(super) struct Kept {
    /// One bit for each key of each row.
    pub(super) bits: Bits,
    /// Factor on the kept elements.
    pub(super) scale: f32,
}

/// Returns the dropout mask of a block; `None` without dropout.
pub(super) fn kept<V: Lanes>(
    geometry: &Geometry<'_>,
    pair: Pair,
    rows: Range<usize>,
    first_key: usize,
) -> Option<Kept> {
    let dropout = geometry.dropout?;
    let (mask, key) = (dropout.mask, dropout.key(pair.sequence));
    let mut kept = [0; BLOCK];
    V::run(inlined!(|| {
        for (bits, row) in kept.iter_mut().zip(rows) {
            let (counter, unused) = geometry.dropout_counter(pair, row, first_key, mask.site);
            // SAFETY: this runs in `V::run`, which the queue detected in the CPU.
            let keep_bits = |counter| unsafe { V::keep_bits(key, counter, mask.threshold) };
            *bits = keep_bits(counter);
            if unused > 0 {
                // Words come in fours, and the first key may be any of the four: the last words are those of the
                // next block.
                let [position, head, four, site] = counter;
                let next = keep_bits([position, head, four.wrapping_add(BLOCK as u32 / 4), site]);
                *bits = *bits >> unused | next << (BLOCK - unused);
            }
        }
    }));
    Some(Kept { bits: kept, scale: mask.scale })
}

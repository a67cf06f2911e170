//! bf16 attention by the bf16 matrix instructions: the algorithms of `forward` and `backward`, with products of
//! blocks by the micro-kernels of the GEMM.
//!
//! Queries, keys and values are packed unchanged. Probabilities and gradients of scores are computed in f32 and
//! rounded to bf16 when they enter a product. Sums are in f32 throughout.

use std::{marker::PhantomData, ops::Range};

use half::bf16;

use super::{
    backward::{self, Backward, unpack},
    block::{kept, prefetch, take},
    forward::{self, Forward, TASK_ROWS},
    geometry::{Bits, Geometry, Pair},
    lanes::{BLOCK, Lanes},
    worker::Worker,
};
use crate::{
    CpuLevel, Write,
    cpu::{
        gemm::panels::{BfloatPair, ColumnPanels, MicroKernel, Operand, Order, RowPanels, Tile, pack},
        simd::{Float, inlined},
    },
};

/// Units of depth of a block of keys or rows: pairs.
const BLOCK_UNITS: usize = BLOCK / 2;

/// Sizes of packed operands in units, for a given head size and the micro-kernel `K`.
struct Sizes<K> {
    head_dim: usize,
    /// Units of depth of a head's vector.
    head_units: usize,
    kernel: PhantomData<fn(K)>,
}

impl<K> Clone for Sizes<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Sizes<K> {}

impl<K: MicroKernel> Sizes<K> {
    fn new(geometry: &Geometry<'_>) -> Self {
        const { assert!(BLOCK_UNITS.is_multiple_of(K::DEPTH) && BLOCK.is_multiple_of(K::COLUMNS)) };
        let head_dim = geometry.head_dim;
        // Four units of every row make whole cache lines of a block.
        let head_units = head_dim.div_ceil(2).next_multiple_of(K::DEPTH.max(4));
        Self { head_dim, head_units, kernel: PhantomData }
    }

    /// Units of a block of vectors as the left operand, summed over the head's elements.
    fn left(self) -> usize {
        BLOCK.next_multiple_of(K::ROWS) * self.head_units
    }

    /// Units of a block of vectors as the right operand, summed over the head's elements.
    fn right(self) -> usize {
        BLOCK * self.head_units
    }

    /// Units of a block of vectors as the right operand, summed over the vectors.
    fn right_across(self) -> usize {
        self.head_dim.next_multiple_of(K::COLUMNS) * BLOCK_UNITS
    }

    /// Units of a block of scores, rounded to bf16.
    fn rounded() -> usize {
        BLOCK * BLOCK / 2
    }

    /// Units of a block of scores as the left operand.
    fn scores() -> usize {
        BLOCK.next_multiple_of(K::ROWS) * BLOCK_UNITS
    }

    /// Units of a block of contiguous vectors.
    fn staged(self) -> usize {
        (BLOCK * self.head_dim).div_ceil(2).next_multiple_of(16)
    }
}

/// Packing of blocks. All methods need a thread that is prepared for `K`, on a CPU that has its instructions.
impl<K: MicroKernel> Sizes<K> {
    /// Copies vectors into a contiguous buffer.
    fn stage<'s>(
        self,
        source: &[bf16],
        vectors: impl Iterator<Item = Range<usize>>,
        staged: &'s mut [f32],
    ) -> Operands<'s> {
        let rows = bytemuck::cast_slice_mut::<f32, bf16>(staged);
        let mut count = 0;
        for (row, vector) in rows.chunks_exact_mut(self.head_dim).zip(vectors) {
            row.copy_from_slice(&source[vector]);
            count += 1;
        }
        Operands { vectors: &rows[..count * self.head_dim], count, head_dim: self.head_dim }
    }

    /// # Safety
    /// See above.
    unsafe fn pack_left(self, vectors: &Operands<'_>, packed: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            left::<K>(&vectors.along(), vectors.rows(), self.elements(), self.head_units, packed);
        }
    }

    /// # Safety
    /// See above.
    unsafe fn pack_right(self, vectors: &Operands<'_>, packed: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            right::<K>(&vectors.along(), vectors.rows(), self.elements(), self.head_units, packed);
        }
    }

    /// # Safety
    /// See above.
    unsafe fn pack_right_across(self, vectors: &Operands<'_>, packed: &mut [f32]) {
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
struct Operands<'a> {
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
unsafe fn left<K: MicroKernel>(
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

/// Rounds a block of scores to bf16.
fn round<'r>(scores: &[f32], rounded: &'r mut [f32]) -> &'r [bf16] {
    let rounded = bytemuck::cast_slice_mut::<f32, bf16>(rounded);
    // Tiles for bf16 are chosen only if the CPU has this instruction.
    CpuLevel::Avx512Bf16.run_with_isa(inlined!(|isa| bf16::store_all(isa, scores, rounded)));
    rounded
}

/// The output of a product: `rows × columns`, rows `stride` elements apart.
struct Target<'a> {
    sums: &'a mut [f32],
    rows: usize,
    columns: usize,
    stride: usize,
    write: Write,
    /// Factor on the product.
    factor: f32,
}

/// Multiplies packed operands of `units` of depth into `target`.
///
/// # Safety
/// The CPU must have the instructions of `K` and of `V`, the thread must be prepared for `K`, and the operands must
/// hold the rows and columns of the target.
unsafe fn multiply<V: Lanes, K: MicroKernel>(units: usize, a: &[f32], b: &[f32], target: Target<'_>) {
    let (a, b) = (bytemuck::cast_slice::<f32, u32>(a), bytemuck::cast_slice::<f32, u32>(b));
    let Target { sums, rows, columns, stride, write, factor } = target;
    let mut tile = Tile::zeros();
    for (column, b) in (0..columns).step_by(K::COLUMNS).zip(b.chunks_exact(K::COLUMNS * units)) {
        for (row, a) in (0..rows).step_by(K::ROWS).zip(a.chunks_exact(K::ROWS * units)) {
            // SAFETY: the caller's promise; both panels hold `units`.
            unsafe { K::tile(units, a.as_ptr(), b.as_ptr(), &mut tile) };
            let (rows, columns) = (row..rows.min(row + K::ROWS), column..columns.min(column + K::COLUMNS));
            V::LEVEL.run(inlined!(|| {
                let targets = sums[rows.start * stride..].chunks_mut(stride).take(rows.len());
                for (target, products) in targets.zip(tile.rows(K::COLUMNS)) {
                    // SAFETY: this runs under `V::LEVEL`.
                    unsafe { put::<V>(&mut target[columns.clone()], products, factor, write) };
                }
            }));
        }
    }
}

/// Computes `sums = products · factor`, or accumulates it. The loop over whole vectors is explicit: the compiler does
/// not know that the two slices are different memory.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn put<V: Lanes>(sums: &mut [f32], products: &[f32], factor: f32, write: Write) {
    let whole = sums.len() - sums.len() % V::LANES;
    let products = &products[..sums.len()];
    // SAFETY: whole vectors lie below `whole`; the caller promises the instructions.
    unsafe {
        let factor = V::splat(factor);
        for i in (0..whole).step_by(V::LANES) {
            let (product, sum) = (V::load(products.as_ptr().add(i)), sums.as_mut_ptr().add(i));
            match write {
                Write::Overwrite => product.mul(factor).store(sum),
                Write::Accumulate => product.mul_add(factor, V::load(sum)).store(sum),
            }
        }
    }
    for (sum, product) in sums[whole..].iter_mut().zip(&products[whole..]) {
        *sum = product * factor + if write == Write::Accumulate { *sum } else { 0.0 };
    }
}

/// A forward or a backward with the micro-kernel `K` of bf16 matrix instructions.
pub(super) struct Tiled<W, K> {
    work: W,
    kernel: PhantomData<fn(K)>,
}

impl<W, K> Tiled<W, K> {
    pub(super) fn new(work: W) -> Self {
        Self { work, kernel: PhantomData }
    }
}

impl<K: MicroKernel> Worker for Tiled<Forward<'_, bf16>, K> {
    fn tasks(&self) -> usize {
        self.work.tasks()
    }

    fn scratch_elements(&self) -> usize {
        let geometry = &self.work.geometry;
        let sizes = Sizes::<K>::new(geometry);
        let strips = self.work.task_rows().div_ceil(BLOCK);
        let queries = strips * sizes.left();
        let sums = self.work.task_rows() * geometry.padded_dim;
        let blocks = sizes.right() + sizes.right_across() + sizes.staged();
        queries + sums + blocks + BLOCK * BLOCK + Sizes::<K>::rounded() + Sizes::<K>::scores()
    }

    fn run<V: Lanes>(&self, task: usize, scratch: &mut [f32]) {
        let (pair, rows) = self.work.task(task);
        // SAFETY: `K` was chosen because the CPU has its instructions.
        unsafe { K::prepared(|| self.rows::<V>(pair, rows, scratch)) };
    }
}

impl<K: MicroKernel> Tiled<Forward<'_, bf16>, K> {
    /// # Safety
    /// The CPU must have the instructions of `K`, and the thread must be prepared.
    unsafe fn rows<V: Lanes>(&self, pair: Pair, rows: Range<usize>, mut scratch: &mut [f32]) {
        let Forward { geometry, q, k, v, .. } = &self.work;
        let sizes = Sizes::<K>::new(geometry);
        let (width, factor) = (geometry.padded_dim, geometry.scale * std::f32::consts::LOG2_E);
        let queries = take(&mut scratch, rows.len().div_ceil(BLOCK) * sizes.left());
        let sums = take(&mut scratch, rows.len() * width);
        let keys = take(&mut scratch, sizes.right());
        let values = take(&mut scratch, sizes.right_across());
        let staged = take(&mut scratch, sizes.staged());
        let scores = take(&mut scratch, BLOCK * BLOCK);
        let rounded = take(&mut scratch, Sizes::<K>::rounded());
        let weights = take(&mut scratch, Sizes::<K>::scores());

        for (strip, packed) in strips(rows.clone()).zip(queries.chunks_exact_mut(sizes.left())) {
            let vectors = sizes.stage(q, strip.map(|row| geometry.query_vector(pair, row)), staged);
            // SAFETY: the caller's promise.
            unsafe { sizes.pack_left(&vectors, packed) };
        }
        sums.fill(0.0);
        let mut maxima = [f32::NEG_INFINITY; TASK_ROWS];
        let mut totals = [0.0; TASK_ROWS];
        let seen = geometry.keys_of(pair, rows.clone());
        for first_key in (seen.start / BLOCK * BLOCK..seen.end).step_by(BLOCK) {
            let block = first_key..geometry.key_len.min(first_key + BLOCK);
            let places = || block.clone().map(|key| geometry.key_vector(pair, key));
            // SAFETY: the caller's promise.
            unsafe {
                sizes.pack_right(&sizes.stage(k, places(), staged), keys);
                sizes.pack_right_across(&sizes.stage(v, places(), staged), values);
            }
            let next = block.end..seen.end.min(block.end + BLOCK);
            let next = || next.clone().map(|key| geometry.key_vector(pair, key));
            prefetch(k, next());
            prefetch(v, next());

            for (strip, queries) in strips(rows.clone()).zip(queries.chunks_exact(sizes.left())) {
                let Some(visible) = geometry.visible(pair, strip.clone(), first_key) else { continue };
                let visible = &visible[..strip.len()];
                let (kept, kept_scale) = kept::<V>(geometry, pair, strip.clone(), first_key);
                let local = strip.start - rows.start..strip.end - rows.start;
                let sums = &mut sums[local.start * width..local.end * width];
                let scored = Target {
                    sums: scores,
                    rows: strip.len(),
                    columns: BLOCK,
                    stride: BLOCK,
                    write: Write::Overwrite,
                    factor,
                };
                // SAFETY: the caller's promise.
                unsafe { multiply::<V, K>(sizes.head_units, queries, keys, scored) };
                forward::Softmax {
                    visible,
                    kept: &kept,
                    kept_scale,
                    maxima: &mut maxima[local.clone()],
                    totals: &mut totals[local],
                }
                .update::<V>(scores, sums, width);
                let gathered = Target {
                    sums,
                    rows: strip.len(),
                    columns: sizes.head_dim,
                    stride: width,
                    write: Write::Accumulate,
                    factor: 1.0,
                };
                let scores = Operand::new(round(scores, rounded), BLOCK, Order::AlongDepth);
                // SAFETY: the caller's promise.
                unsafe {
                    left::<K>(&scores, 0..strip.len(), 0..block.len(), BLOCK_UNITS, weights);
                    multiply::<V, K>(BLOCK_UNITS, weights, values, gathered);
                }
            }
        }
        self.work.finish::<V>(pair, rows, sums, &maxima, &totals);
    }
}

/// Splits rows into strips of a block's height.
fn strips(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(BLOCK).map(move |start| start..end.min(start + BLOCK))
}

/// Scratch of one worker thread in the backward.
struct Scratch<'a> {
    /// All rows of the pair in strips: queries and output gradients, each as left and as right operands.
    strips: &'a mut [f32],
    dq: &'a mut [f32],
    exponents: &'a mut [f32],
    corrections: &'a mut [f32],
    keys: &'a mut [f32],
    keys_across: &'a mut [f32],
    values: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// Scores, then probabilities after dropout.
    probabilities: &'a mut [f32],
    /// Gradients of the probabilities, then of the scores.
    dscores: &'a mut [f32],
    /// Probabilities and score gradients, rounded to bf16.
    rounded: [&'a mut [f32]; 2],
    /// One of the two, packed.
    packed: &'a mut [f32],
    staged: &'a mut [f32],
}

impl<K: MicroKernel> Worker for Tiled<Backward<'_, bf16>, K> {
    fn tasks(&self) -> usize {
        self.work.tasks()
    }

    fn scratch_elements(&self) -> usize {
        let geometry = &self.work.geometry;
        let sizes = Sizes::<K>::new(geometry);
        let rows = geometry.rows().next_multiple_of(16);
        let strips = geometry.rows().div_ceil(BLOCK) * Self::strip_elements(sizes);
        let keys = 2 * sizes.right() + sizes.right_across() + 2 * BLOCK * geometry.padded_dim;
        let scores = 2 * BLOCK * BLOCK + 2 * Sizes::<K>::rounded() + Sizes::<K>::scores();
        strips + rows * (geometry.padded_dim + 2) + keys + scores + sizes.staged()
    }

    fn run<V: Lanes>(&self, task: usize, mut scratch: &mut [f32]) {
        let geometry = &self.work.geometry;
        let sizes = Sizes::<K>::new(geometry);
        let rows = geometry.rows().next_multiple_of(16);
        let mut next = |len| take(&mut scratch, len);
        let scratch = Scratch {
            strips: next(geometry.rows().div_ceil(BLOCK) * Self::strip_elements(sizes)),
            dq: next(rows * geometry.padded_dim),
            exponents: next(rows),
            corrections: next(rows),
            keys: next(sizes.right()),
            keys_across: next(sizes.right_across()),
            values: next(sizes.right()),
            dk: next(BLOCK * geometry.padded_dim),
            dv: next(BLOCK * geometry.padded_dim),
            probabilities: next(BLOCK * BLOCK),
            dscores: next(BLOCK * BLOCK),
            rounded: [(); 2].map(|()| next(Sizes::<K>::rounded())),
            packed: next(Sizes::<K>::scores()),
            staged: next(sizes.staged()),
        };
        // SAFETY: `K` was chosen because the CPU has its instructions.
        unsafe { K::prepared(|| self.pair::<V>(geometry.pair(task), sizes, scratch)) };
    }
}

impl<K: MicroKernel> Tiled<Backward<'_, bf16>, K> {
    /// Returns the size of a strip of rows: queries and output gradients as left operands, then both as right ones.
    fn strip_elements(sizes: Sizes<K>) -> usize {
        2 * (sizes.left() + sizes.right_across())
    }

    /// # Safety
    /// The CPU must have the instructions of `K`, and the thread must be prepared.
    unsafe fn pair<V: Lanes>(&self, pair: Pair, sizes: Sizes<K>, mut scratch: Scratch<'_>) {
        let Backward { geometry, q, dout, .. } = &self.work;
        self.work.prepare_rows::<V>(pair, scratch.dq, scratch.exponents, scratch.corrections);
        let packed_strips = scratch.strips.chunks_exact_mut(Self::strip_elements(sizes));
        for (strip, packed) in strips(0..geometry.rows()).zip(packed_strips) {
            let places = || strip.clone().map(|row| geometry.query_vector(pair, row));
            let (lefts, rights) = packed.split_at_mut(2 * sizes.left());
            let lefts = lefts.chunks_exact_mut(sizes.left());
            let rights = rights.chunks_exact_mut(sizes.right_across());
            for ((source, left), right) in [q, dout].into_iter().zip(lefts).zip(rights) {
                let vectors = sizes.stage(source, places(), scratch.staged);
                // SAFETY: the caller's promise.
                unsafe {
                    sizes.pack_left(&vectors, left);
                    sizes.pack_right_across(&vectors, right);
                }
            }
        }
        for first_key in (0..geometry.key_len).step_by(BLOCK) {
            // SAFETY: the caller's promise.
            unsafe { self.key_block::<V>(pair, first_key, sizes, &mut scratch) };
        }
        let places = (0..geometry.rows()).map(|row| geometry.query_vector(pair, row));
        // SAFETY: only this task writes the pair's rows.
        unsafe {
            unpack::<V, bf16>(scratch.dq, geometry.scale, &self.work.dq, places, geometry.padded_dim);
        }
    }

    /// Computes the gradients of 64 keys and values, and adds their contribution to the gradients of the queries.
    ///
    /// # Safety
    /// As [`Self::pair`].
    unsafe fn key_block<V: Lanes>(
        &self,
        pair: Pair,
        first_key: usize,
        sizes: Sizes<K>,
        scratch: &mut Scratch<'_>,
    ) {
        let Backward { geometry, k, v, dk, dv, .. } = &self.work;
        let block = first_key..geometry.key_len.min(first_key + BLOCK);
        let places = || block.clone().map(|key| geometry.key_vector(pair, key));
        // SAFETY: the caller's promise.
        unsafe {
            sizes.pack_right(&sizes.stage(v, places(), scratch.staged), scratch.values);
            let keys = sizes.stage(k, places(), scratch.staged);
            sizes.pack_right(&keys, scratch.keys);
            sizes.pack_right_across(&keys, scratch.keys_across);
        }
        let next = block.end..geometry.key_len.min(block.end + BLOCK);
        let next = || next.clone().map(|key| geometry.key_vector(pair, key));
        prefetch(k, next());
        prefetch(v, next());
        scratch.dk.fill(0.0);
        scratch.dv.fill(0.0);
        for (index, rows) in strips(0..geometry.rows()).enumerate() {
            if let Some(visible) = geometry.visible(pair, rows.clone(), first_key) {
                // SAFETY: the caller's promise.
                unsafe { self.block::<V>(pair, (index, rows), block.clone(), &visible, sizes, scratch) };
            }
        }
        // SAFETY: only this task writes the pair's keys and values.
        unsafe {
            unpack::<V, bf16>(scratch.dk, geometry.scale, dk, places(), geometry.padded_dim);
            unpack::<V, bf16>(scratch.dv, 1.0, dv, places(), geometry.padded_dim);
        }
    }

    /// Computes the five products of a block of up to 64 rows, strip `index`, and 64 keys.
    ///
    /// # Safety
    /// As [`Self::pair`].
    unsafe fn block<V: Lanes>(
        &self,
        pair: Pair,
        (index, rows): (usize, Range<usize>),
        keys: Range<usize>,
        visible: &Bits,
        sizes: Sizes<K>,
        scratch: &mut Scratch<'_>,
    ) {
        let geometry = &self.work.geometry;
        let width = geometry.padded_dim;
        let strip = &scratch.strips[index * Self::strip_elements(sizes)..];
        let (queries, strip) = strip.split_at(sizes.left());
        let (dout, strip) = strip.split_at(sizes.left());
        let (queries_across, strip) = strip.split_at(sizes.right_across());
        let dout_across = &strip[..sizes.right_across()];
        let scores = |sums, factor| Target {
            sums,
            rows: rows.len(),
            columns: BLOCK,
            stride: BLOCK,
            write: Write::Overwrite,
            factor,
        };
        let gradients = |sums, rows| Target {
            sums,
            rows,
            columns: sizes.head_dim,
            stride: width,
            write: Write::Accumulate,
            factor: 1.0,
        };
        let factor = geometry.scale * std::f32::consts::LOG2_E;
        // SAFETY: the caller's promise.
        unsafe {
            multiply::<V, K>(sizes.head_units, queries, scratch.keys, scores(scratch.probabilities, factor));
            multiply::<V, K>(sizes.head_units, dout, scratch.values, scores(scratch.dscores, 1.0));
        }
        let (kept, kept_scale) = kept::<V>(geometry, pair, rows.clone(), keys.start);
        backward::Softmax {
            visible: &visible[..rows.len()],
            kept: &kept,
            kept_scale,
            exponents: &scratch.exponents[rows.clone()],
            corrections: &scratch.corrections[rows.clone()],
        }
        .differentiate::<V>(scratch.probabilities, scratch.dscores);
        let (row_count, key_count) = (0..rows.len(), 0..keys.len());
        let [probabilities, dscores] = &mut scratch.rounded;
        let probabilities = round(scratch.probabilities, probabilities);
        let dscores = round(scratch.dscores, dscores);
        let across = |block| Operand::new(block, BLOCK, Order::AcrossDepth);
        let along = Operand::new(dscores, BLOCK, Order::AlongDepth);
        let packed = &mut *scratch.packed;
        // SAFETY: the caller's promise.
        unsafe {
            left::<K>(&across(probabilities), key_count.clone(), row_count.clone(), BLOCK_UNITS, packed);
            multiply::<V, K>(BLOCK_UNITS, packed, dout_across, gradients(scratch.dv, keys.len()));
            left::<K>(&across(dscores), key_count.clone(), row_count.clone(), BLOCK_UNITS, packed);
            multiply::<V, K>(BLOCK_UNITS, packed, queries_across, gradients(scratch.dk, keys.len()));
            left::<K>(&along, row_count, key_count, BLOCK_UNITS, packed);
            let dq = &mut scratch.dq[rows.start * width..];
            multiply::<V, K>(BLOCK_UNITS, packed, scratch.keys_across, gradients(dq, rows.len()));
        }
    }
}

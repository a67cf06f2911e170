//! bf16 attention by the bf16 matrix instructions: the algorithms of `forward` and `backward`, with the products of
//! blocks of `packed`.
//!
//! Queries, keys and values are packed unchanged. Probabilities and gradients of scores are computed in f32 and
//! rounded to bf16 when they enter a product. Sums are in f32 throughout.

use std::{marker::PhantomData, ops::Range};

use half::bf16;

use super::{
    backward::{self, Backward, unpack},
    block::{kept, take},
    forward::{self, Forward, TASK_ROWS},
    geometry::{Bits, Pair},
    lanes::{BLOCK, Lanes, prefetch},
    packed::{BLOCK_UNITS, Left, Needed, Sizes, Target, left, multiply, round, score_rows},
    page_codes::scale_columns,
    pages::{CachedBlock, Pages},
    product::Start,
    scores::{change_scores, multiply_derivatives},
    worker::Worker,
};
#[cfg(target_arch = "x86_64")]
use crate::cpu::gemm::panels::{Avx512DotBlock, Avx512DotFour, Avx512DotTwo};
use crate::cpu::gemm::panels::{MicroKernel, Operand, Order};

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
        let Forward { geometry, q, .. } = &self.work;
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
            let vectors = sizes.stage(q, geometry.query_vectors(pair, strip), staged);
            // SAFETY: the caller's promise.
            unsafe { sizes.pack_left(&vectors, packed) };
        }
        sums.fill(0.0);
        let mut maxima = [f32::NEG_INFINITY; TASK_ROWS];
        let mut totals = [0.0; TASK_ROWS];
        self.work.count_sinks(pair, rows.clone(), &mut maxima, &mut totals);
        let mut shrinkage = [1.0; BLOCK];
        for [block, next] in geometry.key_blocks(geometry.keys_of(pair, rows.clone())) {
            let first_key = block.start;
            if geometry.valid_keys(pair, first_key) == 0 {
                continue;
            }
            // SAFETY: the caller's promise.
            let CachedBlock { operands: [keys, values], scales } =
                unsafe { self.operands::<V>(pair, [block.clone(), next], sizes, [staged, keys, values]) };
            for (strip, queries) in strips(rows.clone()).zip(queries.chunks_exact(sizes.left())) {
                let Some(visible) = geometry.visible(pair, strip.clone(), first_key) else { continue };
                let visible = &visible[..strip.len()];
                let kept = kept::<V>(geometry, pair, strip.clone(), first_key);
                let local = strip.start - rows.start..strip.end - rows.start;
                let sums = &mut sums[local.start * width..local.end * width];
                let scored = Target::scores(scores, strip.len(), factor);
                // SAFETY: the caller's promise.
                unsafe {
                    multiply::<V, K>(
                        sizes.head_units,
                        Left::Packed(queries),
                        keys,
                        Needed::Scores(visible),
                        scored,
                    )
                };
                if let Some([of_keys, _]) = scales {
                    scale_columns::<V>(of_keys, &mut scores[..strip.len() * BLOCK]);
                }
                change_scores::<V>(geometry, pair, strip.clone(), first_key, visible, scores, &mut []);
                forward::Softmax {
                    visible,
                    kept: kept.as_ref(),
                    maxima: &mut maxima[local.start..][..BLOCK],
                    totals: &mut totals[local.start..][..BLOCK],
                    shrinkage: &mut shrinkage,
                }
                .update::<V>(scores);
                if let Some([_, of_values]) = scales {
                    scale_columns::<V>(of_values, &mut scores[..strip.len() * BLOCK]);
                }
                let gathered = Target::vectors(sums, strip.len(), geometry, Start::Scaled(&shrinkage));
                let scores = round(&scores[..strip.len() * BLOCK], rounded);
                // SAFETY: the caller's promise.
                unsafe {
                    let weights = score_rows::<K>(scores, strip.len(), block.len(), weights);
                    multiply::<V, K>(BLOCK_UNITS, weights, values, Needed::Keys(visible), gathered);
                }
            }
        }
        self.work.finish::<V>(pair, rows, sums, &maxima, &totals);
    }
}

impl<K: MicroKernel> Tiled<Forward<'_, bf16>, K> {
    /// Returns the keys and values of a block as right operands, which a cache holds, or which are packed or decoded into scratch.
    /// Fetches those of the next block.
    ///
    /// # Safety
    /// As [`Self::rows`].
    unsafe fn operands<'s, V: Lanes>(
        &'s self,
        pair: Pair,
        [block, next]: [Range<usize>; 2],
        sizes: Sizes<K>,
        [staged, keys, values]: [&'s mut [f32]; 3],
    ) -> CachedBlock<'s> {
        let Forward { geometry, k, v, .. } = &self.work;
        if let Some(pages) = geometry.pages_of_blocks() {
            let found = pages.block::<V>(pair.key_head, block.start / BLOCK, [keys, values]);
            if !next.is_empty() {
                for operand in [0, 1] {
                    pages.prefetch(operand, pair.key_head, next.start / BLOCK);
                }
            }
            return found;
        }
        let places = || geometry.key_vectors(pair, block.clone());
        if let Some(pages) = geometry.pages.filter(Pages::are_shared) {
            let rows = bytemuck::cast_slice_mut::<f32, bf16>(staged);
            let decoded = pages.decode_vectors::<V, bf16>(
                pair.key_head,
                block.start / BLOCK,
                (rows, geometry.head_dim),
            );
            let vectors = match decoded {
                Some(_) => sizes.staged_vectors(staged, block.len()),
                None => sizes.stage(k, places(), staged),
            };
            // SAFETY: the caller's promise.
            unsafe {
                sizes.pack_right(&vectors, keys);
                sizes.pack_right_across(&vectors, values);
            }
            if decoded.is_none() {
                geometry.key_vectors(pair, next).for_each(|key| prefetch(k, key));
            } else if !next.is_empty() {
                pages.prefetch(0, pair.key_head, next.start / BLOCK);
            }
            return CachedBlock {
                operands: [keys, values],
                scales: decoded.and_then(|decoded| decoded.scales),
            };
        }
        // SAFETY: the caller's promise.
        unsafe {
            sizes.pack_right(&sizes.stage(k, places(), staged), keys);
            sizes.pack_right_across(&sizes.stage(v, places(), staged), values);
        }
        let next = || geometry.key_vectors(pair, next.clone());
        next().for_each(|key| prefetch(k, key));
        next().for_each(|key| prefetch(v, key));
        CachedBlock { operands: [keys, values], scales: None }
    }
}

/// A forward by the dot products of AVX-512, with a tile that its rows fill. The tile changes no bit.
#[cfg(target_arch = "x86_64")]
pub(super) enum DotProducts<'a> {
    Two(Tiled<Forward<'a, bf16>, Avx512DotTwo>),
    Four(Tiled<Forward<'a, bf16>, Avx512DotFour>),
    Block(Tiled<Forward<'a, bf16>, Avx512DotBlock>),
}

#[cfg(target_arch = "x86_64")]
impl<'a> DotProducts<'a> {
    pub(super) fn new(work: Forward<'a, bf16>) -> Self {
        match work.geometry.rows() {
            0..=2 => Self::Two(Tiled::new(work)),
            3..=4 => Self::Four(Tiled::new(work)),
            _ => Self::Block(Tiled::new(work)),
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Worker for DotProducts<'_> {
    fn tasks(&self) -> usize {
        match self {
            Self::Two(work) => work.tasks(),
            Self::Four(work) => work.tasks(),
            Self::Block(work) => work.tasks(),
        }
    }

    fn scratch_elements(&self) -> usize {
        match self {
            Self::Two(work) => work.scratch_elements(),
            Self::Four(work) => work.scratch_elements(),
            Self::Block(work) => work.scratch_elements(),
        }
    }

    fn run<V: Lanes>(&self, task: usize, scratch: &mut [f32]) {
        match self {
            Self::Two(work) => work.run::<V>(task, scratch),
            Self::Four(work) => work.run::<V>(task, scratch),
            Self::Block(work) => work.run::<V>(task, scratch),
        }
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
    /// Derivatives of the soft-capped scores; empty without a cap.
    cap_derivatives: &'a mut [f32],
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
        let derivatives = geometry.cap_derivatives();
        strips + rows * (geometry.padded_dim + 2) + keys + scores + derivatives + sizes.staged()
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
            cap_derivatives: next(geometry.cap_derivatives()),
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
            let places = || geometry.query_vectors(pair, strip.clone());
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
        let places = geometry.query_vectors(pair, 0..geometry.rows());
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
        let places = || geometry.key_vectors(pair, block.clone());
        // SAFETY: the caller's promise.
        unsafe {
            sizes.pack_right(&sizes.stage(v, places(), scratch.staged), scratch.values);
            let keys = sizes.stage(k, places(), scratch.staged);
            sizes.pack_right(&keys, scratch.keys);
            sizes.pack_right_across(&keys, scratch.keys_across);
        }
        let next = block.end..geometry.key_len.min(block.end + BLOCK);
        let next = || geometry.key_vectors(pair, next.clone());
        next().for_each(|key| prefetch(k, key));
        next().for_each(|key| prefetch(v, key));
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
        let factor = geometry.scale * std::f32::consts::LOG2_E;
        let seen = &visible[..rows.len()];
        let needed = Needed::Scores(seen);
        // SAFETY: the caller's promise.
        unsafe {
            let scores = Target::scores(scratch.probabilities, rows.len(), factor);
            multiply::<V, K>(sizes.head_units, Left::Packed(queries), scratch.keys, needed, scores);
            let dscores = Target::scores(scratch.dscores, rows.len(), 1.0);
            multiply::<V, K>(sizes.head_units, Left::Packed(dout), scratch.values, needed, dscores);
        }
        let (changed, derivatives) = (&mut *scratch.probabilities, &mut *scratch.cap_derivatives);
        change_scores::<V>(geometry, pair, rows.clone(), keys.start, seen, changed, derivatives);
        let kept = kept::<V>(geometry, pair, rows.clone(), keys.start);
        backward::Softmax {
            visible: seen,
            kept: kept.as_ref(),
            exponents: &scratch.exponents[rows.clone()],
            corrections: &scratch.corrections[rows.clone()],
        }
        .differentiate::<V>(scratch.probabilities, scratch.dscores);
        multiply_derivatives::<V>(seen, scratch.cap_derivatives, scratch.dscores);
        let (row_count, key_count) = (0..rows.len(), 0..keys.len());
        let [probabilities, dscores] = &mut scratch.rounded;
        let probabilities = round(scratch.probabilities, probabilities);
        let dscores = round(scratch.dscores, dscores);
        let across = |block| Operand::new(block, BLOCK, Order::AcrossDepth);
        let packed = &mut *scratch.packed;
        // SAFETY: the caller's promise.
        unsafe {
            left::<K>(&across(probabilities), key_count.clone(), row_count.clone(), BLOCK_UNITS, packed);
            multiply::<V, K>(
                BLOCK_UNITS,
                Left::Packed(packed),
                dout_across,
                Needed::Rows(seen),
                Target::vectors(scratch.dv, keys.len(), geometry, Start::Output),
            );
            left::<K>(&across(dscores), key_count, row_count, BLOCK_UNITS, packed);
            multiply::<V, K>(
                BLOCK_UNITS,
                Left::Packed(packed),
                queries_across,
                Needed::Rows(seen),
                Target::vectors(scratch.dk, keys.len(), geometry, Start::Output),
            );
            let dq = &mut scratch.dq[rows.start * width..];
            multiply::<V, K>(
                BLOCK_UNITS,
                score_rows::<K>(dscores, rows.len(), keys.len(), packed),
                scratch.keys_across,
                Needed::Keys(seen),
                Target::vectors(dq, rows.len(), geometry, Start::Output),
            );
        }
    }
}

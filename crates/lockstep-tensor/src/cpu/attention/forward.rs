//! The forward: an online softmax over blocks of keys (Dao, FlashAttention-2, 2023, algorithm 1).
//!
//! A task owns up to [`TASK_ROWS`] rows of one (sequence, key head) pair and reads the keys once. Queries are
//! multiplied by `scale · log2(e)` when packed, so that scores are exponents of two.

use std::ops::Range;

use super::{
    block::{Kept, gather, kept, pack, score, take, transpose},
    geometry::{Geometry, Pair, columns_of},
    lanes::{BLOCK, Lanes, ROWS, prefetch},
    output::Output,
    page_codes::scale_columns,
    pages::{CachedBlock, Pages},
    product::Start,
    scores::change_scores,
    worker::Worker,
};
use crate::{
    Write,
    cpu::{
        operands::Operand,
        simd::{Float, inlined},
    },
};

/// Maximum rows of a task: enough to amortize packing and transposing the keys, few enough to stay in the L2 cache.
pub(super) const TASK_ROWS: usize = 256;

/// Maximum rows of a task where all heads of few tokens share one key head, so that a decoding step has several tasks.
const FEW_ROWS: usize = 32;

/// Operands of the forward.
pub(super) struct Forward<'a, T> {
    pub(super) geometry: Geometry<'a>,
    pub(super) q: &'a [T],
    pub(super) k: &'a [T],
    pub(super) v: &'a [T],
    pub(super) out: Output<'a, T>,
    pub(super) log_sum_exp: Operand<'a, f32>,
}

/// Scratch of one worker thread.
struct Scratch<'a> {
    queries: &'a mut [f32],
    sums: &'a mut [f32],
    keys_transposed: &'a mut [f32],
    /// The keys until they are transposed, then the values.
    vectors: &'a mut [f32],
    scores: &'a mut [f32],
}

impl<T: Float> Worker for Forward<'_, T> {
    fn tasks(&self) -> usize {
        self.geometry.pairs() * self.tasks_per_pair()
    }

    fn scratch_elements(&self) -> usize {
        let width = self.geometry.padded_dim;
        (2 * self.task_rows() + 2 * BLOCK) * width + BLOCK * BLOCK
    }

    fn run<V: Lanes>(&self, task: usize, mut scratch: &mut [f32]) {
        let width = self.geometry.padded_dim;
        let (pair, rows) = self.task(task);
        let mut next = |len| take(&mut scratch, len);
        let scratch = Scratch {
            queries: next(self.task_rows() * width),
            sums: next(self.task_rows() * width),
            keys_transposed: next(BLOCK * width),
            vectors: next(BLOCK * width),
            scores: next(BLOCK * BLOCK),
        };
        self.rows::<V>(pair, rows, scratch);
    }
}

impl<T: Float> Forward<'_, T> {
    fn tasks_per_pair(&self) -> usize {
        self.geometry.rows().div_ceil(self.most_rows())
    }

    /// Returns the rows of a task that is not the last one of its pair. They change no bit.
    fn most_rows(&self) -> usize {
        let geometry = &self.geometry;
        let is_shared = geometry.pages.is_some_and(|pages| pages.are_shared());
        if is_shared && geometry.rows() < 4 * TASK_ROWS { FEW_ROWS } else { TASK_ROWS }
    }

    /// Returns the pair and the rows of a task.
    pub(super) fn task(&self, task: usize) -> (Pair, Range<usize>) {
        let per_pair = self.tasks_per_pair();
        // The last rows see the most keys: they are scheduled first, so that no long task remains at the end.
        let most = self.most_rows();
        let first_row = (per_pair - 1 - task % per_pair) * most;
        (self.geometry.pair(task / per_pair), first_row..self.geometry.rows().min(first_row + most))
    }

    /// Returns the maximum number of rows of a task.
    pub(super) fn task_rows(&self) -> usize {
        self.geometry.rows().min(self.most_rows())
    }

    fn rows<V: Lanes>(&self, pair: Pair, rows: Range<usize>, scratch: Scratch<'_>) {
        let Self { geometry, q, .. } = self;
        let Scratch { queries, sums, keys_transposed, vectors, scores } = scratch;
        let width = geometry.padded_dim;
        let factor = geometry.scale * std::f32::consts::LOG2_E;
        pack::<V, T>(q, geometry.query_vectors(pair, rows.clone()), factor, queries, width);
        sums[..rows.len() * width].fill(0.0);
        let mut maxima = [f32::NEG_INFINITY; TASK_ROWS];
        let mut totals = [0.0; TASK_ROWS];
        self.count_sinks(pair, rows.clone(), &mut maxima, &mut totals);
        let mut shrinkage = [1.0; BLOCK];

        for [block, next] in geometry.key_blocks(geometry.keys_of(pair, rows.clone())) {
            let first_key = block.start;
            if geometry.valid_keys(pair, first_key) == 0 {
                continue;
            }
            let (cached, number) = (geometry.pages_of_blocks(), first_key / BLOCK);
            let scratch = [&mut *keys_transposed, &mut *vectors];
            let CachedBlock { operands: [keys_transposed, vectors], scales } = match cached {
                Some(pages) => {
                    // The values are needed after the product with the keys, the next keys after that with the values; decoding
                    // needs both at once.
                    if !pages.table.format.is_encoded {
                        pages.prefetch(1, pair.key_head, number);
                    }
                    pages.block::<V>(pair.key_head, number, scratch)
                }
                None => self.pack_vectors::<V>(pair, [block, next.clone()], scratch),
            };

            for first_row in rows.clone().step_by(BLOCK) {
                let strip = first_row..rows.end.min(first_row + BLOCK);
                let Some(visible) = geometry.visible(pair, strip.clone(), first_key) else { continue };
                let visible = &visible[..strip.len()];
                let kept = kept::<V>(geometry, pair, strip.clone(), first_key);
                let local = strip.start - rows.start..strip.end - rows.start;
                let sums = &mut sums[local.start * width..local.end * width];
                score::<V>(geometry, visible, &queries[local.start * width..], keys_transposed, scores);
                if let Some([of_keys, _]) = scales {
                    scale_columns::<V>(of_keys, &mut scores[..strip.len() * BLOCK]);
                }
                change_scores::<V>(geometry, pair, strip.clone(), first_key, visible, scores, &mut []);
                Softmax {
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
                if strip.start == rows.start
                    && !next.is_empty()
                    && let Some(pages) = cached
                {
                    pages.prefetch(0, pair.key_head, next.start / BLOCK);
                    if pages.table.format.is_encoded {
                        pages.prefetch(1, pair.key_head, next.start / BLOCK);
                    }
                }
                gather::<V>(geometry, visible, scores, vectors, Start::Scaled(&shrinkage), sums);
            }
        }
        self.finish::<V>(pair, rows, sums, &maxima, &totals);
    }

    /// Packs the keys and values of a block as right operands, and fetches those of the next block.
    fn pack_vectors<'s, V: Lanes>(
        &'s self,
        pair: Pair,
        [block, next]: [Range<usize>; 2],
        [keys_transposed, vectors]: [&'s mut [f32]; 2],
    ) -> CachedBlock<'s> {
        let Self { geometry, k, v, .. } = self;
        let (width, number) = (geometry.padded_dim, block.start / BLOCK);
        let places = || geometry.key_vectors(pair, block.clone());
        let shared = geometry.pages.filter(Pages::are_shared);
        let decoded = shared
            .and_then(|pages| pages.decode_vectors::<V, f32>(pair.key_head, number, (&mut *vectors, width)));
        if decoded.is_none() {
            pack::<V, T>(k, places(), 1.0, vectors, width);
        }
        transpose::<V>(vectors, width, block.len(), keys_transposed);
        if shared.is_none() {
            pack::<V, T>(v, places(), 1.0, vectors, width);
        }
        match shared.filter(|_| decoded.is_some()) {
            Some(pages) if !next.is_empty() => pages.prefetch(0, pair.key_head, next.start / BLOCK),
            Some(_) => {}
            None => {
                let next = || geometry.key_vectors(pair, next.clone());
                next().for_each(|key| prefetch(k, key));
                next().for_each(|key| prefetch(v, key));
            }
        }
        let scales = decoded.and_then(|decoded| decoded.scales);
        CachedBlock { operands: [&*keys_transposed, &*vectors], scales }
    }

    /// Adds the sinks of the rows to their totals, as scores without a value, unless another call has done so.
    pub(super) fn count_sinks(
        &self,
        pair: Pair,
        rows: Range<usize>,
        maxima: &mut [f32; TASK_ROWS],
        totals: &mut [f32; TASK_ROWS],
    ) {
        let Some(sinks) = self.geometry.sinks else { return };
        if self.out.write() == Write::Overwrite {
            for (row, (maximum, total)) in rows.zip(maxima.iter_mut().zip(totals)) {
                *maximum = sinks.logit(self.geometry.head(pair, row)) * std::f32::consts::LOG2_E;
                *total = 1.0;
            }
        }
    }

    /// Divides by the sums of the weights, and writes outputs and log-sum-exps.
    pub(super) fn finish<V: Lanes>(
        &self,
        pair: Pair,
        rows: Range<usize>,
        sums: &[f32],
        maxima: &[f32; TASK_ROWS],
        totals: &[f32; TASK_ROWS],
    ) {
        let geometry = &self.geometry;
        V::run(inlined!(|| {
            let places = geometry.query_vectors(pair, rows.clone()).zip(geometry.statistics(pair, rows));
            for (i, (vector, statistic)) in places.enumerate() {
                let sum = &sums[i * geometry.padded_dim..][..geometry.padded_dim];
                // The output of a row that sees no key is zero.
                let inverse = if totals[i] == 0.0 { 0.0 } else { 1.0 / totals[i] };
                let value = (maxima[i] + libm::log2f(totals[i])) * std::f32::consts::LN_2;
                // SAFETY: tasks own disjoint rows, and a row's elements belong to it alone.
                let place = unsafe { self.log_sum_exp.write(statistic..statistic + 1) };
                let (total, [keep, share]) = match self.out.write() {
                    Write::Overwrite => (value, [0.0, 1.0]),
                    Write::Accumulate => merge(place[0], value),
                };
                // SAFETY: as above.
                unsafe { self.out.row(vector, keep, share * inverse, sum) };
                place[0] = total;
            }
        }));
    }
}

/// Returns `log(e^a + e^b)`, and the fractions of `e^a` and `e^b` in the sum.
fn merge(a: f32, b: f32) -> (f32, [f32; 2]) {
    // One of the two saw no keys.
    if a == f32::NEG_INFINITY {
        return (b, [0.0, 1.0]);
    }
    if b == f32::NEG_INFINITY {
        return (a, [1.0, 0.0]);
    }
    let (a, b) = (f64::from(a), f64::from(b));
    let largest = if a > b { a } else { b };
    let [a, b] = [a, b].map(|x| libm::exp(x - largest));
    let total = a + b;
    ((largest + libm::log(total)) as f32, [a, b].map(|x| (x / total) as f32))
}

/// The online softmax of a strip of up to 64 rows.
pub(super) struct Softmax<'a> {
    pub(super) visible: &'a [u64],
    pub(super) kept: Option<&'a Kept>,
    /// Largest score of each row so far, as an exponent of two.
    pub(super) maxima: &'a mut [f32],
    /// Sum of the weights of each row so far, relative to the maximum.
    pub(super) totals: &'a mut [f32],
    /// Factor by which the maximum of each row has shrunk the sums so far; 1 if it has not grown.
    pub(super) shrinkage: &'a mut [f32; BLOCK],
}

impl Softmax<'_> {
    /// Replaces scores by weights `2^(score - maximum)`, with dropout applied and 0 where not visible.
    #[inline(never)]
    pub(super) fn update<V: Lanes>(mut self, scores: &mut [f32]) {
        let Self { visible, ref maxima, ref totals, .. } = self;
        assert!(scores.len() >= visible.len() * BLOCK && maxima.len() == BLOCK && totals.len() == BLOCK);
        V::run(inlined!(|| {
            for (first, visible) in (0..BLOCK).step_by(ROWS).zip(visible.chunks(ROWS)) {
                let scores = &mut scores[first * BLOCK..][..visible.len() * BLOCK];
                match self.kept {
                    None => self.update_rows::<V, false>(first, visible, scores),
                    Some(_) => self.update_rows::<V, true>(first, visible, scores),
                }
            }
        }));
    }

    /// Updates up to 16 rows: their statistics share registers, so that no row waits for those of the row before it.
    #[inline(always)]
    fn update_rows<V: Lanes, const DROPOUT: bool>(
        &mut self,
        first: usize,
        visible: &[u64],
        scores: &mut [f32],
    ) {
        // SAFETY: this runs in `V::run`.
        let splat = inlined!(|x| unsafe { V::splat(x) });
        let (nothing, zero) = (splat(f32::NEG_INFINITY), splat(0.0));
        let seen = columns_of(visible);
        let seen = seen.start / V::LANES * V::LANES..seen.end;
        let mut rows = [nothing; ROWS];
        for ((largest, bits), scores) in rows.iter_mut().zip(visible).zip(scores.chunks_exact(BLOCK)) {
            for lane in seen.clone().step_by(V::LANES) {
                // SAFETY: as above; the registers of a row lie inside it, here and below.
                let score = unsafe { V::load(scores.as_ptr().add(lane)) };
                *largest = score.select(bits >> lane, nothing).max(*largest);
            }
        }
        let references = self.raise_maxima::<V>(first, &V::maximums(&rows));
        rows = [zero; ROWS];
        for (i, (bits, scores)) in visible.iter().zip(scores.chunks_exact_mut(BLOCK)).enumerate() {
            let reference = splat(references[i]);
            for lane in (0..BLOCK).step_by(V::LANES) {
                let place = scores[lane..lane + V::LANES].as_mut_ptr();
                let mut weight = zero;
                if seen.contains(&lane) {
                    // SAFETY: as above.
                    let score = unsafe { V::load(place) };
                    weight = score.sub(reference).exp2().select(bits >> lane, zero);
                    rows[i] = rows[i].add(weight);
                    if let (true, Some(kept)) = (DROPOUT, self.kept) {
                        weight = weight.mul(splat(kept.scale)).select(kept.bits[first + i] >> lane, zero);
                    }
                }
                // SAFETY: as above.
                unsafe { weight.store(place) };
            }
        }
        let sums = V::sums(&rows);
        for lane in (0..ROWS).step_by(V::LANES) {
            // SAFETY: as above; the statistics are whole blocks of rows.
            unsafe {
                let total = self.totals[first + lane..][..V::LANES].as_mut_ptr();
                let factor = V::load(self.shrinkage[first + lane..][..V::LANES].as_ptr());
                V::load(total).mul(factor).add(V::load(sums[lane..].as_ptr())).store(total);
            }
        }
    }

    /// Replaces the maxima of 16 rows by those of `largest` that are larger. Returns finite references of the weights.
    #[inline(always)]
    fn raise_maxima<V: Lanes>(&mut self, first: usize, largest: &[f32; ROWS]) -> [f32; ROWS] {
        let mut references = [0.0; ROWS];
        for lane in (0..ROWS).step_by(V::LANES) {
            // SAFETY: this runs in `V::run`; the registers lie inside the slices.
            unsafe {
                let maximum = self.maxima[first + lane..][..V::LANES].as_mut_ptr();
                let shrinkage = self.shrinkage[first + lane..][..V::LANES].as_mut_ptr();
                let before = V::load(maximum);
                let after = before.max(V::load(largest[lane..].as_ptr()));
                after.store(maximum);
                // No score so far, or only -inf: any finite reference makes their weights 0.
                let [before, after] = [before, after].map(inlined!(|x: V| x.max(V::splat(f32::MIN))));
                after.store(references[lane..].as_mut_ptr());
                before.sub(after).exp2().store(shrinkage);
            }
        }
        references
    }
}

//! The forward: an online softmax over blocks of keys (Dao, FlashAttention-2, 2023, algorithm 1).
//!
//! A task owns up to [`TASK_ROWS`] rows of one (sequence, key head) pair and reads the keys once. Queries are
//! multiplied by `scale · log2(e)` when packed, so that scores are exponents of two.

use std::ops::Range;

use super::{
    block::{gather, kept, pack, prefetch, score, take, transpose},
    geometry::{Geometry, Pair},
    lanes::{BLOCK, Lanes},
    output::Output,
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
        self.geometry.rows().div_ceil(TASK_ROWS)
    }

    /// Returns the pair and the rows of a task.
    pub(super) fn task(&self, task: usize) -> (Pair, Range<usize>) {
        let per_pair = self.tasks_per_pair();
        // The last rows see the most keys: they are scheduled first, so that no long task remains at the end.
        let first_row = (per_pair - 1 - task % per_pair) * TASK_ROWS;
        (self.geometry.pair(task / per_pair), first_row..self.geometry.rows().min(first_row + TASK_ROWS))
    }

    /// Returns the maximum number of rows of a task.
    pub(super) fn task_rows(&self) -> usize {
        self.geometry.rows().min(TASK_ROWS)
    }

    fn rows<V: Lanes>(&self, pair: Pair, rows: Range<usize>, scratch: Scratch<'_>) {
        let Self { geometry, q, k, v, .. } = self;
        let Scratch { queries, sums, keys_transposed, vectors, scores } = scratch;
        let width = geometry.padded_dim;
        let factor = geometry.scale * std::f32::consts::LOG2_E;
        pack::<V, T>(q, rows.clone().map(|row| geometry.query_vector(pair, row)), factor, queries, width);
        sums[..rows.len() * width].fill(0.0);
        let mut maxima = [f32::NEG_INFINITY; TASK_ROWS];
        let mut totals = [0.0; TASK_ROWS];
        self.count_sinks(pair, rows.clone(), &mut maxima, &mut totals);

        let keys = geometry.keys_of(pair, rows.clone());
        for first_key in (keys.start / BLOCK * BLOCK..keys.end).step_by(BLOCK) {
            if geometry.valid_keys(pair, first_key) == 0 {
                continue;
            }
            let block = first_key..geometry.key_len.min(first_key + BLOCK);
            let places = || block.clone().map(|key| geometry.key_vector(pair, key));
            pack::<V, T>(k, places(), 1.0, vectors, width);
            transpose::<V>(vectors, width, block.len(), keys_transposed);
            pack::<V, T>(v, places(), 1.0, vectors, width);
            let next = block.end..keys.end.min(block.end + BLOCK);
            let next = || next.clone().map(|key| geometry.key_vector(pair, key));
            prefetch(k, next());
            prefetch(v, next());

            for first_row in rows.clone().step_by(BLOCK) {
                let strip = first_row..rows.end.min(first_row + BLOCK);
                let Some(visible) = geometry.visible(pair, strip.clone(), first_key) else { continue };
                let visible = &visible[..strip.len()];
                let (kept, kept_scale) = kept::<V>(geometry, pair, strip.clone(), first_key);
                let local = strip.start - rows.start..strip.end - rows.start;
                let sums = &mut sums[local.start * width..local.end * width];
                score::<V>(geometry, visible, &queries[local.start * width..], keys_transposed, scores);
                change_scores::<V>(geometry, pair, strip.clone(), first_key, visible, scores, &mut []);
                Softmax {
                    visible,
                    kept: &kept,
                    kept_scale,
                    maxima: &mut maxima[local.clone()],
                    totals: &mut totals[local],
                }
                .update::<V>(scores, sums, width);
                gather::<V>(geometry, visible, scores, vectors, sums);
            }
        }
        self.finish::<V>(pair, rows, sums, &maxima, &totals);
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
        V::LEVEL.run(inlined!(|| {
            for (i, row) in rows.enumerate() {
                let sum = &sums[i * geometry.padded_dim..];
                // The output of a row that sees no key is zero.
                let inverse = if totals[i] == 0.0 { 0.0 } else { 1.0 / totals[i] };
                let value = (maxima[i] + libm::log2f(totals[i])) * std::f32::consts::LN_2;
                let statistic = geometry.statistic(pair, row);
                // SAFETY: tasks own disjoint rows, and a row's elements belong to it alone.
                let place = unsafe { self.log_sum_exp.write(statistic..statistic + 1) };
                let (total, [keep, share]) = match self.out.write() {
                    Write::Overwrite => (value, [0.0, 1.0]),
                    Write::Accumulate => merge(place[0], value),
                };
                // SAFETY: as above.
                unsafe { self.out.row(geometry.query_vector(pair, row), keep, share * inverse, sum) };
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

/// The online softmax of a strip of rows.
pub(super) struct Softmax<'a> {
    pub(super) visible: &'a [u64],
    pub(super) kept: &'a [u64],
    pub(super) kept_scale: f32,
    /// Largest score so far, as an exponent of two.
    pub(super) maxima: &'a mut [f32],
    /// Sum of the weights so far, relative to the maximum.
    pub(super) totals: &'a mut [f32],
}

impl Softmax<'_> {
    /// Replaces scores by weights `2^(score - maximum)`, with dropout applied and 0 where not visible. Rescales sums
    /// and totals if the maximum grew.
    #[inline(never)]
    pub(super) fn update<V: Lanes>(self, scores: &mut [f32], sums: &mut [f32], width: usize) {
        let Self { visible, kept, kept_scale, maxima, totals } = self;
        assert!(scores.len() >= visible.len() * BLOCK && maxima.len() == visible.len());
        V::LEVEL.run(inlined!(|| {
            // SAFETY: this runs under `V::LEVEL`; the registers of a row lie inside it, as asserted.
            let splat = |x| unsafe { V::splat(x) };
            let (nothing, zero) = (splat(f32::NEG_INFINITY), splat(0.0));
            for (i, bits) in visible.iter().enumerate() {
                let row = scores[i * BLOCK..][..BLOCK].as_mut_ptr();
                let registers = (0..BLOCK).step_by(V::LANES);
                let mut largest = nothing;
                for lane in registers.clone() {
                    // SAFETY: as above.
                    let score = unsafe { V::load(row.add(lane)) };
                    largest = score.select(bits >> lane, nothing).max(largest);
                }
                let largest = largest.maximum();
                if largest > maxima[i] {
                    let shrink = splat(maxima[i] - largest).exp2();
                    maxima[i] = largest;
                    let factor = shrink.maximum();
                    totals[i] *= factor;
                    for sum in &mut sums[i * width..(i + 1) * width] {
                        *sum *= factor;
                    }
                }
                // No score so far, or only -inf: any finite reference makes their weights 0.
                let reference = if maxima[i] == f32::NEG_INFINITY { 0.0 } else { maxima[i] };
                let reference = splat(reference);
                let mut total = zero;
                for lane in registers {
                    let (visible, kept) = (bits >> lane, kept[i] >> lane);
                    // SAFETY: as above.
                    let score = unsafe { V::load(row.add(lane)) };
                    let weight = score.sub(reference).exp2().select(visible, zero);
                    total = total.add(weight);
                    let weight = weight.mul(splat(kept_scale)).select(kept, zero);
                    // SAFETY: as above.
                    unsafe { weight.store(row.add(lane)) };
                }
                totals[i] += total.sum();
            }
        }));
    }
}

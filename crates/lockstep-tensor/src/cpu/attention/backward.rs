//! The backward: probabilities are recomputed from the log-sum-exp, block by block (Dao, FlashAttention-2, 2023,
//! algorithm 2).
//!
//! With `P = softmax(scale Q Kᵀ)`, `M` the dropout's factors and `D = rowsum(dO ∘ O)`:
//! `dV = (P∘M)ᵀ dO`, `dS = P ∘ ((dO Vᵀ)∘M - D)`, `dQ = scale dS K`, `dK = scale dSᵀ Q`. Soft-capping multiplies `dS`
//! by its derivative `1 - tanh²`.
//! A task owns one (sequence, key head) pair with all its query heads, so sums over a group of query heads have a
//! fixed order.

use std::ops::Range;

use super::{
    block::{Kept, PREFETCH_ROWS, gather, kept, pack, score, take, transpose},
    geometry::{Bits, Geometry, Pair, rows_with},
    lanes::{BLOCK, Lanes, prefetch},
    output::Output as Gradient,
    product::{Left, Output, Right, Start, TILE_ROWS, multiply},
    scores::{change_scores, multiply_derivatives},
    worker::Worker,
};
use crate::cpu::simd::{Float, inlined};

/// Operands of the backward.
pub(super) struct Backward<'a, T> {
    pub(super) geometry: Geometry<'a>,
    pub(super) q: &'a [T],
    pub(super) k: &'a [T],
    pub(super) v: &'a [T],
    pub(super) out: &'a [T],
    pub(super) log_sum_exp: &'a [f32],
    pub(super) dout: &'a [T],
    pub(super) dq: Gradient<'a, T>,
    pub(super) dk: Gradient<'a, T>,
    pub(super) dv: Gradient<'a, T>,
}

/// Scratch of one worker thread: blocks of 64 rows unless said otherwise.
struct Scratch<'a> {
    /// Gradients of all queries of the pair.
    dq: &'a mut [f32],
    /// Log-sum-exp of each row of the pair, as an exponent of two.
    exponents: &'a mut [f32],
    /// `D` of each row of the pair.
    corrections: &'a mut [f32],
    keys: &'a mut [f32],
    keys_transposed: &'a mut [f32],
    values_transposed: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    queries: &'a mut [f32],
    dout: &'a mut [f32],
    /// Scores, then probabilities after dropout.
    probabilities: &'a mut [f32],
    /// Gradients of the probabilities, then of the scores.
    dscores: &'a mut [f32],
    /// Derivatives of the soft-capped scores; empty without a cap.
    cap_derivatives: &'a mut [f32],
}

impl<T: Float> Worker for Backward<'_, T> {
    fn tasks(&self) -> usize {
        self.geometry.pairs()
    }

    fn scratch_elements(&self) -> usize {
        let width = self.geometry.padded_dim;
        let rows = self.geometry.rows().next_multiple_of(16);
        let derivatives = self.geometry.cap_derivatives();
        rows * (width + 2) + 7 * BLOCK * width + 2 * BLOCK * BLOCK + derivatives
    }

    fn run<V: Lanes>(&self, task: usize, mut scratch: &mut [f32]) {
        let rows = self.geometry.rows().next_multiple_of(16);
        let block = BLOCK * self.geometry.padded_dim;
        let mut next = |len| take(&mut scratch, len);
        let scratch = Scratch {
            dq: next(rows * self.geometry.padded_dim),
            exponents: next(rows),
            corrections: next(rows),
            keys: next(block),
            keys_transposed: next(block),
            values_transposed: next(block),
            dk: next(block),
            dv: next(block),
            queries: next(block),
            dout: next(block),
            probabilities: next(BLOCK * BLOCK),
            dscores: next(BLOCK * BLOCK),
            cap_derivatives: next(self.geometry.cap_derivatives()),
        };
        self.pair::<V>(self.geometry.pair(task), scratch);
    }
}

impl<T: Float> Backward<'_, T> {
    fn pair<V: Lanes>(&self, pair: Pair, mut scratch: Scratch<'_>) {
        let geometry = &self.geometry;
        self.prepare_rows::<V>(pair, scratch.dq, scratch.exponents, scratch.corrections);
        for first_key in (0..geometry.key_len).step_by(BLOCK) {
            self.key_block::<V>(pair, first_key, &mut scratch);
        }
        let places = geometry.query_vectors(pair, 0..geometry.rows());
        // SAFETY: only this task writes the pair's rows.
        unsafe { unpack::<V, T>(scratch.dq, geometry.scale, &self.dq, places, geometry.padded_dim) };
    }

    /// Computes the exponent and `D` of each row, and clears `dq`.
    pub(super) fn prepare_rows<V: Lanes>(
        &self,
        pair: Pair,
        dq: &mut [f32],
        exponents: &mut [f32],
        corrections: &mut [f32],
    ) {
        let geometry = &self.geometry;
        dq.fill(0.0);
        V::run(inlined!(|| {
            let rows = 0..geometry.rows();
            let mut later = geometry.query_vectors(pair, rows.clone()).skip(PREFETCH_ROWS);
            let places = geometry.query_vectors(pair, rows.clone()).zip(geometry.statistics(pair, rows));
            let rows = exponents.iter_mut().zip(corrections).zip(places);
            for ((exponent, correction), (vector, statistic)) in rows {
                if let Some(later) = later.next() {
                    prefetch(self.dout, later.clone());
                    prefetch(self.out, later);
                }
                *exponent = self.log_sum_exp[statistic] * std::f32::consts::LOG2_E;
                *correction = dot(&self.dout[vector.clone()], &self.out[vector]);
            }
        }));
    }

    /// Computes the gradients of 64 keys and values, and adds their contribution to the gradients of the queries.
    fn key_block<V: Lanes>(&self, pair: Pair, first_key: usize, scratch: &mut Scratch<'_>) {
        let geometry = &self.geometry;
        let width = geometry.padded_dim;
        let block = first_key..geometry.key_len.min(first_key + BLOCK);
        let places = || geometry.key_vectors(pair, block.clone());
        // Only the transpose of the values is needed; the buffer of the keys is used to pack them.
        pack::<V, T>(self.v, places(), 1.0, scratch.keys, width);
        transpose::<V>(scratch.keys, width, block.len(), scratch.values_transposed);
        pack::<V, T>(self.k, places(), 1.0, scratch.keys, width);
        transpose::<V>(scratch.keys, width, block.len(), scratch.keys_transposed);
        let next = block.end..geometry.key_len.min(block.end + BLOCK);
        let next = || geometry.key_vectors(pair, next.clone());
        next().for_each(|key| prefetch(self.k, key));
        next().for_each(|key| prefetch(self.v, key));
        scratch.dk.fill(0.0);
        scratch.dv.fill(0.0);
        for first_row in (0..geometry.rows()).step_by(BLOCK) {
            let rows = first_row..geometry.rows().min(first_row + BLOCK);
            if let Some(visible) = geometry.visible(pair, rows.clone(), first_key) {
                self.block::<V>(pair, rows, block.clone(), &visible, scratch);
            }
        }
        // Queries were packed with scale · log2(e); only the scale must remain.
        // SAFETY: only this task writes the pair's keys and values.
        unsafe {
            unpack::<V, T>(scratch.dk, std::f32::consts::LN_2, &self.dk, places(), width);
            unpack::<V, T>(scratch.dv, 1.0, &self.dv, places(), width);
        }
    }

    /// Computes the five products of a block of up to 64 rows and 64 keys.
    fn block<V: Lanes>(
        &self,
        pair: Pair,
        rows: Range<usize>,
        keys: Range<usize>,
        visible: &Bits,
        scratch: &mut Scratch<'_>,
    ) {
        let geometry = &self.geometry;
        let width = geometry.padded_dim;
        let factor = geometry.scale * std::f32::consts::LOG2_E;
        let places = || geometry.query_vectors(pair, rows.clone());
        pack::<V, T>(self.q, places(), factor, scratch.queries, width);
        pack::<V, T>(self.dout, places(), 1.0, scratch.dout, width);
        let next = rows.end..geometry.rows().min(rows.end + BLOCK);
        let next = || geometry.query_vectors(pair, next.clone());
        next().for_each(|row| prefetch(self.q, row));
        next().for_each(|row| prefetch(self.dout, row));
        let seen = &visible[..rows.len()];
        score::<V>(geometry, seen, scratch.queries, scratch.keys_transposed, scratch.probabilities);
        score::<V>(geometry, seen, scratch.dout, scratch.values_transposed, scratch.dscores);
        let (scores, derivatives) = (&mut *scratch.probabilities, &mut *scratch.cap_derivatives);
        change_scores::<V>(geometry, pair, rows.clone(), keys.start, seen, scores, derivatives);
        let kept = kept::<V>(geometry, pair, rows.clone(), keys.start);
        Softmax {
            visible: seen,
            kept: kept.as_ref(),
            exponents: &scratch.exponents[rows.clone()],
            corrections: &scratch.corrections[rows.clone()],
        }
        .differentiate::<V>(scratch.probabilities, scratch.dscores);
        multiply_derivatives::<V>(seen, scratch.cap_derivatives, scratch.dscores);
        for key in (0..keys.len()).step_by(TILE_ROWS) {
            let strip = key..keys.len().min(key + TILE_ROWS);
            let rows = rows_with(seen, ((1 << TILE_ROWS) - 1) << key);
            let shape = || (strip.clone(), rows.clone(), 0..width);
            multiply::<V>(
                Start::Output,
                shape(),
                Left { data: scratch.probabilities, row: 1, inner: BLOCK },
                Right { data: scratch.dout, row: width },
                Output { data: scratch.dv, row: width },
            );
            multiply::<V>(
                Start::Output,
                shape(),
                Left { data: scratch.dscores, row: 1, inner: BLOCK },
                Right { data: scratch.queries, row: width },
                Output { data: scratch.dk, row: width },
            );
        }
        let dq = &mut scratch.dq[rows.start * width..];
        gather::<V>(geometry, seen, scratch.dscores, scratch.keys, Start::Output, dq);
    }
}

/// The softmax of a strip of rows, with the statistics of the forward.
pub(super) struct Softmax<'a> {
    pub(super) visible: &'a [u64],
    pub(super) kept: Option<&'a Kept>,
    pub(super) exponents: &'a [f32],
    pub(super) corrections: &'a [f32],
}

impl Softmax<'_> {
    /// Replaces scores by probabilities after dropout, and gradients of the probabilities by gradients of the scores.
    #[inline(never)]
    pub(super) fn differentiate<V: Lanes>(self, scores: &mut [f32], gradients: &mut [f32]) {
        V::run(inlined!(|| {
            match self.kept {
                None => self.differentiate_rows::<V, false>(scores, gradients),
                Some(_) => self.differentiate_rows::<V, true>(scores, gradients),
            }
        }));
    }

    #[inline(always)]
    fn differentiate_rows<V: Lanes, const DROPOUT: bool>(self, scores: &mut [f32], gradients: &mut [f32]) {
        // SAFETY: this runs in `V::run`.
        let splat = inlined!(|x| unsafe { V::splat(x) });
        let zero = splat(0.0);
        let rows = scores.chunks_exact_mut(BLOCK).zip(gradients.chunks_exact_mut(BLOCK));
        for (i, (bits, (scores, gradients))) in self.visible.iter().zip(rows).enumerate() {
            let (exponent, correction) = (splat(self.exponents[i]), splat(self.corrections[i]));
            for lane in (0..BLOCK).step_by(V::LANES) {
                let score = scores[lane..lane + V::LANES].as_mut_ptr();
                let gradient = gradients[lane..lane + V::LANES].as_mut_ptr();
                // SAFETY: both registers lie inside the rows, as just sliced.
                unsafe {
                    let probability = V::load(score).sub(exponent).exp2();
                    let (mut dropped, mut dprobability) = (probability, V::load(gradient));
                    if let (true, Some(kept)) = (DROPOUT, self.kept) {
                        let factor = splat(kept.scale).select(kept.bits[i] >> lane, zero);
                        dropped = dropped.mul(factor);
                        dprobability = dprobability.mul(factor);
                    }
                    dropped.select(bits >> lane, zero).store(score);
                    let dscore = probability.mul(dprobability.sub(correction));
                    dscore.select(bits >> lane, zero).store(gradient);
                }
            }
        }
    }
}

/// Computes `sum(a · b)` in sixteen interleaved partial sums, so that it vectorizes and its order is fixed.
#[inline(always)]
pub(super) fn dot<T: Float>(a: &[T], b: &[T]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let mut sums = [0.0; 16];
    for (a, b) in a.iter().zip(b) {
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum += a[i].load() * b[i].load();
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a.load() * b.load()).sum();
    sums.iter().sum::<f32>() + rest
}

/// Writes packed rows, times `factor`, to their places in `target`.
///
/// # Safety
/// No other task may access the places.
pub(super) unsafe fn unpack<V: Lanes, T: Float>(
    packed: &[f32],
    factor: f32,
    target: &Gradient<'_, T>,
    places: impl Iterator<Item = Range<usize>>,
    width: usize,
) {
    V::run(inlined!(|| {
        for (row, place) in packed.chunks_exact(width).zip(places) {
            // SAFETY: the caller promises that no other task accesses the place.
            unsafe { target.row(place, 1.0, factor, row) };
        }
    }));
}

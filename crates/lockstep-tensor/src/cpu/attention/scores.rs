//! Changes of a block of scores before the softmax: soft-capping, then ALiBi.
//!
//! Scores are exponents of two, so bounds and slopes are multiplied by `log2(e)`. A plain attention returns at once.

use std::{f32::consts::LOG2_E, ops::Range};

use super::{
    geometry::{Geometry, Pair, columns_of},
    lanes::{BLOCK, Lanes},
};
use crate::cpu::simd::inlined;

/// Keys of a block in order, as floats.
const KEYS: [f32; BLOCK] = {
    let mut keys = [0.0; BLOCK];
    let mut key = 0;
    while key < BLOCK {
        keys[key] = key as f32;
        key += 1;
    }
    keys
};

/// Replaces scores by `cap(score) - slope · |i - j|`, at least where `visible` is set. Writes the derivatives of the
/// caps for [`multiply_derivatives`], unless `derivatives` is empty.
#[inline]
pub(super) fn change_scores<V: Lanes>(
    geometry: &Geometry<'_>,
    pair: Pair,
    rows: Range<usize>,
    first_key: usize,
    visible: &[u64],
    scores: &mut [f32],
    derivatives: &mut [f32],
) {
    if let Some(cap) = geometry.soft_cap {
        let bound = cap * LOG2_E;
        if derivatives.is_empty() {
            soft_cap::<V, false>(bound, visible, scores, derivatives);
        } else {
            soft_cap::<V, true>(bound, visible, scores, derivatives);
        }
    }
    if let Some(slopes) = geometry.alibi_slopes {
        add_biases::<V>(geometry, (pair, rows, first_key), slopes, visible, scores);
    }
}

/// Subtracts `slope · |i - j|` from the scores of a strip of rows.
#[inline(never)]
fn add_biases<V: Lanes>(
    geometry: &Geometry<'_>,
    (pair, rows, first_key): (Pair, Range<usize>, usize),
    slopes: &[f32],
    visible: &[u64],
    scores: &mut [f32],
) {
    for ((row, visible), scores) in rows.zip(visible).zip(scores.chunks_exact_mut(BLOCK)) {
        let slope = slopes[geometry.head(pair, row)] * LOG2_E;
        add_bias::<V>(slope, geometry.offset(row, first_key), *visible, scores);
    }
}

/// Multiplies gradients of the changed scores by the derivatives of the caps. Does nothing without a cap.
#[inline]
pub(super) fn multiply_derivatives<V: Lanes>(visible: &[u64], derivatives: &[f32], gradients: &mut [f32]) {
    if derivatives.is_empty() {
        return;
    }
    assert!(derivatives.len() >= visible.len() * BLOCK && gradients.len() >= visible.len() * BLOCK);
    V::run(inlined!(|| {
        for (i, bits) in visible.iter().enumerate() {
            for lane in registers::<V>(*bits) {
                // SAFETY: this runs in `V::run`; the registers of a row lie inside it, as asserted.
                unsafe {
                    let gradient = gradients.as_mut_ptr().add(i * BLOCK + lane);
                    let derivative = V::load(derivatives.as_ptr().add(i * BLOCK + lane));
                    // Derivatives at hidden keys may be NaN.
                    let product = V::load(gradient).mul(derivative);
                    product.select(bits >> lane, V::splat(0.0)).store(gradient);
                }
            }
        }
    }));
}

/// Returns the first key of each register that holds a visible key, or lies between two that do.
#[inline(always)]
fn registers<V: Lanes>(bits: u64) -> impl Iterator<Item = usize> {
    let columns = columns_of(&[bits]);
    (columns.start / V::LANES * V::LANES..columns.end).step_by(V::LANES)
}

/// Replaces scores by `bound · tanh(score / bound)`.
#[inline(never)]
fn soft_cap<V: Lanes, const DERIVATIVES: bool>(
    bound: f32,
    visible: &[u64],
    scores: &mut [f32],
    derivatives: &mut [f32],
) {
    assert!(scores.len() >= visible.len() * BLOCK);
    assert!(!DERIVATIVES || derivatives.len() >= visible.len() * BLOCK);
    V::run(inlined!(|| {
        for (i, bits) in visible.iter().enumerate() {
            for lane in registers::<V>(*bits) {
                let place = i * BLOCK + lane;
                // SAFETY: this runs in `V::run`; the registers of a row lie inside it, as asserted.
                unsafe {
                    let score = scores.as_mut_ptr().add(place);
                    let tangent = V::load(score).mul(V::splat(1.0 / bound)).tanh();
                    tangent.mul(V::splat(bound)).store(score);
                    if DERIVATIVES {
                        let derivative = V::splat(1.0).sub(tangent.mul(tangent));
                        derivative.store(derivatives.as_mut_ptr().add(place));
                    }
                }
            }
        }
    }));
}

/// Subtracts `slope · |offset - key|` from a row of scores. `offset` is the distance from the block's first key to the
/// query.
fn add_bias<V: Lanes>(slope: f32, offset: f32, visible: u64, scores: &mut [f32]) {
    let scores = &mut scores[..BLOCK];
    V::run(inlined!(|| {
        for lane in registers::<V>(visible) {
            // SAFETY: this runs in `V::run`; the registers lie inside the row of 64 just sliced.
            unsafe {
                let score = scores.as_mut_ptr().add(lane);
                let after = V::splat(offset).sub(V::load(KEYS.as_ptr().add(lane)));
                let before = V::splat(0.0).sub(after);
                let distance = after.max(before);
                distance.mul_add(V::splat(-slope), V::load(score)).store(score);
            }
        }
    }));
}

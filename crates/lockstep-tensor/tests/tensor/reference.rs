//! Scalar reference formulas of the kernels in f64, for tests.
//!
//! Backward functions are written from the derivatives; tests below check them by finite differences of the forward
//! functions.

use lockstep_plan::QuantizedType;
use lockstep_tensor::Gelu;

/// Returns `y` and `rstd` of RMS normalization.
pub(crate) fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let rstd: Vec<f64> = x
        .chunks(width)
        .map(|row| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + eps).sqrt())
        .collect();
    let y = x.iter().enumerate().map(|(i, x)| x * rstd[i / width] * weight[i % width]).collect();
    (y, rstd)
}

/// Returns `dx` and `dweight` of RMS normalization.
pub(crate) fn rms_norm_backward(dy: &[f64], x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let (_, rstd) = rms_norm(x, weight, eps);
    let (mut dx, mut dweight) = (vec![0.0; x.len()], vec![0.0; width]);
    for (row, rstd) in rstd.iter().enumerate() {
        let at = |i: usize| row * width + i;
        let dot: f64 = (0..width).map(|i| dy[at(i)] * weight[i] * x[at(i)]).sum();
        for i in 0..width {
            dx[at(i)] = rstd * dy[at(i)] * weight[i] - rstd.powi(3) * x[at(i)] * dot / width as f64;
            dweight[i] += dy[at(i)] * x[at(i)] * rstd;
        }
    }
    (dx, dweight)
}

/// Returns `y`, mean and `rstd` of layer normalization.
pub(crate) fn layer_norm(
    x: &[f64],
    weight: &[f64],
    bias: &[f64],
    eps: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let mean: Vec<f64> = x.chunks(width).map(|row| row.iter().sum::<f64>() / width as f64).collect();
    let rstd: Vec<f64> = x
        .chunks(width)
        .zip(&mean)
        .map(|(row, mean)| row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64)
        .map(|variance| 1.0 / (variance + eps).sqrt())
        .collect();
    let y = x
        .iter()
        .enumerate()
        .map(|(i, x)| (x - mean[i / width]) * rstd[i / width] * weight[i % width] + bias[i % width])
        .collect();
    (y, mean, rstd)
}

/// Returns `dx`, `dweight` and `dbias` of layer normalization.
pub(crate) fn layer_norm_backward(
    dy: &[f64],
    x: &[f64],
    weight: &[f64],
    eps: f64,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let (_, mean, rstd) = layer_norm(x, weight, weight, eps);
    let (mut dx, mut dweight, mut dbias) = (vec![0.0; x.len()], vec![0.0; width], vec![0.0; width]);
    for (row, (mean, rstd)) in mean.iter().zip(&rstd).enumerate() {
        let at = |i: usize| row * width + i;
        let normal = |i: usize| (x[at(i)] - mean) * rstd;
        let average = |f: &dyn Fn(usize) -> f64| (0..width).map(f).sum::<f64>() / width as f64;
        let g = average(&|i| dy[at(i)] * weight[i]);
        let g_normal = average(&|i| dy[at(i)] * weight[i] * normal(i));
        for i in 0..width {
            dx[at(i)] = rstd * (dy[at(i)] * weight[i] - g - normal(i) * g_normal);
            dweight[i] += dy[at(i)] * normal(i);
            dbias[i] += dy[at(i)];
        }
    }
    (dx, dweight, dbias)
}

/// Rotates `[tokens, heads, head_dim]` in the half-split form by `sign · position · frequency`.
///
/// The angle is rounded to f32, which is part of the kernel's definition.
pub(crate) fn rope(x: &[f64], positions: &[u32], frequencies: &[f32], sign: f64) -> Vec<f64> {
    let half = frequencies.len();
    let width = x.len() / positions.len();
    let mut y = vec![0.0; x.len()];
    for (token, position) in positions.iter().enumerate() {
        for head in (token * width..(token + 1) * width).step_by(2 * half) {
            for (i, frequency) in frequencies.iter().enumerate() {
                let (sin, cos) = (sign * f64::from(*position as f32 * frequency)).sin_cos();
                let (a, b) = (x[head + i], x[head + half + i]);
                y[head + i] = a * cos - b * sin;
                y[head + half + i] = b * cos + a * sin;
            }
        }
    }
    y
}

/// Returns the scale of a block of finite numbers, and its codes before rounding.
pub(crate) fn quantized(kind: QuantizedType, x: &[f64]) -> (f64, Vec<f64>) {
    let largest = x.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    let scale = f64::from(largest as f32 / kind.limit());
    let code = |x: &f64| if scale > 0.0 { x / scale } else { 0.0 };
    (scale, x.iter().map(code).collect())
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn gelu(kind: Gelu, x: f64) -> f64 {
    let cubic = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    match kind {
        Gelu::Exact => 0.5 * x * libm::erfc(-x / std::f64::consts::SQRT_2),
        Gelu::Tanh => 0.5 * x * (1.0 + cubic.tanh()),
    }
}

pub(crate) fn gelu_derivative(kind: Gelu, x: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let tanh = (root * (x + 0.044715 * x.powi(3))).tanh();
    match kind {
        Gelu::Exact => {
            0.5 * libm::erfc(-x / std::f64::consts::SQRT_2)
                + x * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt()
        }
        Gelu::Tanh => {
            0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * root * (1.0 + 3.0 * 0.044715 * x * x)
        }
    }
}

/// Returns the losses and log-sum-exps.
pub(crate) fn cross_entropy(logits: &[f64], labels: &[i32]) -> (Vec<f64>, Vec<f64>) {
    let vocabulary = logits.len() / labels.len();
    let log_sum_exp: Vec<f64> = logits
        .chunks(vocabulary)
        .map(|row| {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
        })
        .collect();
    let loss = |(token, label): (usize, &i32)| match label {
        -100 => 0.0,
        label => log_sum_exp[token] - logits[token * vocabulary + *label as usize],
    };
    (labels.iter().enumerate().map(loss).collect(), log_sum_exp)
}

/// Returns the gradient of `seed · Σ losses` with respect to the logits.
pub(crate) fn cross_entropy_backward(logits: &[f64], labels: &[i32], seed: f64) -> Vec<f64> {
    let vocabulary = logits.len() / labels.len();
    let (_, log_sum_exp) = cross_entropy(logits, labels);
    logits
        .iter()
        .enumerate()
        .map(|(i, x)| match labels[i / vocabulary] {
            -100 => 0.0,
            label => {
                let one = if label as usize == i % vocabulary { 1.0 } else { 0.0 };
                seed * ((x - log_sum_exp[i / vocabulary]).exp() - one)
            }
        })
        .collect()
}

/// The results of a router.
pub(crate) struct Routing {
    pub(crate) scores: Vec<f64>,
    pub(crate) probabilities: Vec<f64>,
    pub(crate) log_sum_exp: Vec<f64>,
    pub(crate) weights: Vec<f64>,
}

/// Returns the scores of `[tokens, experts]` logits, and the weights of the experts that each token has chosen.
pub(crate) fn route(
    logits: &[f64],
    experts: usize,
    chosen: &[u32],
    is_softmax: bool,
    is_normalized: bool,
    scale: f64,
) -> Routing {
    let tokens = logits.len() / experts;
    let top_k = chosen.len() / tokens;
    let (_, log_sum_exp) = cross_entropy(logits, &vec![0; tokens]);
    let score = |(i, x): (usize, &f64)| {
        if is_softmax { (x - log_sum_exp[i / experts]).exp() } else { sigmoid(*x) }
    };
    let scores: Vec<f64> = logits.iter().enumerate().map(score).collect();
    let probabilities =
        scores.chunks(experts).flat_map(|row| row.iter().map(move |s| s / row.iter().sum::<f64>())).collect();
    let of_slot = |slot: usize| scores[slot / top_k * experts + chosen[slot] as usize];
    let weight = |slot: usize| {
        let first = slot / top_k * top_k;
        let total = if is_normalized { (first..first + top_k).map(of_slot).sum() } else { 1.0 };
        scale * of_slot(slot) / total
    };
    let weights = (0..chosen.len()).map(weight).collect();
    Routing { scores, probabilities, log_sum_exp, weights }
}

/// Returns the derivative of `f` at `x` by central differences.
pub(crate) fn finite_differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let centre = x[i];
            x[i] = centre + STEP;
            let above = f(&x);
            x[i] = centre - STEP;
            let below = f(&x);
            x[i] = centre;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

mod tests {
    use super::*;
    use crate::testing::{assert_close, random};

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn the_gradients_of_rms_norm_match_finite_differences() {
        let (x, weight, dy) = (random(1, 3 * 7), random(2, 7), random(3, 3 * 7));
        let (dx, dweight) = rms_norm_backward(&dy, &x, &weight, 1e-3);
        let by_x = finite_differences(&x, |x| dot(&rms_norm(x, &weight, 1e-3).0, &dy));
        let by_weight = finite_differences(&weight, |weight| dot(&rms_norm(&x, weight, 1e-3).0, &dy));
        assert_close("dx", &dx, &by_x, 1e-8, 1e-8);
        assert_close("dweight", &dweight, &by_weight, 1e-8, 1e-8);
    }

    #[test]
    fn the_gradients_of_layer_norm_match_finite_differences() {
        let (x, weight, bias, dy) = (random(1, 3 * 7), random(2, 7), random(3, 7), random(4, 3 * 7));
        let (dx, dweight, dbias) = layer_norm_backward(&dy, &x, &weight, 1e-3);
        let loss = |x: &[f64], weight: &[f64], bias: &[f64]| dot(&layer_norm(x, weight, bias, 1e-3).0, &dy);
        assert_close("dx", &dx, &finite_differences(&x, |x| loss(x, &weight, &bias)), 1e-8, 1e-8);
        let by_weight = finite_differences(&weight, |weight| loss(&x, weight, &bias));
        assert_close("dweight", &dweight, &by_weight, 1e-8, 1e-8);
        let by_bias = finite_differences(&bias, |bias| loss(&x, &weight, bias));
        assert_close("dbias", &dbias, &by_bias, 1e-8, 1e-8);
    }

    #[test]
    fn the_gradient_of_rope_matches_finite_differences() {
        let (x, dy) = (random(1, 2 * 3 * 4), random(2, 2 * 3 * 4));
        let (positions, frequencies) = ([3, 1000], [1.0, 0.01]);
        let by_x = finite_differences(&x, |x| dot(&rope(x, &positions, &frequencies, 1.0), &dy));
        assert_close("dx", &rope(&dy, &positions, &frequencies, -1.0), &by_x, 1e-8, 1e-8);
    }

    #[test]
    fn the_derivative_of_gelu_matches_finite_differences() {
        for kind in [Gelu::Exact, Gelu::Tanh] {
            let x: Vec<f64> = random(1, 100).iter().map(|x| 5.0 * x).collect();
            let derivative: Vec<f64> = x.iter().map(|x| gelu_derivative(kind, *x)).collect();
            let difference = finite_differences(&x, |x| x.iter().map(|x| gelu(kind, *x)).sum());
            assert_close(&format!("{kind:?}"), &derivative, &difference, 1e-8, 1e-8);
        }
    }

    #[test]
    fn the_gradient_of_cross_entropy_matches_finite_differences() {
        let logits = random(1, 4 * 9);
        let labels = [3, -100, 0, 8];
        let gradient = cross_entropy_backward(&logits, &labels, 0.3);
        let difference =
            finite_differences(&logits, |x| 0.3 * cross_entropy(x, &labels).0.iter().sum::<f64>());
        assert_close("logits", &gradient, &difference, 1e-8, 1e-8);
    }
}

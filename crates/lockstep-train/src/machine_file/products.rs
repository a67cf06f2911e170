//! Matrix products of the shapes that transformers have, timed, and the shares of the peak that describe them.

use std::time::Instant;

use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{Arena, CpuQueue, Gemm, GemmLayout, Kernels, Tensor, TensorError, Write};

use super::descent::descend;
use crate::benchmark::random;

/// Tokens of a product.
const TOKENS: [usize; 3] = [64, 256, 1024];
/// Inputs and outputs of a layer.
const LAYERS: [(usize, usize); 6] = [(64, 64), (128, 512), (256, 256), (256, 1024), (768, 768), (768, 3072)];
/// Runs of each, of which the fastest counts.
const RUNS: usize = 4;
/// Floats that pass through the caches before each run: in a step other operations come between a product's operands and it.
const BETWEEN: usize = 1 << 20;

/// A product and what it took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timed {
    /// Rows, inner elements, columns.
    sides: [f64; 3],
    seconds: f64,
}

impl Timed {
    /// Operations a second.
    fn rate(&self) -> f64 {
        2.0 * self.sides.iter().product::<f64>() / self.seconds
    }
}

/// Times the three products of each layer with no more than `most_tokens`: forward, gradient of the input, gradient of the weight.
pub(super) fn time(
    queue: &CpuQueue,
    arena: &Arena,
    dtype: DType,
    most_tokens: usize,
) -> Result<Vec<Timed>, TensorError> {
    let mut timed = Vec::new();
    let between = Tensor::zeros(arena, DType::F32, [1, BETWEEN], MemoryCategory::Workspace)?;
    let rounded = Tensor::zeros(arena, DType::BF16, [1, BETWEEN], MemoryCategory::Workspace)?;
    for (inputs, outputs) in LAYERS {
        for tokens in TOKENS.into_iter().filter(|tokens| *tokens <= most_tokens) {
            for layout in [GemmLayout::NT, GemmLayout::NN, GemmLayout::TN] {
                let (m, n, k) = match layout {
                    GemmLayout::NT => (tokens, outputs, inputs),
                    GemmLayout::NN => (tokens, inputs, outputs),
                    GemmLayout::TN => (outputs, inputs, tokens),
                };
                let a = random(queue, arena, dtype, if layout == GemmLayout::TN { [k, m] } else { [m, k] })?;
                let b = random(queue, arena, dtype, if layout == GemmLayout::NT { [n, k] } else { [k, n] })?;
                // Gradients of weights are summed in f32.
                let out = if layout == GemmLayout::TN { DType::F32 } else { dtype };
                let c = Tensor::zeros(arena, out, [m, n], MemoryCategory::Workspace)?;
                let mut seconds = f64::INFINITY;
                for _ in 0..RUNS {
                    queue.cast(between.view(), rounded.view());
                    let begin = Instant::now();
                    queue.gemm(Gemm {
                        layout,
                        a: a.view(),
                        b: b.view(),
                        c: c.view(),
                        bias: None,
                        write: Write::Overwrite,
                    });
                    seconds = seconds.min(begin.elapsed().as_secs_f64());
                }
                timed.push(Timed { sides: [m, k, n].map(|side| side as f64), seconds });
            }
        }
    }
    Ok(timed)
}

/// What describes the products of several types.
#[derive(Debug, Clone)]
pub(super) struct Fit {
    /// Share of the peaks that large products come to.
    pub(super) product: f64,
    /// Rows, inner elements and columns with which they come to half of that.
    pub(super) half_shape: [f64; 3],
    /// Peak of each type in operations a second: what was measured, but for what its products come to more or less than those of
    /// the others.
    pub(super) peaks: Vec<f64>,
    /// By how much single products are off, on average.
    pub(super) error: f64,
}

/// Fits one share and one shape to the products of several types, of which each has a measured peak.
pub(super) fn fit(types: &[(f64, Vec<Timed>)]) -> Fit {
    let by_sides = |timed: &Timed, halves: &[f64; 3]| -> f64 {
        timed.sides.iter().zip(halves).map(|(side, half)| side / (side + half)).product()
    };
    // Of each type: how much faster its products are than shapes and peaks say, on average.
    let share = |(peak, timed): &(f64, Vec<Timed>), halves: &[f64; 3]| {
        let logs = timed.iter().map(|timed| (timed.rate() / peak / by_sides(timed, halves)).ln());
        (logs.sum::<f64>() / timed.len().max(1) as f64).exp()
    };
    let spread = |halves: &[f64; 3]| -> f64 {
        let of_type = |of_type: &(f64, Vec<Timed>)| {
            let share = share(of_type, halves);
            let error =
                |timed: &Timed| (timed.rate() / of_type.0 / share / by_sides(timed, halves)).ln().powi(2);
            of_type.1.iter().map(error).sum::<f64>()
        };
        types.iter().map(of_type).sum()
    };
    let mut half_shape = [8.0, 32.0, 8.0];
    descend(&mut half_shape, [(0.25, 4096.0); 3], spread);
    let shares: Vec<f64> = types.iter().map(|of_type| share(of_type, &half_shape)).collect();
    let mean = (shares.iter().map(|share| share.ln()).sum::<f64>() / shares.len().max(1) as f64).exp();
    // Where a type is made of another one's products it may come to more than its own peak.
    let product = mean.clamp(0.01, 1.0);
    let count: usize = types.iter().map(|(_, timed)| timed.len()).sum();
    Fit {
        product,
        half_shape,
        peaks: types.iter().zip(&shares).map(|((peak, _), share)| peak * share / product).collect(),
        error: (spread(&half_shape) / count.max(1) as f64).sqrt(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_the_formula_is_found_again() {
        let (halves, share) = ([6.0, 90.0, 20.0], 0.9);
        let of_type = |peak: f64, factor: f64| {
            let timed = |(inputs, outputs, tokens): (f64, f64, f64)| {
                let sides: [f64; 3] = [tokens, inputs, outputs];
                let shape: f64 = sides.iter().zip(halves).map(|(side, half)| side / (side + half)).product();
                let flops = 2.0 * sides.iter().product::<f64>();
                Timed { sides, seconds: flops / (peak * factor * share * shape) }
            };
            let sides = [16.0, 64.0, 256.0, 2048.0];
            let all = sides.iter().flat_map(|&a| sides.iter().flat_map(move |&b| sides.map(|c| (a, b, c))));
            (peak, all.map(timed).collect::<Vec<_>>())
        };
        let found = fit(&[of_type(1e11, 1.0), of_type(2e11, 1.1)]);
        assert!(found.error < 0.01, "{found:?}");
        for (found, expected) in found.half_shape.iter().zip(halves) {
            assert!((found / expected - 1.0).abs() < 0.1, "{found}, not {expected}");
        }
        // Products of a type that come to more than those of the other raise its peak.
        assert!((found.peaks[1] / found.peaks[0] - 2.2).abs() < 0.02, "{found:?}");
        assert!((found.product * found.peaks[0] / (share * 1e11) - 1.0).abs() < 0.02, "{found:?}");
    }
}

//! Times matrix products of the shapes of transformers, and fits the efficiency model of products to them.

use std::collections::BTreeMap;
use std::time::Instant;

use lockstep_plan::{DType, MemoryCategory};
use lockstep_planner::predict::product_name;
use lockstep_tensor::{Arena, CpuQueue, Gemm, GemmKernels, GemmLayout, Tensor, TensorError, Write};

use super::descent::descend;
use crate::benchmark::random;

/// Rows of the timed products, in tokens.
const TOKENS: [usize; 3] = [64, 256, 1024];
/// Layers of the timed products, as (inputs, outputs).
const LAYERS: [(usize, usize); 6] =
    [(128, 512), (256, 256), (384, 384), (384, 1280), (768, 768), (768, 3072)];
/// Rounds over all shapes, and runs of a shape in a row. The median counts: on a shared machine rates vary from second to second,
/// and a step gets neither the best nor the worst of them.
const ROUNDS: usize = 3;
const RUNS: usize = 3;
/// Bytes of distinct operands between two uses of the same one. In a step all other layers come between, so no cache still has a
/// weight, the output buffer, or a saved activation.
const BETWEEN: usize = 48 << 20;
/// Most copies of a small operand.
const MOST_COPIES: usize = 256;

/// A product with its measured time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timed {
    /// True for a weight gradient, which is accumulated in f32.
    is_of_weight: bool,
    /// Rows, inner elements and columns.
    sides: [f64; 3],
    /// Bytes that the product reads or writes and that no cache has.
    cold_bytes: f64,
    seconds: f64,
}

impl Timed {
    /// Returns the name in a cluster file and the rate in GFLOP/s.
    pub(super) fn rate(&self, dtype: DType) -> (String, f64) {
        let name = product_name(self.is_of_weight, self.sides.map(|side| side as usize), dtype);
        (name, 2.0 * self.sides.iter().product::<f64>() / self.seconds / 1e9)
    }

    /// Returns the predicted seconds: by a peak in FLOP/s, by the sides at which half of it is reached, and by a rate for cold bytes.
    fn predicted(&self, peak: f64, halves: [f64; 3], cold: f64) -> f64 {
        let of_peak: f64 = self.sides.iter().zip(halves).map(|(side, half)| side / (side + half)).product();
        2.0 * self.sides.iter().product::<f64>() / (peak * of_peak) + self.cold_bytes / cold
    }
}

/// Times the three products of each layer with at most `most_tokens` tokens: forward, input gradient and weight gradient.
pub(super) fn time(
    queue: &CpuQueue,
    arena: &Arena,
    dtype: DType,
    most_tokens: usize,
) -> Result<Vec<Timed>, TensorError> {
    let mut runs: BTreeMap<(bool, [usize; 3]), Vec<f64>> = BTreeMap::new();
    for _ in 0..ROUNDS {
        for (inputs, outputs) in LAYERS {
            for tokens in TOKENS.into_iter().filter(|tokens| *tokens <= most_tokens) {
                for layout in [GemmLayout::NT, GemmLayout::NN, GemmLayout::TN] {
                    let [m, k, n] = match layout {
                        GemmLayout::NT => [tokens, inputs, outputs],
                        GemmLayout::NN => [tokens, outputs, inputs],
                        GemmLayout::TN => [outputs, tokens, inputs],
                    };
                    let seconds = runs_of(queue, arena, dtype, layout, [m, k, n])?;
                    runs.entry((layout == GemmLayout::TN, [m, k, n])).or_default().extend(seconds);
                }
            }
        }
    }
    let middle = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let timed = |((is_of_weight, [m, k, n]), seconds): ((bool, [usize; 3]), Vec<f64>)| Timed {
        is_of_weight,
        sides: [m, k, n].map(|side| side as f64),
        cold_bytes: (k * n * dtype.size_bytes()
            + if is_of_weight { 8 * m * n } else { m * n * dtype.size_bytes() }) as f64,
        seconds: middle(seconds),
    };
    Ok(runs.into_iter().map(timed).collect())
}

/// Returns the seconds of a few runs of a product with `[m, k, n]` rows, inner elements and columns.
fn runs_of(
    queue: &CpuQueue,
    arena: &Arena,
    dtype: DType,
    layout: GemmLayout,
    [m, k, n]: [usize; 3],
) -> Result<Vec<f64>, TensorError> {
    // A weight gradient is accumulated in f32.
    let (out, write) = match layout {
        GemmLayout::TN => (DType::F32, Write::Accumulate),
        _ => (dtype, Write::Overwrite),
    };
    let a = random(queue, arena, dtype, if layout == GemmLayout::TN { [k, m] } else { [m, k] })?;
    let of_b = if layout == GemmLayout::NT { [n, k] } else { [k, n] };
    let bytes = k * n * dtype.size_bytes() + m * n * out.size_bytes();
    let cold = (0..BETWEEN.div_ceil(bytes).clamp(RUNS, MOST_COPIES))
        .map(|_| {
            let b = Tensor::zeros(arena, dtype, of_b, MemoryCategory::Workspace)?;
            Ok((b, Tensor::zeros(arena, out, [m, n], MemoryCategory::Workspace)?))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let run = |(b, c): &(Tensor, Tensor)| {
        let begin = Instant::now();
        queue.gemm(Gemm { layout, a: a.view(), b: b.view(), c: c.view(), bias: None, write });
        begin.elapsed().as_secs_f64()
    };
    // The copies that were made last are still in the caches, so the first ones are run.
    Ok(cold.iter().take(RUNS).map(run).collect())
}

/// The efficiency model fitted to the products of several types.
#[derive(Debug, Clone)]
pub(super) struct Fit {
    /// Fraction of the peaks that large products achieve.
    pub(super) product: f64,
    /// Rows, inner elements and columns at which products reach half of that.
    pub(super) half_shape: [f64; 3],
    /// Rate at which cold bytes are fetched, in bytes per second.
    pub(super) cold: f64,
    /// Peak of each type in FLOP/s: the measured one, scaled by how its products compare with those of the other types.
    pub(super) peaks: Vec<f64>,
    /// Mean relative error on single products.
    pub(super) error: f64,
}

/// Fits one efficiency, one half shape and one cold rate to the products of several types, given as (measured peak, products).
pub(super) fn fit(types: &[(f64, Vec<Timed>)]) -> Fit {
    let off = |timed: &Timed, peak: f64, halves: [f64; 3], cold: f64| -> f64 {
        (timed.predicted(peak, halves, cold) / timed.seconds).ln()
    };
    // Each type has a factor on its peak of its own; half shape and cold rate are common.
    let fitted = |numbers: &[f64; 5], index: usize| -> f64 {
        let [a, b, c, cold, share] = *numbers;
        let (peak, timed) = &types[index];
        timed.iter().map(|timed| off(timed, peak * share, [a, b, c], cold).powi(2)).sum()
    };
    let best_share = |numbers: &[f64; 4], index: usize| -> (f64, f64) {
        let [a, b, c, cold] = *numbers;
        let mut share = [0.8];
        descend(&mut share, [(0.01, 10.0)], |share| fitted(&[a, b, c, cold, share[0]], index));
        (share[0], fitted(&[a, b, c, cold, share[0]], index))
    };
    let error = |numbers: &[f64; 4]| (0..types.len()).map(|index| best_share(numbers, index).1).sum::<f64>();
    let mut numbers = [8.0, 32.0, 8.0, 1e10];
    descend(&mut numbers, [(0.25, 4096.0), (0.25, 4096.0), (0.25, 4096.0), (1e8, 1e13)], error);
    let shares: Vec<f64> = (0..types.len()).map(|index| best_share(&numbers, index).0).collect();
    let mean = (shares.iter().map(|share| share.ln()).sum::<f64>() / shares.len().max(1) as f64).exp();
    // A type whose products are computed with those of another may exceed its own peak.
    let product = mean.clamp(0.01, 1.0);
    let count: usize = types.iter().map(|(_, timed)| timed.len()).sum();
    let [a, b, c, cold] = numbers;
    Fit {
        product,
        half_shape: [a, b, c],
        cold,
        peaks: types.iter().zip(&shares).map(|((peak, _), share)| peak * share / product).collect(),
        error: (error(&numbers) / count.max(1) as f64).sqrt(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_the_formula_is_found_again() {
        let (halves, share, cold) = ([6.0, 90.0, 20.0], 0.9, 2e10);
        let of_type = |peak: f64, factor: f64| {
            let timed = |(inputs, outputs, tokens): (f64, f64, f64)| {
                let sides: [f64; 3] = [tokens, inputs, outputs];
                let cold_bytes = 4.0 * inputs * outputs;
                let timed = Timed { is_of_weight: false, sides, cold_bytes, seconds: 0.0 };
                Timed { seconds: timed.predicted(peak * factor * share, halves, cold), ..timed }
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
        assert!((found.cold / cold - 1.0).abs() < 0.1, "{found:?}");
        // Products of a type that exceed those of the other raise its peak.
        assert!((found.peaks[1] / found.peaks[0] - 2.2).abs() < 0.02, "{found:?}");
        assert!((found.product * found.peaks[0] / (share * 1e11) - 1.0).abs() < 0.02, "{found:?}");
    }
}

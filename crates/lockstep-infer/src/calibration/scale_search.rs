//! Search for the scales of an input's channels: `s = mean|x|^α`, with the exponent `α` of least error (Lin et al., 2023, "AWQ", equations 4 and
//! 5). The error is that of the layers' outputs on the observed inputs, `‖X (Q(W s) / s - W)ᵀ‖²`.

use lockstep_checkpoint::QuantizedForm;
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{Arena, Gemm, GemmLayout, Kernels, Tensor, TensorError, View, Write};

/// Number of exponents, evenly spaced in [0, 1).
const EXPONENTS: usize = 20;
/// Least magnitude of a channel relative to the mean one, so that a channel that is silent on the text is not given up.
const LEAST_MAGNITUDE: f64 = 0.01;
/// Rows of the inputs in a product.
const ROWS: usize = 1024;

/// A quantized layer that reads the input.
pub(super) struct Layer<'a> {
    /// Name of the weight.
    pub(super) name: &'a str,
    /// Weight `[out, columns]`.
    pub(super) weights: Vec<f32>,
}

/// The parameter that produces the input.
pub(super) struct Producer<'a> {
    /// Its row for each column of the input.
    pub(super) rows: &'a [usize],
    /// Number of its rows.
    pub(super) count: usize,
    /// Its values if it is a vector, which is stored in the model's type; `None` for a matrix.
    pub(super) values: Option<Vec<f32>>,
    /// Number that the model adds to it.
    pub(super) offset: f32,
}

/// An input with the layers that read it.
pub(super) struct ScaleSearch<'a> {
    pub(super) kernels: &'a dyn Kernels,
    pub(super) arena: &'a Arena,
    /// The input, f32 `[tokens, columns]`.
    pub(super) x: View<'a>,
    pub(super) layers: Vec<Layer<'a>>,
    pub(super) producer: Producer<'a>,
    pub(super) form: QuantizedForm,
}

/// The scales of least error.
pub(super) struct BestScales {
    pub(super) exponent: f32,
    /// Divisor of each row of the producer.
    pub(super) of_rows: Vec<f32>,
    /// For each layer, the sums of its squared outputs and of their squared errors without and with scales.
    pub(super) energies: Vec<[f64; 3]>,
}

/// Memory of products.
struct Scratch {
    weights: Tensor,
    outputs: Tensor,
}

impl ScaleSearch<'_> {
    pub(super) fn run(&self) -> Result<BestScales, TensorError> {
        let columns = self.producer.rows.len();
        let largest = self.layers.iter().map(|layer| layer.weights.len()).max().unwrap_or(0);
        let flat =
            |elements: usize| Tensor::zeros(self.arena, DType::F32, [elements], MemoryCategory::Workspace);
        let scratch = Scratch { weights: flat(largest)?, outputs: flat(ROWS * largest / columns)? };
        let magnitudes = self.magnitudes();
        let outputs: Vec<f64> =
            self.layers.iter().map(|layer| self.energy(&layer.weights, &scratch)).collect();
        let errors = |of_rows: &[f32]| -> Vec<f64> {
            self.layers.iter().map(|layer| self.energy(&self.error(layer, of_rows), &scratch)).collect()
        };
        let unscaled = vec![1.0; self.producer.count];
        let plain = errors(&unscaled);
        let (mut exponent, mut best, mut least) = (0.0, unscaled, plain.clone());
        for step in 1..EXPONENTS {
            let tried = step as f32 / EXPONENTS as f32;
            let of_rows = self.scales(&magnitudes, tried);
            let found = errors(&of_rows);
            if found.iter().sum::<f64>() < least.iter().sum() {
                (exponent, best, least) = (tried, of_rows, found);
            }
        }
        let energies = outputs.into_iter().zip(plain).zip(least);
        let energies = energies.map(|((energy, plain), least)| [energy, plain, least]).collect();
        Ok(BestScales { exponent, of_rows: best, energies })
    }

    /// Returns the mean magnitude of the columns of each row of the producer.
    fn magnitudes(&self) -> Vec<f64> {
        let (columns, count) = (self.producer.rows.len(), self.producer.count);
        let (mut sums, mut counts) = (vec![0.0; count], vec![0_usize; count]);
        for row in self.x.to_vec::<f32>().chunks_exact(columns) {
            for (x, &of) in row.iter().zip(self.producer.rows) {
                sums[of] += f64::from(x.abs());
                counts[of] += 1;
            }
        }
        sums.iter().zip(counts).map(|(sum, count)| sum / count.max(1) as f64).collect()
    }

    /// Returns the scales of an exponent, centered at 1. Those of a norm are rounded so that the norm has the type of the model's
    /// files when it is divided.
    fn scales(&self, magnitudes: &[f64], exponent: f32) -> Vec<f32> {
        let mean = magnitudes.iter().sum::<f64>() / magnitudes.len().max(1) as f64;
        let relative = |magnitude: f64| if mean > 0.0 { magnitude / mean } else { 1.0 };
        let raise =
            |&magnitude: &f64| relative(magnitude).max(LEAST_MAGNITUDE).powf(f64::from(exponent)) as f32;
        let mut scales: Vec<f32> = magnitudes.iter().map(raise).collect();
        let [least, most] = scales.iter().fold([f32::MAX, 0.0], |[a, b], &x| [a.min(x), b.max(x)]);
        let center = (least * most).sqrt();
        scales.iter_mut().for_each(|scale| *scale /= center);
        let Producer { values, offset, .. } = &self.producer;
        for (scale, value) in scales.iter_mut().zip(values.iter().flatten()) {
            let stored = self.form.rounded((value + offset) / *scale - offset);
            let exact = (value + offset) / (stored + offset);
            if exact.is_finite() && exact > 0.0 {
                *scale = exact;
            }
        }
        scales
    }

    /// Returns the error of a layer's weight that is quantized with scales.
    fn error(&self, layer: &Layer<'_>, of_rows: &[f32]) -> Vec<f32> {
        let scales: Vec<f32> = self.producer.rows.iter().map(|&row| of_rows[row]).collect();
        let mut matrix = layer.weights.clone();
        for row in matrix.chunks_exact_mut(scales.len()) {
            row.iter_mut().zip(&scales).for_each(|(x, scale)| *x *= scale);
        }
        self.form.round_trip(&mut matrix);
        for (row, exact) in
            matrix.chunks_exact_mut(scales.len()).zip(layer.weights.chunks_exact(scales.len()))
        {
            row.iter_mut().zip(&scales).zip(exact).for_each(|((x, scale), exact)| *x = *x / scale - exact);
        }
        matrix
    }

    /// Returns `‖X Wᵀ‖²`.
    fn energy(&self, weights: &[f32], scratch: &Scratch) -> f64 {
        let (tokens, columns) = self.x.shape().as_matrix();
        let out = weights.len() / columns;
        let b = scratch.weights.view().rows(0..weights.len()).reshape([out, columns]);
        b.write(weights);
        let mut sum = 0.0;
        for first in (0..tokens).step_by(ROWS) {
            let rows = ROWS.min(tokens - first);
            let c = scratch.outputs.view().rows(0..rows * out).reshape([rows, out]);
            let a = self.x.rows(first..first + rows);
            self.kernels.gemm(Gemm { layout: GemmLayout::NT, a, b, c, bias: None, write: Write::Overwrite });
            sum += c.to_vec::<f32>().iter().map(|y| f64::from(*y) * f64::from(*y)).sum::<f64>();
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use lockstep_checkpoint::WeightType;

    use super::*;

    #[test]
    fn channels_that_are_silent_on_the_text_keep_a_part_of_the_scale() {
        let arena = Arena::new();
        let queue = arena.queue(1).unwrap();
        let x = Tensor::zeros(&arena, DType::F32, [1, 3], MemoryCategory::Activations).unwrap();
        let form = QuantizedForm { to: WeightType::Int4, group_size: 3, dtype: DType::F32 };
        let producer = Producer { rows: &[0, 1, 2], count: 3, values: None, offset: 0.0 };
        let search =
            ScaleSearch { kernels: &*queue, arena: &arena, x: x.view(), layers: vec![], producer, form };
        // The mean is 2: the silent channel counts as 0.02, and its scale is that of the largest over √(4 / 0.02).
        let scales = search.scales(&[0.0, 2.0, 4.0], 0.5);
        let [silent, _, largest] = scales[..] else { panic!("{scales:?}") };
        assert!((largest / silent - 200_f32.sqrt()).abs() < 1e-4, "{scales:?}");
        assert!((largest * silent - 1.0).abs() < 1e-6, "centered at 1: {scales:?}");
        assert_eq!(search.scales(&[0.0; 3], 0.5), [1.0; 3]);
    }

    #[test]
    fn norms_that_are_divided_by_their_scales_have_the_type_of_the_files() {
        let arena = Arena::new();
        let queue = arena.queue(1).unwrap();
        let x = Tensor::zeros(&arena, DType::F32, [1, 4], MemoryCategory::Activations).unwrap();
        let form = QuantizedForm { to: WeightType::Int4, group_size: 4, dtype: DType::BF16 };
        let values: Vec<f32> = [0.3, 1.7, -2.9, 0.0].iter().map(|x| form.rounded(*x)).collect();
        for offset in [0.0, 1.0] {
            let producer = Producer { rows: &[0, 1, 2, 3], count: 4, values: Some(values.clone()), offset };
            let search =
                ScaleSearch { kernels: &*queue, arena: &arena, x: x.view(), layers: vec![], producer, form };
            let scales = search.scales(&[0.1, 3.0, 0.7, 11.0], 0.45);
            for (value, scale) in values.iter().zip(&scales) {
                let divided = (value + offset) / scale - offset;
                let error = (form.rounded(divided) - divided).abs();
                assert!(*scale > 0.0 && error <= 1e-6, "{value} + {offset} over {scale} is {divided}");
            }
        }
    }
}

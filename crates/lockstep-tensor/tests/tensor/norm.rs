//! Norms and their gradients against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{CpuQueue, LayerNorm, NormKernels, RmsNorm, Write};
use proptest::prelude::*;

use crate::reference;
use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random, random_of, tolerance, values,
};

/// Numbers of rows and widths: small and odd, and large enough for several tasks.
fn shapes() -> impl Strategy<Value = (usize, usize)> {
    prop_oneof![(1usize..10, 1usize..70), (60usize..200, 500usize..900)]
}

fn check_rms_norm(dtype: DType, [rows, width]: [usize; 2], scale: f64, eps: f32, offset: f32) {
    let x: Vec<f64> = random_of(dtype, 1, rows * width).iter().map(|x| x * scale).collect();
    let weight = random_of(dtype, 2, width);
    let (dy, before) = (random_of(dtype, 3, rows * width), random_of(dtype, 4, rows * width));
    let dweight_before = random(5, width).iter().map(|x| f64::from(*x as f32)).collect::<Vec<_>>();
    let run = |queue: &CpuQueue| {
        let (x, weight) = (floats(dtype, [rows, width], &x), floats(dtype, [width], &weight));
        let (dy, y) = (floats(dtype, [rows, width], &dy), floats(dtype, [rows, width], &before));
        let rstd = floats(DType::F32, [rows], &vec![0.0; rows]);
        let (dx, added) = (floats(dtype, [rows, width], &before), floats(dtype, [rows, width], &before));
        let dweight = floats(DType::F32, [width], &dweight_before);
        let [x, weight, dy, y] = [&x, &weight, &dy, &y].map(|tensor| tensor.view());
        let [rstd, dx, added, dweight] = [&rstd, &dx, &added, &dweight].map(|tensor| tensor.view());
        let norm = RmsNorm { x, weight, offset, rstd };
        queue.rms_norm(norm, eps, y);
        queue.rms_norm_backward_input(norm, dy, dx, Write::Overwrite);
        queue.rms_norm_backward_input(norm, dy, added, Write::Accumulate);
        queue.rms_norm_backward_weight(norm, dy, dweight);
        [y, rstd, dx, added, dweight].map(values).to_vec()
    };
    let weight: Vec<f64> = weight.iter().map(|weight| weight + f64::from(offset)).collect();
    let (y, rstd) = reference::rms_norm(&x, &weight, f64::from(eps));
    let (dx, dweight) = reference::rms_norm_backward(&dy, &x, &weight, f64::from(eps));
    let added: Vec<f64> = dx.iter().zip(&before).map(|(a, b)| a + b).collect();
    let dweight: Vec<f64> = dweight.iter().zip(&dweight_before).map(|(a, b)| a + b).collect();
    let largest = dx.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    on_every_queue(run, |results| {
        let relative = tolerance(dtype);
        assert_close("y", &results[0], &y, relative, 1e-6);
        assert_close("rstd", &results[1], &rstd, 2e-6, 0.0);
        assert_close("dx", &results[2], &dx, relative, 2e-6 * largest);
        assert_close("dx added", &results[3], &added, relative, 2e-6 * (largest + 1.0));
        assert_close("dweight", &results[4], &dweight, 2e-6, 2e-6 * (rows as f64).sqrt());
    });
}

fn check_layer_norm(dtype: DType, rows: usize, width: usize, offset: f64, with_bias: bool) {
    let eps = 1e-5;
    let x: Vec<f64> = random(1, rows * width).iter().map(|x| x + offset).collect();
    let x = crate::testing::rounded(dtype, &x);
    let weight = random_of(dtype, 2, width);
    let bias = if with_bias { random_of(dtype, 3, width) } else { vec![0.0; width] };
    let (dy, before) = (random_of(dtype, 4, rows * width), random_of(dtype, 5, rows * width));
    let run = |queue: &CpuQueue| {
        let matrix = |values: &[f64]| floats(dtype, [rows, width], values);
        let (x, dy, y) = (matrix(&x), matrix(&dy), matrix(&before));
        let (dx, added) = (matrix(&before), matrix(&before));
        let (weight, bias) = (floats(dtype, [width], &weight), floats(dtype, [width], &bias));
        let statistic = || floats(DType::F32, [rows], &vec![0.0; rows]);
        let gradient = || floats(DType::F32, [width], &vec![1.0; width]);
        let (mean, rstd, dweight, dbias) = (statistic(), statistic(), gradient(), gradient());
        let norm = LayerNorm { x: x.view(), weight: weight.view(), mean: mean.view(), rstd: rstd.view() };
        queue.layer_norm(norm, with_bias.then_some(bias.view()), eps, y.view());
        queue.layer_norm_backward_input(norm, dy.view(), dx.view(), Write::Overwrite);
        queue.layer_norm_backward_input(norm, dy.view(), added.view(), Write::Accumulate);
        let dbias_view = with_bias.then_some(dbias.view());
        queue.layer_norm_backward_weight(norm, dy.view(), dweight.view(), dbias_view);
        [&y, &mean, &rstd, &dx, &added, &dweight, &dbias].map(|tensor| values(tensor.view())).to_vec()
    };
    let (y, mean, rstd) = reference::layer_norm(&x, &weight, &bias, f64::from(eps));
    let (dx, dweight, dbias) = reference::layer_norm_backward(&dy, &x, &weight, f64::from(eps));
    let added: Vec<f64> = dx.iter().zip(&before).map(|(a, b)| a + b).collect();
    let plus_one = |sums: Vec<f64>| sums.into_iter().map(|sum| sum + 1.0).collect::<Vec<_>>();
    let (dweight, dbias) = (plus_one(dweight), plus_one(dbias));
    let largest = dx.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
    // The rounding error of the mean, which is as large as that of numbers of the size of the offset.
    let shift = 1e-6 * (1.0 + offset.abs()) * rstd.iter().fold(0.0, |a: f64, b| a.max(*b));
    on_every_queue(run, |results| {
        let relative = tolerance(dtype);
        assert_close("y", &results[0], &y, relative, 4.0 * shift);
        assert_close("mean", &results[1], &mean, 1e-6, 1e-6);
        assert_close("rstd", &results[2], &rstd, 4e-6, 0.0);
        assert_close("dx", &results[3], &dx, relative, (4e-6 + shift) * largest);
        assert_close("dx added", &results[4], &added, relative, (4e-6 + shift) * (largest + 1.0));
        let sum = (4e-6 + 4.0 * shift) * (rows as f64).sqrt();
        assert_close("dweight", &results[5], &dweight, 2e-6, sum);
        let expected = if with_bias { dbias.clone() } else { vec![1.0; width] };
        assert_close("dbias", &results[6], &expected, 2e-6, 2e-6 * (rows as f64).sqrt());
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn rms_norm_and_its_gradients_match_the_reference((rows, width) in shapes()) {
        for dtype in ACTIVATIONS {
            check_rms_norm(dtype, [rows, width], 1.0, 1e-5, 0.0);
            check_rms_norm(dtype, [rows, width], 1.0, 1e-5, 1.0);
        }
    }

    #[test]
    fn layer_norm_and_its_gradients_match_the_reference((rows, width) in shapes(), with_bias in any::<bool>()) {
        // A row of one or two elements has a variance near zero, of which only rounding error remains.
        let width = width + 2;
        for dtype in ACTIVATIONS {
            check_layer_norm(dtype, rows, width, 0.0, with_bias);
        }
    }
}

#[test]
fn rows_of_zeros_and_of_large_numbers_stay_finite() {
    check_rms_norm(DType::F32, [3, 33], 0.0, 1e-6, 0.0);
    check_rms_norm(DType::F32, [3, 33], 1e15, 1e-6, 0.0);
    check_rms_norm(DType::BF16, [3, 33], (1u64 << 40) as f64, 1e-6, 0.0);
}

#[test]
fn a_large_mean_does_not_cancel_the_variance() {
    check_layer_norm(DType::F32, 5, 129, 300.0, true);
}

#[test]
#[should_panic(expected = "rms_norm: weight must be f32 with 4 elements, not f32 [5]")]
fn a_weight_of_another_width_is_refused() {
    let queue = CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap();
    let [x, y] = [(); 2].map(|()| floats(DType::F32, [2, 4], &[0.0; 8]));
    let (weight, rstd) = (floats(DType::F32, [5], &[0.0; 5]), floats(DType::F32, [2], &[0.0; 2]));
    let norm = RmsNorm { x: x.view(), weight: weight.view(), offset: 0.0, rstd: rstd.view() };
    queue.rms_norm(norm, 1e-5, y.view());
}

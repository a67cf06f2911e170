//! Batch normalization against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{BatchNorm, BatchNormKernels, CpuQueue, RunningStatistics, View, Write};
use proptest::prelude::*;

use crate::reference::finite_differences;
use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random_of, rounded, tolerance, values,
};

const EPS: f64 = 1e-5;

/// Returns mean and biased variance of each channel.
fn statistics(x: &[f64], channels: usize) -> Vec<(f64, f64)> {
    let rows = (x.len() / channels) as f64;
    let of = |channel: usize| x.iter().skip(channel).step_by(channels);
    let mean = |channel| of(channel).sum::<f64>() / rows;
    (0..channels).map(|c| (mean(c), of(c).map(|x| (x - mean(c)).powi(2)).sum::<f64>() / rows)).collect()
}

fn normalized(x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let statistics = statistics(x, weight.len());
    let at = |i: usize| {
        let (mean, variance) = statistics[i % weight.len()];
        (x[i] - mean) / (variance + EPS).sqrt() * weight[i % weight.len()] + bias[i % weight.len()]
    };
    (0..x.len()).map(at).collect()
}

/// Returns the gradients of input, weight and bias.
fn backward(dy: &[f64], x: &[f64], weight: &[f64]) -> [Vec<f64>; 3] {
    let channels = weight.len();
    let rows = (x.len() / channels) as f64;
    let statistics = statistics(x, channels);
    let xhat = |i: usize| (x[i] - statistics[i % channels].0) / (statistics[i % channels].1 + EPS).sqrt();
    let (mut dweight, mut dbias) = (vec![0.0; channels], vec![0.0; channels]);
    for (i, dy) in dy.iter().enumerate() {
        dweight[i % channels] += dy * xhat(i);
        dbias[i % channels] += dy;
    }
    let dx = (0..x.len()).map(|i| {
        let c = i % channels;
        weight[c] / (statistics[c].1 + EPS).sqrt() * (dy[i] - dbias[c] / rows - xhat(i) * dweight[c] / rows)
    });
    [dx.collect(), dweight, dbias]
}

struct Operands {
    dtype: DType,
    x: Vec<f64>,
    dy: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    /// Rows of the first rank; another has the rest.
    first_rows: usize,
}

/// Returns y, dx, dx accumulated, the sums of the backward, mean, rstd, and the running statistics.
fn run(queue: &CpuQueue, operands: &Operands) -> Vec<Vec<f64>> {
    let Operands { dtype, x, dy, weight, bias, first_rows } = operands;
    let (dtype, channels) = (*dtype, weight.len());
    let rows = x.len() / channels;
    let matrix = |values: &[f64]| floats(dtype, [rows, channels], values);
    let vector = |values: &[f64]| floats(dtype, [channels], values);
    let of_f32 =
        |parts: usize, value: f64| floats(DType::F32, [parts, channels], &vec![value; parts * channels]);
    let (x_tensor, dy, weight, bias) = (matrix(x), matrix(dy), vector(weight), vector(bias));
    let (y, dx, added) = (matrix(x), matrix(x), matrix(x));
    let (parts, mean, rstd, sums) = (of_f32(6, 9.0), of_f32(1, 9.0), of_f32(1, 9.0), of_f32(2, 9.0));
    let (running_mean, running_variance) = (of_f32(1, 0.5), of_f32(1, 2.0));
    queue.batch_norm_statistics(x_tensor.view().rows(0..*first_rows), parts.view().rows(0..3));
    queue.batch_norm_statistics(x_tensor.view().rows(*first_rows..rows), parts.view().rows(3..6));
    let running =
        RunningStatistics { mean: running_mean.view(), variance: running_variance.view(), momentum: 0.1 };
    queue.merge_batch_norm(parts.view(), EPS as f32, Some(running), mean.view(), rstd.view());
    let norm = BatchNorm { x: x_tensor.view(), weight: weight.view(), mean: mean.view(), rstd: rstd.view() };
    queue.batch_norm(norm, bias.view(), y.view());
    queue.batch_norm_backward_sums(norm, dy.view(), sums.view());
    for (dx, write) in [(&dx, Write::Overwrite), (&added, Write::Accumulate)] {
        queue.batch_norm_backward_input(norm, dy.view(), sums.view(), rows, dx.view(), write);
    }
    [y, dx, added, sums, mean, rstd, running_mean, running_variance].map(|t| values(t.view())).to_vec()
}

/// Returns the statistics of all rows by sums of the two ranks' totals and recentred squares.
fn summed_over_ranks(queue: &CpuQueue, operands: &Operands) -> Vec<f64> {
    let Operands { x, weight, first_rows, .. } = operands;
    let channels = weight.len();
    let matrix = |rows: usize| floats(DType::F32, [rows, channels], &vec![9.0; rows * channels]);
    let x = floats(DType::F32, [x.len() / channels, channels], x);
    let all = x.view().shape().as_matrix().0;
    let ranks = [0..*first_rows, *first_rows..all].map(|rows| {
        let (statistics, totals) = (matrix(3), matrix(2));
        queue.batch_norm_statistics(x.view().rows(rows), statistics.view());
        queue.batch_norm_totals(statistics.view(), totals.view());
        (statistics, totals)
    });
    let sum = |a: View<'_>, b: View<'_>| -> Vec<f64> {
        values(a).iter().zip(values(b)).map(|(a, b)| a + b).collect()
    };
    let totals = floats(DType::F32, [2, channels], &sum(ranks[0].1.view(), ranks[1].1.view()));
    ranks.iter().for_each(|(statistics, _)| queue.recentre_batch_norm(totals.view(), statistics.view()));
    let [first, second] = [&ranks[0].0, &ranks[1].0].map(|tensor| tensor.view());
    assert_eq!(values(first.rows(0..2)), values(second.rows(0..2)), "ranks agree on rows and mean");
    [values(first.rows(0..2)), sum(first.rows(2..3), second.rows(2..3))].concat()
}

#[test]
fn ranks_that_sum_totals_and_recentred_squares_get_the_statistics_of_all_rows() {
    for (rows, first_rows, channels, offset) in [(70, 3, 5, 0.0), (9, 0, 2, 10.0), (64, 63, 3, -3.0)] {
        let x: Vec<f64> = random_of(DType::F32, 1, rows * channels).iter().map(|x| x + offset).collect();
        let operands = Operands {
            dtype: DType::F32,
            x,
            dy: vec![],
            weight: vec![1.0; channels],
            bias: vec![],
            first_rows,
        };
        let expected = statistics(&operands.x, channels);
        on_every_queue(
            |queue| vec![summed_over_ranks(queue, &operands)],
            |results| {
                let [count, means, squares] =
                    [0, 1, 2].map(|i| &results[0][i * channels..(i + 1) * channels]);
                assert!(count.iter().all(|count| *count == rows as f64), "{count:?}");
                let of_means: Vec<f64> = expected.iter().map(|(mean, _)| *mean).collect();
                let of_squares: Vec<f64> =
                    expected.iter().map(|(_, variance)| variance * rows as f64).collect();
                assert_close("mean", means, &of_means, 1e-6, 1e-6);
                assert_close("squares", squares, &of_squares, 1e-5, 1e-4 * offset.abs());
            },
        );
    }
}

fn check_against_the_reference(operands: &Operands, spread: f64) {
    let Operands { dtype, x, dy, weight, bias, .. } = operands;
    let channels = weight.len();
    let rows = x.len() / channels;
    let of_channels = statistics(x, channels);
    let (y, [dx, dweight, dbias]) = (normalized(x, weight, bias), backward(dy, x, weight));
    let added: Vec<f64> = dx.iter().zip(x).map(|(a, b)| a + b).collect();
    let means: Vec<f64> = of_channels.iter().map(|(mean, _)| *mean).collect();
    let rstd: Vec<f64> = of_channels.iter().map(|(_, variance)| 1.0 / (variance + EPS).sqrt()).collect();
    let running_mean: Vec<f64> = means.iter().map(|mean| 0.45 + 0.1 * mean).collect();
    let unbiased = rows as f64 / (rows as f64 - 1.0).max(1.0);
    let running_variance: Vec<f64> = of_channels
        .iter()
        .map(|(_, variance)| if rows > 1 { 1.8 + 0.1 * variance * unbiased } else { 2.0 })
        .collect();
    // Rounding errors of the mean, relative to the deviation.
    let largest = rstd.iter().fold(1.0, |a: f64, b| a.max(*b));
    let shift = 4e-7 * (2.0 + spread) * largest;
    on_every_queue(
        |queue| run(queue, operands),
        |results| {
            let (relative, rows) = (tolerance(*dtype), rows as f64);
            assert_close("y", &results[0], &y, relative, 4.0 * shift + 1e-6);
            assert_close("dx", &results[1], &dx, relative, (8.0 * shift + 4e-6) * largest);
            assert_close(
                "dx added",
                &results[2],
                &added,
                relative,
                (8.0 * shift + 4e-6) * (largest + spread),
            );
            assert_close("dbias", &results[3][..channels], &dbias, 1e-6, 1e-6 * rows);
            assert_close("dweight", &results[3][channels..], &dweight, 1e-6, (2e-6 + 4.0 * shift) * rows);
            assert_close("mean", &results[4], &means, 1e-6, 1e-6);
            assert_close("rstd", &results[5], &rstd, 1e-5, 0.0);
            assert_close("running mean", &results[6], &running_mean, 1e-6, 1e-6);
            assert_close("running variance", &results[7], &running_variance, 1e-5, 1e-6);
        },
    );
}

fn operands(dtype: DType, rows: usize, channels: usize, offset: f64, first_rows: usize) -> Operands {
    let x: Vec<f64> = random_of(dtype, 1, rows * channels).iter().map(|x| x + offset).collect();
    Operands {
        dtype,
        x: rounded(dtype, &x),
        dy: random_of(dtype, 2, rows * channels),
        weight: random_of(dtype, 3, channels),
        bias: random_of(dtype, 4, channels),
        first_rows,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn batch_norm_and_its_gradients_match_the_reference(
        // Few rows may agree by chance: then only rounding error remains of their variance.
        (rows, channels) in prop_oneof![(16usize..90, 1usize..40), (250usize..400, 250usize..300)],
        part in 0.0..1.0,
    ) {
        for dtype in ACTIVATIONS {
            let first_rows = (part * rows as f64) as usize;
            check_against_the_reference(&operands(dtype, rows, channels, 0.0, first_rows), 0.0);
        }
    }
}

#[test]
fn a_mean_much_larger_than_the_deviation_does_not_cancel_the_variance() {
    check_against_the_reference(&operands(DType::F32, 300, 33, 300.0, 140), 300.0);
}

#[test]
fn one_row_is_its_own_mean_and_leaves_the_running_variance() {
    let operands = operands(DType::F32, 1, 5, 0.0, 0);
    let results = run(&CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap(), &operands);
    assert_eq!((&results[0], &results[4]), (&operands.bias, &operands.x));
    assert_eq!(results[7], [2.0; 5]);
}

#[test]
fn no_rows_change_no_running_statistics() {
    let operands = operands(DType::F32, 0, 5, 0.0, 0);
    let results = run(&CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap(), &operands);
    assert_eq!((&results[3], &results[4]), (&vec![0.0; 10], &vec![0.0; 5]));
    assert_eq!((&results[6], &results[7]), (&vec![0.5; 5], &vec![2.0; 5]));
}

#[test]
fn the_reference_gradients_match_finite_differences() {
    let (rows, channels) = (6, 3);
    let [x, dy] = [1, 2].map(|seed| random_of(DType::F32, seed, rows * channels));
    let [weight, bias] = [3, 4].map(|seed| random_of(DType::F32, seed, channels));
    let loss = |x: &[f64], weight: &[f64], bias: &[f64]| -> f64 {
        normalized(x, weight, bias).iter().zip(&dy).map(|(y, dy)| y * dy).sum()
    };
    let [dx, dweight, dbias] = backward(&dy, &x, &weight);
    assert_close("dx", &dx, &finite_differences(&x, |x| loss(x, &weight, &bias)), 1e-5, 1e-5);
    assert_close("dweight", &dweight, &finite_differences(&weight, |w| loss(&x, w, &bias)), 1e-6, 1e-6);
    assert_close("dbias", &dbias, &finite_differences(&bias, |b| loss(&x, &weight, b)), 1e-6, 1e-6);
}

#[test]
fn evaluation_divides_by_the_running_deviation() {
    let queue = CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap();
    let (variance, rstd) = (floats(DType::F32, [2], &[4.0, 0.0]), floats(DType::F32, [2], &[0.0; 2]));
    queue.reciprocal_deviation(variance.view(), 0.25, rstd.view());
    assert_close("rstd", &values(rstd.view()), &[1.0 / 4.25_f64.sqrt(), 2.0], 1e-6, 0.0);
}

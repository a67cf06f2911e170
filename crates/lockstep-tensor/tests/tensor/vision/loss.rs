//! Losses with label smoothing against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{CpuQueue, LossKernels};
use proptest::prelude::*;

use crate::reference::finite_differences;
use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
};

/// Returns the losses of the rows; 0 where the label is -100.
fn smoothed(logits: &[f64], labels: &[i32], smoothing: f64) -> Vec<f64> {
    let classes = logits.len() / labels.len();
    let of_row = |(row, label): (&[f64], &i32)| {
        let Ok(label) = usize::try_from(*label) else { return 0.0 };
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln();
        (1.0 - smoothing) * (total - row[label])
            + smoothing / classes as f64 * row.iter().map(|x| total - x).sum::<f64>()
    };
    logits.chunks(classes).zip(labels).map(of_row).collect()
}

fn labels(rows: usize, classes: usize) -> Vec<i32> {
    (0..rows).map(|row| if row % 4 == 3 { -100 } else { (row * 7919 % classes) as i32 }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn smoothed_losses_and_gradients_match_the_reference(
        (rows, classes) in prop_oneof![(1usize..8, 1usize..600), (100usize..130, 900usize..1000)],
        smoothing in prop_oneof![Just(0.0_f32), 0.0_f32..=1.0],
    ) {
        let labels = labels(rows, classes);
        for dtype in ACTIVATIONS {
            let logits: Vec<f64> = random_of(dtype, 1, rows * classes).iter().map(|x| 4.0 * x).collect();
            let run = |queue: &CpuQueue| {
                let (logits, labels) = (floats(dtype, [rows, classes], &logits), tensor(&labels));
                let [alone, losses] = [(); 2].map(|()| floats(DType::F32, [rows], &vec![9.0; rows]));
                queue.cross_entropy_smoothed(logits.view(), labels.view(), smoothing, alone.view());
                queue.cross_entropy_smoothed_with_gradient(
                    logits.view(), labels.view(), smoothing, losses.view(), 0.25,
                );
                [alone, losses, logits].map(|tensor| values(tensor.view())).to_vec()
            };
            let smoothing = f64::from(smoothing);
            let expected = smoothed(&logits, &labels, smoothing);
            let mut gradient = Vec::new();
            for (row, label) in logits.chunks(classes).zip(&labels) {
                let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = row.iter().map(|x| (x - largest).exp()).sum();
                gradient.extend(row.iter().enumerate().map(|(class, x)| match usize::try_from(*label) {
                    Ok(label) => {
                        let target = smoothing / classes as f64 + if class == label { 1.0 - smoothing } else { 0.0 };
                        0.25 * ((x - largest).exp() / total - target)
                    }
                    Err(_) => 0.0,
                }));
            }
            on_every_queue(run, |results| {
                assert_close("losses", &results[0], &expected, 2e-6, 4e-6);
                assert_eq!(results[0], results[1], "losses without and with the gradient");
                assert_close("gradient", &results[2], &gradient, tolerance(dtype) + 4e-6, 1e-6);
            });
        }
    }

    #[test]
    fn squared_errors_and_gradients_match_the_reference(
        (rows, width) in prop_oneof![(1usize..8, 1usize..600), (100usize..130, 900usize..1000)],
    ) {
        for dtype in ACTIVATIONS {
            let [x, target] = [1, 2].map(|seed| random_of(dtype, seed, rows * width));
            let run = |queue: &CpuQueue| {
                let [x, target] = [&x, &target].map(|values| floats(dtype, [rows, width], values));
                let [alone, losses] = [(); 2].map(|()| floats(DType::F32, [rows], &vec![9.0; rows]));
                queue.squared_error(x.view(), target.view(), alone.view());
                queue.squared_error_with_gradient(x.view(), target.view(), losses.view(), 0.5);
                [alone, losses, x].map(|tensor| values(tensor.view())).to_vec()
            };
            let differences: Vec<f64> = x.iter().zip(&target).map(|(x, target)| x - target).collect();
            let losses: Vec<f64> = differences.chunks(width).map(|row| row.iter().map(|d| d * d).sum()).collect();
            on_every_queue(run, |results| {
                assert_close("losses", &results[0], &losses, 2e-6, 1e-6);
                assert_eq!(results[0], results[1], "losses without and with the gradient");
                assert_close("gradient", &results[2], &differences, tolerance(dtype), 1e-6);
            });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn correct_rows_are_those_whose_first_largest_logit_is_the_labels(
        (rows, classes) in prop_oneof![(1usize..8, 1usize..40), (100usize..130, 90usize..100)],
    ) {
        let mut labels = labels(rows, classes);
        for dtype in ACTIVATIONS {
            // Few values, so that many are equal.
            let logits: Vec<f64> =
                random_of(dtype, 1, rows * classes).iter().map(|x| (2.0 * x).round()).collect();
            let first_largest = |row: &[f64]| {
                (0..classes).reduce(|best, class| if row[class] > row[best] { class } else { best }).unwrap()
            };
            let largest: Vec<usize> = logits.chunks(classes).map(first_largest).collect();
            for (row, label) in labels.iter_mut().enumerate().step_by(2) {
                *label = largest[row] as i32;
            }
            let expected: Vec<f64> = largest
                .iter()
                .zip(&labels)
                .map(|(largest, label)| f64::from(u8::from(*largest as i32 == *label)))
                .collect();
            let run = |queue: &CpuQueue| {
                let correct = floats(DType::F32, [rows], &vec![9.0; rows]);
                let logits = floats(dtype, [rows, classes], &logits);
                queue.correct(logits.view(), tensor(&labels).view(), correct.view());
                vec![values(correct.view())]
            };
            on_every_queue(run, |results| assert_eq!(results[0], expected, "labels {labels:?}"));
        }
    }
}

#[test]
fn rows_that_are_masked_or_hold_a_nan_are_not_correct() {
    let logits = [1.0, 0.0, f64::NAN, 0.0, 1.0, f64::NAN, 1.0, 0.0];
    let run = |queue: &CpuQueue| {
        let correct = floats(DType::F32, [4], &[9.0; 4]);
        let logits = floats(DType::F32, [4, 2], &logits);
        queue.correct(logits.view(), tensor(&[-100_i32, 0, 0, 0]).view(), correct.view());
        vec![values(correct.view())]
    };
    on_every_queue(run, |results| assert_eq!(results[0], [0.0, 0.0, 0.0, 1.0]));
}

#[test]
fn the_gradients_match_finite_differences() {
    let (rows, classes, smoothing) = (4, 7, 0.1);
    let [logits, target] = [1, 2].map(|seed| random_of(DType::F32, seed, rows * classes));
    let labels = labels(rows, classes);
    let of_labels = finite_differences(&logits, |x| smoothed(x, &labels, smoothing).iter().sum());
    let of_target =
        finite_differences(&logits, |x| x.iter().zip(&target).map(|(x, t)| (x - t).powi(2)).sum());
    let run = |queue: &CpuQueue| {
        let [x, logits] = [(); 2].map(|()| floats(DType::F32, [rows, classes], &logits));
        let (target, labels) = (floats(DType::F32, [rows, classes], &target), tensor(&labels));
        let losses = floats(DType::F32, [rows], &vec![0.0; rows]);
        let smoothing = smoothing as f32;
        queue.cross_entropy_smoothed_with_gradient(
            logits.view(),
            labels.view(),
            smoothing,
            losses.view(),
            1.0,
        );
        queue.squared_error_with_gradient(x.view(), target.view(), losses.view(), 1.0);
        [logits, x].map(|tensor| values(tensor.view())).to_vec()
    };
    on_every_queue(run, |results| {
        assert_close("cross-entropy", &results[0], &of_labels, 1e-6, 1e-6);
        assert_close("squared error", &results[1], &of_target, 1e-6, 1e-6);
    });
}

#[test]
fn a_class_of_negative_infinity_leaves_the_loss_without_smoothing_finite() {
    let run = |queue: &CpuQueue| {
        let logits = floats(DType::F32, [1, 3], &[1.0, f64::NEG_INFINITY, 1.0]);
        let losses = floats(DType::F32, [1], &[9.0]);
        queue.cross_entropy_smoothed(logits.view(), tensor(&[0_i32]).view(), 0.0, losses.view());
        vec![values(losses.view())]
    };
    on_every_queue(run, |results| assert_close("loss", &results[0], &[2.0_f64.ln()], 1e-6, 0.0));
}

#[test]
#[should_panic(expected = "the label smoothing 1.5 must lie in [0, 1]")]
fn a_smoothing_above_one_is_refused() {
    let queue = CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap();
    let (logits, losses) = (floats(DType::F32, [1, 2], &[0.0; 2]), floats(DType::F32, [1], &[0.0]));
    queue.cross_entropy_smoothed(logits.view(), tensor(&[0_i32]).view(), 1.5, losses.view());
}

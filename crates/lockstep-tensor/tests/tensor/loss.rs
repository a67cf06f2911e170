//! Losses and their gradients against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CpuQueue, LossKernels, Tensor};
use proptest::prelude::*;

use crate::reference;
use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random, random_of, rounded, tensor, tolerance, values,
};

fn check(dtype: DType, logits: &[f64], labels: &[i32]) {
    let tokens = labels.len();
    let vocabulary = logits.len() / tokens;
    let seed = 0.25;
    let run = |queue: &CpuQueue| {
        let logits = floats(dtype, [tokens, vocabulary], logits);
        let labels = tensor(labels);
        let [alone, losses] = [(); 2].map(|()| floats(DType::F32, [tokens], &vec![9.0; tokens]));
        queue.cross_entropy(logits.view(), labels.view(), alone.view());
        queue.cross_entropy_with_gradient(logits.view(), labels.view(), losses.view(), seed);
        [alone, losses, logits].map(|tensor| values(tensor.view())).to_vec()
    };
    let (losses, log_sum_exp) = reference::cross_entropy(logits, labels);
    let gradient = reference::cross_entropy_backward(logits, labels, f64::from(seed));
    // Logits and their log-sum-exp are f32: their differences have the rounding error of the larger one.
    let largest = log_sum_exp.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
    on_every_queue(run, |results| {
        assert_close("losses", &results[0], &losses, 1e-6, 2e-7 * largest);
        assert_eq!(results[0], results[1], "losses without and with the gradient");
        // At a label that is nearly certain, p - 1 cancels and only the rounding error of p remains.
        let absolute = 1e-7 + f64::from(seed) * 2e-7 * largest;
        assert_close("gradient", &results[2], &gradient, tolerance(dtype) + 2e-7 * largest, absolute);
        for (row, label) in results[2].chunks(vocabulary).zip(labels) {
            assert!(*label != -100 || row.iter().all(|x| *x == 0.0), "a masked token has a gradient");
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn losses_and_gradients_match_the_reference(
        (tokens, vocabulary) in prop_oneof![(1usize..8, 1usize..600), (20usize..30, 4000usize..5000)],
        scale in 0.1f64..30.0,
    ) {
        let labels: Vec<i32> =
            (0..tokens).map(|t| if t % 3 == 2 { -100 } else { (t * 7919 % vocabulary) as i32 }).collect();
        for dtype in ACTIVATIONS {
            let logits: Vec<f64> = random(1, tokens * vocabulary).iter().map(|x| scale * x).collect();
            check(dtype, &rounded(dtype, &logits), &labels);
        }
    }
}

/// Returns losses, log-sum-exps and gradients of logits whose columns are sharded at `cuts`.
fn in_parts(queue: &CpuQueue, dtype: DType, logits: &[f64], labels: &[i32], cuts: &[usize]) -> [Vec<f64>; 3] {
    let tokens = labels.len();
    let vocabulary = logits.len() / tokens;
    let labels = tensor(labels);
    let columns = |x: &[f64], from: usize, to: usize| -> Vec<f64> {
        x.chunks(vocabulary).flat_map(|row| row[from..to].to_vec()).collect()
    };
    let parts: Vec<Tensor> = cuts
        .windows(2)
        .map(|cut| floats(dtype, [tokens, cut[1] - cut[0]], &columns(logits, cut[0], cut[1])))
        .collect();
    let statistics = floats(DType::F32, [parts.len(), 3, tokens], &vec![9.0; parts.len() * 3 * tokens]);
    for (i, (part, cut)) in parts.iter().zip(cuts).enumerate() {
        queue.softmax_statistics(part.view(), labels.view(), *cut, statistics.view().rows(i..i + 1));
    }
    let [log_sum_exp, losses] = [(); 2].map(|()| floats(DType::F32, [tokens], &vec![9.0; tokens]));
    queue.merge_softmax(statistics.view(), labels.view(), log_sum_exp.view(), losses.view());
    let mut gradient = vec![9.0; logits.len()];
    for (part, cut) in parts.iter().zip(cuts.windows(2)) {
        queue.softmax_gradient(part.view(), labels.view(), cut[0], log_sum_exp.view(), 0.25);
        let width = cut[1] - cut[0];
        for (row, part) in gradient.chunks_mut(vocabulary).zip(values(part.view()).chunks(width.max(1))) {
            row[cut[0]..cut[1]].copy_from_slice(&part[..width]);
        }
    }
    [values(losses.view()), values(log_sum_exp.view()), gradient]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn columns_in_parts_give_the_losses_and_gradients_of_the_whole(
        (tokens, vocabulary) in prop_oneof![(1usize..8, 4usize..600), (20usize..30, 4000usize..5000)],
        scale in 0.1f64..30.0,
    ) {
        let labels: Vec<i32> =
            (0..tokens).map(|t| if t % 3 == 2 { -100 } else { (t * 7919 % vocabulary) as i32 }).collect();
        let cut = vocabulary / 3;
        for dtype in ACTIVATIONS {
            let logits: Vec<f64> = random(1, tokens * vocabulary).iter().map(|x| scale * x).collect();
            let logits = rounded(dtype, &logits);
            let (expected, log_sum_exp) = reference::cross_entropy(&logits, &labels);
            let gradient = reference::cross_entropy_backward(&logits, &labels, 0.25);
            let largest = log_sum_exp.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
            // The last shard but one has no columns.
            for cuts in [&[0, vocabulary][..], &[0, 1, cut, 2 * cut, 2 * cut, vocabulary]] {
                let run = |queue: &CpuQueue| in_parts(queue, dtype, &logits, &labels, cuts).to_vec();
                on_every_queue(run, |results| {
                    assert_close("losses", &results[0], &expected, 1e-6, 2e-7 * largest);
                    for (token, label) in labels.iter().enumerate() {
                        let expected = if *label == -100 { f64::NEG_INFINITY } else { log_sum_exp[token] };
                        let found = results[1][token];
                        assert!(
                            found == expected || (found - expected).abs() <= 1e-6 * largest,
                            "log-sum-exp {found} instead of {expected}"
                        );
                    }
                    let relative = tolerance(dtype) + 2e-7 * largest;
                    assert_close("gradient", &results[2], &gradient, relative, 1e-7 + 1e-7 * largest);
                });
            }
        }
    }
}

#[test]
fn one_part_gives_the_numbers_of_the_whole() {
    let (tokens, vocabulary) = (9, 1003);
    let logits = random_of(DType::F32, 1, tokens * vocabulary);
    let labels: Vec<i32> = (0..tokens as i32).map(|t| if t == 4 { -100 } else { t * 111 }).collect();
    let run = |queue: &CpuQueue| {
        let whole = floats(DType::F32, [tokens, vocabulary], &logits);
        let losses = floats(DType::F32, [tokens], &vec![9.0; tokens]);
        queue.cross_entropy_with_gradient(whole.view(), tensor(&labels).view(), losses.view(), 0.25);
        let [in_parts, _, gradient] = in_parts(queue, DType::F32, &logits, &labels, &[0, vocabulary]);
        vec![in_parts, values(losses.view()), gradient, values(whole.view())]
    };
    on_every_queue(run, |results| {
        assert_close("losses", &results[0], &results[1], 1e-7, 2.4e-7);
        assert_close("gradient", &results[2], &results[3], 1e-6, 0.0);
    });
}

#[test]
fn a_part_of_nothing_but_negative_infinity_has_no_share() {
    let nothing = f64::NEG_INFINITY;
    let logits = [1.0, 2.0, nothing, nothing, 3.0, 0.5, nothing, nothing];
    let run = |queue: &CpuQueue| in_parts(queue, DType::F32, &logits, &[0, 0], &[0, 2, 4]).to_vec();
    let (losses, _) = reference::cross_entropy(&logits, &[0, 0]);
    let gradient = reference::cross_entropy_backward(&logits, &[0, 0], 0.25);
    on_every_queue(run, |results| {
        assert_close("losses", &results[0], &losses, 1e-6, 5e-7);
        assert_close("gradient", &results[2], &gradient, 1e-6, 1e-8);
    });
}

#[test]
fn a_nan_in_one_part_spoils_the_token_in_all() {
    let logits = [f64::NEG_INFINITY, f64::NAN, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0];
    let run = |queue: &CpuQueue| in_parts(queue, DType::F32, &logits, &[2, 2], &[0, 2, 4]).to_vec();
    on_every_queue(run, |results| {
        assert!(results[0][0].is_nan() && results[2][..4].iter().all(|x| x.is_nan()), "{results:?}");
        assert!(results[0][1].is_finite() && results[2][4..].iter().all(|x| x.is_finite()), "{results:?}");
    });
}

#[test]
fn large_logits_neither_overflow_nor_lose_the_loss() {
    let logits = [1e4, 1e4, -1e4, 1e4, -1e4, -1e4, -3e4, -3e4, -3e4];
    check(DType::F32, &logits, &[0, 1, 2]);
    check(DType::F32, &[3e38, -3e38, 0.0], &[0]);
}

#[test]
fn logits_of_negative_infinity_have_no_share() {
    check(DType::F32, &[f64::NEG_INFINITY, 1.0, 2.0, f64::NEG_INFINITY], &[1]);
}

#[test]
fn masked_tokens_have_neither_loss_nor_gradient() {
    check(DType::F32, &random(1, 3 * 50), &[-100; 3]);
}

#[test]
fn chunks_of_tokens_give_the_bits_of_the_whole() {
    let (tokens, vocabulary) = (50, 2003);
    let logits = random_of(DType::BF16, 1, tokens * vocabulary);
    let labels: Vec<i32> = (0..tokens as i32).map(|t| if t % 7 == 3 { -100 } else { t * 40 }).collect();
    let run = |queue: &CpuQueue, chunk: usize| {
        let (logits, labels) = (floats(DType::BF16, [tokens, vocabulary], &logits), tensor(&labels));
        let losses = floats(DType::F32, [tokens], &vec![9.0; tokens]);
        for start in (0..tokens).step_by(chunk) {
            let rows = start..tokens.min(start + chunk);
            let [logits, labels, losses] =
                [&logits, &labels, &losses].map(|tensor| tensor.view().rows(rows.clone()));
            queue.cross_entropy_with_gradient(logits, labels, losses, 0.1);
        }
        [losses, logits].map(|tensor| values(tensor.view())).to_vec()
    };
    let both = |queue: &CpuQueue| [run(queue, tokens), run(queue, 16)].concat();
    on_every_queue(both, |results| assert!(results[..2] == results[2..], "chunks change bits"));
}

#[test]
fn logits_without_a_largest_one_give_no_number() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    for nowhere in [f64::INFINITY, f64::NEG_INFINITY] {
        let row = if nowhere > 0.0 { [1.0, nowhere, 2.0] } else { [nowhere; 3] };
        let logits = floats(DType::F32, [1, 3], &row);
        let losses = floats(DType::F32, [1], &[0.0]);
        queue.cross_entropy(logits.view(), tensor(&[0]).view(), losses.view());
        assert!(!values(losses.view())[0].is_finite(), "{row:?} give {:?}", values(losses.view()));
    }
}

/// Computes the losses of tokens with these labels and a vocabulary of three entries.
fn losses_of(labels: &[i32]) -> Vec<f64> {
    let tokens = labels.len();
    let logits = floats(DType::F32, [tokens, 3], &vec![0.0; 3 * tokens]);
    let losses = floats(DType::F32, [tokens], &vec![0.0; tokens]);
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    queue.cross_entropy(logits.view(), tensor(labels).view(), losses.view());
    values(losses.view())
}

#[test]
#[should_panic(expected = "token 1 has label 3, but the vocabulary has 3 entries (-100 = masked)")]
fn a_label_outside_the_vocabulary_is_named() {
    losses_of(&[0, 3]);
}

#[test]
#[should_panic(expected = "token 0 has label -1,")]
fn a_negative_label_that_is_not_the_mask_is_named() {
    losses_of(&[-1]);
}

#[test]
#[should_panic(expected = "token 1 has label -2, which no vocabulary has (-100 = masked)")]
fn a_negative_label_is_named_by_parts_as_well() {
    let logits = floats(DType::F32, [2, 3], &[0.0; 6]);
    let statistics = floats(DType::F32, [6], &[0.0; 6]);
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    queue.softmax_statistics(logits.view(), tensor(&[5, -2]).view(), 0, statistics.view());
}

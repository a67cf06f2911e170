//! Cross-entropy on logits: one row of the vocabulary at a time, in place in the backward.
//!
//! `loss = log Σ exp(logit) - logit[label]`; the sum is relative to the largest logit, so that it neither overflows
//! nor vanishes. With vocabulary-parallel logits, each rank computes its sum relative to its own largest logit, and
//! the sums are rescaled to the largest of all (Shoeybi et al., Megatron-LM, 2019, section 3). Ranks exchange three
//! numbers for each token instead of its logits.

use lockstep_plan::DType;

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, expect},
    simd::{Float, inlined, with_float},
    softmax::{
        MASKED, Smoothing, check_labels, check_shapes, differentiate, finite_reference, log_sum_exp_of,
        sum_of_exp,
    },
    vision,
};
use crate::{LossKernels, View};

impl LossKernels for CpuQueue {
    fn cross_entropy(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>) {
        let (tokens, vocabulary) = check_shapes(logits, labels, losses);
        check_disjoint(&[losses], &[logits, labels]);
        let labels = check_labels(labels, vocabulary);
        with_float!(logits.dtype(), T => {
            let (logits, losses) = (Operand::<T>::new(logits), Operand::<f32>::new(losses));
            self.for_each_row(tokens, vocabulary, inlined!(|token, isa| {
                // SAFETY: the logits are only read; each element of the losses belongs to one task.
                let (row, loss) = unsafe {
                    (
                        logits.read(token * vocabulary..(token + 1) * vocabulary),
                        losses.write(token..token + 1),
                    )
                };
                loss[0] = match usize::try_from(labels[token]) {
                    Ok(label) => log_sum_exp_of(isa, row) - row[label].load(),
                    Err(_) => 0.0,
                };
            }));
        });
    }

    fn cross_entropy_with_gradient(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>, seed: f32) {
        let (tokens, vocabulary) = check_shapes(logits, labels, losses);
        check_disjoint(&[logits, losses], &[labels]);
        let labels = check_labels(labels, vocabulary);
        with_float!(logits.dtype(), T => {
            let (logits, losses) = (Operand::<T>::new(logits), Operand::<f32>::new(losses));
            self.for_each_row(tokens, vocabulary, inlined!(|token, isa| {
                // SAFETY: each row of the logits and each element of the losses belongs to one task.
                let (row, loss) = unsafe {
                    (
                        logits.write(token * vocabulary..(token + 1) * vocabulary),
                        losses.write(token..token + 1),
                    )
                };
                let Ok(label) = usize::try_from(labels[token]) else {
                    loss[0] = 0.0;
                    row.fill(T::store(0.0));
                    return;
                };
                let total = log_sum_exp_of(isa, row);
                loss[0] = total - row[label].load();
                differentiate(isa, row, Some(label), total, Smoothing::NONE, seed);
            }));
        });
    }

    fn cross_entropy_smoothed(&self, logits: View<'_>, labels: View<'_>, smoothing: f32, losses: View<'_>) {
        vision::cross_entropy_smoothed(self, logits, labels, smoothing, losses, None);
    }

    fn cross_entropy_smoothed_with_gradient(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        smoothing: f32,
        losses: View<'_>,
        seed: f32,
    ) {
        vision::cross_entropy_smoothed(self, logits, labels, smoothing, losses, Some(seed));
    }

    fn squared_error(&self, x: View<'_>, target: View<'_>, losses: View<'_>) {
        vision::squared_error(self, x, target, losses, None);
    }

    fn squared_error_with_gradient(&self, x: View<'_>, target: View<'_>, losses: View<'_>, seed: f32) {
        vision::squared_error(self, x, target, losses, Some(seed));
    }

    fn correct(&self, logits: View<'_>, labels: View<'_>, correct: View<'_>) {
        vision::correct(self, logits, labels, correct);
    }

    fn softmax_statistics(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        statistics: View<'_>,
    ) {
        let (tokens, columns) = logits.shape().as_matrix();
        expect("labels of softmax_statistics", labels, DType::I32, tokens);
        expect("statistics of softmax_statistics", statistics, DType::F32, 3 * tokens);
        check_disjoint(&[statistics], &[logits, labels]);
        let labels = check_labels_of_parts(labels);
        with_float!(logits.dtype(), T => {
            let (logits, statistics) = (Operand::<T>::new(logits), Operand::<f32>::new(statistics));
            self.for_each_row(tokens, columns, inlined!(|token, isa| {
                // SAFETY: the logits are only read.
                let row = unsafe { logits.read(token * columns..(token + 1) * columns) };
                let (largest, total, at_label) = if labels[token] == MASKED {
                    (f32::NEG_INFINITY, 0.0, 0.0)
                } else {
                    let label = column_of(labels[token], first_column, columns);
                    let (largest, total) = sum_of_exp(isa, row);
                    (largest, total as f32, label.map_or(0.0, |label| row[label].load()))
                };
                for (which, value) in [largest, total, at_label].into_iter().enumerate() {
                    let place = which * labels.len() + token;
                    // SAFETY: the three statistics of a token belong to one task.
                    let statistic = unsafe { statistics.write(place..place + 1) };
                    statistic[0] = value;
                }
            }));
        });
    }

    fn merge_softmax(&self, parts: View<'_>, labels: View<'_>, log_sum_exp: View<'_>, losses: View<'_>) {
        let tokens = labels.elements();
        // Without tokens, any number of parts has no elements.
        let count = parts.elements() / (3 * tokens).max(1);
        expect("parts of merge_softmax", parts, DType::F32, count * 3 * tokens);
        expect("labels of merge_softmax", labels, DType::I32, tokens);
        expect("log_sum_exp of merge_softmax", log_sum_exp, DType::F32, tokens);
        expect("losses of merge_softmax", losses, DType::F32, tokens);
        check_disjoint(&[log_sum_exp, losses], &[parts, labels]);
        let labels = check_labels_of_parts(labels);
        let parts = Operand::<f32>::new(parts);
        let [log_sum_exp, losses] = [log_sum_exp, losses].map(Operand::<f32>::new);
        self.for_each_row(
            tokens,
            3 * count,
            inlined!(|token, _| {
                let statistic = |part: usize, which: usize| {
                    let place = (3 * part + which) * tokens + token;
                    // SAFETY: the parts are only read.
                    let statistic = unsafe { parts.read(place..place + 1) };
                    statistic[0]
                };
                let (total, loss) = if labels[token] == MASKED {
                    (f32::NEG_INFINITY, 0.0)
                } else {
                    let largest = (0..count).map(|part| statistic(part, 0)).fold(f32::NEG_INFINITY, f32::max);
                    let reference = f64::from(finite_reference(largest));
                    let (mut total, mut at_label) = (0.0, 0.0);
                    for part in 0..count {
                        let own = f64::from(finite_reference(statistic(part, 0)));
                        let share = f64::from(statistic(part, 1));
                        // A part without columns, or with negative infinity only, adds nothing; NaN stays NaN.
                        total += if share == 0.0 { 0.0 } else { share * libm::exp(own - reference) };
                        at_label += statistic(part, 2);
                    }
                    let total = (reference + libm::log(total)) as f32;
                    (total, total - at_label)
                };
                // SAFETY: each element belongs to one task.
                let places = unsafe { [&log_sum_exp, &losses].map(|output| output.write(token..token + 1)) };
                for (place, value) in places.into_iter().zip([total, loss]) {
                    place[0] = value;
                }
            }),
        );
    }

    fn softmax_gradient(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        log_sum_exp: View<'_>,
        seed: f32,
    ) {
        let (tokens, columns) = logits.shape().as_matrix();
        expect("labels of softmax_gradient", labels, DType::I32, tokens);
        expect("log_sum_exp of softmax_gradient", log_sum_exp, DType::F32, tokens);
        check_disjoint(&[logits], &[labels, log_sum_exp]);
        let labels = check_labels_of_parts(labels);
        // SAFETY: as just checked it overlaps no output, and kernels write only their outputs.
        let log_sum_exp = unsafe { log_sum_exp.slice::<f32>() };
        with_float!(logits.dtype(), T => {
            let logits = Operand::<T>::new(logits);
            self.for_each_row(tokens, columns, inlined!(|token, isa| {
                // SAFETY: each row of the logits belongs to one task.
                let row = unsafe { logits.write(token * columns..(token + 1) * columns) };
                if labels[token] == MASKED {
                    row.fill(T::store(0.0));
                } else {
                    let label = column_of(labels[token], first_column, columns);
                    differentiate(isa, row, label, log_sum_exp[token], Smoothing::NONE, seed);
                }
            }));
        });
    }
}

/// Returns the column of a label in the vocabulary shard that starts with `first_column`; `None` if it is in another
/// shard.
#[inline(always)]
fn column_of(label: i32, first_column: usize, columns: usize) -> Option<usize> {
    let column = usize::try_from(label).ok()?.checked_sub(first_column)?;
    (column < columns).then_some(column)
}

/// Returns the labels, after a check that each is masked or at least 0. A shard does not know the size of the
/// vocabulary.
fn check_labels_of_parts<'a>(labels: View<'a>) -> &'a [i32] {
    // SAFETY: as in `check_labels`.
    let labels = unsafe { labels.slice::<i32>() };
    let bad = |label: &i32| *label < 0 && *label != MASKED;
    if let Some((token, label)) = labels.iter().enumerate().find(|(_, label)| bad(label)) {
        panic!("token {token} has label {label}, which no vocabulary has ({MASKED} = masked)");
    }
    labels
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::{
        reference,
        testing::{
            ACTIVATIONS, assert_close, floats, on_every_queue, random, random_of, rounded, tensor, tolerance,
            values,
        },
    };
    use crate::{Arena, Tensor};

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
    fn in_parts(
        queue: &CpuQueue,
        dtype: DType,
        logits: &[f64],
        labels: &[i32],
        cuts: &[usize],
    ) -> [Vec<f64>; 3] {
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
            assert!(
                results[0][1].is_finite() && results[2][4..].iter().all(|x| x.is_finite()),
                "{results:?}"
            );
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

    #[test]
    #[should_panic(expected = "token 1 has label 3, but the vocabulary has 3 entries (-100 = masked)")]
    fn a_label_outside_the_vocabulary_is_named() {
        check_labels(tensor(&[0, 3]).view(), 3);
    }

    #[test]
    #[should_panic(expected = "token 0 has label -1,")]
    fn a_negative_label_that_is_not_the_mask_is_named() {
        check_labels(tensor(&[-1]).view(), 3);
    }

    #[test]
    #[should_panic(expected = "token 1 has label -2, which no vocabulary has (-100 = masked)")]
    fn a_negative_label_is_named_by_parts_as_well() {
        check_labels_of_parts(tensor(&[5, -2]).view());
    }
}

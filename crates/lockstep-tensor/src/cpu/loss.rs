//! Cross-entropy on logits: one row of the vocabulary at a time, in place in the backward.
//!
//! `loss = log Σ exp(logit) - logit[label]`; the sum is taken relative to the largest logit, so that it
//! neither overflows nor vanishes.

use lockstep_plan::DType;

use super::{
    CpuQueue, check_disjoint,
    simd::{Float, Isa, exp, map_block, max, sum, with_float},
    tasks::{BLOCK, Block, Operand, expect, rows_per_task},
};
use crate::View;

/// The label of a token that has no loss.
const MASKED: i32 = -100;

pub(super) fn cross_entropy(queue: &CpuQueue, logits: View<'_>, labels: View<'_>, losses: View<'_>) {
    let (tokens, vocabulary) = check_shapes(logits, labels, losses);
    check_disjoint(&[losses], &[logits, labels]);
    let labels = check_labels(labels, vocabulary);
    with_float!(logits.dtype(), T => {
        let (logits, losses) = (Operand::<T>::new(logits), Operand::<f32>::new(losses));
        queue.for_each_range(tokens, rows_per_task(tokens, vocabulary), #[inline(always)] |tokens, isa| {
            for token in tokens {
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
            }
        });
    });
}

pub(super) fn cross_entropy_with_gradient(
    queue: &CpuQueue,
    logits: View<'_>,
    labels: View<'_>,
    losses: View<'_>,
    seed: f32,
) {
    let (tokens, vocabulary) = check_shapes(logits, labels, losses);
    check_disjoint(&[logits, losses], &[labels]);
    let labels = check_labels(labels, vocabulary);
    with_float!(logits.dtype(), T => {
        let (logits, losses) = (Operand::<T>::new(logits), Operand::<f32>::new(losses));
        queue.for_each_range(tokens, rows_per_task(tokens, vocabulary), #[inline(always)] |tokens, isa| {
            let mut gradients = [Block::ZERO];
            for token in tokens {
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
                    continue;
                };
                let total = log_sum_exp_of(isa, row);
                loss[0] = total - row[label].load();
                // The label's element is rounded once, like the others.
                let at_label = seed * (exp(isa, -loss[0]) - 1.0);
                for part in row.chunks_mut(BLOCK) {
                    map_block([&*part], &mut gradients, part.len(), #[inline(always)] |[x]| [seed * exp(isa, x - total)]);
                    T::store_all(isa, &gradients[0].0[..part.len()], part);
                }
                row[label] = T::store(at_label);
            }
        });
    });
}

/// Rows and columns of the logits.
fn check_shapes(logits: View<'_>, labels: View<'_>, losses: View<'_>) -> (usize, usize) {
    let (tokens, vocabulary) = logits.shape().as_matrix();
    expect("labels of a cross-entropy", labels, DType::I32, tokens);
    expect("losses of a cross-entropy", losses, DType::F32, tokens);
    (tokens, vocabulary)
}

/// `log Σ exp(x)`.
#[inline(always)]
fn log_sum_exp_of<T: Float>(isa: Isa, row: &[T]) -> f32 {
    let largest = max(row);
    let mut total = 0.0_f64;
    for part in row.chunks(BLOCK) {
        let [part] = sum(
            [part],
            #[inline(always)]
            |[x]| [exp(isa, x - largest)],
        );
        total += f64::from(part);
    }
    (f64::from(largest) + libm::log(total)) as f32
}

/// The labels, each of which is masked or lies in the vocabulary.
fn check_labels<'a>(labels: View<'a>, vocabulary: usize) -> &'a [i32] {
    // SAFETY: the caller has checked that labels overlap no output, and kernels write nothing else.
    let labels = unsafe { labels.slice::<i32>() };
    let bad =
        |label: i32| label != MASKED && usize::try_from(label).map_or(true, |label| label >= vocabulary);
    if let Some((token, label)) = labels.iter().enumerate().find(|(_, label)| bad(**label)) {
        panic!(
            "token {token} has label {label}, but the vocabulary has {vocabulary} entries ({MASKED} = masked)"
        );
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
    use crate::{Arena, Kernels};

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
        // Logits and their log-sum-exp are f32: their differences carry the rounding of the larger.
        let largest = log_sum_exp.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
        on_every_queue(run, |results| {
            assert_close("losses", &results[0], &losses, 1e-6, 2e-7 * largest);
            assert_eq!(results[0], results[1], "losses without and with the gradient");
            // At a label that is nearly certain, p - 1 cancels and the rounding of p is left.
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
}

//! Cross-entropy on logits: one row of the vocabulary at a time, in place in the backward.
//!
//! `loss = log Σ exp(logit) - logit[label]`; the sum is taken relative to the largest logit, so that it
//! neither overflows nor vanishes.

use lockstep_plan::DType;

use super::{
    CpuQueue, check_disjoint,
    simd::{Float, exp, max, sum, with_float},
    tasks::{BLOCK, Block, Operand, expect, rows_per_task},
};
use crate::View;

/// The label of a token that has no loss.
const MASKED: i32 = -100;

pub(super) fn cross_entropy(
    queue: &CpuQueue,
    logits: View<'_>,
    labels: View<'_>,
    losses: View<'_>,
    log_sum_exp: View<'_>,
) {
    let (tokens, vocabulary) = logits.shape().as_matrix();
    expect("cross_entropy: labels", labels, DType::I32, tokens);
    expect("cross_entropy: losses", losses, DType::F32, tokens);
    expect("cross_entropy: log_sum_exp", log_sum_exp, DType::F32, tokens);
    check_disjoint(&[losses, log_sum_exp], &[logits, labels]);
    let labels = check_labels(labels, vocabulary);
    with_float!(logits.dtype(), T => {
        let logits = Operand::<T>::new(logits);
        let (losses, log_sum_exp) = (Operand::<f32>::new(losses), Operand::<f32>::new(log_sum_exp));
        queue.for_each_range(tokens, rows_per_task(tokens, vocabulary), #[inline(always)] |tokens| {
            for token in tokens {
                // SAFETY: the logits are only read; each element of the outputs belongs to one task.
                let (row, loss, total) = unsafe {
                    (
                        logits.read(token * vocabulary..(token + 1) * vocabulary),
                        losses.write(token..token + 1),
                        log_sum_exp.write(token..token + 1),
                    )
                };
                total[0] = log_sum_exp_of(row);
                loss[0] = match usize::try_from(labels[token]) {
                    Ok(label) => total[0] - row[label].load(),
                    Err(_) => 0.0,
                };
            }
        });
    });
}

pub(super) fn cross_entropy_backward(
    queue: &CpuQueue,
    logits: View<'_>,
    labels: View<'_>,
    log_sum_exp: View<'_>,
    seed: f32,
) {
    let (tokens, vocabulary) = logits.shape().as_matrix();
    expect("cross_entropy_backward: labels", labels, DType::I32, tokens);
    expect("cross_entropy_backward: log_sum_exp", log_sum_exp, DType::F32, tokens);
    check_disjoint(&[logits], &[labels, log_sum_exp]);
    let labels = check_labels(labels, vocabulary);
    with_float!(logits.dtype(), T => {
        let (logits, log_sum_exp) = (Operand::<T>::new(logits), Operand::<f32>::new(log_sum_exp));
        queue.for_each_range(tokens, rows_per_task(tokens, vocabulary), #[inline(always)] |tokens| {
            for token in tokens {
                // SAFETY: each row of the logits belongs to one task; the rest is only read.
                let (row, total) = unsafe {
                    (
                        logits.write(token * vocabulary..(token + 1) * vocabulary),
                        log_sum_exp.read(token..token + 1)[0],
                    )
                };
                let Ok(label) = usize::try_from(labels[token]) else {
                    row.fill(T::store(0.0));
                    continue;
                };
                // The label's element is rounded once, like the others.
                let at_label = seed * (exp(row[label].load() - total) - 1.0);
                for x in row.iter_mut() {
                    *x = T::store(seed * exp(x.load() - total));
                }
                row[label] = T::store(at_label);
            }
        });
    });
}

/// `log Σ exp(x)`.
#[inline(always)]
fn log_sum_exp_of<T: Float>(row: &[T]) -> f32 {
    let largest = max(row);
    let mut total = 0.0_f64;
    for part in row.chunks(BLOCK) {
        let mut block = Block::ZERO;
        for (e, x) in block.0.iter_mut().zip(part) {
            *e = exp(x.load() - largest);
        }
        let [part] = sum(
            [&block.0],
            #[inline(always)]
            |[e]| [e],
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

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

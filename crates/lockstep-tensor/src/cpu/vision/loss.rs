//! Losses and correct predictions of classifiers, and the losses of regression, row by row.
//!
//! With label smoothing ε over K classes (Szegedy et al., 2016, section 7) the target of a row is
//! `(1 - ε) onehot(label) + ε / K`, and so
//! `loss = log Σ exp(x) - (1 - ε) x[label] - ε / K Σ x`, as PyTorch defines it.

use lockstep_plan::DType;

use crate::{
    CpuQueue, View, Write,
    cpu::{
        operands::{Operand, check_disjoint, expect},
        simd::{BLOCK, Float, inlined, map_slices, sum, with_float},
        softmax::{Smoothing, check_labels, check_shapes, differentiate, log_sum_exp_of},
    },
};

/// Computes the losses; with a `seed` also overwrites the logits with their gradient.
pub(in crate::cpu) fn cross_entropy_smoothed(
    queue: &CpuQueue,
    logits: View<'_>,
    labels: View<'_>,
    smoothing: f32,
    losses: View<'_>,
    seed: Option<f32>,
) {
    assert!((0.0..=1.0).contains(&smoothing), "the label smoothing {smoothing} must lie in [0, 1]");
    let (rows, classes) = check_shapes(logits, labels, losses);
    check_disjoint(&[logits, losses], &[labels]);
    let labels = check_labels(labels, classes);
    let smoothing = Smoothing::new(smoothing, classes);
    with_float!(logits.dtype(), T => {
        let (logits, losses) = (Operand::<T>::new(logits), Operand::<f32>::new(losses));
        queue.for_each_row(rows, classes, inlined!(|row, isa| {
            let elements = row * classes..(row + 1) * classes;
            // SAFETY: each element of the losses belongs to one task.
            let loss = unsafe { losses.write(row..row + 1) };
            let Ok(label) = usize::try_from(labels[row]) else {
                loss[0] = 0.0;
                if seed.is_some() {
                    // SAFETY: as above.
                    unsafe { logits.write(elements) }.fill(T::store(0.0));
                }
                return;
            };
            // SAFETY: each row of the logits belongs to one task, and is not written while the slice lives.
            let x = unsafe { logits.read(elements.clone()) };
            let total = log_sum_exp_of(isa, x);
            // Differences from the log-sum-exp, because the logits may be much larger than the loss. Without smoothing
            // they are not summed: a logit of negative infinity would give 0 · infinity.
            let spread = if smoothing.part > 0.0 {
                let [differences] = sum([x], inlined!(|[x]| [total - x]));
                smoothing.of_class * differences
            } else {
                0.0
            };
            loss[0] = (1.0 - smoothing.part) * (total - x[label].load()) + spread;
            if let Some(seed) = seed {
                // SAFETY: as above; `x` is no longer used.
                let row = unsafe { logits.write(elements) };
                differentiate(isa, row, Some(label), total, smoothing, seed);
            }
        }));
    });
}

/// Writes 1 for each row whose largest logit is that of its label, else 0.
pub(in crate::cpu) fn correct(queue: &CpuQueue, logits: View<'_>, labels: View<'_>, correct: View<'_>) {
    let (rows, classes) = check_shapes(logits, labels, correct);
    check_disjoint(&[correct], &[logits, labels]);
    let labels = check_labels(labels, classes);
    with_float!(logits.dtype(), T => {
        let (logits, correct) = (Operand::<T>::new(logits), Operand::<f32>::new(correct));
        queue.for_each_row(rows, classes, inlined!(|row, _isa| {
            // SAFETY: each element of the output belongs to one task, and the logits are only read.
            let (out, x) =
                unsafe { (correct.write(row..row + 1), logits.read(row * classes..(row + 1) * classes)) };
            let is_correct = usize::try_from(labels[row]).is_ok_and(|label| {
                let of_label = x[label].load();
                // A comparison with a NaN is false.
                let (before, after) = (&x[..label], &x[label..]);
                before.iter().all(|x| x.load() < of_label) && after.iter().all(|x| x.load() <= of_label)
            });
            out[0] = f32::from(u8::from(is_correct));
        }));
    });
}

/// Computes the sum of squared differences of each row; with a `seed` also overwrites `x` with the gradient.
pub(in crate::cpu) fn squared_error(
    queue: &CpuQueue,
    x: View<'_>,
    target: View<'_>,
    losses: View<'_>,
    seed: Option<f32>,
) {
    let (rows, width) = x.shape().as_matrix();
    expect("squared_error: target", target, x.dtype(), x.elements());
    expect("squared_error: losses", losses, DType::F32, rows);
    check_disjoint(&[x, losses], &[target]);
    with_float!(x.dtype(), T => {
        let (x, target, losses) = (Operand::<T>::new(x), Operand::<T>::new(target), Operand::<f32>::new(losses));
        queue.for_each_row(rows, width, inlined!(|row, isa| {
            let elements = row * width..(row + 1) * width;
            // SAFETY: each element of the losses and each row belong to one task, and no row is written while the
            // slices live.
            let (loss, target) = unsafe { (losses.write(row..row + 1), target.read(elements.clone())) };
            let squared = inlined!(|[x, target]: [f32; 2]| [(x - target) * (x - target)]);
            // SAFETY: as above.
            let [total] = sum([unsafe { x.read(elements.clone()) }, target], squared);
            loss[0] = total;
            if let Some(seed) = seed {
                // SAFETY: as above.
                let row = unsafe { x.write(elements) };
                let factor = 2.0 * seed;
                for (row, target) in row.chunks_mut(BLOCK).zip(target.chunks(BLOCK)) {
                    let mut before = [T::store(0.0); BLOCK];
                    let before = &mut before[..row.len()];
                    before.copy_from_slice(row);
                    let gradient = inlined!(|[x, target]: [f32; 2]| factor * (x - target));
                    map_slices(isa, [&*before, target], row, Write::Overwrite, gradient);
                }
            }
        }));
    });
}

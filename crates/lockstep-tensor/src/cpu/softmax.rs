//! The log-sum-exp of a row of logits, and the checks of the operands of a cross-entropy.

use lockstep_plan::DType;

use super::{
    operands::expect,
    simd::{BLOCK, Block, Float, Isa, exp, inlined, map_block, max, sum},
};
use crate::View;

/// Label of a token without a loss (PyTorch's `ignore_index`).
pub(super) const MASKED: i32 = -100;

/// Checks the shapes, and returns the rows and columns of the logits.
pub(super) fn check_shapes(logits: View<'_>, labels: View<'_>, losses: View<'_>) -> (usize, usize) {
    let (tokens, vocabulary) = logits.shape().as_matrix();
    expect("labels of a cross-entropy", labels, DType::I32, tokens);
    expect("losses of a cross-entropy", losses, DType::F32, tokens);
    (tokens, vocabulary)
}

/// Label smoothing of a cross-entropy.
#[derive(Clone, Copy)]
pub(super) struct Smoothing {
    /// Part of the target that is spread over all classes, in [0, 1].
    pub(super) part: f32,
    /// The spread part divided by the number of classes.
    pub(super) of_class: f32,
}

impl Smoothing {
    pub(super) const NONE: Self = Self { part: 0.0, of_class: 0.0 };

    pub(super) fn new(part: f32, classes: usize) -> Self {
        Self { part, of_class: part / classes.max(1) as f32 }
    }
}

/// Overwrites a row of logits with `seed · (softmax(x) - (1 - part) onehot(label) - of_class)`. The label is `None` if
/// another shard has it.
#[inline(always)]
pub(super) fn differentiate<T: Float>(
    isa: Isa,
    row: &mut [T],
    label: Option<usize>,
    log_sum_exp: f32,
    Smoothing { part, of_class }: Smoothing,
    seed: f32,
) {
    // The label's element is rounded once, like the others.
    let at_label =
        label.map(|label| seed * (exp(isa, row[label].load() - log_sum_exp) - (1.0 - part) - of_class));
    let mut gradients = [Block::ZERO];
    for chunk in row.chunks_mut(BLOCK) {
        let gradient = inlined!(|[x]: [f32; 1]| [seed * (exp(isa, x - log_sum_exp) - of_class)]);
        map_block([&*chunk], &mut gradients, chunk.len(), gradient);
        T::store_all(isa, &gradients[0].0[..chunk.len()], chunk);
    }
    if let (Some(label), Some(at_label)) = (label, at_label) {
        row[label] = T::store(at_label);
    }
}

/// Computes `log Σ exp(x)`.
#[inline(always)]
pub(super) fn log_sum_exp_of<T: Float>(isa: Isa, row: &[T]) -> f32 {
    let (largest, total) = sum_of_exp(isa, row);
    (f64::from(largest) + libm::log(total)) as f32
}

/// Returns the largest element (negative infinity if there is none) and `Σ exp(x - largest)`.
#[inline(always)]
pub(super) fn sum_of_exp<T: Float>(isa: Isa, row: &[T]) -> (f32, f64) {
    let largest = max(row);
    let reference = finite_reference(largest);
    let mut total = 0.0_f64;
    for part in row.chunks(BLOCK) {
        let [part] = sum([part], inlined!(|[x]| [exp(isa, x - reference)]));
        total += f64::from(part);
    }
    (largest, total)
}

/// Returns the number that is subtracted from exponents: the largest element, or 0 if all are negative infinity, so
/// that their exponentials vanish.
#[inline(always)]
pub(super) fn finite_reference(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

/// Returns the labels, after a check that each is masked or lies in the vocabulary.
pub(super) fn check_labels<'a>(labels: View<'a>, vocabulary: usize) -> &'a [i32] {
    // SAFETY: the caller has checked that labels overlap no output, and kernels write only their outputs.
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

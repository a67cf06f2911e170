//! The merge of attentions to disjoint keys: outputs weighted by their shares of the softmax's denominator.
//!
//! With `lse` the log-sum-exp of a part, its weight is `e^lse / sum of e^lse over the parts`.

use crate::cpu::{
    CpuQueue,
    operands::Operand,
    simd::{Float, inlined},
};

/// Elements that are summed in registers.
const LANES: usize = 64;

/// Operands of the merge.
pub(super) struct Merge<'a, T> {
    /// `[parts, rows, heads, head_dim]`.
    pub(super) parts: &'a [f32],
    /// `[parts, heads, rows]`.
    pub(super) log_sum_exp: &'a [f32],
    /// `[rows, heads, head_dim]`.
    pub(super) out: Operand<'a, T>,
    pub(super) rows: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
}

impl<T: Float> Merge<'_, T> {
    pub(super) fn run(&self, queue: &CpuQueue) {
        let &Self { parts, rows, heads, head_dim, .. } = self;
        let width = heads * head_dim;
        queue.for_each_row(
            rows,
            width,
            inlined!(|row, _| {
                // SAFETY: a task has its rows alone.
                let out = unsafe { self.out.write(row * width..(row + 1) * width) };
                for (head, out) in out.chunks_exact_mut(head_dim).enumerate() {
                    let (largest, total) = self.denominator(row, head);
                    for (first, out) in (0..head_dim).step_by(LANES).zip(out.chunks_mut(LANES)) {
                        let mut sums = [0.0; LANES];
                        let sums = &mut sums[..out.len()];
                        for (part, part_lse) in self.of_parts(row, head).enumerate() {
                            let weight = weight(part_lse, largest, total);
                            let start = (part * rows + row) * width + head * head_dim + first;
                            for (sum, x) in sums.iter_mut().zip(&parts[start..]) {
                                *sum += weight * x;
                            }
                        }
                        for (out, sum) in out.iter_mut().zip(sums) {
                            *out = T::store(*sum);
                        }
                    }
                }
            }),
        );
    }

    /// Returns the log-sum-exp of each part.
    fn of_parts(&self, row: usize, head: usize) -> impl Iterator<Item = f32> {
        self.log_sum_exp.iter().copied().skip(head * self.rows + row).step_by(self.heads * self.rows)
    }

    /// Returns the largest log-sum-exp, and the sum of the exponentials of all relative to it.
    fn denominator(&self, row: usize, head: usize) -> (f32, f64) {
        let largest = self
            .of_parts(row, head)
            .fold(f32::NEG_INFINITY, |most, part| if part > most { part } else { most });
        let exponential = |part: f32| libm::exp(f64::from(part) - f64::from(largest));
        // Without any key, all weights are 0.
        let parts = self.of_parts(row, head).filter(|part| *part > f32::NEG_INFINITY);
        (largest, parts.map(exponential).sum())
    }
}

/// Returns the weight of a part; 0 if it saw no key.
fn weight(part: f32, largest: f32, total: f64) -> f32 {
    if part == f32::NEG_INFINITY {
        return 0.0;
    }
    (libm::exp(f64::from(part) - f64::from(largest)) / total) as f32
}

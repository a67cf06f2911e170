//! The gradient of attention sinks: `-sum over rows of exp(sink - lse) · rowsum(dO ∘ O)`.
//!
//! A sink is a column of scores with a value of zero, so its gradient is `P ∘ (0 - D)` of the backward. It needs no
//! keys.

use super::{
    backward::dot,
    geometry::{Geometry, Pair},
    variant::Sinks,
};
use crate::cpu::{
    CpuQueue,
    operands::Operand,
    simd::{Float, exp, inlined},
};

/// Operands of the gradient.
pub(super) struct SinksBackward<'a, T> {
    pub(super) geometry: Geometry<'a>,
    pub(super) sinks: Sinks<'a>,
    pub(super) out: &'a [T],
    pub(super) log_sum_exp: &'a [f32],
    pub(super) dout: &'a [T],
    pub(super) dsinks: Operand<'a, f32>,
}

impl<T: Float> SinksBackward<'_, T> {
    /// Accumulates the gradient of each head, one head to a task.
    pub(super) fn run(&self, queue: &CpuQueue) {
        let (geometry, group) = (&self.geometry, self.geometry.group);
        let heads = geometry.heads();
        queue.for_each_range(
            heads,
            1,
            inlined!(|range, isa| for head in range {
                let sink = self.sinks.logit(head);
                let mut gradient = 0.0;
                for sequence in 0..geometry.sequences() {
                    let pair = Pair { sequence, key_head: head / group };
                    let rows = 0..geometry.rows();
                    let vectors = geometry.query_vectors(pair, rows.clone());
                    let rows = vectors.zip(geometry.statistics(pair, rows));
                    for (vector, statistic) in rows.skip(head % group).step_by(group) {
                        let correction = dot(&self.dout[vector.clone()], &self.out[vector]);
                        let probability = exp(isa, sink - self.log_sum_exp[statistic]);
                        gradient -= f64::from(probability * correction);
                    }
                }
                // SAFETY: only this task writes to the head's gradient.
                let place = unsafe { self.dsinks.write(head..head + 1) };
                place[0] = (f64::from(place[0]) + gradient) as f32;
            }),
        );
    }
}

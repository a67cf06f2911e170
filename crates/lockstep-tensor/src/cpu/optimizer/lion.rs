//! Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): steps by the sign of an average of
//! gradients.

use super::{CpuQueue, Operands, update};
use crate::{Lion, cpu::simd::inlined};

pub(super) fn lion(queue: &CpuQueue, step: &Lion<'_>) {
    let [beta1, beta2] = step.betas;
    let keep = (1.0 - step.learning_rate * step.weight_decay) as f32;
    let (learning_rate, gradient_scale) = (step.learning_rate as f32, step.gradient_scale);
    let (one_minus_beta1, one_minus_beta2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
    let Lion { parameter, exp_avg, gradient, rounded, rounding, .. } = *step;
    let names = ["lion: parameter", "lion: exp_avg"];
    update(
        queue,
        &Operands { names, stored: [parameter, exp_avg], gradient, rounded, rounding },
        inlined!(|[parameter, exp_avg], gradient| {
            for ((p, m), g) in parameter.iter_mut().zip(exp_avg).zip(gradient) {
                let g = g * gradient_scale;
                let direction = *m + (g - *m) * one_minus_beta1;
                // The sign of the direction, 0 for 0.
                let sign = if direction == 0.0 { 0.0 } else { 1.0_f32.copysign(direction) };
                *p = *p * keep - learning_rate * sign;
                *m += (g - *m) * one_minus_beta2;
            }
        }),
    );
}

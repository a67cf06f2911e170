//! AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), rounded as PyTorch does.

use super::{CpuQueue, Operands, update};
use crate::{AdamW, cpu::simd::inlined};

pub(super) fn adamw(queue: &CpuQueue, step: &AdamW<'_>) {
    let rates = AdamWRates::new(step);
    let AdamW { parameter, exp_avg, exp_avg_sq, gradient, rounded, rounding, .. } = *step;
    let names = ["adamw: parameter", "adamw: exp_avg", "adamw: exp_avg_sq"];
    let stored = [parameter, exp_avg, exp_avg_sq];
    update(
        queue,
        &Operands { names, stored, gradient, rounded, rounding },
        inlined!(|[parameter, exp_avg, exp_avg_sq], gradient| rates
            .update(parameter, gradient, exp_avg, exp_avg_sq)),
    );
}

/// The scalars of one AdamW step, computed in f64 and rounded once, as PyTorch does.
#[derive(Clone, Copy)]
struct AdamWRates {
    gradient_scale: f32,
    keep: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    root_correction2: f32,
    eps: f32,
    step_size: f32,
}

impl AdamWRates {
    fn new(step: &AdamW<'_>) -> Self {
        assert!(step.step >= 1, "adamw: steps are counted from 1");
        let (learning_rate, [beta1, beta2]) = (step.learning_rate, step.betas);
        let correction1 = 1.0 - libm::pow(beta1, step.step as f64);
        let correction2 = 1.0 - libm::pow(beta2, step.step as f64);
        Self {
            gradient_scale: step.gradient_scale,
            keep: (1.0 - learning_rate * step.weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            root_correction2: libm::sqrt(correction2) as f32,
            eps: step.eps as f32,
            step_size: (learning_rate / correction1) as f32,
        }
    }

    #[inline(always)]
    fn update(self, parameter: &mut [f32], gradient: &[f32], exp_avg: &mut [f32], exp_avg_sq: &mut [f32]) {
        for (((p, g), m), v) in parameter.iter_mut().zip(gradient).zip(exp_avg).zip(exp_avg_sq) {
            let g = g * self.gradient_scale;
            *m += (g - *m) * self.one_minus_beta1;
            *v = *v * self.beta2 + g * g * self.one_minus_beta2;
            let denominator = v.sqrt() / self.root_correction2 + self.eps;
            *p = *p * self.keep - self.step_size * (*m / denominator);
        }
    }
}

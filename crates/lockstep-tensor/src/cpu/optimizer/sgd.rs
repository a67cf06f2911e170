//! SGD with momentum, as PyTorch's `SGD`.

use super::{CpuQueue, Operands, update};
use crate::{Sgd, cpu::simd::inlined};

pub(super) fn sgd(queue: &CpuQueue, step: &Sgd<'_>) {
    assert!(
        step.momentum_buffer.is_some() || step.momentum == 0.0,
        "sgd: momentum {} needs a momentum buffer",
        step.momentum
    );
    assert!(step.step >= 1, "sgd: steps are counted from 1");
    let rates = SgdRates {
        gradient_scale: step.gradient_scale,
        weight_decay: step.weight_decay,
        // The first step overwrites the momentum buffer.
        momentum: (step.step > 1).then_some(step.momentum),
        learning_rate: step.learning_rate,
    };
    let Sgd { parameter, gradient, rounded, rounding, .. } = *step;
    match step.momentum_buffer {
        Some(buffer) => {
            let names = ["sgd: parameter", "sgd: momentum buffer"];
            update(
                queue,
                &Operands { names, stored: [parameter, buffer], gradient, rounded, rounding },
                inlined!(
                    |[parameter, buffer], gradient| rates.update_with_momentum(parameter, gradient, buffer)
                ),
            );
        }
        None => update(
            queue,
            &Operands { names: ["sgd: parameter"], stored: [parameter], gradient, rounded, rounding },
            inlined!(|[parameter], gradient| rates.update(parameter, gradient)),
        ),
    }
}

/// The scalars of one SGD step; `momentum` is `None` in the first.
#[derive(Clone, Copy)]
struct SgdRates {
    gradient_scale: f32,
    weight_decay: f32,
    momentum: Option<f32>,
    learning_rate: f32,
}

impl SgdRates {
    #[inline(always)]
    fn update(self, parameter: &mut [f32], gradient: &[f32]) {
        for (p, g) in parameter.iter_mut().zip(gradient) {
            *p -= self.learning_rate * self.decayed(*g, *p);
        }
    }

    #[inline(always)]
    fn update_with_momentum(self, parameter: &mut [f32], gradient: &[f32], buffer: &mut [f32]) {
        for ((p, g), m) in parameter.iter_mut().zip(gradient).zip(buffer) {
            let g = self.decayed(*g, *p);
            *m = match self.momentum {
                Some(momentum) => momentum * *m + g,
                None => g,
            };
            *p -= self.learning_rate * *m;
        }
    }

    #[inline(always)]
    fn decayed(self, gradient: f32, parameter: f32) -> f32 {
        gradient * self.gradient_scale + self.weight_decay * parameter
    }
}

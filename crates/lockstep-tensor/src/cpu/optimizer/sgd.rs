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

#[cfg(test)]
mod tests {
    use lockstep_plan::DType;

    use super::*;
    use crate::cpu::testing::{assert_close, floats, on_every_queue, random_of, rounded, values};
    use crate::{Arena, OptimizerKernels, Rounding};

    const LENGTHS: [usize; 4] = [1, 255, 1027, 70_003];
    const STEPS: u64 = 5;
    const GRADIENT_SCALE: f32 = 0.75;

    fn gradient(step: u64, len: usize) -> Vec<f64> {
        random_of(DType::F32, 100 + step, len)
    }

    /// PyTorch's `_single_tensor_sgd` for one element, in f64.
    fn sgd_element(p: f64, momentum: f64, gradient: impl Fn(u64) -> f64) -> [f64; 2] {
        let (lr, decay) = (f64::from(0.1_f32), f64::from(0.01_f32));
        let (mut p, mut m) = (p, 0.0);
        for step in 1..=STEPS {
            let g = gradient(step) * f64::from(GRADIENT_SCALE) + decay * p;
            m = if step == 1 { g } else { momentum * m + g };
            p -= lr * m;
        }
        [p, m]
    }

    #[test]
    fn sgd_follows_pytorch_for_several_steps_with_and_without_momentum() {
        for (len, momentum) in LENGTHS.into_iter().flat_map(|len| [0.0_f32, 0.9].map(|m| (len, m))) {
            let weights = random_of(DType::F32, 1, len);
            let gradients: Vec<Vec<f64>> = (1..=STEPS).map(|step| gradient(step, len)).collect();
            let run = |queue: &CpuQueue| {
                let parameter = floats(DType::F32, [len], &weights);
                // The contents of the buffer before the first step must not matter.
                let buffer = floats(DType::F32, [len], &vec![f64::NAN; len]);
                let copy = floats(DType::BF16, [len], &vec![0.0; len]);
                for step in 1..=STEPS {
                    queue.sgd(&Sgd {
                        parameter: parameter.view(),
                        gradient: floats(DType::F32, [len], &gradients[step as usize - 1]).view(),
                        momentum_buffer: (momentum != 0.0).then_some(buffer.view()),
                        rounded: Some(copy.view()),
                        rounding: Rounding::Nearest,
                        learning_rate: 0.1,
                        momentum,
                        weight_decay: 0.01,
                        gradient_scale: GRADIENT_SCALE,
                        step,
                    });
                }
                let buffer = if momentum == 0.0 { vec![] } else { values(buffer.view()) };
                vec![values(parameter.view()), buffer, values(copy.view())]
            };
            let expected: Vec<[f64; 2]> = (0..len)
                .map(|i| sgd_element(weights[i], f64::from(momentum), |step| gradients[step as usize - 1][i]))
                .collect();
            let column = |k: usize| expected.iter().map(|row| row[k]).collect::<Vec<f64>>();
            on_every_queue(run, |results| {
                assert_close("parameter", &results[0], &column(0), 2e-6, 5e-7);
                if momentum != 0.0 {
                    assert_close("momentum", &results[1], &column(1), 2e-6, 1e-6);
                }
                assert_eq!(results[2], rounded(DType::BF16, &results[0]), "the bf16 copy");
            });
        }
    }

    #[test]
    #[should_panic(expected = "momentum 0.9 needs a momentum buffer")]
    fn momentum_without_a_buffer_is_refused() {
        let [p, g] = [(); 2].map(|()| floats(DType::F32, [1], &[1.0]));
        CpuQueue::new(1, &Arena::new()).unwrap().sgd(&Sgd {
            parameter: p.view(),
            gradient: g.view(),
            momentum_buffer: None,
            rounded: None,
            rounding: Rounding::Nearest,
            learning_rate: 0.1,
            momentum: 0.9,
            weight_decay: 0.0,
            gradient_scale: 1.0,
            step: 1,
        });
    }
}

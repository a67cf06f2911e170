//! Lion against the paper's formula in f64.

use lockstep_plan::DType;
use lockstep_tensor::{CpuQueue, Lion, OptimizerKernels, Rounding, Tensor};

use crate::testing::{assert_close, floats, on_every_queue, random_of, rounded, values};

const STEPS: u64 = 5;

/// The paper's algorithm 2 for one element, in f64.
fn reference(p: f64, gradient: impl Fn(u64) -> f64) -> [f64; 2] {
    let (lr, beta1, beta2, decay) = (1e-2, 0.9, 0.99, 0.1);
    let (mut p, mut m) = (p, 0.0);
    for step in 1..=STEPS {
        let g = gradient(step) * 0.75;
        let direction: f64 = beta1 * m + (1.0 - beta1) * g;
        p -= lr * (if direction == 0.0 { 0.0 } else { direction.signum() } + decay * p);
        m = beta2 * m + (1.0 - beta2) * g;
    }
    [p, m]
}

#[test]
fn lion_follows_its_paper_for_several_steps_and_rounds_its_copy() {
    for len in [1, 255, 1027, 70_003] {
        let weights = random_of(DType::F32, 1, len);
        let mut gradients: Vec<Vec<f64>> =
            (1..=STEPS).map(|step| random_of(DType::F32, 100 + step, len)).collect();
        // An element without a gradient only decays.
        gradients.iter_mut().for_each(|gradient| gradient[0] = 0.0);
        let run = |queue: &CpuQueue| {
            let [parameter, exp_avg] =
                [&weights, &vec![0.0; len]].map(|values| floats(DType::F32, [len], values));
            let copy = floats(DType::BF16, [len], &vec![0.0; len]);
            for gradient in &gradients {
                queue.lion(&Lion {
                    parameter: parameter.view(),
                    gradient: floats(DType::F32, [len], gradient).view(),
                    exp_avg: exp_avg.view(),
                    rounded: Some(copy.view()),
                    rounding: Rounding::Nearest,
                    learning_rate: 1e-2,
                    betas: [0.9, 0.99],
                    weight_decay: 0.1,
                    gradient_scale: 0.75,
                });
            }
            [&parameter, &exp_avg, &copy].map(Tensor::view).map(values).to_vec()
        };
        let expected: Vec<[f64; 2]> =
            (0..len).map(|i| reference(weights[i], |step| gradients[step as usize - 1][i])).collect();
        let column = |k: usize| expected.iter().map(|row| row[k]).collect::<Vec<f64>>();
        on_every_queue(run, |results| {
            assert_close("parameter", &results[0], &column(0), 2e-6, 2e-7);
            assert_close("exp_avg", &results[1], &column(1), 2e-6, 2e-7);
            assert_eq!(results[2], rounded(DType::BF16, &results[0]), "the bf16 copy");
        });
    }
}

//! SGD against PyTorch's formula in f64.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CpuQueue, OptimizerKernels, Rounding, Sgd};

use crate::testing::{assert_close, floats, on_every_queue, random_of, rounded, values};

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

//! AdamW against PyTorch's formula in f64.

use lockstep_plan::DType;
use lockstep_tensor::{AdamW, CpuQueue, OptimizerKernels, Rounding, Tensor};

use crate::testing::{adamw_step, assert_close, floats, on_every_queue, random_of, rounded, values};

const LENGTHS: [usize; 4] = [1, 255, 1027, 70_003];
const STEPS: u64 = 5;
const GRADIENT_SCALE: f32 = 0.75;

fn gradient(step: u64, len: usize) -> Vec<f64> {
    random_of(DType::F32, 100 + step, len)
}

/// PyTorch's `_single_tensor_adamw` for one element, in f64.
fn adamw_element(p: f64, gradient: impl Fn(u64) -> f64) -> [f64; 3] {
    let (lr, beta1, beta2, eps, decay) = (1e-2, 0.9, 0.95, 1e-8, 0.1);
    let (mut p, mut m, mut v) = (p, 0.0, 0.0);
    for step in 1..=STEPS {
        let g = gradient(step) * f64::from(GRADIENT_SCALE);
        p *= 1.0 - lr * decay;
        m = beta1 * m + (1.0 - beta1) * g;
        v = beta2 * v + (1.0 - beta2) * g * g;
        let correction = [beta1, beta2].map(|beta| 1.0 - beta.powi(step as i32));
        p -= lr / correction[0] * m / (v.sqrt() / correction[1].sqrt() + eps);
    }
    [p, m, v]
}

fn adamw_steps(queue: &CpuQueue, weights: &[f64], copy: &Tensor) -> Vec<Vec<f64>> {
    let len = weights.len();
    let parameter = floats(DType::F32, [len], weights);
    let [exp_avg, exp_avg_sq] = [(); 2].map(|()| floats(DType::F32, [len], &vec![0.0; len]));
    for step in 1..=STEPS {
        let gradient = floats(DType::F32, [len], &gradient(step, len));
        let scalars = adamw_step([&parameter, &gradient, &exp_avg, &exp_avg_sq].map(Tensor::view));
        queue.adamw(&AdamW { rounded: Some(copy.view()), gradient_scale: GRADIENT_SCALE, step, ..scalars });
    }
    [&parameter, &exp_avg, &exp_avg_sq, copy].map(|tensor| values(tensor.view())).to_vec()
}

#[test]
fn adamw_follows_pytorch_for_several_steps_and_rounds_its_copy() {
    for (len, dtype) in LENGTHS.into_iter().flat_map(|len| [DType::BF16, DType::F16].map(|d| (len, d))) {
        let weights = random_of(DType::F32, 1, len);
        let gradients: Vec<Vec<f64>> = (1..=STEPS).map(|step| gradient(step, len)).collect();
        let expected: Vec<[f64; 3]> =
            (0..len).map(|i| adamw_element(weights[i], |step| gradients[step as usize - 1][i])).collect();
        let column = |k: usize| expected.iter().map(|row| row[k]).collect::<Vec<f64>>();
        let run = |queue: &CpuQueue| adamw_steps(queue, &weights, &floats(dtype, [len], &vec![0.0; len]));
        on_every_queue(run, |results| {
            assert_close("parameter", &results[0], &column(0), 2e-6, 2e-7);
            assert_close("exp_avg", &results[1], &column(1), 1e-6, 2e-7);
            assert_close("exp_avg_sq", &results[2], &column(2), 2e-6, 0.0);
            assert_eq!(results[3], rounded(dtype, &results[0]), "the {dtype} copy");
        });
    }
}

#[test]
fn a_step_on_shards_gives_the_bits_of_a_step_on_the_whole() {
    let len = 70_003;
    let weights = random_of(DType::F32, 1, len);
    let run = |queue: &CpuQueue, cuts: &[usize]| {
        let [p, m, v] =
            [&weights, &gradient(2, len), &vec![0.25; len]].map(|values| floats(DType::F32, [len], values));
        let (g, copy) = (floats(DType::F32, [len], &gradient(1, len)), floats(DType::BF16, [len], &weights));
        for cut in cuts.windows(2) {
            let [p, g, m, v, copy] = [&p, &g, &m, &v, &copy].map(|tensor| tensor.view().rows(cut[0]..cut[1]));
            queue.adamw(&AdamW { rounded: Some(copy), step: 3, ..adamw_step([p, g, m, v]) });
        }
        [p, m, v, copy].map(|tensor| values(tensor.view())).to_vec()
    };
    // Shards that end inside vectors and blocks.
    let both = |queue: &CpuQueue| [run(queue, &[0, len]), run(queue, &[0, 0, 1, 1030, 66_001, len])].concat();
    on_every_queue(both, |results| assert!(results[..4] == results[4..], "shards change bits"));
}

#[test]
fn state_and_weights_in_bf16_are_those_of_f32_rounded_after_each_step() {
    let len = 1027;
    let weights = random_of(DType::BF16, 1, len);
    let run = |queue: &CpuQueue| {
        let stored =
            |dtype| [&weights, &vec![0.0; len], &vec![0.0; len]].map(|values| floats(dtype, [len], values));
        let (narrow, wide) = (stored(DType::BF16), stored(DType::F32));
        for step in 1..=STEPS {
            let gradient = floats(DType::F32, [len], &gradient(step, len));
            for [p, m, v] in [&narrow, &wide] {
                let views = [p, &gradient, m, v].map(Tensor::view);
                queue.adamw(&AdamW { step, ..adamw_step(views) });
            }
            for tensor in &wide {
                let nearest = rounded(DType::BF16, &values(tensor.view()));
                let nearest: Vec<f32> = nearest.iter().map(|x| *x as f32).collect();
                tensor.view().copy_from(&nearest);
            }
        }
        narrow.iter().chain(&wide).map(|tensor| values(tensor.view())).collect()
    };
    on_every_queue(run, |results| assert!(results[..3] == results[3..], "bf16 differs from rounded f32"));
}

#[test]
fn random_rounding_keeps_changes_that_rounding_to_the_nearest_loses() {
    let len = 4096;
    let queue = CpuQueue::new(2, &lockstep_tensor::Arena::new()).unwrap();
    let train = |rounding: fn(u64) -> Rounding| {
        let [p, m, v] = [1.0, 0.0, 0.0].map(|x| floats(DType::BF16, [len], &vec![x; len]));
        let gradient = floats(DType::F32, [len], &vec![1.0; len]);
        for step in 1..=100 {
            let views = [&p, &gradient, &m, &v].map(Tensor::view);
            let rates = AdamW { learning_rate: 1e-4, weight_decay: 0.0, ..adamw_step(views) };
            queue.adamw(&AdamW { step, rounding: rounding(step), ..rates });
        }
        values(p.view()).iter().sum::<f64>() / len as f64
    };
    // 100 steps of 1e-4 each. The spacing of bf16 below 1 is 2^-8, and 1e-4 is far less than half of that.
    let nearest = train(|_| Rounding::Nearest);
    let stochastic = train(|step| Rounding::Stochastic { key: 1, step, first_element: 0 });
    assert_eq!(nearest, 1.0);
    assert!((stochastic - 0.99).abs() < 5e-4, "{stochastic}");
}

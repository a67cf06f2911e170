//! The optimizers' steps, each one pass over its operands, and the sum of squares behind gradient clipping.

use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use lockstep_plan::{DType, exact::ExactSum};

use super::{
    CpuQueue, check_disjoint,
    elementwise::store,
    tasks::{BLOCK, Operand, elements_per_task, expect, is_parallel},
};
use crate::{AdamW, Sgd, View};

/// Elements whose squares are summed before they enter the exact sum; shards are cut at its multiples.
const NORM_BLOCK: usize = 1024;
/// Blocks of squares that make a task.
const NORM_BLOCKS_PER_TASK: usize = 64;

/// The copy of the weights that kernels read, if they read another precision.
enum Rounded<'a> {
    None,
    Bf16(Operand<'a, bf16>),
    F16(Operand<'a, f16>),
}

impl<'a> Rounded<'a> {
    /// # Panics
    /// If the view is not bf16 or f16, has another number of elements, or overlaps `others`.
    fn new(view: Option<View<'a>>, elements: usize, others: &[View<'_>]) -> Self {
        let Some(view) = view else { return Self::None };
        expect("optimizer: rounded weights", view, view.dtype(), elements);
        check_disjoint(&[view], others);
        match view.dtype() {
            DType::BF16 => Self::Bf16(Operand::new(view)),
            DType::F16 => Self::F16(Operand::new(view)),
            other => panic!("weights are rounded to bf16 or f16, not to {other}"),
        }
    }

    /// Rounds the weights that start at element `start`.
    ///
    /// # Safety
    /// Nothing else may touch these elements of the copy.
    #[inline(always)]
    unsafe fn store(&self, start: usize, weights: &[f32]) {
        let range = start..start + weights.len();
        match self {
            Self::None => {}
            // SAFETY: promised by the caller.
            Self::Bf16(copy) => store(weights, unsafe { copy.write(range) }),
            // SAFETY: promised by the caller.
            Self::F16(copy) => store(weights, unsafe { copy.write(range) }),
        }
    }
}

pub(super) fn adamw(queue: &CpuQueue, step: &AdamW<'_>) {
    let elements = step.parameter.elements();
    let operands = [step.parameter, step.gradient, step.exp_avg, step.exp_avg_sq];
    let names = ["adamw: parameter", "adamw: gradient", "adamw: exp_avg", "adamw: exp_avg_sq"];
    for (name, view) in names.into_iter().zip(operands) {
        expect(name, view, DType::F32, elements);
    }
    check_disjoint(&[step.parameter, step.exp_avg, step.exp_avg_sq], &[step.gradient]);
    let rounded = Rounded::new(step.rounded, elements, &operands);
    let [parameter, gradient, exp_avg, exp_avg_sq] = operands.map(Operand::<f32>::new);
    let rates = AdamWRates::new(step);
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        #[inline(always)]
        |range, _| {
            for start in range.clone().step_by(BLOCK) {
                let block = start..range.end.min(start + BLOCK);
                // SAFETY: the operands do not overlap, and each range of them belongs to one task.
                unsafe {
                    let parameter = parameter.write(block.clone());
                    rates.update(
                        parameter,
                        gradient.read(block.clone()),
                        exp_avg.write(block.clone()),
                        exp_avg_sq.write(block),
                    );
                    rounded.store(start, parameter);
                }
            }
        },
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

pub(super) fn sgd(queue: &CpuQueue, step: &Sgd<'_>) {
    let elements = step.parameter.elements();
    expect("sgd: parameter", step.parameter, DType::F32, elements);
    expect("sgd: gradient", step.gradient, DType::F32, elements);
    check_disjoint(&[step.parameter], &[step.gradient]);
    if let Some(buffer) = step.momentum_buffer {
        expect("sgd: momentum buffer", buffer, DType::F32, elements);
        check_disjoint(&[buffer], &[step.parameter, step.gradient]);
    }
    assert!(
        step.momentum_buffer.is_some() || step.momentum == 0.0,
        "sgd: momentum {} needs a momentum buffer",
        step.momentum
    );
    assert!(step.step >= 1, "sgd: steps are counted from 1");
    let others = [step.parameter, step.gradient, step.momentum_buffer.unwrap_or(step.parameter)];
    let rounded = Rounded::new(step.rounded, elements, &others);
    let (parameter, gradient) = (Operand::<f32>::new(step.parameter), Operand::<f32>::new(step.gradient));
    let momentum_buffer = step.momentum_buffer.map(Operand::<f32>::new);
    let rates = SgdRates {
        gradient_scale: step.gradient_scale,
        weight_decay: step.weight_decay,
        // The first step sets the buffer, whatever it held.
        momentum: (step.step > 1).then_some(step.momentum),
        learning_rate: step.learning_rate,
    };
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        #[inline(always)]
        |range, _| {
            for start in range.clone().step_by(BLOCK) {
                let block = start..range.end.min(start + BLOCK);
                // SAFETY: the operands do not overlap, and each range of them belongs to one task.
                unsafe {
                    let parameter = parameter.write(block.clone());
                    let gradient = gradient.read(block.clone());
                    match &momentum_buffer {
                        Some(buffer) => rates.update_with_momentum(parameter, gradient, buffer.write(block)),
                        None => rates.update(parameter, gradient),
                    }
                    rounded.store(start, parameter);
                }
            }
        },
    );
}

/// The scalars of one SGD step; no momentum in the first.
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

pub(super) fn sum_of_squares(queue: &CpuQueue, x: View<'_>) -> ExactSum {
    let elements = x.elements();
    expect("sum_of_squares: x", x, DType::F32, elements);
    // SAFETY: this kernel writes nothing.
    let x = unsafe { x.slice::<f32>() };
    let sum = |part: &[f32]| {
        queue.level.run(
            #[inline(always)]
            || {
                let mut sum = ExactSum::default();
                for block in part.chunks(NORM_BLOCK) {
                    sum.add(squares_of_block(block));
                }
                sum
            },
        )
    };
    // The sum is exact, so the order in which the parts are merged changes nothing.
    let total = Mutex::new(ExactSum::default());
    let part = if is_parallel(elements) { NORM_BLOCK * NORM_BLOCKS_PER_TASK } else { elements.max(1) };
    queue.pool.run(elements.div_ceil(part), |task| {
        let sum = sum(&x[task * part..elements.min((task + 1) * part)]);
        total.lock().unwrap_or_else(PoisonError::into_inner).merge(&sum);
    });
    total.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Each square is exact in f64. The order of the additions is part of the result's definition.
#[inline(always)]
fn squares_of_block(block: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut lanes = [0.0_f64; LANES];
    let mut chunks = block.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*x) * f64::from(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f64::from(*x) * f64::from(*x);
    }
    lanes.into_iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{adamw_step, assert_close, floats, on_every_queue, random_of, rounded, values};
    use crate::{Arena, Kernels, Tensor};

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
            queue.adamw(&AdamW {
                rounded: Some(copy.view()),
                gradient_scale: GRADIENT_SCALE,
                step,
                ..scalars
            });
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
            let [p, m, v] = [&weights, &gradient(2, len), &vec![0.25; len]]
                .map(|values| floats(DType::F32, [len], values));
            let (g, copy) =
                (floats(DType::F32, [len], &gradient(1, len)), floats(DType::BF16, [len], &weights));
            for cut in cuts.windows(2) {
                let [p, g, m, v, copy] =
                    [&p, &g, &m, &v, &copy].map(|tensor| tensor.view().rows(cut[0]..cut[1]));
                queue.adamw(&AdamW { rounded: Some(copy), step: 3, ..adamw_step([p, g, m, v]) });
            }
            [p, m, v, copy].map(|tensor| values(tensor.view())).to_vec()
        };
        // Cut where no vector and no block ends.
        let both =
            |queue: &CpuQueue| [run(queue, &[0, len]), run(queue, &[0, 0, 1, 1030, 66_001, len])].concat();
        on_every_queue(both, |results| assert!(results[..4] == results[4..], "shards change bits"));
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
                // What an unset buffer holds must not matter.
                let buffer = floats(DType::F32, [len], &vec![f64::NAN; len]);
                let copy = floats(DType::BF16, [len], &vec![0.0; len]);
                for step in 1..=STEPS {
                    queue.sgd(&Sgd {
                        parameter: parameter.view(),
                        gradient: floats(DType::F32, [len], &gradients[step as usize - 1]).view(),
                        momentum_buffer: (momentum != 0.0).then_some(buffer.view()),
                        rounded: Some(copy.view()),
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
    fn the_sum_of_squares_does_not_depend_on_how_shards_are_cut() {
        let len = 300_017;
        let x = random_of(DType::F32, 1, len);
        let expected: f64 = x.iter().map(|x| x * x).sum();
        let run = |queue: &CpuQueue| {
            let tensor = floats(DType::F32, [len], &x);
            let whole = queue.sum_of_squares(tensor.view()).wait();
            let mut cut = queue.sum_of_squares(tensor.view().rows(200 * NORM_BLOCK..len)).wait();
            cut.merge(&queue.sum_of_squares(tensor.view().rows(0..200 * NORM_BLOCK)).wait());
            assert_eq!(whole.value().to_bits(), cut.value().to_bits());
            vec![vec![whole.value()]]
        };
        on_every_queue(run, |results| assert_close("sum", &results[0], &[expected], 1e-12, 0.0));
    }

    #[test]
    fn the_sum_of_squares_is_nan_if_any_element_is_not_finite() {
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        for bad in [f64::NAN, f64::INFINITY] {
            let mut x = vec![1.0; 2000];
            x[1999] = bad;
            assert!(queue.sum_of_squares(floats(DType::F32, [2000], &x).view()).wait().value().is_nan());
        }
        // Squares that no f32 can hold are no reason for NaN.
        let large = queue.sum_of_squares(floats(DType::F32, [2], &[3e38, 3e38]).view()).wait().value();
        assert!((large / 1.8e77 - 1.0).abs() < 1e-6, "{large}");
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
            learning_rate: 0.1,
            momentum: 0.9,
            weight_decay: 0.0,
            gradient_scale: 1.0,
            step: 1,
        });
    }
}

//! The optimizers' steps, each one pass over its operands, and the sum of squares behind gradient clipping.

use half::{bf16, f16};
use lockstep_plan::{DType, exact::ExactSum};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

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
    for (name, view) in ["parameter", "gradient", "exp_avg", "exp_avg_sq"].into_iter().zip(operands) {
        expect(&format!("adamw: {name}"), view, DType::F32, elements);
    }
    check_disjoint(&[step.parameter, step.exp_avg, step.exp_avg_sq], &[step.gradient]);
    let rounded = Rounded::new(step.rounded, elements, &operands);
    let [parameter, gradient, exp_avg, exp_avg_sq] = operands.map(Operand::<f32>::new);
    let rates = AdamWRates::new(step);
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        #[inline(always)]
        |range| {
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
        let [beta1, beta2] = step.betas.map(f64::from);
        let learning_rate = f64::from(step.learning_rate);
        let correction1 = 1.0 - libm::pow(beta1, step.step as f64);
        let correction2 = 1.0 - libm::pow(beta2, step.step as f64);
        Self {
            gradient_scale: step.gradient_scale,
            keep: (1.0 - learning_rate * f64::from(step.weight_decay)) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: step.betas[1],
            one_minus_beta2: (1.0 - beta2) as f32,
            root_correction2: libm::sqrt(correction2) as f32,
            eps: step.eps,
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
        |range| {
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
    let merge = |mut a: ExactSum, b: ExactSum| {
        a.merge(&b);
        a
    };
    // The sum is exact, so the order in which the parts are merged changes nothing.
    if is_parallel(elements) && queue.threads() > 1 {
        let part = NORM_BLOCK * NORM_BLOCKS_PER_TASK;
        let tasks = elements.div_ceil(part);
        queue.pool.install(|| {
            (0..tasks)
                .into_par_iter()
                .map(|task| sum(&x[task * part..elements.min((task + 1) * part)]))
                .reduce(ExactSum::default, merge)
        })
    } else {
        sum(x)
    }
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

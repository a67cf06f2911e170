//! Kernels of the optimizer step: fused updates, and the norm of the gradients.

use lockstep_plan::{DType, exact::ExactSum};

use crate::{Pending, View};

/// Rounding of the weights and optimizer state that are stored in bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest number, ties to even.
    Nearest,
    /// Stochastic rounding: up or down at random, so that the expected value is exact and small changes add up. The
    /// random bits are a function of these numbers and the element.
    Stochastic {
        /// Key derived from the seed and the parameter's name; each operand derives a key of its own from it.
        key: u64,
        /// Number of the optimizer step.
        step: u64,
        /// Index of the first element within its parameter; a multiple of 8.
        first_element: u64,
    },
}

/// One AdamW step (Loshchilov and Hutter, 2019) on one flat range. The gradient is f32; weights and moments are f32
/// or bf16.
#[derive(Debug, Clone, Copy)]
pub struct AdamW<'a> {
    /// Weights, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient in f32.
    pub gradient: View<'a>,
    /// First moment (`exp_avg` in PyTorch).
    pub exp_avg: View<'a>,
    /// Second moment (`exp_avg_sq` in PyTorch).
    pub exp_avg_sq: View<'a>,
    /// Output for the rounded weights, if kernels read another precision (bf16 or f16).
    pub rounded: Option<View<'a>>,
    /// Rounding of bf16 operands.
    pub rounding: Rounding,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
    /// Number of this step, from 1, for the bias corrections.
    pub step: u64,
}

/// One step of gradient descent with momentum, as PyTorch's `SGD`: `g += decay·p; m = momentum·m + g; p -= lr·m`.
#[derive(Debug, Clone, Copy)]
pub struct Sgd<'a> {
    /// Weights, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient in f32.
    pub gradient: View<'a>,
    /// Momentum buffer; `None` if the momentum is zero.
    pub momentum_buffer: Option<View<'a>>,
    /// Output for the rounded weights, if kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// Rounding of bf16 operands.
    pub rounding: Rounding,
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Factor on the old momentum buffer.
    pub momentum: f32,
    /// L2 decay, added to the gradient.
    pub weight_decay: f32,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
    /// Number of this step, from 1: the first one sets the momentum buffer to the gradient.
    pub step: u64,
}

/// One step of Lion (Chen et al., 2023) on one flat range:
/// `p -= lr·(sign(β₁·m + (1-β₁)·g) + decay·p); m = β₂·m + (1-β₂)·g`. The gradient is f32; weights and average are f32
/// or bf16.
#[derive(Debug, Clone, Copy)]
pub struct Lion<'a> {
    /// Weights, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient in f32.
    pub gradient: View<'a>,
    /// Exponential moving average of the gradients.
    pub exp_avg: View<'a>,
    /// Output for the rounded weights, if kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// Rounding of bf16 operands.
    pub rounding: Rounding,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Factors `β₁`, `β₂` on the old average: in the update direction, and in the new average.
    pub betas: [f64; 2],
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
}

/// One step of Muon (Jordan et al., 2024) on a whole matrix. The gradient is f32; weights and momentum are f32 or
/// bf16.
#[derive(Debug, Clone, Copy)]
pub struct Muon<'a> {
    /// Weights `[rows, columns]`, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient in f32.
    pub gradient: View<'a>,
    /// Momentum buffer: moving average of the gradients.
    pub momentum_buffer: View<'a>,
    /// Output for the rounded weights, if kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// Rounding of bf16 operands.
    pub rounding: Rounding,
    /// Type of the GEMMs of the orthogonalization (Newton-Schulz): f32 or bf16.
    pub dtype: DType,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Factor on the old average; the Nesterov form is used.
    pub momentum: f32,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
    /// Factor on the learning rate that follows from the matrix's shape.
    pub scale: f32,
}

/// Optimizer steps, and the sum of squares for gradient clipping. Part of [`Kernels`](crate::Kernels).
pub trait OptimizerKernels {
    /// Runs one AdamW step.
    fn adamw(&self, step: &AdamW<'_>);

    /// Runs one SGD step.
    fn sgd(&self, step: &Sgd<'_>);

    /// Runs one Lion step.
    fn lion(&self, step: &Lion<'_>);

    /// Runs one Muon step.
    fn muon(&self, step: &Muon<'_>);

    /// Returns the sum of squares of an f32 view: f64 sums of blocks of 1,024 elements, added exactly. NaN or
    /// infinite elements make it NaN.
    fn sum_of_squares(&self, x: View<'_>) -> Pending<'static, ExactSum>;
}

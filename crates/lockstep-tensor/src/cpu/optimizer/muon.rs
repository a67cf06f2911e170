//! Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024): orthogonalized momentum,
//! whose singular values are all about one.
//!
//! The update direction of a matrix is `U·Vᵀ` of its (Nesterov) momentum `U·S·Vᵀ`, approximated by five rounds of a
//! quintic Newton-Schulz iteration, `X ← (a·I + b·A + c·A²)·X` with `A = X·Xᵀ`, which needs GEMMs only. The GEMMs run
//! in the type of the weights that kernels read, with `A` over the shorter side of the matrix.

use lockstep_plan::{DType, MemoryCategory};

use super::{
    super::{operands::Operand, simd::inlined, tasks::elements_per_task},
    CpuQueue, Operands,
    norm::sum_of_squares,
    update,
};
use crate::{Buffer, CopyKernels, Gemm, GemmKernels, GemmLayout, Muon, View, Write};

/// The coefficients (a, b, c), chosen for the steepest slope at zero.
const QUINTIC: [f32; 3] = [3.4445, -4.7750, 2.0315];
const ROUNDS: usize = 5;
/// Smallest norm that a direction is divided by.
const EPS: f64 = 1e-7;

pub(super) fn muon(queue: &CpuQueue, step: &Muon<'_>) {
    let shape = step.parameter.shape();
    let &[rows, columns] = shape.dims() else { panic!("muon: a parameter of shape {shape:?} is no matrix") };
    let scratch = Scratch::new(queue, step.dtype, [rows, columns]);
    let direction = scratch.direction();
    momentum(queue, step, direction);
    let norm = sum_of_squares(queue, direction).value().sqrt().max(EPS);
    orthogonalize(queue, &scratch, (1.0 / norm) as f32);
    let keep = (1.0 - step.learning_rate * step.weight_decay) as f32;
    let learning_rate = (step.learning_rate * f64::from(step.scale)) as f32;
    let Muon { parameter, rounded, rounding, .. } = *step;
    update(
        queue,
        &Operands { names: ["muon: parameter"], stored: [parameter], gradient: direction, rounded, rounding },
        inlined!(|[parameter], direction| {
            for (p, d) in parameter.iter_mut().zip(direction) {
                *p = *p * keep - learning_rate * d;
            }
        }),
    );
}

/// Computes `m ← m + (g - m)·(1 - momentum)`, and the direction `g + (m - g)·momentum`.
fn momentum(queue: &CpuQueue, step: &Muon<'_>, direction: View<'_>) {
    let (gradient_scale, momentum) = (step.gradient_scale, step.momentum);
    let one_minus_momentum = (1.0 - f64::from(momentum)) as f32;
    let Muon { momentum_buffer, gradient, rounding, .. } = *step;
    let names = ["muon: direction", "muon: momentum buffer"];
    update(
        queue,
        &Operands { names, stored: [direction, momentum_buffer], gradient, rounded: None, rounding },
        inlined!(|[direction, buffer], gradient| {
            for ((d, m), g) in direction.iter_mut().zip(buffer).zip(gradient) {
                let g = g * gradient_scale;
                *m += (g - *m) * one_minus_momentum;
                *d = g + (*m - g) * momentum;
            }
        }),
    );
}

/// Returns the floating-point operations of the GEMMs in one step on a matrix of this shape.
pub fn muon_flops(shape: [usize; 2]) -> u64 {
    let [short, long] = [shape[0].min(shape[1]), shape[0].max(shape[1])].map(|side| side as u64);
    ROUNDS as u64 * (4 * short * short * long + 2 * short * short * short)
}

/// Replaces the direction, times `factor`, by approximately the nearest matrix with equal singular values.
fn orthogonalize(queue: &CpuQueue, scratch: &Scratch, factor: f32) {
    let direction = scratch.direction();
    scale(queue, direction, factor);
    let [mut x, mut next] = [0, 1].map(|i| scratch.iterate(i));
    queue.cast(direction, x);
    let multiply = |layout, a, b, c: View<'_>| {
        let product = Gemm { layout, a, b, c, bias: None, write: Write::Overwrite };
        queue.gemm(product);
    };
    let [rows, columns] = scratch.shape;
    let (gram, square, operand) = (scratch.square(0), scratch.square(1), scratch.operand());
    for _ in 0..ROUNDS {
        // `A = X·Xᵀ` or `Xᵀ·X`, over the shorter side.
        let layout = if rows <= columns { GemmLayout::NT } else { GemmLayout::TN };
        multiply(layout, x, x, gram);
        queue.cast(gram, operand);
        multiply(GemmLayout::NN, operand, operand, square);
        quintic(queue, gram, square);
        queue.cast(gram, operand);
        if rows <= columns {
            multiply(GemmLayout::NN, operand, x, next);
        } else {
            multiply(GemmLayout::NN, x, operand, next);
        }
        std::mem::swap(&mut x, &mut next);
    }
    queue.cast(x, direction);
}

/// Computes `gram ← a·I + b·gram + c·square`.
fn quintic(queue: &CpuQueue, gram: View<'_>, square: View<'_>) {
    let (side, _) = gram.shape().as_matrix();
    let [a, b, c] = QUINTIC;
    let (gram, square) = (Operand::<f32>::new(gram), Operand::<f32>::new(square));
    let rows_per_task = elements_per_task(side * side).div_ceil(side);
    queue.for_each_range(
        side,
        rows_per_task,
        inlined!(|rows, _| {
            for row in rows {
                let line = row * side..(row + 1) * side;
                // SAFETY: each row belongs to one task, and the operands are two buffers.
                let (gram, square) = unsafe { (gram.write(line.clone()), square.read(line)) };
                for (g, s) in gram.iter_mut().zip(square) {
                    *g = b * *g + c * s;
                }
                gram[row] += a;
            }
        }),
    );
}

fn scale(queue: &CpuQueue, x: View<'_>, factor: f32) {
    let elements = x.elements();
    let x = Operand::<f32>::new(x);
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        inlined!(|range, _| {
            // SAFETY: each range belongs to one task.
            unsafe { x.write(range) }.iter_mut().for_each(|x| *x *= factor);
        }),
    );
}

/// Memory for the iteration of one matrix, in one buffer.
struct Scratch {
    buffer: Buffer,
    dtype: DType,
    shape: [usize; 2],
}

impl Scratch {
    fn new(queue: &CpuQueue, dtype: DType, shape: [usize; 2]) -> Self {
        let side = shape[0].min(shape[1]);
        let (matrix, square) = (shape[0] * shape[1], side * side);
        let wide = aligned(matrix * size_of::<f32>()) + 2 * aligned(square * size_of::<f32>());
        let narrow = 2 * aligned(matrix * dtype.size_bytes()) + aligned(square * dtype.size_bytes());
        let buffer = queue
            .arena
            .allocate(wide + narrow, MemoryCategory::Workspace)
            .unwrap_or_else(|error| panic!("no memory for an update of a {shape:?} matrix by muon: {error}"));
        Self { buffer, dtype, shape }
    }

    /// Returns the f32 matrix that holds the momentum at first and the orthogonalized direction at the end.
    fn direction(&self) -> View<'_> {
        self.buffer.view(DType::F32, 0, self.shape)
    }

    /// Returns one of two square f32 matrices of the shorter side.
    fn square(&self, index: usize) -> View<'_> {
        let start = aligned(self.elements() * size_of::<f32>());
        let each = aligned(self.side() * self.side() * size_of::<f32>());
        self.buffer.view(DType::F32, start + index * each, [self.side(); 2])
    }

    /// Returns one of two iterates: a round reads one and writes the other.
    fn iterate(&self, index: usize) -> View<'_> {
        self.buffer.view(self.dtype, self.iterates_at() + index * self.iterate_bytes(), self.shape)
    }

    /// Returns the square matrix that a round multiplies with.
    fn operand(&self) -> View<'_> {
        let start = self.iterates_at() + 2 * self.iterate_bytes();
        self.buffer.view(self.dtype, start, [self.side(); 2])
    }

    fn iterates_at(&self) -> usize {
        let square = self.side() * self.side() * size_of::<f32>();
        aligned(self.elements() * size_of::<f32>()) + 2 * aligned(square)
    }

    fn iterate_bytes(&self) -> usize {
        aligned(self.elements() * self.dtype.size_bytes())
    }

    fn elements(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    fn side(&self) -> usize {
        self.shape[0].min(self.shape[1])
    }
}

/// Rounds a number of bytes up to whole cache lines.
fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}

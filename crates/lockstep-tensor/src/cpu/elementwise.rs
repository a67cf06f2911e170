//! Kernels that work element by element, and the sum over rows.
//!
//! All of the former are one loop, [`map`]: blocks of the operands are converted to f32 on the stack, a
//! function is applied, and the results are rounded and stored. Inputs are read before outputs are written,
//! so an output may be one of the inputs, and the loop over the stack buffers vectorizes in either case.

use super::{
    CpuQueue, check_disjoint, check_elementwise,
    simd::{Float, normal_distribution, sigmoid, with_float},
    tasks::{BLOCK, Block, Operand, elements_per_task, expect},
};
use crate::{Gelu, View};

use lockstep_plan::DType;

/// `outputs[m][i] = f(inputs[0][i], inputs[1][i], ...)[m]`.
///
/// The caller has checked that all views have the same number of elements, and that an output overlaps
/// another operand only if it is an input in place. `f` must be `#[inline(always)]`.
#[inline(always)]
fn map<T: Float, const N: usize, const M: usize>(
    queue: &CpuQueue,
    inputs: [View<'_>; N],
    outputs: [View<'_>; M],
    f: impl Fn([f32; N]) -> [f32; M] + Sync,
) {
    let elements = outputs[0].elements();
    let inputs = inputs.map(Operand::<T>::new);
    let outputs = outputs.map(Operand::<T>::new);
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        #[inline(always)]
        |range| {
            let mut x = [Block::ZERO; N];
            let mut y = [Block::ZERO; M];
            for start in range.clone().step_by(BLOCK) {
                let n = BLOCK.min(range.end - start);
                for (input, block) in inputs.iter().zip(&mut x) {
                    // SAFETY: this task alone writes this range of any operand, and not while the slice lives.
                    load(unsafe { input.read(start..start + n) }, &mut block.0[..n]);
                }
                for i in 0..n {
                    let mut arguments = [0.0; N];
                    for (argument, block) in arguments.iter_mut().zip(&x) {
                        *argument = block.0[i];
                    }
                    let results = f(arguments);
                    for (block, result) in y.iter_mut().zip(results) {
                        block.0[i] = result;
                    }
                }
                for (output, block) in outputs.iter().zip(&y) {
                    // SAFETY: this task alone touches this range, and no slice of it lives.
                    store(&block.0[..n], unsafe { output.write(start..start + n) });
                }
            }
        },
    );
}

#[inline(always)]
pub(super) fn load<T: Float>(from: &[T], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.load();
    }
}

#[inline(always)]
pub(super) fn store<T: Float>(from: &[f32], to: &mut [T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = T::store(*from);
    }
}

pub(super) fn swiglu(queue: &CpuQueue, gate: View<'_>, up: View<'_>, y: View<'_>) {
    expect("swiglu: up", up, gate.dtype(), gate.elements());
    expect("swiglu: y", y, gate.dtype(), gate.elements());
    check_disjoint(&[y], &[gate, up]);
    with_float!(gate.dtype(), T => map::<T, 2, 1>(
        queue, [gate, up], [y], #[inline(always)] |[gate, up]| [gate * sigmoid(gate) * up],
    ));
}

pub(super) fn swiglu_backward(
    queue: &CpuQueue,
    dy: View<'_>,
    gate: View<'_>,
    up: View<'_>,
    dgate: View<'_>,
    dup: View<'_>,
) {
    for (name, view) in [("gate", gate), ("up", up), ("dgate", dgate), ("dup", dup)] {
        expect(&format!("swiglu_backward: {name}"), view, dy.dtype(), dy.elements());
    }
    check_disjoint(&[dgate, dup], &[dy, gate, up]);
    with_float!(dy.dtype(), T => map::<T, 3, 2>(
        queue, [dy, gate, up], [dgate, dup], #[inline(always)] |[dy, gate, up]| {
            let s = sigmoid(gate);
            // d(g s(g))/dg = s + g s (1 - s)
            [dy * up * (s + gate * s * (1.0 - s)), dy * gate * s]
        },
    ));
}

pub(super) fn gelu(queue: &CpuQueue, kind: Gelu, x: View<'_>, y: View<'_>) {
    expect("gelu: y", y, x.dtype(), x.elements());
    check_disjoint(&[y], &[x]);
    with_float!(x.dtype(), T => match kind {
        Gelu::Exact => map::<T, 1, 1>(queue, [x], [y], #[inline(always)] |[x]| [x * normal_distribution(x).0]),
        Gelu::Tanh => map::<T, 1, 1>(queue, [x], [y], #[inline(always)] |[x]| [x * tanh_gate(x).0]),
    });
}

pub(super) fn gelu_backward(queue: &CpuQueue, kind: Gelu, dy: View<'_>, x: View<'_>, dx: View<'_>) {
    expect("gelu_backward: x", x, dy.dtype(), dy.elements());
    expect("gelu_backward: dx", dx, dy.dtype(), dy.elements());
    check_disjoint(&[dx], &[x]);
    check_elementwise(dx, &[dy]);
    with_float!(x.dtype(), T => match kind {
        Gelu::Exact => map::<T, 2, 1>(queue, [dy, x], [dx], #[inline(always)] |[dy, x]| {
            let (probability, density) = normal_distribution(x);
            [dy * (probability + x * density)]
        }),
        Gelu::Tanh => map::<T, 2, 1>(queue, [dy, x], [dx], #[inline(always)] |[dy, x]| {
            let (s, slope) = tanh_gate(x);
            [dy * (s + x * slope)]
        }),
    });
}

/// `(1 + tanh u) / 2` and its derivative by `x`, for `u = √(2/π) (x + 0.044715 x³)`: the sigmoid of `2u`.
#[inline(always)]
fn tanh_gate(x: f32) -> (f32, f32) {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_1;
    const CUBIC: f32 = 0.044_715;
    let s = sigmoid(TWO_SQRT_2_OVER_PI * (x + CUBIC * x * x * x));
    // Where s(1-s) is zero the other factor may be infinite, but only for |x| > 1e19.
    (s, s * (1.0 - s) * TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x))
}

pub(super) fn add(queue: &CpuQueue, a: View<'_>, b: View<'_>, y: View<'_>) {
    expect("add: b", b, a.dtype(), a.elements());
    expect("add: y", y, a.dtype(), a.elements());
    check_elementwise(y, &[a, b]);
    with_float!(a.dtype(), T => map::<T, 2, 1>(queue, [a, b], [y], #[inline(always)] |[a, b]| [a + b]));
}

pub(super) fn sum_rows(queue: &CpuQueue, x: View<'_>, out: View<'_>) {
    let (rows, width) = x.shape().as_matrix();
    expect("sum_rows: out", out, DType::F32, width);
    check_disjoint(&[out], &[x]);
    with_float!(x.dtype(), T => {
        let x = Operand::<T>::new(x);
        queue.add_sum_over_rows(rows, [out], #[inline(always)] |rows, [sum]| {
            for row in rows {
                // SAFETY: `x` is only read, and overlaps no output.
                let x = unsafe { x.read(row * width..(row + 1) * width) };
                for (sum, x) in sum.iter_mut().zip(x) {
                    *sum += x.load();
                }
            }
        });
    });
}

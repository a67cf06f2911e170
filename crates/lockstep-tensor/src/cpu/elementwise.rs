//! Elementwise kernels, and the sum over rows.
//!
//! All elementwise kernels are one loop, [`map()`]: a function is applied to a block of the operands, and its results
//! go to a block on the stack before they are rounded and stored. Inputs are read before outputs are written, so an
//! output may be one of the inputs, and the loop vectorizes in both cases.

use lockstep_plan::DType;

use super::{
    CpuQueue, dropout, gate, gated,
    map::map,
    operands::{Operand, check_disjoint, check_elementwise, expect},
    simd::{Float, inlined, normal_distribution, tanh_gate, with_float},
    vision,
};
use crate::{Activation, Dropout, ElementwiseKernels, GatedActivation, Gelu, TokenPositions, View};

impl ElementwiseKernels for CpuQueue {
    fn gated(&self, kind: GatedActivation, gate: View<'_>, up: View<'_>, y: View<'_>) {
        gated::gated(self, kind, [gate, up], y);
    }

    fn gated_backward(
        &self,
        kind: GatedActivation,
        dy: View<'_>,
        gate: View<'_>,
        up: View<'_>,
        dgate: View<'_>,
        dup: View<'_>,
    ) {
        gated::gated_backward(self, kind, dy, [gate, up], [dgate, dup]);
    }

    fn gelu(&self, kind: Gelu, x: View<'_>, y: View<'_>) {
        expect("gelu: y", y, x.dtype(), x.elements());
        check_disjoint(&[y], &[x]);
        with_float!(x.dtype(), T => match kind {
            Gelu::Exact => map::<T, 1, 1>(self, [x], [y], inlined!(|isa, [x]| [x * normal_distribution(isa, x).0])),
            Gelu::Tanh => map::<T, 1, 1>(self, [x], [y], inlined!(|isa, [x]| [x * tanh_gate(isa, x).0])),
        });
    }

    fn gelu_backward(&self, kind: Gelu, dy: View<'_>, x: View<'_>, dx: View<'_>) {
        expect("gelu_backward: x", x, dy.dtype(), dy.elements());
        expect("gelu_backward: dx", dx, dy.dtype(), dy.elements());
        check_disjoint(&[dx], &[x]);
        check_elementwise(dx, &[dy]);
        with_float!(x.dtype(), T => match kind {
            Gelu::Exact => map::<T, 2, 1>(self, [dy, x], [dx], inlined!(|isa, [dy, x]| {
                let (probability, density) = normal_distribution(isa, x);
                [dy * (probability + x * density)]
            })),
            Gelu::Tanh => map::<T, 2, 1>(self, [dy, x], [dx], inlined!(|isa, [dy, x]| {
                let (s, slope) = tanh_gate(isa, x);
                [dy * (s + x * slope)]
            })),
        });
    }

    fn activation(&self, kind: Activation, x: View<'_>, y: View<'_>) {
        vision::activation(self, kind, x, y);
    }

    fn activation_backward(&self, kind: Activation, dy: View<'_>, saved: View<'_>, dx: View<'_>) {
        vision::activation_backward(self, kind, dy, saved, dx);
    }

    fn add(&self, a: View<'_>, b: View<'_>, y: View<'_>) {
        expect("add: b", b, a.dtype(), a.elements());
        expect("add: y", y, a.dtype(), a.elements());
        check_elementwise(y, &[a, b]);
        with_float!(a.dtype(), T => map::<T, 2, 1>(self, [a, b], [y], inlined!(|_, [a, b]| [a + b])));
    }

    fn scale(&self, factor: f32, x: View<'_>, y: View<'_>) {
        expect("scale: y", y, x.dtype(), x.elements());
        check_elementwise(y, &[x]);
        with_float!(x.dtype(), T => map::<T, 1, 1>(self, [x], [y], inlined!(|_, [x]| [factor * x])));
    }

    fn dropout(
        &self,
        dropout: Dropout<'_>,
        places: TokenPositions,
        first_feature: u32,
        x: View<'_>,
        y: View<'_>,
    ) {
        dropout::dropout(self, dropout, places, first_feature, x, y);
    }

    fn gate_rows(&self, gate: View<'_>, x: View<'_>, y: View<'_>) {
        gate::gate_rows(self, gate, x, y);
    }

    fn gate_rows_backward(&self, dy: View<'_>, gate: View<'_>, x: View<'_>, dgate: View<'_>, dx: View<'_>) {
        gate::gate_rows_backward(self, dy, gate, x, [dgate, dx]);
    }

    fn sum_rows(&self, x: View<'_>, out: View<'_>) {
        let (rows, width) = x.shape().as_matrix();
        expect("sum_rows: out", out, DType::F32, width);
        check_disjoint(&[out], &[x]);
        with_float!(x.dtype(), T => {
            let x = Operand::<T>::new(x);
            self.add_sum_over_rows(rows, [out], inlined!(|rows, [sum]| {
                for row in rows {
                    // SAFETY: `x` is only read, and overlaps no output.
                    let x = unsafe { x.read(row * width..(row + 1) * width) };
                    for (sum, x) in sum.iter_mut().zip(x) {
                        *sum += x.load();
                    }
                }
            }));
        });
    }
}

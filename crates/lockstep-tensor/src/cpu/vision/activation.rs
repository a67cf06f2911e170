//! Activation functions of vision models, elementwise. Their gradients are functions of the saved tensor that
//! [`Activation::saves_output`] names.

use crate::{
    Activation, CpuQueue, View,
    cpu::{
        map::map,
        operands::{check_disjoint, check_elementwise, expect},
        simd::{Isa, exp, inlined, sigmoid, with_float},
    },
};

pub(in crate::cpu) fn activation(queue: &CpuQueue, kind: Activation, x: View<'_>, y: View<'_>) {
    expect("activation: y", y, x.dtype(), x.elements());
    check_elementwise(y, &[x]);
    with_float!(x.dtype(), T => match kind {
        // NaN passes through.
        Activation::Relu => map::<T, 1, 1>(queue, [x], [y], inlined!(|_, [x]| [if x <= 0.0 { 0.0 } else { x }])),
        Activation::Silu => map::<T, 1, 1>(queue, [x], [y], inlined!(|isa, [x]| [x * sigmoid(isa, x)])),
        Activation::Tanh => map::<T, 1, 1>(queue, [x], [y], inlined!(|isa, [x]| [tanh(isa, x)])),
        Activation::Sigmoid => map::<T, 1, 1>(queue, [x], [y], inlined!(|isa, [x]| [sigmoid(isa, x)])),
        Activation::SoftCap(cap) => {
            let scale = cap.recip();
            map::<T, 1, 1>(queue, [x], [y], inlined!(|isa, [x]| [cap * tanh(isa, x * scale)]));
        }
    });
}

pub(in crate::cpu) fn activation_backward(
    queue: &CpuQueue,
    kind: Activation,
    dy: View<'_>,
    saved: View<'_>,
    dx: View<'_>,
) {
    expect("activation_backward: saved", saved, dy.dtype(), dy.elements());
    expect("activation_backward: dx", dx, dy.dtype(), dy.elements());
    check_disjoint(&[dx], &[saved]);
    check_elementwise(dx, &[dy]);
    with_float!(dy.dtype(), T => match kind {
        Activation::Relu => {
            map::<T, 2, 1>(queue, [dy, saved], [dx], inlined!(|_, [dy, y]| [if y <= 0.0 { 0.0 } else { dy }]));
        }
        Activation::Silu => map::<T, 2, 1>(queue, [dy, saved], [dx], inlined!(|isa, [dy, x]| {
            let s = sigmoid(isa, x);
            [dy * (s + x * s * (1.0 - s))]
        })),
        Activation::Tanh => {
            map::<T, 2, 1>(queue, [dy, saved], [dx], inlined!(|_, [dy, y]| [dy * (1.0 - y * y)]));
        }
        Activation::Sigmoid => {
            map::<T, 2, 1>(queue, [dy, saved], [dx], inlined!(|_, [dy, y]| [dy * y * (1.0 - y)]));
        }
        Activation::SoftCap(cap) => {
            let scale = cap.recip();
            map::<T, 2, 1>(queue, [dy, saved], [dx], inlined!(|_, [dy, y]| {
                let t = y * scale;
                [dy * (1.0 - t * t)]
            }));
        }
    });
}

/// Computes the hyperbolic tangent to within 4 units in the last place.
#[inline(always)]
fn tanh(isa: Isa, x: f32) -> f32 {
    /// `(tanh(x) / x - 1) / x²` as a polynomial in `x²` for |x| < 0.65, by weighted least squares; the relative error
    /// of the result is 8e-9.
    const SMALL: [f32; 5] = [-0.333_332_48, 0.133_305_43, -0.053_665_053, 0.020_397_976, -0.005_439_451];
    let z = x * x;
    let small = isa.mul_add(x * z, isa.polynomial(z, SMALL), x);
    // 1 - 2 / (e^2|x| + 1) does not cancel for the others.
    let large = (1.0 - 2.0 / (exp(isa, 2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.65 { small } else { large }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tangent_is_close_near_zero_and_saturates() {
        let isas = [Isa::PLAIN];
        for isa in isas {
            for i in -200_000..200_000 {
                let x = i as f32 * 1e-4;
                let exact = f64::from(x).tanh();
                let error = (f64::from(tanh(isa, x)) - exact).abs();
                assert!(error <= 4.0 * f64::from(f32::EPSILON) * exact.abs(), "tanh({x}) = {}", tanh(isa, x));
            }
            assert_eq!((tanh(isa, -1e30), tanh(isa, f32::INFINITY), tanh(isa, 1e-30)), (-1.0, 1.0, 1e-30));
        }
    }
}

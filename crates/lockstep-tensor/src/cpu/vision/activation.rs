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
    use lockstep_plan::DType;
    use proptest::prelude::*;

    use super::*;
    use crate::{
        Arena, ElementwiseKernels,
        cpu::{
            reference::finite_differences,
            testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tolerance, values},
        },
    };

    /// Every activation function, also those with a bound.
    fn kinds() -> impl Iterator<Item = Activation> {
        Activation::ALL.into_iter().chain([Activation::SoftCap(1.5)])
    }

    fn exact(kind: Activation, x: f64) -> f64 {
        match kind {
            Activation::Relu => x.max(0.0),
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Tanh => x.tanh(),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::SoftCap(cap) => f64::from(cap) * (x / f64::from(cap)).tanh(),
        }
    }

    /// Returns the derivative as a function of the saved value.
    fn derivative(kind: Activation, saved: f64) -> f64 {
        match kind {
            Activation::Relu => f64::from(saved > 0.0),
            Activation::Silu => {
                let s = 1.0 / (1.0 + (-saved).exp());
                s + saved * s * (1.0 - s)
            }
            Activation::Tanh => 1.0 - saved * saved,
            Activation::Sigmoid => saved * (1.0 - saved),
            Activation::SoftCap(cap) => 1.0 - (saved / f64::from(cap)).powi(2),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6))]

        #[test]
        fn activations_and_their_gradients_match_the_reference_also_in_place(
            len in prop_oneof![1usize..600, 70_000usize..90_000],
        ) {
            for (dtype, kind) in ACTIVATIONS.into_iter().flat_map(|dtype| kinds().map(move |kind| (dtype, kind))) {
                let x: Vec<f64> = random_of(dtype, 1, len).iter().map(|x| 4.0 * x).collect();
                let dy = random_of(dtype, 2, len);
                let run = |queue: &CpuQueue| {
                    let [input, dy, in_place, y_in_place] =
                        [&x, &dy, &dy, &x].map(|values| floats(dtype, [len], values));
                    let [y, dx] = [(); 2].map(|()| floats(dtype, [len], &vec![9.0; len]));
                    queue.activation(kind, input.view(), y.view());
                    queue.activation(kind, y_in_place.view(), y_in_place.view());
                    let saved = if kind.saves_output() { y.view() } else { input.view() };
                    queue.activation_backward(kind, dy.view(), saved, dx.view());
                    queue.activation_backward(kind, in_place.view(), saved, in_place.view());
                    [y, dx, y_in_place, in_place].map(|tensor| values(tensor.view())).to_vec()
                };
                let y: Vec<f64> = x.iter().map(|x| exact(kind, *x)).collect();
                on_every_queue(run, |results| {
                    assert_close("y", &results[0], &y, tolerance(dtype), 1e-7);
                    // The gradient is a function of the saved value as it was rounded.
                    let saved = if kind.saves_output() { &results[0] } else { &x };
                    let dx: Vec<f64> = saved.iter().zip(&dy).map(|(saved, dy)| dy * derivative(kind, *saved)).collect();
                    assert_close("dx", &results[1], &dx, tolerance(dtype), 1e-6);
                    assert_eq!((&results[0], &results[1]), (&results[2], &results[3]), "in place");
                });
            }
        }
    }

    #[test]
    fn the_derivatives_match_finite_differences() {
        let x = random_of(DType::F32, 1, 40);
        for kind in kinds() {
            let by_x = finite_differences(&x, |x| x.iter().map(|x| exact(kind, *x)).sum());
            let saved = |x: &f64| if kind.saves_output() { exact(kind, *x) } else { *x };
            let derivatives: Vec<f64> = x.iter().map(|x| derivative(kind, saved(x))).collect();
            assert_close("dx", &derivatives, &by_x, 1e-6, 1e-6);
        }
    }

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

    #[test]
    fn nan_passes_through_every_activation() {
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        let (nan, one) = (floats(DType::F32, [1], &[f64::NAN]), floats(DType::F32, [1], &[1.0]));
        let y = floats(DType::F32, [1], &[0.0]);
        for kind in kinds() {
            queue.activation(kind, nan.view(), y.view());
            assert!(values(y.view())[0].is_nan(), "{kind:?}");
            queue.activation_backward(kind, nan.view(), one.view(), y.view());
            assert!(values(y.view())[0].is_nan(), "{kind:?}");
        }
    }
}

//! Activation functions against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{Activation, Arena, CpuQueue, ElementwiseKernels};
use proptest::prelude::*;

use crate::reference::finite_differences;
use crate::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tolerance, values};

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

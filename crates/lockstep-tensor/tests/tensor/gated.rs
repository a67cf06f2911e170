//! Gated activation functions and their gradients against the reference.

use lockstep_tensor::{CpuQueue, ElementwiseKernels, GatedActivation};
use proptest::prelude::*;

use crate::reference::{finite_differences, gelu, gelu_derivative, sigmoid};
use crate::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tolerance, values};

/// Returns `f(gate)`, its derivative, the factor of `up`, and that factor's derivative.
fn parts(kind: GatedActivation, gate: f64, up: f64) -> [f64; 4] {
    match kind {
        GatedActivation::Silu => {
            let s = sigmoid(gate);
            [gate * s, s * (1.0 + gate * (1.0 - s)), up, 1.0]
        }
        GatedActivation::Gelu(kind) => [gelu(kind, gate), gelu_derivative(kind, gate), up, 1.0],
        GatedActivation::Clamped { slope, limit } => {
            let (slope, limit) = (f64::from(slope), f64::from(limit));
            let g = gate.min(limit);
            let s = sigmoid(slope * g);
            let inside = |x: f64| f64::from(u8::from(x.abs() <= limit));
            let derivative = if gate > limit { 0.0 } else { s + slope * g * s * (1.0 - s) };
            [g * s, derivative, up.clamp(-limit, limit) + 1.0, inside(up)]
        }
    }
}

fn expected(kind: GatedActivation, gate: &[f64], up: &[f64]) -> Vec<f64> {
    let y = |(gate, up): (&f64, &f64)| {
        let [value, _, factor, _] = parts(kind, *gate, *up);
        value * factor
    };
    gate.iter().zip(up).map(y).collect()
}

/// Returns `dgate` and `dup`.
fn gradients(kind: GatedActivation, dy: &[f64], gate: &[f64], up: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let both = |(dy, (gate, up)): (&f64, (&f64, &f64))| {
        let [value, slope, factor, of_up] = parts(kind, *gate, *up);
        (dy * factor * slope, dy * value * of_up)
    };
    dy.iter().zip(gate.iter().zip(up)).map(both).unzip()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn gated_activations_and_their_gradients_match_the_reference(
        len in prop_oneof![1usize..600, 70_000usize..90_000],
    ) {
        for (dtype, kind) in ACTIVATIONS.into_iter().flat_map(|dtype| GatedActivation::ALL.map(|kind| (dtype, kind))) {
            // Beyond the limits of the clamped activation as well.
            let [gate, up] = [1, 2].map(|seed| {
                random_of(dtype, seed, len).iter().map(|x| 8.0 * x).collect::<Vec<_>>()
            });
            let dy = random_of(dtype, 3, len);
            let run = |queue: &CpuQueue| {
                let [g, u, d] = [&gate, &up, &dy].map(|values| floats(dtype, [len], values));
                let [y, dgate, dup] = [(); 3].map(|()| floats(dtype, [len], &vec![9.0; len]));
                queue.gated(kind, g.view(), u.view(), y.view());
                queue.gated_backward(kind, d.view(), g.view(), u.view(), dgate.view(), dup.view());
                [y, dgate, dup].map(|tensor| values(tensor.view())).to_vec()
            };
            let (dgate, dup) = gradients(kind, &dy, &gate, &up);
            on_every_queue(run, |results| {
                assert_close("y", &results[0], &expected(kind, &gate, &up), tolerance(dtype), 4e-6);
                assert_close("dgate", &results[1], &dgate, tolerance(dtype), 4e-6);
                assert_close("dup", &results[2], &dup, tolerance(dtype), 4e-6);
            });
        }
    }
}

#[test]
fn the_gradients_match_finite_differences() {
    let dtype = lockstep_plan::DType::F32;
    let [gate, up] =
        [1, 2].map(|seed| random_of(dtype, seed, 60).iter().map(|x| 9.0 * x).collect::<Vec<_>>());
    let dy = random_of(dtype, 3, 60);
    for kind in GatedActivation::ALL {
        let loss = |gate: &[f64], up: &[f64]| {
            expected(kind, gate, up).iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>()
        };
        let (dgate, dup) = gradients(kind, &dy, &gate, &up);
        let by_gate = finite_differences(&gate, |gate| loss(gate, &up));
        let by_up = finite_differences(&up, |up| loss(&gate, up));
        assert_close(&format!("dgate of {kind:?}"), &dgate, &by_gate, 1e-6, 1e-6);
        assert_close(&format!("dup of {kind:?}"), &dup, &by_up, 1e-6, 1e-6);
    }
}

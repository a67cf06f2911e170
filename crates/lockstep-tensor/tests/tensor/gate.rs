//! Gates of rows and their gradients against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{CpuQueue, ElementwiseKernels};
use proptest::prelude::*;

use crate::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tolerance, values};

fn expected(gate: &[f64], x: &[f64]) -> Vec<f64> {
    let width = x.len() / gate.len();
    x.iter().enumerate().map(|(i, x)| x / (1.0 + (-gate[i / width]).exp())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn gated_rows_and_their_gradients_match_the_reference(
        (rows, width) in prop_oneof![(1usize..20, 1usize..40), (90usize..120, 500usize..800)],
    ) {
        for dtype in ACTIVATIONS {
            let [x, dy] = [1, 2].map(|seed| random_of(dtype, seed, rows * width));
            let gate = random_of(dtype, 3, rows);
            let run = |queue: &CpuQueue| {
                let [x, dy] = [&x, &dy].map(|values| floats(dtype, [rows, width], values));
                let gate = floats(dtype, [rows, 1], &gate);
                let [y, dx] = [(); 2].map(|()| floats(dtype, [rows, width], &vec![9.0; rows * width]));
                let dgate = floats(dtype, [rows, 1], &vec![9.0; rows]);
                queue.gate_rows(gate.view(), x.view(), y.view());
                queue.gate_rows_backward(dy.view(), gate.view(), x.view(), dgate.view(), dx.view());
                [y, dx, dgate].map(|tensor| values(tensor.view())).to_vec()
            };
            let (y, dx) = (expected(&gate, &x), expected(&gate, &dy));
            let dgate: Vec<f64> = (0..rows)
                .map(|row| {
                    let s = 1.0 / (1.0 + (-gate[row]).exp());
                    let all = row * width..(row + 1) * width;
                    s * (1.0 - s) * x[all.clone()].iter().zip(&dy[all]).map(|(x, dy)| x * dy).sum::<f64>()
                })
                .collect();
            on_every_queue(run, |results| {
                assert_close("y", &results[0], &y, tolerance(dtype), 1e-6);
                assert_close("dx", &results[1], &dx, tolerance(dtype), 1e-6);
                assert_close("dgate", &results[2], &dgate, tolerance(dtype), 1e-4);
            });
        }
    }
}

#[test]
fn the_gradients_match_finite_differences() {
    let [gate, x, dy] = [(1, 3), (2, 12), (3, 12)].map(|(seed, len)| random_of(DType::F32, seed, len));
    let loss = |gate: &[f64], x: &[f64]| expected(gate, x).iter().zip(&dy).map(|(y, dy)| y * dy).sum();
    let by_gate = crate::reference::finite_differences(&gate, |gate| loss(gate, &x));
    let by_x = crate::reference::finite_differences(&x, |x| loss(&gate, x));
    let queue = CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap();
    let [dx, dgate] = [12, 3].map(|len| floats(DType::F32, [len], &vec![0.0; len]));
    let [x, dy] = [&x, &dy].map(|values| floats(DType::F32, [3, 4], values));
    let gate = floats(DType::F32, [3], &gate);
    queue.gate_rows_backward(dy.view(), gate.view(), x.view(), dgate.view(), dx.view());
    assert_close("dgate", &values(dgate.view()), &by_gate, 1e-6, 1e-6);
    assert_close("dx", &values(dx.view()), &by_x, 1e-6, 1e-6);
}

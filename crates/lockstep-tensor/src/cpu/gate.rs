//! Sigmoid gate of rows: the gate of a shared expert's output, one logit for each token.

use lockstep_plan::DType;

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, expect},
    simd::{BLOCK, Block, Float, inlined, sigmoid, sum, with_float},
    tasks::rows_per_task,
};
use crate::View;

/// Checks the shapes, and returns the number of rows and their width.
fn shape(kernel: &str, gate: View<'_>, x: View<'_>, dtype: DType) -> (usize, usize) {
    let (rows, width) = x.shape().as_matrix();
    expect(format_args!("{kernel}: x"), x, dtype, rows * width);
    expect(format_args!("{kernel}: gate"), gate, dtype, rows);
    (rows, width)
}

pub(super) fn gate_rows(queue: &CpuQueue, gate: View<'_>, x: View<'_>, y: View<'_>) {
    let (rows, width) = shape("gate_rows", gate, x, y.dtype());
    expect("gate_rows: y", y, x.dtype(), rows * width);
    check_disjoint(&[y], &[gate, x]);
    with_float!(x.dtype(), T => {
        let [gate, x, y] = [gate, x, y].map(Operand::<T>::new);
        queue.for_each_range(rows, rows_per_task(rows, width), inlined!(|range, isa| {
            let mut results = Block::ZERO;
            for row in range {
                // SAFETY: the gate is only read.
                let factor = sigmoid(isa, unsafe { gate.read(row..row + 1) }[0].load());
                for column in (0..width).step_by(BLOCK) {
                    let n = BLOCK.min(width - column);
                    let at = row * width + column..row * width + column + n;
                    // SAFETY: `x` is only read.
                    let x = unsafe { x.read(at.clone()) };
                    results.0.iter_mut().zip(x).for_each(|(result, x)| *result = factor * x.load());
                    // SAFETY: each row belongs to one task.
                    T::store_all(isa, &results.0[..n], unsafe { y.write(at) });
                }
            }
        }));
    });
}

pub(super) fn gate_rows_backward(
    queue: &CpuQueue,
    dy: View<'_>,
    gate: View<'_>,
    x: View<'_>,
    [dgate, dx]: [View<'_>; 2],
) {
    let (rows, width) = shape("gate_rows_backward", gate, x, dy.dtype());
    expect("gate_rows_backward: dy", dy, x.dtype(), rows * width);
    expect("gate_rows_backward: dgate", dgate, x.dtype(), rows);
    expect("gate_rows_backward: dx", dx, x.dtype(), rows * width);
    check_disjoint(&[dgate, dx], &[dy, gate, x]);
    with_float!(x.dtype(), T => {
        let [dy, gate, x, dgate, dx] = [dy, gate, x, dgate, dx].map(Operand::<T>::new);
        queue.for_each_range(rows, rows_per_task(rows, 2 * width), inlined!(|range, isa| {
            let mut results = Block::ZERO;
            for row in range {
                let all = row * width..(row + 1) * width;
                // SAFETY: these are only read.
                let (gate, dy, x) = unsafe { (gate.read(row..row + 1), dy.read(all.clone()), x.read(all)) };
                let factor = sigmoid(isa, gate[0].load());
                let [product] = sum([dy, x], inlined!(|[dy, x]| [dy * x]));
                // SAFETY: each row belongs to one task.
                T::store_all(isa, &[factor * (1.0 - factor) * product], unsafe { dgate.write(row..row + 1) });
                for (index, dy) in dy.chunks(BLOCK).enumerate() {
                    results.0.iter_mut().zip(dy).for_each(|(result, dy)| *result = factor * dy.load());
                    let first = row * width + index * BLOCK;
                    // SAFETY: as above.
                    T::store_all(isa, &results.0[..dy.len()], unsafe { dx.write(first..first + dy.len()) });
                }
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ElementwiseKernels;
    use crate::cpu::testing::{
        ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tolerance, values,
    };

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
        let by_gate = crate::cpu::reference::finite_differences(&gate, |gate| loss(gate, &x));
        let by_x = crate::cpu::reference::finite_differences(&x, |x| loss(&gate, x));
        let queue = CpuQueue::new(1, &crate::Arena::new()).unwrap();
        let [dx, dgate] = [12, 3].map(|len| floats(DType::F32, [len], &vec![0.0; len]));
        let [x, dy] = [&x, &dy].map(|values| floats(DType::F32, [3, 4], values));
        let gate = floats(DType::F32, [3], &gate);
        queue.gate_rows_backward(dy.view(), gate.view(), x.view(), dgate.view(), dx.view());
        assert_close("dgate", &values(dgate.view()), &by_gate, 1e-6, 1e-6);
        assert_close("dx", &values(dx.view()), &by_x, 1e-6, 1e-6);
    }
}

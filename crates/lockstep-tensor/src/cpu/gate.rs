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

//! Products of each head with a matrix of its own.

use lockstep_plan::{BlockFormat, DType};
use lockstep_tensor::{BlockLayout, BlockMatrix, CpuQueue, GemmLayout, HeadKernels, HeadProduct, Matrix};

use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
};

/// Returns `x_h · W_h` or `x_h · W_hᵀ` of `rows` rows of heads of `x_width` elements.
fn expected(
    layout: GemmLayout,
    [rows, heads, x_width]: [usize; 3],
    [depth, columns]: [usize; 2],
    x: &[f64],
    weight: &[f64],
) -> Vec<f64> {
    let element = |row: usize, head: usize, column: usize| -> f64 {
        let of_weight = |p: usize| match layout {
            GemmLayout::NN => weight[(head * depth + p) * columns + column],
            _ => weight[(head * columns + column) * depth + p],
        };
        (0..depth).map(|p| x[(row * heads + head) * x_width + p] * of_weight(p)).sum()
    };
    let rows = (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head)));
    rows.flat_map(|(row, head)| (0..columns).map(move |column| (row, head, column)))
        .map(|(row, head, column)| element(row, head, column))
        .collect()
}

#[test]
fn each_head_is_multiplied_by_its_own_matrix() {
    let cases =
        [([1, 4, 10], [10, 16]), ([7, 3, 24], [16, 12]), ([300, 2, 130], [128, 70]), ([0, 2, 4], [3, 5])];
    for (([rows, heads, x_width], [depth, columns]), layout) in
        cases.into_iter().flat_map(|case| [GemmLayout::NN, GemmLayout::NT].map(|layout| (case, layout)))
    {
        for dtype in ACTIVATIONS {
            let x = random_of(dtype, 1, rows * heads * x_width);
            let weight = random_of(dtype, 2, heads * depth * columns);
            let shape =
                if layout == GemmLayout::NN { [heads * depth, columns] } else { [heads * columns, depth] };
            let run = |queue: &CpuQueue| {
                let y = floats(dtype, [rows, heads, columns], &vec![9.0; rows * heads * columns]);
                let one = floats(dtype, [1, heads, columns], &vec![9.0; heads * columns]);
                let x = floats(dtype, [rows, heads, x_width], &x);
                let weight = floats(dtype, shape, &weight);
                let weight = Matrix::Dense(weight.view());
                queue.multiply_heads(HeadProduct { layout, x: x.view(), weight, y: y.view() });
                if rows > 0 {
                    let (x, y) = (x.view().rows(rows - 1..rows), one.view());
                    queue.multiply_heads(HeadProduct { layout, x, weight, y });
                }
                vec![values(y.view()), values(one.view())]
            };
            on_every_queue(run, |results| {
                let exact = expected(layout, [rows, heads, x_width], [depth, columns], &x, &weight);
                let absolute = 1e-6 * depth as f64;
                assert_close(&format!("{layout:?} {dtype}"), &results[0], &exact, tolerance(dtype), absolute);
                if rows > 0 {
                    let last = &results[0][(rows - 1) * heads * columns..];
                    assert_eq!(last, results[1], "{layout:?} {dtype}: the last row alone");
                }
            });
        }
    }
}

/// Rows of int8 codes with a scale: f16 1, then bytes.
#[test]
fn quantized_matrices_are_decoded_in_both_orders_of_their_blocks() {
    let (rows, heads, depth, columns) = (3, 2, 16, 32);
    let format = BlockFormat::Q8_0;
    let codes: Vec<i8> = (0..heads * depth * columns).map(|at| (at * 37 % 101) as i8 - 50).collect();
    let blocks: Vec<u8> = codes
        .chunks(32)
        .flat_map(|codes| [0x00, 0x3c].into_iter().chain(codes.iter().map(|&code| code as u8)))
        .collect();
    let decoded: Vec<f64> = codes.iter().map(|&code| f64::from(code)).collect();
    let shape = [heads * depth, columns];
    let x = random_of(DType::F32, 1, rows * heads * depth);
    let exact = expected(GemmLayout::NN, [rows, heads, depth], [depth, columns], &x, &decoded);
    on_every_queue(
        |queue| {
            let (blocks, x) = (tensor(&blocks), floats(DType::F32, [rows, heads, depth], &x));
            let in_rows = BlockMatrix::new(format, blocks.view(), shape);
            let bytes = BlockMatrix::bytes_of(format, BlockLayout::Interleaved, shape).unwrap();
            let interleaved = tensor(&vec![0_u8; bytes]);
            let interleaved =
                BlockMatrix::with_layout(format, BlockLayout::Interleaved, interleaved.view(), shape);
            lockstep_tensor::BlockKernels::interleave_blocks(queue, in_rows, interleaved);
            [in_rows, interleaved]
                .map(|matrix| {
                    let y = floats(DType::F32, [rows, heads, columns], &vec![9.0; rows * heads * columns]);
                    let (layout, weight) = (GemmLayout::NN, Matrix::Blocks(matrix));
                    queue.multiply_heads(HeadProduct { layout, x: x.view(), weight, y: y.view() });
                    values(y.view())
                })
                .to_vec()
        },
        |results| {
            assert_close("rows", &results[0], &exact, 1e-5, 1e-3);
            assert_eq!(results[0], results[1], "interleaved rows");
        },
    );
}

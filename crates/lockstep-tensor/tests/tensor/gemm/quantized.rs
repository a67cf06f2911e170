//! Products with quantized weights against dense ones with the decoded weights: the same bits.

use lockstep_plan::{BlockFormat, DType, random::Philox};
use lockstep_tensor::{
    BlockActivations, BlockGemm, BlockKernels, BlockLayout, BlockMatrix, CpuLevel, CpuQueue,
    EmbeddingKernels, Gemm, GemmKernels, GemmLayout, Queue, Summation, Tensor, View, Write,
};

use super::products::queues;
use crate::testing::{floats, normals, random_of, tensor, values};

/// Returns the bytes of a quantized matrix, and its decoded elements.
fn quantized(format: BlockFormat, [rows, columns]: [usize; 2], seed: u64) -> (Tensor, Vec<f64>) {
    let philox = Philox::new(seed);
    let numbers: Vec<f32> = normals(philox, rows * columns).collect();
    let mut bytes = vec![0; format.bytes(numbers.len()).unwrap()];
    format.quantize(&numbers, &mut bytes);
    let mut decoded = vec![0.0; numbers.len()];
    format.dequantize(&bytes, &mut decoded);
    (tensor(&bytes), decoded.into_iter().map(f64::from).collect())
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor.view()).into_iter().map(f64::to_bits).collect()
}

/// Returns the queues that multiply weights of a format. An emulated level multiplies two formats, with and without integer codes: decoded
/// weights are the same numbers whatever multiplies them, and emulation takes most of the time.
fn queues_of(format: BlockFormat, threads: usize) -> impl Iterator<Item = CpuQueue> {
    let is_emulated = matches!(format, BlockFormat::Q4K | BlockFormat::Nf4G64);
    queues(threads).into_iter().filter(move |queue| is_emulated || queue.level() <= CpuLevel::detect())
}

const TYPES: [(DType, DType); 4] = [
    (DType::F32, DType::F32),
    (DType::BF16, DType::F32),
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F16),
];

/// Compares products with a quantized matrix with the dense ones.
fn compare(format: BlockFormat, [n, k]: [usize; 2], row_counts: &[usize], threads: usize) {
    let (bytes, decoded) = quantized(format, [n, k], 3);
    let matrix = BlockMatrix::new(format, bytes.view(), [n, k]);
    for (types, mut queue) in
        TYPES.into_iter().flat_map(|types| queues_of(format, threads).map(move |queue| (types, queue)))
    {
        queue.set_summation(Summation::ByDepth);
        let b = floats(types.0, [n, k], &decoded);
        for &rows in row_counts {
            let a = floats(types.0, [rows, k], &random_of(types.0, 1, rows * k));
            let bias = rows.is_multiple_of(2).then(|| floats(types.0, [n], &random_of(types.0, 2, n)));
            let bias = bias.as_ref().map(Tensor::view);
            let [found, expected] = [(); 2].map(|()| floats(types.1, [rows, n], &vec![0.0; rows * n]));
            queue.block_gemm(BlockGemm::linear(a.view(), matrix, found.view(), bias));
            let (layout, write) = (GemmLayout::NT, Write::Overwrite);
            queue.gemm(Gemm { layout, a: a.view(), b: b.view(), c: expected.view(), bias, write });
            let (found, expected) = (bits(&found), bits(&expected));
            if let Some(at) = found.iter().zip(&expected).position(|(found, expected)| found != expected) {
                let [found, expected] = [found[at], expected[at]].map(f64::from_bits);
                let product = format!("{} {format} {types:?} {rows} x {n} x {k}", queue.level());
                panic!("{product}: element {at} is {found} for {expected}");
            }
        }
    }
}

/// Depths: one chunk and a part of one, and two blocks of depth whose border lies within a chunk.
#[test]
fn a_product_with_quantized_weights_has_the_bits_of_the_dense_product() {
    for format in BlockFormat::ALL {
        compare(format, [37, 256 + format.block_elements()], &[1, 2, 3, 4, 5, 6, 7, 8, 9], 1);
        compare(format, [40, 2304], &[2, 30], 2);
    }
}

/// Compares gradients of a linear layer's input with the dense ones, overwritten and accumulated.
fn compare_gradients(format: BlockFormat, [k, n]: [usize; 2], row_counts: &[usize], threads: usize) {
    let (bytes, decoded) = quantized(format, [k, n], 3);
    let b = BlockMatrix::new(format, bytes.view(), [k, n]);
    for (types, mut queue) in
        TYPES.into_iter().flat_map(|types| queues_of(format, threads).map(move |queue| (types, queue)))
    {
        queue.set_summation(Summation::ByDepth);
        // Only linear layers round their activations.
        queue.set_block_activations(BlockActivations::Int8);
        let dense = floats(types.0, [k, n], &decoded);
        for (&rows, write) in
            row_counts.iter().flat_map(|rows| [(rows, Write::Overwrite), (rows, Write::Accumulate)])
        {
            let a = floats(types.0, [rows, k], &random_of(types.0, 1, rows * k));
            let [found, expected] =
                [(); 2].map(|()| floats(types.1, [rows, n], &random_of(types.1, 2, rows * n)));
            let (layout, a, bias) = (GemmLayout::NN, a.view(), None);
            queue.block_gemm(BlockGemm { layout, a, b, c: found.view(), bias, write });
            queue.gemm(Gemm { layout, a, b: dense.view(), c: expected.view(), bias, write });
            let (found, expected) = (bits(&found), bits(&expected));
            if let Some(at) = found.iter().zip(&expected).position(|(found, expected)| found != expected) {
                let [found, expected] = [found[at], expected[at]].map(f64::from_bits);
                let product = format!("{} {format} {types:?} {write:?} {rows} x {n} x {k}", queue.level());
                panic!("{product}: element {at} is {found} for {expected}");
            }
        }
    }
}

/// Widths: whole strips of panels and parts of one. Depths: less than the lines that are decoded at a time, and two blocks of depth.
#[test]
fn a_gradient_through_quantized_weights_has_the_bits_of_the_dense_gradient() {
    for format in BlockFormat::ALL {
        let block = format.block_elements();
        compare_gradients(format, [37, 256 + block], &[1, 7, 40], 1);
        compare_gradients(format, [1100, 192_usize.next_multiple_of(block)], &[30], 2);
    }
}

#[test]
#[should_panic(expected = "no TN product")]
fn a_gradient_of_quantized_weights_is_refused() {
    let (bytes, _) = quantized(BlockFormat::Nf4G64, [4, 64], 3);
    let b = BlockMatrix::new(BlockFormat::Nf4G64, bytes.view(), [4, 64]);
    let [a, c] = [floats(DType::F32, [4, 2], &[0.0; 8]), floats(DType::F32, [2, 64], &[0.0; 128])];
    let (layout, bias, write) = (GemmLayout::TN, None, Write::Overwrite);
    queues(1)[0].block_gemm(BlockGemm { layout, a: a.view(), b, c: c.view(), bias, write });
}

/// Returns activations as int8 products read them: each the nearest of 255 multiples of a scale for its 32 neighbours.
fn rounded_to_int8(activations: &[f64]) -> Vec<f64> {
    let groups = activations.chunks_exact(32).flat_map(|group| {
        let largest = group.iter().fold(0.0_f32, |largest, value| largest.max(value.abs() as f32));
        let code = move |value: &f64| f64::from((*value as f32 * (127.0 / largest)).round_ties_even());
        group.iter().map(move |value| f64::from(largest / 127.0) * code(value))
    });
    groups.collect()
}

/// Returns the queues that multiply weights of a format with int8 activations. An emulated level multiplies formats with one and with two
/// runs in a group, and with offsets.
fn integer_queues(format: BlockFormat) -> impl Iterator<Item = CpuQueue> {
    let is_emulated = matches!(format, BlockFormat::Q8_0 | BlockFormat::Q4K | BlockFormat::Q6K);
    queues(2).into_iter().filter(move |queue| is_emulated || queue.level() <= CpuLevel::detect())
}

/// Compares each element with the f64 product of the rounded operands, and its bits with those of the row alone.
#[test]
fn a_product_with_int8_activations_is_that_of_their_codes_in_any_batch() {
    for format in BlockFormat::ALL.into_iter().filter(|format| format.has_integer_codes()) {
        for (n, k, rows) in [(37, 256 + format.block_elements(), 9), (70, 1280, 21), (16, 512, 3)] {
            let (bytes, decoded) = quantized(format, [n, k], 3);
            let matrix = BlockMatrix::new(format, bytes.view(), [n, k]);
            for (types, mut queue) in
                TYPES.into_iter().flat_map(|types| integer_queues(format).map(move |queue| (types, queue)))
            {
                queue.set_block_activations(BlockActivations::Int8);
                let random = random_of(types.0, 1, rows * k);
                let a = floats(types.0, [rows, k], &random);
                let bias = floats(types.0, [n], &random_of(types.0, 2, n));
                let multiply = |a: View<'_>, rows: usize| {
                    let c = floats(types.1, [rows, n], &vec![0.0; rows * n]);
                    let bias = Some(bias.view());
                    queue.block_gemm(BlockGemm::linear(a, matrix, c.view(), bias));
                    values(c.view())
                };
                let found = multiply(a.view(), rows);
                let name = format!("{} {format} {types:?} {rows} x {n} x {k}", queue.level());
                let rounding = match types.1 {
                    DType::BF16 => 2.0_f64.powi(-8),
                    DType::F16 => 2.0_f64.powi(-11),
                    _ => 0.0,
                };
                for (row, found) in found.chunks_exact(n).enumerate() {
                    let alone = multiply(a.view().rows(row..row + 1), 1);
                    assert_eq!(found, alone, "{name}: row {row} among others and alone");
                    let codes = rounded_to_int8(&random[row * k..][..k]);
                    for (column, (found, bias)) in found.iter().zip(values(bias.view())).enumerate() {
                        let terms = codes.iter().zip(&decoded[column * k..][..k]).map(|(x, w)| x * w);
                        let (sum, magnitude) =
                            terms.fold((bias, bias.abs()), |(sum, all), term| (sum + term, all + term.abs()));
                        let bound = 1e-6 * magnitude + rounding * sum.abs();
                        let error = (found - sum).abs();
                        assert!(error <= bound, "{name}: [{row}, {column}] is {found} for {sum}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_of_activations_without_a_number_spoils_no_other_row() {
    let (bytes, _) = quantized(BlockFormat::Q8_0, [20, 64], 3);
    let matrix = BlockMatrix::new(BlockFormat::Q8_0, bytes.view(), [20, 64]);
    for mut queue in queues(1) {
        queue.set_block_activations(BlockActivations::Int8);
        let mut activations = vec![1.0; 3 * 64];
        (activations[3], activations[64 + 40], activations[65]) = (f64::INFINITY, f64::NAN, 1e-42);
        let [a, c] = [floats(DType::F32, [3, 64], &activations), floats(DType::F32, [3, 20], &[0.0; 60])];
        queue.block_gemm(BlockGemm::linear(a.view(), matrix, c.view(), None));
        for (row, products) in values(c.view()).chunks_exact(20).enumerate() {
            let is_expected = |product: &f64| if row < 2 { product.is_nan() } else { product.is_finite() };
            assert!(products.iter().all(is_expected), "{} row {row}: {products:?}", queue.level());
        }
    }
}

#[test]
fn rows_of_a_quantized_table_are_the_decoded_ones() {
    let (rows, width, ids) = (20, 512, [3_u32, 19, 0, 3, 20, u32::MAX]);
    for queue in queues(2) {
        for format in BlockFormat::ALL {
            let (bytes, decoded) = quantized(format, [rows, width], 5);
            let matrix = BlockMatrix::new(format, bytes.view(), [rows, width]);
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let table = floats(dtype, [rows, width], &decoded);
                let [found, expected] = [(); 2].map(|()| floats(dtype, [6, width], &[9.0; 6 * 512]));
                let ids = tensor(&ids);
                queue.block_embedding(ids.view(), matrix, 0, found.view());
                queue.embedding(ids.view(), table.view(), 0, expected.view());
                assert_eq!(
                    values(found.view()),
                    values(expected.view()),
                    "{} {format} {dtype}",
                    queue.level()
                );
            }
        }
    }
}

#[test]
fn weights_below_the_normal_range_and_of_both_signs_of_zero_are_multiplied_as_dense_ones_are() {
    // Scales of 2^-24 with small codes: bf16 and f16 round some of the weights to subnormal numbers or to zero.
    let block: Vec<u8> = [1, 0].into_iter().chain((0..32).map(|code| code * 8)).collect();
    let bytes: Vec<u8> = block.iter().copied().cycle().take(16 * 2 * block.len()).collect();
    let mut decoded = vec![0.0; 16 * 64];
    BlockFormat::Q8_0.dequantize(&bytes, &mut decoded);
    let decoded: Vec<f64> = decoded.into_iter().map(f64::from).collect();
    let bytes = tensor(&bytes);
    let matrix = BlockMatrix::new(BlockFormat::Q8_0, bytes.view(), [16, 64]);
    for mut queue in queues(1) {
        queue.set_summation(Summation::ByDepth);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for rows in [1, 20] {
                let a = floats(dtype, [rows, 64], &vec![1024.0; rows * 64]);
                let b = floats(dtype, [16, 64], &decoded);
                let [found, expected] =
                    [(); 2].map(|()| floats(DType::F32, [rows, 16], &vec![0.0; rows * 16]));
                let (a, b, c) = (a.view(), b.view(), expected.view());
                queue.block_gemm(BlockGemm::linear(a, matrix, found.view(), None));
                let (layout, write) = (GemmLayout::NT, Write::Overwrite);
                queue.gemm(Gemm { layout, a, b, c, bias: None, write });
                assert_eq!(bits(&found), bits(&expected), "{} {dtype} {rows} rows", queue.level());
            }
        }
    }
}

#[test]
#[should_panic(expected = "a q4_k matrix [2, 128]")]
fn rows_of_parts_of_blocks_are_refused() {
    let bytes = tensor(&[0_u8; 144]);
    let _ = BlockMatrix::new(BlockFormat::Q4K, bytes.view(), [2, 128]);
}

/// Interleaves the rows of a matrix.
fn interleaved(queue: &impl BlockKernels, matrix: BlockMatrix<'_>) -> Tensor {
    let layout = BlockLayout::Interleaved;
    let bytes =
        BlockMatrix::bytes_of(matrix.format(), layout, matrix.shape()).expect("16 rows and whole blocks");
    let target = tensor(&vec![0_u8; bytes]);
    let to = BlockMatrix::with_layout(matrix.format(), layout, target.view(), matrix.shape());
    queue.interleave_blocks(matrix, to);
    target
}

/// Depths: whole chunks, and a part of one.
#[test]
fn products_with_interleaved_rows_have_the_bits_of_those_with_rows_as_files_store_them() {
    for format in BlockFormat::ALL {
        let (n, k) = (48, 512 + format.block_elements());
        let (bytes, _) = quantized(format, [n, k], 3);
        let matrix = BlockMatrix::new(format, bytes.view(), [n, k]);
        for (types, mut queue) in
            TYPES.into_iter().flat_map(|types| queues_of(format, 2).map(move |queue| (types, queue)))
        {
            let bytes = interleaved(&queue, matrix);
            let other = BlockMatrix::with_layout(format, BlockLayout::Interleaved, bytes.view(), [n, k]);
            let bias = floats(types.0, [n], &random_of(types.0, 2, n));
            for (activations, rows) in [BlockActivations::Int8, BlockActivations::Float]
                .into_iter()
                .flat_map(|activations| [1, 2, 9, 40].map(|rows| (activations, rows)))
            {
                queue.set_block_activations(activations);
                let a = floats(types.0, [rows, k], &random_of(types.0, 1, rows * k));
                let product = |b: BlockMatrix<'_>| {
                    let c = floats(types.1, [rows, n], &vec![0.0; rows * n]);
                    queue.block_gemm(BlockGemm::linear(a.view(), b, c.view(), Some(bias.view())));
                    values(c.view())
                };
                let name = format!("{} {format} {types:?} {activations:?} {rows} x {n} x {k}", queue.level());
                assert_eq!(product(other), product(matrix), "{name}");
            }
        }
    }
}

#[test]
fn rows_of_an_interleaved_table_are_the_decoded_ones() {
    let ([rows, width], ids) = ([32, 768], [3_u32, 31, 0, 17]);
    for queue in queues(2) {
        for format in BlockFormat::ALL {
            let (bytes, _) = quantized(format, [rows, width], 5);
            let matrix = BlockMatrix::new(format, bytes.view(), [rows, width]);
            let bytes = interleaved(&queue, matrix);
            let table =
                BlockMatrix::with_layout(format, BlockLayout::Interleaved, bytes.view(), [rows, width]);
            let rows_of = |table: BlockMatrix<'_>, ids: &[u32]| {
                let found = floats(DType::F32, [ids.len(), width], &vec![9.0; ids.len() * width]);
                queue.block_embedding(tensor(ids).view(), table, 0, found.view());
                values(found.view())
            };
            assert_eq!(rows_of(table, &ids), rows_of(matrix, &ids), "{} {format}", queue.level());
        }
    }
}

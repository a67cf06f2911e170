//! GEMMs at the shapes of real models on two threads: each linear layer forward (NT), and its gradients with respect
//! to the input (NN) and the weight (TN, accumulated in f32).
//!
//! Throughput counts floating-point operations, two for each multiply-add; for few rows it counts bytes of weights.
#![expect(missing_docs, reason = "the function that criterion's macro makes has none")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lockstep_plan::{BlockFormat, DType, MemoryCategory};
use lockstep_tensor::{
    Arena, BlockActivations, BlockGemm, BlockKernels, BlockLayout, BlockMatrix, CopyKernels, CpuQueue, Gemm,
    GemmKernels, GemmLayout, Queue, Summation, Tensor, Write,
};

const THREADS: usize = 2;

/// A linear layer: `tokens` vectors of `inputs` elements become vectors of `outputs` elements.
struct Layer {
    name: &'static str,
    tokens: usize,
    inputs: usize,
    outputs: usize,
}

const LAYERS: [Layer; 9] = [
    Layer { name: "baby-gpt query", tokens: 2048, inputs: 384, outputs: 384 },
    Layer { name: "baby-gpt up", tokens: 2048, inputs: 384, outputs: 1536 },
    Layer { name: "baby-gpt down", tokens: 2048, inputs: 1536, outputs: 384 },
    Layer { name: "baby-gpt head", tokens: 2048, inputs: 384, outputs: 256 },
    Layer { name: "gpt2-124m query", tokens: 1024, inputs: 768, outputs: 768 },
    Layer { name: "gpt2-124m up", tokens: 1024, inputs: 768, outputs: 3072 },
    Layer { name: "gpt2-124m down", tokens: 1024, inputs: 3072, outputs: 768 },
    Layer { name: "gpt2-124m head, a chunk", tokens: 128, inputs: 768, outputs: 50_257 },
    Layer { name: "gpt2-124m up, generation", tokens: 1, inputs: 768, outputs: 3072 },
];

/// Creates a matrix of small numbers that vary.
fn matrix(arena: &Arena, queue: &CpuQueue, dtype: DType, shape: [usize; 2]) -> Tensor {
    let values: Vec<f32> =
        (0..shape[0] * shape[1]).map(|i| ((i * 7919) % 1009) as f32 / 505.0 - 1.0).collect();
    let category = MemoryCategory::Activations;
    let source = Tensor::from_slice(arena, shape, &values, category).expect("memory for a bench");
    let target = Tensor::zeros(arena, dtype, shape, category).expect("memory for a bench");
    queue.cast(source.view(), target.view());
    target
}

fn gemm(criterion: &mut Criterion) {
    let arena = Arena::new();
    let queue = CpuQueue::new(THREADS, &arena).expect("threads for a bench");
    for dtype in [DType::F32, DType::BF16] {
        for Layer { name, tokens, inputs, outputs } in LAYERS {
            let x = matrix(&arena, &queue, dtype, [tokens, inputs]);
            let y = matrix(&arena, &queue, dtype, [tokens, outputs]);
            let w = matrix(&arena, &queue, dtype, [outputs, inputs]);
            let dx = matrix(&arena, &queue, dtype, [tokens, inputs]);
            let dw = matrix(&arena, &queue, DType::F32, [outputs, inputs]);
            let products = [
                (GemmLayout::NT, &x, &w, &y, Write::Overwrite),
                (GemmLayout::NN, &y, &w, &dx, Write::Overwrite),
                (GemmLayout::TN, &y, &x, &dw, Write::Accumulate),
            ];
            let mut group = criterion.benchmark_group(format!("gemm {dtype} at {}, {name}", queue.level()));
            group.throughput(Throughput::Elements(2 * (tokens * inputs * outputs) as u64));
            for (layout, a, b, c, write) in products {
                let (a, b, c) = (a.view(), b.view(), c.view());
                group.bench_function(format!("{layout:?}"), |bencher| {
                    bencher.iter(|| queue.gemm(Gemm { layout, a, b, c, bias: None, write }));
                });
            }
            group.finish();
        }
    }
}

/// Products of few rows with weights in memory and in cache, in both orders of additions.
fn few_rows(criterion: &mut Criterion) {
    let arena = Arena::new();
    let mut queue = CpuQueue::new(THREADS, &arena).expect("threads for a bench");
    for dtype in [DType::F32, DType::BF16] {
        for (rows, outputs, inputs) in
            [(1, 4096, 11_008), (8, 4096, 11_008), (32, 4096, 11_008), (1, 768, 768), (32, 768, 768)]
        {
            let x = matrix(&arena, &queue, dtype, [rows, inputs]);
            let y = matrix(&arena, &queue, dtype, [rows, outputs]);
            let w = matrix(&arena, &queue, dtype, [outputs, inputs]);
            let name = format!("few rows, {dtype} at {}, {rows} x {outputs} x {inputs}", queue.level());
            let mut group = criterion.benchmark_group(name);
            group.throughput(Throughput::Bytes((outputs * inputs * dtype.size_bytes()) as u64));
            for summation in [Summation::ByShape, Summation::ByDepth] {
                queue.set_summation(summation);
                let (layout, write) = (GemmLayout::NT, Write::Overwrite);
                let gemm = Gemm { layout, a: x.view(), b: w.view(), c: y.view(), bias: None, write };
                group.bench_function(format!("{summation:?}"), |bencher| bencher.iter(|| queue.gemm(gemm)));
            }
            group.finish();
        }
    }
}

/// Products of few rows with quantized weights in memory, and of many rows. Throughput counts bytes of quantized weights.
fn quantized_weights(criterion: &mut Criterion) {
    let arena = Arena::new();
    let mut queue = CpuQueue::new(THREADS, &arena).expect("threads for a bench");
    queue.set_summation(Summation::ByDepth);
    let (outputs, inputs) = (4096, 11_008);
    for (dtype, format) in BlockFormat::ALL
        .map(|format| (DType::BF16, format))
        .into_iter()
        .chain([(DType::F32, BlockFormat::Q8_0)])
    {
        let elements = outputs * inputs;
        let values: Vec<f32> = (0..elements).map(|i| ((i * 7919) % 1009) as f32 / 505.0 - 1.0).collect();
        let mut bytes = vec![0; format.bytes(elements).expect("whole blocks")];
        format.quantize(&values, &mut bytes);
        let category = MemoryCategory::Activations;
        let bytes = Tensor::from_slice(&arena, [bytes.len()], &bytes, category).expect("memory for a bench");
        let b = BlockMatrix::new(format, bytes.view(), [outputs, inputs]);
        let layout = BlockLayout::Interleaved;
        let len = BlockMatrix::bytes_of(format, layout, b.shape()).expect("16 rows and whole blocks");
        let interleaved =
            Tensor::from_slice(&arena, [len], &vec![0_u8; len], category).expect("memory for a bench");
        let interleaved = BlockMatrix::with_layout(format, layout, interleaved.view(), b.shape());
        queue.interleave_blocks(b, interleaved);
        for rows in [1, 8, 512] {
            let x = matrix(&arena, &queue, dtype, [rows, inputs]);
            let y = matrix(&arena, &queue, dtype, [rows, outputs]);
            let kind = if rows > 8 { "many rows" } else { "few rows" };
            let name =
                format!("{kind}, {format} as {dtype} at {}, {rows} x {outputs} x {inputs}", queue.level());
            let mut group = criterion.benchmark_group(name);
            group.throughput(Throughput::Bytes(bytes.view().elements() as u64));
            for (name, b, activations) in [
                ("Float", b, BlockActivations::Float),
                ("Int8", b, BlockActivations::Int8),
                ("Int8 interleaved", interleaved, BlockActivations::Int8),
            ] {
                queue.set_block_activations(activations);
                let gemm = BlockGemm::linear(x.view(), b, y.view(), None);
                group.bench_function(name, |bencher| bencher.iter(|| queue.block_gemm(gemm)));
            }
            group.finish();
        }
    }
}

criterion_group!(benches, gemm, few_rows, quantized_weights);
criterion_main!(benches);

//! GEMMs at the shapes of real models on two threads: each linear layer forward (NT), and its gradients with respect
//! to the input (NN) and the weight (TN, accumulated in f32).
//!
//! Throughput counts floating-point operations, two for each multiply-add.
#![expect(missing_docs, reason = "the function that criterion's macro makes has none")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{Arena, CopyKernels, CpuQueue, Gemm, GemmKernels, GemmLayout, Tensor, Write};

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

criterion_group!(benches, gemm);
criterion_main!(benches);

//! Speed of the memory-bound kernels, in bytes moved per second at each level and for each storage type.
//!
//! The shapes are those of a small model (GPT-2's width and vocabulary); `LOCKSTEP_BENCH_THREADS` sets the
//! number of threads (default 1). Only the best level of the CPU is run unless `LOCKSTEP_BENCH_LEVELS=all`.
#![expect(missing_docs, reason = "the function that criterion's macro makes has none")]

use std::hint::black_box;

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{
    AdamW, Arena, CopyKernels, CpuLevel, CpuQueue, Dropout, ElementwiseKernels, EmbeddingKernels,
    GatedActivation, Gelu, LayerNorm, LossKernels, NormKernels, OptimizerKernels, RmsNorm, Rotary,
    RotaryKernels, Rotation, Rounding, Sgd, Tensor, TokenPositions, Write,
};

const TOKENS: usize = 2048;
const WIDTH: usize = 768;
const HEAD_DIM: usize = 64;
const VOCABULARY: usize = 50_257;
const LOSS_TOKENS: usize = 64;

/// A queue and the type of the operands.
struct Setting {
    queue: CpuQueue,
    dtype: DType,
    arena: Arena,
}

impl Setting {
    /// Creates a matrix of small numbers that vary.
    fn matrix(&self, dtype: DType, rows: usize, width: usize) -> Tensor {
        let values: Vec<f32> = (0..rows * width).map(|i| ((i * 7919) % 1009) as f32 / 505.0 - 1.0).collect();
        let category = MemoryCategory::Activations;
        let source = Tensor::from_slice(&self.arena, [rows, width], &values, category)
            .expect("the machine has the memory");
        let target =
            Tensor::zeros(&self.arena, dtype, [rows, width], category).expect("the machine has the memory");
        self.queue.cast(source.view(), target.view());
        target
    }

    fn words(&self, words: &[u32]) -> Tensor {
        Tensor::from_slice(&self.arena, [words.len()], words, MemoryCategory::Activations)
            .expect("the machine has the memory")
    }

    fn activation(&self) -> Tensor {
        self.matrix(self.dtype, TOKENS, WIDTH)
    }
}

type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// Measures `kernel`, which moves `bytes` bytes.
fn measure(group: &mut Group<'_>, name: &str, bytes: usize, kernel: impl Fn()) {
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function(name, |bencher| bencher.iter(|| black_box(&kernel)()));
}

fn elementwise(group: &mut Group<'_>, s: &Setting) {
    let q = &s.queue;
    let [a, b, c, y, z] = [(); 5].map(|()| s.activation());
    let [a, b, c, y, z] = [&a, &b, &c, &y, &z].map(Tensor::view);
    let bytes = TOKENS * WIDTH * s.dtype.size_bytes();
    measure(group, "add", 3 * bytes, || q.add(a, b, y));
    measure(group, "add in place", 3 * bytes, || q.add(y, b, y));
    let kinds =
        ["swiglu", "geglu exact", "geglu tanh", "clamped swiglu"].into_iter().zip(GatedActivation::ALL);
    for (name, kind) in kinds {
        measure(group, name, 3 * bytes, || q.gated(kind, a, b, y));
        measure(group, &format!("{name}_backward"), 5 * bytes, || q.gated_backward(kind, c, a, b, y, z));
    }
    for (name, kind) in [("exact", Gelu::Exact), ("tanh", Gelu::Tanh)] {
        measure(group, &format!("gelu {name}"), 2 * bytes, || q.gelu(kind, a, y));
        measure(group, &format!("gelu_backward {name}"), 3 * bytes, || q.gelu_backward(kind, b, a, y));
    }
    let keys = s.words(&[1, 2]);
    let dropout = Dropout { probability: 0.2, site: 3, keys: keys.view() };
    measure(group, "dropout", 2 * bytes, || q.dropout(dropout, TokenPositions::whole(TOKENS), 0, a, y));
    let other = if s.dtype == DType::F32 { DType::BF16 } else { DType::F32 };
    let converted = s.matrix(other, TOKENS, WIDTH);
    let half = s.matrix(DType::F16, TOKENS, WIDTH);
    measure(group, "cast", TOKENS * WIDTH * 6, || q.cast(a, converted.view()));
    let f16_bytes = TOKENS * WIDTH * 2;
    measure(group, "cast to f16", bytes + f16_bytes, || q.cast(a, half.view()));
    measure(group, "cast from f16", bytes + f16_bytes, || q.cast(half.view(), y));
    measure(group, "copy", 2 * bytes, || q.cast(a, y));
    measure(group, "zero", bytes, || q.zero(y));
}

fn rows(group: &mut Group<'_>, s: &Setting) {
    let q = &s.queue;
    let [x, dy, y] = [(); 3].map(|()| s.activation());
    let [x, dy, y] = [&x, &dy, &y].map(Tensor::view);
    let [weight, bias] = [(); 2].map(|()| s.matrix(s.dtype, 1, WIDTH));
    let (weight, bias) = (weight.view().reshape([WIDTH]), bias.view().reshape([WIDTH]));
    let [mean, rstd] = [(); 2].map(|()| s.matrix(DType::F32, TOKENS, 1));
    let (mean, rstd) = (mean.view().reshape([TOKENS]), rstd.view().reshape([TOKENS]));
    let [dweight, dbias] = [(); 2].map(|()| s.matrix(DType::F32, 1, WIDTH));
    let (dweight, dbias) = (dweight.view().reshape([WIDTH]), dbias.view().reshape([WIDTH]));
    let bytes = TOKENS * WIDTH * s.dtype.size_bytes();
    let write = Write::Overwrite;
    measure(group, "sum_rows", bytes, || q.sum_rows(x, dweight));
    let norm = RmsNorm { x, weight, offset: 0.0, rstd };
    measure(group, "rms_norm", 2 * bytes, || q.rms_norm(norm, 1e-5, y));
    measure(group, "rms_norm_backward_input", 3 * bytes, || q.rms_norm_backward_input(norm, dy, y, write));
    measure(group, "rms_norm_backward_weight", 2 * bytes, || q.rms_norm_backward_weight(norm, dy, dweight));
    let norm = LayerNorm { x, weight, mean, rstd };
    measure(group, "layer_norm", 2 * bytes, || q.layer_norm(norm, Some(bias), 1e-5, y));
    measure(group, "layer_norm_backward_input", 3 * bytes, || {
        q.layer_norm_backward_input(norm, dy, y, write);
    });
    measure(group, "layer_norm_backward_weight", 2 * bytes, || {
        q.layer_norm_backward_weight(norm, dy, dweight, Some(dbias));
    });
    let positions = s.words(&(0..TOKENS as u32).collect::<Vec<_>>());
    let frequencies = s.matrix(DType::F32, 1, HEAD_DIM / 2);
    let forward = Rotation::Forward;
    let [x, y] = [x, y].map(|view| view.reshape([TOKENS, view.elements() / TOKENS / HEAD_DIM, HEAD_DIM]));
    measure(group, "rope", 2 * bytes, || {
        q.rope(x, Rotary::new(positions.view(), frequencies.view()), forward, y)
    });
}

fn vocabulary(group: &mut Group<'_>, s: &Setting) {
    let q = &s.queue;
    let logits = s.matrix(s.dtype, LOSS_TOKENS, VOCABULARY);
    let labels: Vec<i32> = (0..LOSS_TOKENS as i32).map(|t| t * 701).collect();
    let labels = Tensor::from_slice(&s.arena, [LOSS_TOKENS], &labels, MemoryCategory::Activations)
        .expect("the machine has the memory");
    let losses = s.matrix(DType::F32, LOSS_TOKENS, 1);
    let bytes = LOSS_TOKENS * VOCABULARY * s.dtype.size_bytes();
    let (logits, labels, losses) = (logits.view(), labels.view(), losses.view());
    measure(group, "cross_entropy", bytes, || q.cross_entropy(logits, labels, losses));
    measure(group, "cross_entropy_with_gradient", 2 * bytes, || {
        q.cross_entropy_with_gradient(logits, labels, losses, 1e-3);
    });
    let ids = s.words(&(0..TOKENS as u32).map(|t| t * 7919 % VOCABULARY as u32).collect::<Vec<_>>());
    let table = s.matrix(s.dtype, VOCABULARY, WIDTH);
    let gradient = s.matrix(DType::F32, VOCABULARY, WIDTH);
    let out = s.activation();
    let bytes = TOKENS * WIDTH * s.dtype.size_bytes();
    measure(group, "embedding", 2 * bytes, || q.embedding(ids.view(), table.view(), 0, out.view()));
    measure(group, "embedding_backward", bytes + 8 * TOKENS * WIDTH, || {
        q.embedding_backward(ids.view(), out.view(), 0, gradient.view());
    });
}

fn optimizers(group: &mut Group<'_>, s: &Setting) {
    let elements = 4 << 20;
    let q = &s.queue;
    let [parameter, gradient, m, v] = [(); 4].map(|()| s.matrix(DType::F32, 1, elements));
    let copy = s.matrix(DType::BF16, 1, elements);
    let rounded = (s.dtype == DType::BF16).then_some(copy.view());
    let copy_bytes = rounded.map_or(0, |_| 2);
    q.zero(v.view());
    measure(group, "adamw", elements * (28 + copy_bytes), || {
        q.adamw(&AdamW {
            parameter: parameter.view(),
            gradient: gradient.view(),
            exp_avg: m.view(),
            exp_avg_sq: v.view(),
            rounded,
            rounding: Rounding::Nearest,
            learning_rate: 1e-3,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            gradient_scale: 1.0,
            step: 10,
        });
    });
    measure(group, "sgd", elements * (20 + copy_bytes), || {
        q.sgd(&Sgd {
            parameter: parameter.view(),
            gradient: gradient.view(),
            momentum_buffer: Some(m.view()),
            rounded,
            rounding: Rounding::Nearest,
            learning_rate: 1e-3,
            momentum: 0.9,
            weight_decay: 0.0,
            gradient_scale: 1.0,
            step: 10,
        });
    });
    measure(group, "sum_of_squares", elements * 4, || {
        black_box(q.sum_of_squares(gradient.view()).wait());
    });
}

fn kernels(criterion: &mut Criterion) {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let threads = variable("LOCKSTEP_BENCH_THREADS").parse().unwrap_or(1);
    let all_levels = variable("LOCKSTEP_BENCH_LEVELS") == "all";
    let levels = CpuLevel::available().filter(|level| all_levels || *level == CpuLevel::detect());
    for (level, dtype) in levels.flat_map(|level| [DType::F32, DType::BF16].map(|dtype| (level, dtype))) {
        let arena = Arena::new();
        let queue = CpuQueue::with_level(threads, &arena, level).expect("threads can be started");
        let setting = Setting { queue, dtype, arena };
        let mut group = criterion.benchmark_group(format!("{level} {dtype}"));
        group
            .sample_size(10)
            .warm_up_time(std::time::Duration::from_millis(100))
            .measurement_time(std::time::Duration::from_millis(400));
        elementwise(&mut group, &setting);
        rows(&mut group, &setting);
        vocabulary(&mut group, &setting);
        optimizers(&mut group, &setting);
        group.finish();
    }
}

criterion_group!(benches, kernels);
criterion_main!(benches);

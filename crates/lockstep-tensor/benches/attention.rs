//! Attention, forward and backward, at the shapes of real models on one thread, and one step of generation.
//!
//! Throughput counts the floating-point operations of the visible scores: two products forward, five backward. Times are
//! processor times, which other processes on the machine disturb less.
#![expect(missing_docs, reason = "the function that criterion's macro makes has none")]

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lockstep_plan::{CachePlace, DType, KvCacheType, MemoryCategory, random::Philox};
use lockstep_tensor::{
    Arena, Attention, AttentionKernels, AttentionVariant, AttentionWrite, CacheShape, CachedVectors,
    CopyKernels, CpuQueue, Dropout, PAGE_TOKENS, PagedCache, Queue, Tensor, TokenSpan, Write,
};
use rustix::time::{ClockId, clock_gettime};

/// Processor time is that of all threads: with more than one it says nothing about their balance.
const THREADS: usize = 1;
const CATEGORY: MemoryCategory = MemoryCategory::Activations;

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    sequences: usize,
    query_len: usize,
    key_len: usize,
    heads: usize,
    key_value_heads: usize,
    head_dim: usize,
    dropout: f32,
    /// Tokens in each document of a sequence.
    document_len: usize,
}

impl Case {
    const fn training(name: &'static str, sequences: usize, len: usize, heads: usize) -> Self {
        Self {
            name,
            sequences,
            query_len: len,
            key_len: len,
            heads,
            key_value_heads: heads,
            head_dim: 64,
            dropout: 0.0,
            document_len: len,
        }
    }

    fn visible_scores(&self) -> u64 {
        let start = self.key_len - self.query_len;
        let seen: usize = (start..self.key_len).map(|position| position % self.document_len + 1).sum();
        (self.sequences * self.heads * seen) as u64
    }
}

fn cases() -> [Case; 8] {
    let llama = Case { key_value_heads: 8, ..Case::training("llama 1x2048, 32/8 heads of 64", 1, 2048, 32) };
    [
        Case::training("baby-gpt 8x256, 6 heads of 64", 8, 256, 6),
        Case { dropout: 0.2, ..Case::training("baby-gpt with dropout", 8, 256, 6) },
        Case::training("gpt2 2x512, 12 heads of 64", 2, 512, 12),
        Case { head_dim: 96, ..Case::training("2x512, 8 heads of 96", 2, 512, 8) },
        Case { head_dim: 128, name: "llama 1x2048, 32/8 heads of 128", ..llama },
        llama,
        Case { name: "llama 1x2048 in documents of 256, 32/8 heads of 64", document_len: 256, ..llama },
        Case { query_len: 1, name: "generation, 1 query on 2048 keys, 32/8 heads of 64", ..llama },
    ]
}

fn random(arena: &Arena, dtype: DType, elements: usize, queue: &CpuQueue) -> Tensor {
    let philox = Philox::new(elements as u64);
    let values: Vec<f32> = (0..elements as u64).map(|i| philox.normal(i)).collect();
    let source = Tensor::from_slice(arena, [elements], &values, CATEGORY).expect("memory for a bench");
    let tensor = Tensor::zeros(arena, dtype, [elements], CATEGORY).expect("memory for a bench");
    queue.cast(source.view(), tensor.view());
    tensor
}

/// Calls `kernel` as often as asked, and returns the processor time of the calls.
fn processor_time(calls: u64, kernel: impl Fn()) -> Duration {
    let now = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let start = now();
    (0..calls).for_each(|_| kernel());
    now() - start
}

fn attention(c: &mut Criterion) {
    let arena = Arena::new();
    let queue = CpuQueue::new(THREADS, &arena).expect("threads for a bench");
    for dtype in [DType::F32, DType::BF16] {
        for case in cases() {
            let keys = Tensor::zeros(&arena, DType::U32, [case.sequences, 2], CATEGORY).expect("memory");
            let starts = (case.document_len < case.query_len).then(|| {
                let start = |token| token as u32 / case.document_len as u32 * case.document_len as u32;
                let starts: Vec<u32> = (0..case.query_len).map(start).collect();
                Tensor::from_slice(&arena, [starts.len()], &starts, CATEGORY).expect("memory")
            });
            let geometry = Attention {
                sequences: case.sequences,
                queries: TokenSpan {
                    position: case.key_len - case.query_len,
                    ..TokenSpan::whole(case.query_len)
                },
                keys: TokenSpan::whole(case.key_len),
                heads: case.heads,
                key_value_heads: case.key_value_heads,
                head_dim: case.head_dim,
                scale: (case.head_dim as f32).powf(-0.5),
                window: None,
                document_starts: starts.as_ref().map(Tensor::view),
                first_head: 0,
                dropout: (case.dropout > 0.0).then(|| Dropout {
                    probability: case.dropout,
                    site: 0,
                    keys: keys.view(),
                }),
                variant: AttentionVariant::default(),
            };
            let queries = case.sequences * case.query_len * case.heads * case.head_dim;
            let keys = case.sequences * case.key_len * case.key_value_heads * case.head_dim;
            let new = |elements| random(&arena, dtype, elements, &queue);
            let [q, out, dout, dq] = [queries; 4].map(new);
            let [k, v, dk, dv] = [keys; 4].map(new);
            let statistics = random(&arena, DType::F32, queries / case.head_dim, &queue);
            let operations_per_product = 2 * case.visible_scores() * case.head_dim as u64;

            let mut group = c.benchmark_group(format!("attention {dtype}, {}", case.name));
            group.throughput(Throughput::Elements(2 * operations_per_product));
            let forward = || {
                let write = Write::Overwrite;
                queue.attention(
                    &geometry,
                    q.view(),
                    k.view(),
                    v.view(),
                    out.view(),
                    statistics.view(),
                    write,
                );
            };
            group.bench_function("forward", |b| b.iter_custom(|calls| processor_time(calls, forward)));
            if case.query_len == case.key_len {
                group.throughput(Throughput::Elements(5 * operations_per_product));
                group.bench_function("backward", |b| {
                    let backward = || {
                        queue.attention_backward(
                            &geometry,
                            q.view(),
                            k.view(),
                            v.view(),
                            out.view(),
                            statistics.view(),
                            dout.view(),
                            dq.view(),
                            dk.view(),
                            dv.view(),
                            AttentionWrite::OVERWRITE,
                        );
                    };
                    b.iter_custom(|calls| processor_time(calls, backward));
                });
            }
            group.finish();
        }
    }
}

/// One new token of a sequence with a cache in pages, on two threads. The sequences take turns, so that the cache comes from
/// memory: throughput counts its bytes.
fn decode(c: &mut Criterion) {
    const TOKENS: usize = 4096;
    const SEQUENCES: usize = 8;
    const PAGES: usize = TOKENS / PAGE_TOKENS;
    let arena = Arena::new();
    let queue = CpuQueue::new(2, &arena).expect("threads for a bench");
    let words = |words: &[u32]| Tensor::from_slice(&arena, [words.len()], words, CATEGORY).expect("memory");
    for (dtype, stored, heads, key_value_heads) in [
        (DType::F32, KvCacheType::F32, 16, 8),
        (DType::F32, KvCacheType::Int8, 16, 8),
        (DType::BF16, KvCacheType::Bf16, 16, 8),
        (DType::BF16, KvCacheType::Int8, 16, 8),
        (DType::BF16, KvCacheType::Fp8, 16, 8),
        (DType::BF16, KvCacheType::Bf16, 32, 32),
        (DType::BF16, KvCacheType::Int8, 32, 32),
    ] {
        let head_dim = 128;
        let geometry = Attention {
            sequences: 1,
            queries: TokenSpan::whole(1),
            keys: TokenSpan::whole(TOKENS),
            heads,
            key_value_heads,
            head_dim,
            scale: (head_dim as f32).powf(-0.5),
            window: None,
            document_starts: None,
            first_head: 0,
            dropout: None,
            variant: AttentionVariant::default(),
        };
        let page_bytes = queue.page_bytes(
            dtype,
            stored,
            CacheShape { key_value_heads, head_dim, vectors: CachedVectors::KeyAndValue },
        );
        // Any bytes are numbers: speed does not depend on them, unless they are subnormal.
        let [keys, values] = page_bytes.map(|bytes| {
            let bytes = vec![0x3e_u8; SEQUENCES * PAGES * bytes];
            Tensor::from_slice(&arena, [bytes.len()], &bytes, CATEGORY).expect("memory")
        });
        let q = random(&arena, dtype, heads * head_dim, &queue);
        let out = random(&arena, dtype, heads * head_dim, &queue);
        let statistics = random(&arena, DType::F32, heads, &queue);
        let (row_starts, cached) = (words(&[0, 1]), words(&[TOKENS as u32 - 1]));
        let tables: Vec<u32> = (0..(SEQUENCES * PAGES) as u32).collect();
        let tables: Vec<Tensor> = tables.chunks(PAGES).map(words).collect();
        let bytes = PAGES * page_bytes.iter().sum::<usize>();
        let name = format!(
            "decode {dtype}, cache {stored}, {TOKENS} keys, {heads}/{key_value_heads} heads of {head_dim}"
        );
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Bytes(bytes as u64));
        let mut turn = 0;
        group.bench_function("one token", |b| {
            b.iter(|| {
                turn = (turn + 1) % SEQUENCES;
                let cache = PagedCache {
                    stored,
                    keys: keys.view(),
                    values: Some(values.view()),
                    row_starts: row_starts.view(),
                    cached: cached.view(),
                    pages: tables[turn].view(),
                    place: CachePlace::default(),
                };
                let shape = [1, heads, head_dim];
                let (q, out) = (q.view().reshape(shape), out.view().reshape(shape));
                queue.cached_attention(&geometry, cache, q, out, statistics.view());
            });
        });
        group.finish();
    }
}

criterion_group!(benches, attention, decode);
criterion_main!(benches);

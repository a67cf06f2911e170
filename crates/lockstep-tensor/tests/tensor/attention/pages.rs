//! Attention to a cache in pages: new tokens of several sequences in steps of any length have the bits of whole sequences. On ranks
//! with shards of a cache they have parts of the attention, which are merged.

use std::ops::Range;

use half::{bf16, f16};
use lockstep_plan::{CachePlace, DType, KvCacheType, MemoryCategory, random::Philox};
use lockstep_tensor::{
    Arena, Attention, AttentionKernels, AttentionVariant, CacheShape, CachedVectors, CpuLevel, CpuQueue,
    Element, PAGE_TOKENS, PagedCache, Queue, Summation, Tensor, TokenSpan, View, Write, alibi_slopes,
    page_bytes,
};
use proptest::prelude::*;

use super::{
    kernels::{Inputs, VariantTensors, causal, levels},
    reference::Case,
    variants::sinks,
};
use crate::testing::{Float, emulated};

const CATEGORY: MemoryCategory = MemoryCategory::Activations;

fn tensor<T: Element>(arena: &Arena, elements: &[T]) -> Tensor {
    Tensor::from_slice(arena, [elements.len()], elements, CATEGORY).unwrap()
}

/// Largest integer code of a cache.
const INT8_LIMIT: f32 = 127.0;
/// Largest E4M3 number.
const FP8_LIMIT: f32 = 448.0;
/// Smallest normal E4M3 number.
const FP8_NORMAL: f32 = 0.015_625;

/// Replaces a vector by what a cache gives back for it, one number at a time.
fn round_trip(stored: KvCacheType, vector: &mut [f32]) {
    let largest = vector.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    for x in vector {
        *x = match stored {
            KvCacheType::Bf16 => bf16::from_f32(*x).to_f32(),
            KvCacheType::Int8 => {
                let scale = largest / INT8_LIMIT;
                (*x / scale).round_ties_even() * scale
            }
            KvCacheType::Fp8 => {
                let scale = largest / FP8_LIMIT;
                // Three fraction bits, and no exponent below that of the smallest normal number.
                let unit = libm::exp2f((*x / scale).abs().max(FP8_NORMAL).log2().floor() - 3.0);
                (*x / scale / unit).round_ties_even() * unit * scale
            }
            KvCacheType::F32 | KvCacheType::F16 => *x,
        };
    }
}

fn queue(level: CpuLevel, threads: usize, arena: &Arena) -> CpuQueue {
    let mut queue = if level <= CpuLevel::detect() {
        CpuQueue::with_level(threads, arena, level).unwrap()
    } else {
        emulated(level, threads, arena).unwrap()
    };
    queue.set_summation(Summation::ByDepth);
    queue
}

fn geometry<'a>(case: &Case, variant: &'a VariantTensors) -> Attention<'a> {
    Attention {
        sequences: 1,
        queries: TokenSpan::whole(case.query_len),
        keys: TokenSpan::whole(case.query_len),
        heads: case.heads,
        key_value_heads: case.key_value_heads,
        head_dim: case.head_dim,
        scale: case.scale,
        window: case.window,
        document_starts: None,
        first_head: 0,
        dropout: None,
        variant: variant.variant(case),
    }
}

/// Returns outputs and log-sum-exps, `[heads, tokens]`, of whole sequences.
fn whole<T: Float>(case: &Case, inputs: &Inputs<T>, queue: &CpuQueue, arena: &Arena) -> (Vec<f32>, Vec<f32>) {
    let variant = VariantTensors::new(case, None, arena);
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|elements| tensor(arena, elements));
    let out = tensor(arena, &vec![T::store(f32::NAN); case.query_elements()]);
    let statistics = tensor(arena, &vec![f32::NAN; case.statistic_elements()]);
    let [q, k, v, outputs] = [&q, &k, &v, &out].map(Tensor::view);
    queue.attention(&geometry(case, &variant), q, k, v, outputs, statistics.view(), Write::Overwrite);
    (out.view().to_vec::<T>().into_iter().map(T::load).collect(), statistics.view().to_vec())
}

/// A sequence that is read in steps.
struct Reading<T> {
    case: Case,
    inputs: Inputs<T>,
    pages: Vec<u32>,
    read: usize,
    out: Vec<f32>,
    statistics: Vec<f32>,
}

/// Lengths of steps.
const STEPS: [usize; 6] = [0, 1, 1, 3, 70, 130];

/// Reads sequences together in a cache of type `stored`, in steps of random lengths among `steps`, on pages in random order.
fn read_in_steps<T: Float>(
    readings: &mut [Reading<T>],
    what: (KvCacheType, CachedVectors, &[usize]),
    queue: &CpuQueue,
    arena: &Arena,
    random: &mut impl FnMut(usize) -> usize,
) {
    read_on_ranks(readings, what, 1, (queue, arena), random);
}

/// Returns part `index` of `parts` equal ones.
fn part(all: View<'_>, index: usize, parts: usize) -> View<'_> {
    let of_each = all.elements() / parts;
    all.reshape([parts, of_each]).rows(index..index + 1)
}

/// Appends new tokens to the caches of all ranks, and attends from them: `q`, `k` and `v`. `tables`: first rows, cached tokens and pages of
/// the sequences. Returns the outputs, and the log-sum-exps of the first rank.
fn attend_on_ranks<T: Float>(
    (case, (stored, vectors)): (&Case, (KvCacheType, CachedVectors)),
    caches: &[[Tensor; 2]],
    [row_starts, cached, pages]: &[Tensor; 3],
    [q, k, v]: &[Tensor; 3],
    (queue, arena): (&CpuQueue, &Arena),
) -> (Vec<T>, Vec<f32>) {
    let Case { heads, key_value_heads, head_dim, .. } = *case;
    let (ranks, rows) = (caches.len(), q.view().elements() / (heads * head_dim));
    let (shape, key_shape) = ([rows, heads, head_dim], [rows, key_value_heads, head_dim]);
    let has_values = vectors == CachedVectors::KeyAndValue;
    let out = tensor(arena, &vec![T::store(f32::NAN); rows * heads * head_dim]);
    let of_ranks = tensor(arena, &vec![f32::NAN; ranks * rows * heads * head_dim]);
    let statistics = tensor(arena, &vec![f32::NAN; ranks * rows * heads]);
    let (out, statistics) = (out.view().reshape(shape), statistics.view());
    for (rank, [keys, values]) in caches.iter().enumerate() {
        let cache = PagedCache {
            stored,
            keys: keys.view(),
            values: has_values.then(|| values.view()),
            row_starts: row_starts.view(),
            cached: cached.view(),
            pages: pages.view(),
            place: CachePlace { ranks, rank },
        };
        let new_values = has_values.then(|| v.view().reshape(key_shape));
        queue.append_to_cache(cache, key_value_heads, k.view().reshape(key_shape), new_values);
        let variant = VariantTensors::new(case, None, arena);
        let geometry = geometry(case, &variant);
        let sinks = geometry.variant.sinks.filter(|_| rank == 0);
        let geometry = Attention { variant: AttentionVariant { sinks, ..geometry.variant }, ..geometry };
        let own = if ranks == 1 { out } else { part(of_ranks.view(), rank, ranks).reshape(shape) };
        let statistics = part(statistics, rank, ranks).reshape([rows * heads]);
        queue.cached_attention(&geometry, cache, q.view().reshape(shape), own, statistics);
    }
    if ranks > 1 {
        queue.merge_attention(of_ranks.view(), statistics, out);
    }
    (out.to_vec(), part(statistics, 0, ranks).to_vec())
}

/// Reads sequences as [`read_in_steps`] does, in a cache that is sharded over `ranks` ranks. Several ranks give no log-sum-exps.
fn read_on_ranks<T: Float>(
    readings: &mut [Reading<T>],
    (stored, vectors, steps): (KvCacheType, CachedVectors, &[usize]),
    ranks: usize,
    (queue, arena): (&CpuQueue, &Arena),
    random: &mut impl FnMut(usize) -> usize,
) {
    let Case { heads, key_value_heads, head_dim, .. } = readings[0].case;
    let page_tokens = ranks * PAGE_TOKENS;
    let pages =
        2 + readings.iter().map(|reading| reading.case.query_len.div_ceil(page_tokens)).sum::<usize>();
    let mut free: Vec<u32> = (0..pages as u32).collect();
    let page_bytes = queue.page_bytes(T::DTYPE, stored, CacheShape { key_value_heads, head_dim, vectors });
    // Caches of NaN: what is not written must not be read.
    let cache = || {
        page_bytes.map(|bytes| {
            Tensor::from_slice(arena, [pages, bytes], &vec![0xff_u8; pages * bytes], CATEGORY).unwrap()
        })
    };
    let caches: Vec<[Tensor; 2]> = (0..ranks).map(|_| cache()).collect();
    while readings.iter().any(|reading| reading.read < reading.case.query_len) {
        let (mut starts, mut cached, mut tables) = (vec![0_u32], Vec::new(), Vec::new());
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let most = pages;
        let mut parts = Vec::new();
        for (index, reading) in readings.iter_mut().enumerate() {
            let left = reading.case.query_len - reading.read;
            let len = left.min(steps[random(steps.len())]);
            while reading.pages.len() * page_tokens < reading.read + len {
                reading.pages.push(free.swap_remove(random(free.len())));
            }
            let tokens = reading.read..reading.read + len;
            let part_of =
                |x: &[T], heads| x[tokens.start * heads * head_dim..tokens.end * heads * head_dim].to_vec();
            q.extend(part_of(&reading.inputs.q, heads));
            k.extend(part_of(&reading.inputs.k, key_value_heads));
            v.extend(part_of(&reading.inputs.v, key_value_heads));
            starts.push(starts[index] + len as u32);
            cached.push(reading.read as u32);
            tables.extend((0..most).map(|page| reading.pages.get(page).copied().unwrap_or(u32::MAX)));
            parts.push(tokens);
            reading.read += len;
        }
        let rows = q.len() / (heads * head_dim);
        if rows == 0 {
            continue;
        }
        let tables = [&starts, &cached, &tables].map(|words| tensor(arena, words));
        let operands = [q, k, v].map(|elements| tensor(arena, &elements));
        let what = (&readings[0].case, (stored, vectors));
        let (out, statistics) = attend_on_ranks::<T>(what, &caches, &tables, &operands, (queue, arena));
        for ((reading, tokens), &start) in readings.iter_mut().zip(parts).zip(&starts) {
            reading.record(tokens, start as usize, (&out, &statistics));
        }
    }
}

impl<T: Float> Reading<T> {
    /// Notes the results of `tokens`, which are the rows of a batch from `first` on.
    fn record(&mut self, tokens: Range<usize>, first: usize, (out, statistics): (&[T], &[f32])) {
        let Case { heads, head_dim, query_len, .. } = self.case;
        let (width, rows) = (heads * head_dim, statistics.len() / heads);
        for (row, token) in (first..).zip(tokens) {
            let values = out[row * width..][..width].iter().map(|&value| value.load());
            self.out.splice(token * width..(token + 1) * width, values);
            for head in 0..heads {
                self.statistics[head * query_len + token] = statistics[head * rows + row];
            }
        }
    }
}

fn check<T: Float>(case: &Case, lengths: &[usize], level: CpuLevel, threads: usize, seed: u64) {
    let arena = Arena::new();
    let queue = queue(level, threads, &arena);
    let philox = Philox::new(seed);
    let mut draws = 0;
    let mut random = |below: usize| {
        draws += 1;
        (philox.uniform(draws) * below as f64) as usize
    };
    let new = || -> Vec<Reading<T>> { readings(case, lengths, seed) };
    let own = KvCacheType::of(T::DTYPE).unwrap();
    for stored in KvCacheType::ALL.into_iter().filter(|stored| stored.holds(T::DTYPE)) {
        let mut found = new();
        read_in_steps(&mut found, (stored, CachedVectors::KeyAndValue, &STEPS), &queue, &arena, &mut random);
        let mut in_one_step = new();
        read_in_steps(
            &mut in_one_step,
            (stored, CachedVectors::KeyAndValue, &[usize::MAX]),
            &queue,
            &arena,
            &mut random,
        );
        for (number, (found, in_one_step)) in found.iter().zip(&in_one_step).enumerate() {
            let what = format!("{} in {stored} {level:?}, sequence {number} of {lengths:?}", T::DTYPE);
            let bits = [(&found.out, &in_one_step.out), (&found.statistics, &in_one_step.statistics)];
            for (found, expected) in bits {
                assert_same_bits(found, expected, &what);
            }
            let expected = whole(&found.case, &found.inputs, &queue, &arena);
            if stored == own {
                assert_same_bits(&found.out, &expected.0, &what);
                assert_same_bits(&found.statistics, &expected.1, &what);
                continue;
            }
            let rounded = found.inputs.in_cache(&found.case, stored);
            let exact = found.inputs.widened();
            let [(out, statistics), exact] = [rounded, exact].map(|wide| {
                whole(
                    &found.case,
                    &wide,
                    &CpuQueue::with_level(1, &arena, CpuLevel::Portable).unwrap(),
                    &arena,
                )
            });
            // One token's output is its value, which its own type holds exactly and a scaled code does not.
            let rounding = match T::DTYPE {
                DType::BF16 => 4e-3,
                DType::F16 => 5e-4,
                _ => 1e-5,
            };
            // The computation in its own type adds to the error of the cache what it has without one.
            let own_error = distance(&expected.0, &exact.0);
            assert!(
                distance(&found.out, &out) <= 1.5 * own_error + rounding,
                "{what}: relative error {} of outputs from those of the rounded cache, {own_error} without one",
                distance(&found.out, &out)
            );
            assert!(
                distance(&found.statistics, &statistics) <= 1.5 * distance(&expected.1, &exact.1) + 1e-4,
                "{what}: relative error {} of log-sum-exps",
                distance(&found.statistics, &statistics)
            );
        }
    }
}

/// Returns the relative distance of two vectors.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    difference / norm(&mut expected.iter().map(|&x| f64::from(x)))
}

fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    let differs = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
    let values = differs.map(|at| (found[at], expected[at]));
    assert!(differs.is_none(), "{what}: {differs:?} is {values:?} instead");
}

/// Returns the sequences of some lengths before anything is read.
fn readings<T: Float>(case: &Case, lengths: &[usize], seed: u64) -> Vec<Reading<T>> {
    let reading = |(&len, seed): (&usize, u64)| {
        let case = Case { query_len: len, key_len: len, ..case.clone() };
        Reading {
            inputs: Inputs::random(&case, seed),
            pages: Vec::new(),
            read: 0,
            out: vec![f32::NAN; case.query_elements()],
            statistics: vec![f32::NAN; case.statistic_elements()],
            case,
        }
    };
    lengths.iter().zip(seed..).map(reading).collect()
}

impl<T: Float> Inputs<T> {
    /// Returns the inputs in f32.
    fn widened(&self) -> Inputs<f32> {
        let wide = |x: &[T]| x.iter().map(|x| x.load()).collect();
        Inputs { q: wide(&self.q), k: wide(&self.k), v: wide(&self.v), dout: wide(&self.dout) }
    }

    /// Returns the inputs in f32 with keys and values as a cache stores them.
    fn in_cache(&self, case: &Case, stored: KvCacheType) -> Inputs<f32> {
        let mut inputs = self.widened();
        for vectors in [&mut inputs.k, &mut inputs.v] {
            for vector in vectors.chunks_exact_mut(case.head_dim) {
                round_trip(stored, vector);
            }
        }
        inputs
    }
}

fn case(heads: usize, group: usize, head_dim: usize, variant: usize) -> Case {
    let plain = causal(1, 1, heads * group, heads, head_dim);
    match variant {
        0 => plain,
        1 => Case { window: Some(33), ..plain },
        2 => Case { alibi_slopes: Some(alibi_slopes(heads * group)), soft_cap: Some(3.0), ..plain },
        _ => Case { sinks: Some(sinks(heads * group)), window: Some(100), ..plain },
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

    #[test]
    fn any_steps_on_any_pages_have_the_bits_of_whole_sequences(
        heads in 1_usize..=3,
        group in prop::sample::select(vec![1_usize, 2, 5]),
        head_dim in prop::sample::select(vec![8_usize, 20, 33, 64, 80]),
        variant in 0_usize..4,
        lengths in prop::collection::vec(1_usize..200, 1..4),
        threads in 1_usize..=2,
        seed in 0_u64..1000,
    ) {
        let case = case(heads, group, head_dim, variant);
        for level in levels() {
            check::<f32>(&case, &lengths, level, threads, seed);
            check::<bf16>(&case, &lengths, level, threads, seed);
            check::<f16>(&case, &lengths, level, threads, seed);
        }
    }
}

/// Checks that ranks with shards of a cache have the attention of one rank, with the same bits for steps of any length.
fn check_sharded<T: Float>(
    (case, lengths): (&Case, &[usize]),
    ranks: usize,
    level: CpuLevel,
    (threads, seed): (usize, u64),
) {
    let arena = Arena::new();
    let queue = queue(level, threads, &arena);
    let philox = Philox::new(seed);
    let mut draws = 0;
    let mut random = |below: usize| {
        draws += 1;
        (philox.uniform(draws) * below as f64) as usize
    };
    for stored in KvCacheType::ALL.into_iter().filter(|stored| stored.holds(T::DTYPE)) {
        let mut found_on = |ranks: usize, steps: &[usize]| {
            let mut found: Vec<Reading<T>> = readings(case, lengths, seed);
            let what = (stored, CachedVectors::KeyAndValue, steps);
            read_on_ranks(&mut found, what, ranks, (&queue, &arena), &mut random);
            found
        };
        let one = found_on(1, &[usize::MAX]);
        let [in_one_step, found] = [&[usize::MAX], &STEPS[..]].map(|steps| found_on(ranks, steps));
        for (number, ((one, in_one_step), found)) in one.iter().zip(&in_one_step).zip(&found).enumerate() {
            let what = format!(
                "{} in {stored} {level:?} on {ranks} ranks, sequence {number} of {lengths:?}",
                T::DTYPE
            );
            assert_same_bits(&found.out, &in_one_step.out, &what);
            // Outputs are rounded once, as on one rank.
            let rounding = match T::DTYPE {
                DType::BF16 => 4e-3,
                DType::F16 => 5e-4,
                _ => 1e-6,
            };
            let distance = distance(&found.out, &one.out);
            assert!(distance <= rounding, "{what}: relative difference {distance} from one rank");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, ..ProptestConfig::default() })]

    #[test]
    fn ranks_with_shards_of_a_cache_have_the_attention_of_one(
        heads in 1_usize..=3,
        group in prop::sample::select(vec![1_usize, 2, 5]),
        head_dim in prop::sample::select(vec![8_usize, 33, 64, 80]),
        variant in 0_usize..4,
        lengths in prop::collection::vec(1_usize..400, 1..4),
        ranks in 2_usize..=4,
        threads in 1_usize..=2,
        seed in 0_u64..1000,
    ) {
        let case = case(heads, group, head_dim, variant);
        for level in levels() {
            check_sharded::<f32>((&case, &lengths), ranks, level, (threads, seed));
            check_sharded::<bf16>((&case, &lengths), ranks, level, (threads, seed));
            check_sharded::<f16>((&case, &lengths), ranks, level, (threads, seed));
        }
    }
}

#[test]
fn parts_without_keys_have_no_weight_in_a_merge() {
    let arena = Arena::new();
    let queue = queue(CpuLevel::detect(), 2, &arena);
    // Two parts of three rows of a head of two: one row has keys in both, one in the second, one in none.
    let nothing = f32::NEG_INFINITY;
    let parts = [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 5.0, 8.0, 3.0, 4.0, 0.0, 0.0_f32];
    let statistics = [0.0, nothing, nothing, 3.0_f32.ln(), 80.0, nothing];
    let [parts, statistics, out] = [&parts[..], &statistics, &[f32::NAN; 6]].map(|x| tensor(&arena, x));
    queue.merge_attention(parts.view(), statistics.view(), out.view().reshape([3, 1, 2]));
    let found = out.view().to_vec::<f32>();
    let expected = [4.0, 6.5, 3.0, 4.0, 0.0, 0.0];
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}, not {expected:?}");
}

/// Checks that a cache of one vector a token has the bits of a cache whose values are copies of its keys.
fn check_shared<T: Float>(case: &Case, lengths: &[usize], level: CpuLevel, seed: u64) {
    let arena = Arena::new();
    let queue = queue(level, 2, &arena);
    let philox = Philox::new(seed);
    let mut draws = 0;
    let mut random = |below: usize| {
        draws += 1;
        (philox.uniform(draws) * below as f64) as usize
    };
    for stored in KvCacheType::ALL.into_iter().filter(|stored| stored.holds(T::DTYPE)) {
        let [shared, copied] = [CachedVectors::Shared, CachedVectors::KeyAndValue].map(|vectors| {
            let mut readings = readings::<T>(case, lengths, seed);
            readings.iter_mut().for_each(|reading| reading.inputs.v = reading.inputs.k.clone());
            read_in_steps(&mut readings, (stored, vectors, &STEPS), &queue, &arena, &mut random);
            readings
        });
        for (number, (shared, copied)) in shared.iter().zip(&copied).enumerate() {
            let what = format!("{} in {stored} {level:?}, sequence {number} of {lengths:?}", T::DTYPE);
            assert_same_bits(&shared.out, &copied.out, &what);
            assert_same_bits(&shared.statistics, &copied.statistics, &what);
        }
    }
}

/// The heads share one vector, as the latent of multi-head latent attention, whose width may be no multiple of a register.
#[test]
fn a_vector_that_is_key_and_value_is_stored_once() {
    for (head_dim, heads) in [(24, 4), (33, 1), (80, 70)] {
        let case = case(1, heads, head_dim, 0);
        for level in levels() {
            check_shared::<f32>(&case, &[150, 1, 64], level, 3);
            check_shared::<bf16>(&case, &[150, 1, 64], level, 4);
            check_shared::<f16>(&case, &[150, 1, 64], level, 5);
        }
    }
    let shape = CacheShape { key_value_heads: 1, head_dim: 576, vectors: CachedVectors::Shared };
    for (stored, dtype, bytes) in [
        (KvCacheType::F32, DType::F32, 4 * 576),
        (KvCacheType::Bf16, DType::BF16, 2 * 576),
        (KvCacheType::Int8, DType::BF16, 576 + 4),
        (KvCacheType::Fp8, DType::BF16, 576 + 4),
    ] {
        let found = page_bytes(CpuLevel::detect(), dtype, stored, shape);
        assert_eq!(found, [PAGE_TOKENS * bytes, 0], "{stored}");
    }
}

#[test]
#[should_panic(expected = "has pages")]
fn a_sequence_without_a_page_for_its_tokens_is_refused() {
    let arena = Arena::new();
    let queue = queue(CpuLevel::detect(), 1, &arena);
    let [keys, values] = queue
        .page_bytes(
            f32::DTYPE,
            KvCacheType::F32,
            CacheShape { key_value_heads: 1, head_dim: 8, vectors: CachedVectors::KeyAndValue },
        )
        .map(|bytes| Tensor::zeros(&arena, DType::U8, [1, bytes], CATEGORY).unwrap());
    let [row_starts, cached, pages] = [vec![0_u32, 1], vec![64], vec![0]].map(|words| tensor(&arena, &words));
    let cache = PagedCache {
        stored: KvCacheType::F32,
        keys: keys.view(),
        values: Some(values.view()),
        row_starts: row_starts.view(),
        cached: cached.view(),
        pages: pages.view(),
        place: CachePlace::default(),
    };
    let new = tensor(&arena, &[0.0_f32; 8]);
    let new = new.view().reshape([1, 1, 8]);
    queue.append_to_cache(cache, 1, new, Some(new));
}

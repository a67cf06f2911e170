//! Attention by calls on spans of queries and keys, as context-parallel ranks make them, against the definition on
//! whole sequences.

use std::ops::Range;

use half::{bf16, f16};
use lockstep_plan::MemoryCategory;
use lockstep_tensor::{
    Arena, Attention, AttentionDirection, AttentionKernels, AttentionWrite, CopyKernels, CpuLevel, CpuQueue,
    Dropout, Element, Tensor, TokenSpan, Write, alibi_slopes, document_ends,
};
use proptest::prelude::*;

use super::{
    kernels::{Inputs, Outputs, VariantTensors, assert_agrees, causal, document_starts, levels},
    reference::Case,
    variants::{random_mask, sinks},
};
use crate::testing::{Float, emulated};

/// Assignment of a sequence's tokens to context-parallel ranks.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// One range for each rank.
    Contiguous,
    /// Two ranges for each rank, one from each end, so that all ranks have the same work.
    ZigZag,
}

/// The ranges of positions that a rank holds, in order.
type Stretches = Vec<Range<usize>>;

fn stretches(cut: Cut, len: usize, ranks: usize) -> Vec<Stretches> {
    let piece = |i: usize, pieces: usize| i * len / pieces..(i + 1) * len / pieces;
    let of = |rank: usize| match cut {
        Cut::Contiguous => vec![piece(rank, ranks)],
        Cut::ZigZag => vec![piece(rank, 2 * ranks), piece(2 * ranks - 1 - rank, 2 * ranks)],
    };
    (0..ranks).map(of).collect()
}

fn stored(stretches: &Stretches) -> usize {
    stretches.iter().map(Range::len).sum()
}

/// Returns range `index` of a rank's tensors as a span.
fn span(stretches: &Stretches, index: usize) -> TokenSpan {
    TokenSpan {
        stored: stored(stretches),
        first: stretches[..index].iter().map(Range::len).sum(),
        len: stretches[index].len(),
        position: stretches[index].start,
    }
}

/// Returns a rank's part of a tensor `[outer, len, width]`.
fn part<T: Copy>(x: &[T], len: usize, width: usize, stretches: &Stretches) -> Vec<T> {
    let tokens = |sequence: &[T]| -> Vec<T> {
        stretches.iter().flat_map(|s| sequence[s.start * width..s.end * width].to_vec()).collect()
    };
    x.chunks(len * width).flat_map(tokens).collect()
}

/// Writes a rank's part back to the whole tensor.
fn put_back(x: &mut [f32], part: &[f32], len: usize, width: usize, stretches: &Stretches) {
    let mut part = part.iter();
    for sequence in x.chunks_mut(len * width) {
        for stretch in stretches {
            for x in &mut sequence[stretch.start * width..stretch.end * width] {
                *x = *part.next().expect("a part has the elements of its stretches");
            }
        }
    }
}

/// Tensors of one rank.
struct Rank {
    stretches: Stretches,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    document_starts: Option<Tensor>,
    variant: VariantTensors,
    /// f32 accumulator of the outputs.
    out: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    log_sum_exp: Tensor,
    dsinks: Tensor,
}

/// All ranks, simulated one after the other in one process.
struct Ring<'a> {
    case: &'a Case,
    arena: Arena,
    queue: CpuQueue,
    keys: Tensor,
    ranks: Vec<Rank>,
}

impl<'a> Ring<'a> {
    fn new<T: Float>(
        case: &'a Case,
        inputs: &Inputs<T>,
        stretches: Vec<Stretches>,
        level: CpuLevel,
        threads: usize,
    ) -> Self {
        let arena = Arena::new();
        let queue = if level <= CpuLevel::detect() {
            CpuQueue::with_level(threads, &arena, level).unwrap()
        } else {
            emulated(level, threads, &arena).unwrap()
        };
        let words: Vec<u32> = (0..case.sequences)
            .flat_map(|sequence| [Case::key(sequence) as u32, (Case::key(sequence) >> 32) as u32])
            .collect();
        let (width, key_width) = (case.heads * case.head_dim, case.key_value_heads * case.head_dim);
        let rank = |stretches: Stretches| {
            let part = |x: &[T], width| tensor(&arena, &part(x, case.query_len, width, &stretches));
            let tokens = case.sequences * stored(&stretches);
            // Accumulators start as NaN: the first call on a span must overwrite them.
            let sums = |elements| tensor(&arena, &vec![f32::NAN; elements]);
            Rank {
                q: part(&inputs.q, width),
                k: part(&inputs.k, key_width),
                v: part(&inputs.v, key_width),
                dout: part(&inputs.dout, width),
                document_starts: case
                    .document_starts
                    .as_ref()
                    .map(|starts| tensor(&arena, &self::part(starts, case.query_len, 1, &stretches))),
                variant: {
                    let ends = case.document_ends.as_ref();
                    let ends = ends.map(|ends| self::part(ends, case.query_len, 1, &stretches));
                    VariantTensors::new(case, ends.as_deref(), &arena)
                },
                dsinks: tensor(&arena, &vec![0.0_f32; case.sinks.as_ref().map_or(0, Vec::len)]),
                out: sums(tokens * width),
                dq: sums(tokens * width),
                dk: sums(tokens * key_width),
                dv: sums(tokens * key_width),
                log_sum_exp: sums(tokens * case.heads),
                stretches,
            }
        };
        let ranks = stretches.into_iter().map(rank).collect();
        Self { keys: tensor(&arena, &words), case, queue, ranks, arena }
    }

    /// Calls `visit` with (queries' rank, keys' rank, geometry of two spans, write modes of the queries' and keys'
    /// results) in the order in which keys travel around a ring.
    fn for_each_call(&self, mut visit: impl FnMut(&Rank, &Rank, &Attention<'_>, AttentionWrite)) {
        let count = self.ranks.len();
        let mut written = vec![[[false; 2]; 2]; count];
        for step in 0..count {
            for query_rank in 0..count {
                let key_rank = (query_rank + count - step) % count;
                let (own, other) = (&self.ranks[query_rank], &self.ranks[key_rank]);
                for (i, queries) in own.stretches.iter().enumerate() {
                    for (j, keys) in other.stretches.iter().enumerate() {
                        let is_after =
                            self.case.direction == AttentionDirection::Causal && keys.start >= queries.end;
                        if queries.is_empty() || keys.is_empty() || is_after {
                            continue;
                        }
                        let attention =
                            self.attention(own, span(&own.stretches, i), span(&other.stretches, j));
                        let mut write = |rank: usize, which: usize, stretch: usize| {
                            let before = std::mem::replace(&mut written[rank][which][stretch], true);
                            if before { Write::Accumulate } else { Write::Overwrite }
                        };
                        let write =
                            AttentionWrite { queries: write(query_rank, 0, i), keys: write(key_rank, 1, j) };
                        visit(own, other, &attention, write);
                    }
                }
            }
        }
    }

    fn attention<'r>(&'r self, own: &'r Rank, queries: TokenSpan, keys: TokenSpan) -> Attention<'r> {
        let case = self.case;
        Attention {
            sequences: case.sequences,
            queries,
            keys,
            heads: case.heads,
            key_value_heads: case.key_value_heads,
            head_dim: case.head_dim,
            scale: case.scale,
            window: case.window,
            document_starts: own.document_starts.as_ref().map(Tensor::view),
            first_head: case.first_head,
            dropout: (case.dropout > 0.0).then(|| Dropout {
                probability: case.dropout,
                site: case.site,
                keys: self.keys.view(),
            }),
            variant: own.variant.variant(case),
        }
    }

    /// Runs forward and backward, and assembles the parts of all ranks.
    fn run<T: Float>(&self) -> Outputs {
        self.for_each_call(|own, other, attention, write| {
            let [q, k, v, out, log_sum_exp] =
                [&own.q, &other.k, &other.v, &own.out, &own.log_sum_exp].map(Tensor::view);
            self.queue.attention(attention, q, k, v, out, log_sum_exp, write.queries);
        });
        let rounded = |rank: &Rank| {
            let out = tensor(&self.arena, &vec![T::store(0.0); rank.out.view().elements()]);
            self.queue.cast(rank.out.view(), out.view());
            out
        };
        let outs: Vec<Tensor> = self.ranks.iter().map(rounded).collect();
        self.for_each_call(|own, other, attention, write| {
            let index = self.ranks.iter().position(|rank| std::ptr::eq(rank, own)).unwrap();
            let [q, k, v, out, log_sum_exp, dout, dq, dk, dv] = [
                &own.q,
                &other.k,
                &other.v,
                &outs[index],
                &own.log_sum_exp,
                &own.dout,
                &own.dq,
                &other.dk,
                &other.dv,
            ]
            .map(Tensor::view);
            self.queue.attention_backward(attention, q, k, v, out, log_sum_exp, dout, dq, dk, dv, write);
        });
        let case = self.case;
        if case.sinks.is_some() {
            for (rank, out) in self.ranks.iter().zip(&outs) {
                for (index, _) in rank.stretches.iter().enumerate() {
                    // The span of the keys has no effect.
                    let queries = span(&rank.stretches, index);
                    let attention = self.attention(rank, queries, TokenSpan { len: 0, ..queries });
                    let [out, log_sum_exp, dout, dsinks] =
                        [out, &rank.log_sum_exp, &rank.dout, &rank.dsinks].map(Tensor::view);
                    self.queue.attention_sinks_backward(&attention, out, log_sum_exp, dout, dsinks);
                }
            }
        }
        let (width, key_width) = (case.heads * case.head_dim, case.key_value_heads * case.head_dim);
        let whole = |width: usize, part: &dyn Fn(usize) -> Vec<f32>| {
            let mut x = vec![f32::NAN; case.sequences * case.query_len * width];
            for (index, rank) in self.ranks.iter().enumerate() {
                put_back(&mut x, &part(index), case.query_len, width, &rank.stretches);
            }
            x
        };
        let mut log_sum_exp = vec![f32::NAN; case.statistic_elements()];
        for rank in &self.ranks {
            put_back(&mut log_sum_exp, &rank.log_sum_exp.view().to_vec(), case.query_len, 1, &rank.stretches);
        }
        Outputs {
            out: whole(width, &|i| outs[i].view().to_vec::<T>().into_iter().map(T::load).collect()),
            log_sum_exp,
            dq: whole(width, &|i| self.ranks[i].dq.view().to_vec()),
            dk: whole(key_width, &|i| self.ranks[i].dk.view().to_vec()),
            dv: whole(key_width, &|i| self.ranks[i].dv.view().to_vec()),
            dsinks: (0..case.sinks.as_ref().map_or(0, Vec::len))
                .map(|head| self.ranks.iter().map(|rank| rank.dsinks.view().to_vec::<f32>()[head]).sum())
                .collect(),
        }
    }
}

fn tensor<T: Element>(arena: &Arena, elements: &[T]) -> Tensor {
    Tensor::from_slice(arena, [elements.len()], elements, MemoryCategory::Activations).unwrap()
}

fn check<T: Float>(case: &Case, cut: Cut, ranks: usize, level: CpuLevel) {
    let inputs = Inputs::<T>::random(case, 21);
    let stretches = stretches(cut, case.query_len, ranks);
    let outputs = Ring::new(case, &inputs, stretches, level, 2).run::<T>();
    assert_agrees(case, level, &inputs, &outputs);
}

fn check_everywhere(case: &Case) {
    for (cut, ranks) in
        [Cut::Contiguous, Cut::ZigZag].into_iter().flat_map(|cut| [2, 3, 4].map(|ranks| (cut, ranks)))
    {
        for level in levels() {
            check::<f32>(case, cut, ranks, level);
            check::<bf16>(case, cut, ranks, level);
        }
    }
}

#[test]
fn sequences_in_parts_give_the_attention_of_whole_ones() {
    for (len, head_dim) in [(9, 5), (64, 16), (150, 40), (390, 64)] {
        check_everywhere(&causal(2, len, 2, 2, head_dim));
    }
    check::<f16>(&causal(1, 130, 2, 1, 24), Cut::ZigZag, 2, CpuLevel::detect());
}

#[test]
fn parts_share_key_heads_like_whole_sequences() {
    check_everywhere(&causal(2, 101, 6, 2, 24));
}

#[test]
fn windows_and_documents_reach_across_parts() {
    for window in [1, 20, 64, 100] {
        check_everywhere(&Case { window: Some(window), ..causal(1, 150, 2, 1, 16) });
    }
    for lengths in [&[64, 64][..], &[63, 2, 64], &[10; 15], &[100, 7]] {
        // The second sequence has other documents.
        let starts = [document_starts(150, lengths), document_starts(150, &[70, 30])].concat();
        check_everywhere(&Case { document_starts: Some(starts), ..causal(2, 150, 4, 2, 24) });
    }
}

#[test]
fn dropout_of_parts_is_that_of_whole_sequences() {
    // Parts begin at positions that are not multiples of four.
    check_everywhere(&Case { dropout: 0.4, first_head: 3, ..causal(2, 147, 2, 1, 16) });
}

#[test]
fn variants_of_parts_are_those_of_whole_sequences() {
    let plain = Case { alibi_slopes: Some(alibi_slopes(4)), soft_cap: Some(2.0), ..causal(2, 150, 4, 2, 16) };
    let sinks = Some(sinks(4));
    check_everywhere(&Case { sinks: sinks.clone(), window: Some(70), dropout: 0.2, ..plain.clone() });
    let starts = [document_starts(150, &[63, 2, 64]), document_starts(150, &[70, 30])].concat();
    check_everywhere(&Case {
        sinks,
        direction: AttentionDirection::Bidirectional,
        key_mask: Some(random_mask(3, 300, 0.7)),
        document_ends: Some(document_ends(&starts, 150)),
        document_starts: Some(starts),
        ..plain
    });
}

#[test]
fn emulated_tiles_merge_parts() {
    let level = CpuLevel::AmxBf16;
    if level > CpuLevel::detect() && emulated(level, 1, &Arena::new()).is_some() {
        check::<bf16>(&Case { dropout: 0.2, ..causal(1, 90, 4, 1, 33) }, Cut::ZigZag, 2, level);
    }
}

#[test]
fn any_number_of_threads_merges_to_the_same_bits() {
    let case = Case { dropout: 0.3, window: Some(80), ..causal(2, 200, 6, 2, 40) };
    for level in levels() {
        let run = |threads| {
            let inputs = Inputs::<bf16>::random(&case, 22);
            Ring::new(&case, &inputs, stretches(Cut::ZigZag, 200, 2), level, threads).run::<bf16>()
        };
        let one = run(1);
        assert!(one == run(2) && one == run(3), "threads change bits at {level}");
    }
}

#[test]
fn rows_that_are_not_among_the_queries_or_keys_stay_as_they_are() {
    let case = causal(1, 40, 1, 1, 8);
    let inputs = Inputs::<f32>::random(&case, 23);
    let everything = 0..case.query_len;
    let ring = Ring::new(&case, &inputs, vec![vec![everything]], CpuLevel::detect(), 1);
    let rank = &ring.ranks[0];
    let part = |first, len| TokenSpan { stored: 40, first, len, position: first };
    let attention = ring.attention(rank, part(20, 10), part(5, 20));
    let [q, k, v, dout, out, log_sum_exp, dq, dk, dv] =
        [&rank.q, &rank.k, &rank.v, &rank.dout, &rank.out, &rank.log_sum_exp, &rank.dq, &rank.dk, &rank.dv]
            .map(Tensor::view);
    let write = AttentionWrite::OVERWRITE;
    ring.queue.attention(&attention, q, k, v, out, log_sum_exp, write.queries);
    ring.queue.attention_backward(&attention, q, k, v, out, log_sum_exp, dout, dq, dk, dv, write);
    for (name, view, width, written) in [
        ("out", out, 8, 20..30),
        ("log_sum_exp", log_sum_exp, 1, 20..30),
        ("dq", dq, 8, 20..30),
        ("dk", dk, 8, 5..25),
        ("dv", dv, 8, 5..25),
    ] {
        for (i, x) in view.to_vec::<f32>().into_iter().enumerate() {
            let is_written = written.contains(&(i / width));
            assert_eq!(x.is_nan(), !is_written, "{name}[{i}] is {x}, written: {is_written}");
        }
    }
}

#[test]
#[should_panic(expected = "out of attention is bf16 [640]; what is added to must be f32")]
fn parts_are_not_added_up_in_bf16() {
    let case = causal(1, 40, 2, 1, 8);
    let inputs = Inputs::<bf16>::random(&case, 24);
    let everything = 0..case.query_len;
    let ring = Ring::new(&case, &inputs, vec![vec![everything]], CpuLevel::detect(), 1);
    let rank = &ring.ranks[0];
    let attention = ring.attention(rank, TokenSpan::whole(40), TokenSpan::whole(40));
    let [q, k, v, out] = [&rank.q, &rank.k, &rank.v, &rank.dout].map(Tensor::view);
    ring.queue.attention(&attention, q, k, v, out, rank.log_sum_exp.view(), Write::Accumulate);
}

#[test]
#[should_panic(expected = "keys of attention: 10 from 31 on are more than the 40 of a sequence")]
fn spans_beyond_the_stored_tokens_are_refused() {
    let case = causal(1, 40, 1, 1, 8);
    let inputs = Inputs::<f32>::random(&case, 25);
    let everything = 0..case.query_len;
    let ring = Ring::new(&case, &inputs, vec![vec![everything]], CpuLevel::detect(), 1);
    let rank = &ring.ranks[0];
    let beyond = TokenSpan { stored: 40, first: 31, len: 10, position: 31 };
    let attention = ring.attention(rank, TokenSpan::whole(40), beyond);
    let [q, k, v, out] = [&rank.q, &rank.k, &rank.v, &rank.out].map(Tensor::view);
    ring.queue.attention(&attention, q, k, v, out, rank.log_sum_exp.view(), Write::Overwrite);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_division_gives_the_attention_of_whole_sequences(
        (sequences, len, ranks) in (1..3_usize, 8..260_usize, 1..5_usize),
        (group, key_value_heads) in (1..4_usize, 1..3_usize),
        head_dim in 1..70_usize,
        window in proptest::option::of(1..200_usize),
        dropout in prop_oneof![Just(0.0_f32), 0.0..0.95_f32],
        lengths in proptest::option::of(proptest::collection::vec(1..120_usize, 1..8)),
        [is_zig_zag, is_bidirectional, has_sinks] in proptest::array::uniform3(proptest::bool::ANY),
        share_of_keys in proptest::option::of(0.02..1.0),
    ) {
        let starts = lengths.map(|lengths| document_starts(len, &lengths).repeat(sequences));
        let heads = group * key_value_heads;
        let case = Case {
            window,
            dropout,
            document_ends: starts.as_ref().map(|starts| document_ends(starts, len)),
            document_starts: starts,
            direction: [AttentionDirection::Causal, AttentionDirection::Bidirectional]
                [usize::from(is_bidirectional)],
            key_mask: share_of_keys.map(|share| random_mask(3, sequences * len, share)),
            sinks: has_sinks.then(|| sinks(heads)),
            ..causal(sequences, len, heads, key_value_heads, head_dim)
        };
        let cut = if is_zig_zag { Cut::ZigZag } else { Cut::Contiguous };
        for level in levels() {
            check::<f32>(&case, cut, ranks, level);
            check::<bf16>(&case, cut, ranks, level);
        }
    }
}

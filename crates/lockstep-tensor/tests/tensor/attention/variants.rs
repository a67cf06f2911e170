//! Variants of attention against the definition: direction, key masks, ALiBi, soft-capping and sinks.

use std::ops::Range;

use half::{bf16, f16};
use lockstep_plan::{MemoryCategory, random::Philox};
use lockstep_tensor::{Arena, AttentionDirection, CpuLevel, Tensor, alibi_slopes, document_ends};
use proptest::prelude::*;

use super::{
    kernels::{Fixture, Inputs, Outputs, causal, check, check_everywhere, document_starts, levels},
    reference::Case,
};
use crate::testing::emulated;

/// Returns a plain bidirectional attention over `len` tokens.
fn bidirectional(
    sequences: usize,
    len: usize,
    heads: usize,
    key_value_heads: usize,
    head_dim: usize,
) -> Case {
    Case {
        direction: AttentionDirection::Bidirectional,
        ..causal(sequences, len, heads, key_value_heads, head_dim)
    }
}

/// Returns a sink for each head, around the size of a row's log-sum-exp.
pub(crate) fn sinks(heads: usize) -> Vec<f64> {
    (0..heads as u64).map(|head| f64::from(1.0 + 2.0 * Philox::new(17).normal(head))).collect()
}

/// Returns a mask of the keys, each valid with a probability of `share`.
pub(crate) fn random_mask(seed: u64, keys: usize, share: f64) -> Vec<u32> {
    let philox = Philox::new(seed);
    // Any number other than 0 shows a key.
    (0..keys as u64).map(|key| if philox.uniform(key) < share { 1 + key as u32 % 3 } else { 0 }).collect()
}

/// Returns a mask of `len` keys for each sequence that shows the first `valid` of them.
fn padded(len: usize, valid: &[usize]) -> Vec<u32> {
    valid.iter().flat_map(|valid| (0..len).map(move |key| u32::from(key < *valid))).collect()
}

/// Returns a case in which all of the variants that apply to decoders take part.
fn decoder(case: Case) -> Case {
    Case {
        alibi_slopes: Some(alibi_slopes(case.heads)),
        soft_cap: Some(2.0),
        sinks: Some(sinks(case.heads)),
        ..case
    }
}

#[test]
fn bidirectional_queries_see_the_keys_on_both_sides() {
    for (len, head_dim) in [(1, 1), (2, 3), (63, 16), (65, 80), (130, 7), (300, 17)] {
        check_everywhere(&bidirectional(2, len, 2, 2, head_dim));
    }
    check_everywhere(&bidirectional(1, 75, 6, 2, 24));
    check_everywhere(&Case { dropout: 0.3, ..bidirectional(2, 90, 2, 1, 32) });
    check_everywhere(&Case { query_len: 20, query_start: 50, ..bidirectional(1, 150, 2, 1, 16) });
}

#[test]
fn a_bidirectional_window_reaches_equally_far_on_both_sides() {
    for window in [1, 2, 17, 64, 65, 100, 149, 1000, usize::MAX] {
        check_everywhere(&Case { window: Some(window), ..bidirectional(1, 150, 2, 1, 16) });
    }
}

#[test]
fn bidirectional_queries_see_nothing_outside_their_document() {
    for lengths in [&[150][..], &[1; 150], &[64, 64], &[63, 2, 64], &[1, 148], &[10; 15]] {
        let starts = [document_starts(150, lengths), document_starts(150, &[70, 30])].concat();
        let ends = Some(document_ends(&starts, 150));
        let case =
            Case { document_starts: Some(starts), document_ends: ends, ..bidirectional(2, 150, 4, 2, 24) };
        check_everywhere(&case);
        check_everywhere(&Case { window: Some(40), dropout: 0.2, ..case });
    }
}

#[test]
fn masked_keys_are_not_seen() {
    for valid in [[150, 1], [64, 65], [100, 0], [3, 149]] {
        let key_mask = Some(padded(150, &valid));
        check_everywhere(&Case { key_mask: key_mask.clone(), ..bidirectional(2, 150, 4, 2, 24) });
        check_everywhere(&Case { key_mask, window: Some(30), dropout: 0.2, ..causal(2, 150, 4, 2, 24) });
    }
    for share in [0.02, 0.5, 0.98] {
        let key_mask = Some(random_mask(4, 2 * 150, share));
        check_everywhere(&Case { key_mask: key_mask.clone(), ..bidirectional(2, 150, 2, 1, 33) });
        check_everywhere(&Case { key_mask, ..causal(2, 150, 2, 1, 33) });
    }
}

#[test]
fn a_row_without_valid_keys_gives_zeros() {
    let mask = [padded(70, &[70, 0]), [[0; 40].as_slice(), &[1; 30]].concat()].concat();
    let case = Case { key_mask: Some(mask), soft_cap: Some(3.0), ..causal(3, 70, 2, 1, 16) };
    for level in levels() {
        let Outputs { out, dq, dk, dv, .. } =
            Fixture::new(&case, Inputs::<bf16>::random(&case, 3)).run(level, 2);
        let of_sequence = |x: &[f32], sequence: usize| x[x.len() / 3 * sequence..][..x.len() / 3].to_vec();
        for (name, x) in [("out", &out), ("dq", &dq), ("dk", &dk), ("dv", &dv)] {
            assert!(x.iter().all(|x| x.is_finite()), "{name} is not finite at {level}");
            assert!(of_sequence(x, 1).iter().all(|x| *x == 0.0), "{name} of no valid keys at {level}");
        }
        // The first 40 tokens of the third sequence are padding before its beginning.
        assert!(of_sequence(&out, 2)[..40 * 32].iter().all(|x| *x == 0.0), "out of padding at {level}");
        assert!(of_sequence(&dk, 2)[..40 * 16].iter().all(|x| *x == 0.0), "dk of padding at {level}");
    }
}

#[test]
fn masks_of_bytes_and_wide_masks_mean_the_same() {
    let len = 100;
    let mask = random_mask(5, 2 * len, 0.6);
    let case = Case { key_mask: Some(mask.clone()), ..bidirectional(2, len, 2, 1, 16) };
    let inputs = || Inputs::<f32>::random(&case, 4);
    let words = Fixture::new(&case, inputs()).run(CpuLevel::detect(), 1);
    let category = MemoryCategory::Activations;
    for width in [len, len + 31] {
        let mut fixture = Fixture::new(&case, inputs());
        let row = |row: &[u32]| {
            let mut row: Vec<u8> = row.iter().map(|valid| *valid as u8).collect();
            row.resize(width, 1);
            row
        };
        let bytes: Vec<u8> = mask.chunks(len).flat_map(row).collect();
        fixture.variant.key_mask =
            Some(Tensor::from_slice(&fixture.arena, [2, width], &bytes, category).unwrap());
        assert!(fixture.run(CpuLevel::detect(), 1) == words, "masks of {width} bytes");
    }
}

#[test]
fn neutral_variants_give_the_bits_of_plain_attention() {
    let plain = Case { window: Some(90), dropout: 0.1, ..causal(2, 140, 4, 2, 32) };
    let neutral = [
        Case { key_mask: Some(vec![1; 280]), ..plain.clone() },
        Case { alibi_slopes: Some(vec![0.0; 4]), ..plain.clone() },
        Case { sinks: Some(vec![f64::NEG_INFINITY; 4]), ..plain.clone() },
        Case { document_ends: Some(vec![0; 280]), ..plain.clone() },
    ];
    for level in levels() {
        let run = |case: &Case| {
            let outputs = Fixture::new(case, Inputs::<bf16>::random(case, 13)).run(level, 2);
            Outputs { dsinks: Vec::new(), ..outputs }
        };
        let expected = run(&plain);
        for case in &neutral {
            assert!(run(case) == expected, "bits differ at {level}, {case:?}");
        }
    }
}

#[test]
fn alibi_lowers_scores_by_the_distance() {
    for heads in [1, 6, 8] {
        let alibi_slopes = Some(alibi_slopes(heads));
        check_everywhere(&Case { alibi_slopes: alibi_slopes.clone(), ..causal(2, 130, heads, 1, 16) });
        check_everywhere(&Case { alibi_slopes, ..bidirectional(1, 200, heads, heads, 24) });
    }
    let cached = Case { query_start: 129, query_len: 1, key_len: 130, ..causal(2, 1, 4, 2, 40) };
    check_everywhere(&Case { alibi_slopes: Some(vec![0.3, 0.1, 0.02, 0.0]), ..cached });
}

#[test]
fn capped_scores_and_their_gradients_agree_with_the_definition() {
    for cap in [0.3, 2.0, 50.0] {
        let soft_cap = Some(cap);
        check_everywhere(&Case { soft_cap, ..causal(2, 130, 4, 2, 33) });
        check_everywhere(&Case { soft_cap, window: Some(70), ..bidirectional(1, 150, 2, 1, 16) });
        // Scores of many times the cap.
        check_everywhere(&Case { soft_cap, scale: 4.0, dropout: 0.2, ..causal(1, 100, 2, 1, 16) });
    }
}

#[test]
fn sinks_take_their_share_of_the_probabilities() {
    let with_sinks = |case: Case| Case { sinks: Some(sinks(case.heads)), ..case };
    for (len, head_dim) in [(1, 4), (65, 16), (300, 24)] {
        check_everywhere(&with_sinks(causal(2, len, 6, 2, head_dim)));
        check_everywhere(&with_sinks(bidirectional(1, len, 2, 1, head_dim)));
    }
    check_everywhere(&with_sinks(Case { dropout: 0.3, window: Some(40), ..causal(2, 150, 2, 1, 16) }));
    // Queries that see nothing but the sink.
    check_everywhere(&with_sinks(Case {
        key_len: 10,
        query_start: 40,
        window: Some(33),
        ..causal(1, 5, 2, 1, 8)
    }));
}

#[test]
fn gradients_of_sinks_accumulate_and_sinks_may_have_the_type_of_the_queries() {
    let values = [0.5, -1.25];
    let case = Case { sinks: Some(values.to_vec()), ..causal(2, 70, 2, 1, 16) };
    let category = MemoryCategory::Activations;
    for level in levels() {
        let inputs = || Inputs::<bf16>::random(&case, 6);
        let expected = Fixture::new(&case, inputs()).run(level, 1);
        let mut fixture = Fixture::new(&case, inputs());
        let narrow = values.map(bf16::from_f64);
        fixture.variant.sinks = Some(Tensor::from_slice(&fixture.arena, [2], &narrow, category).unwrap());
        assert!(fixture.run(level, 1) == expected, "bf16 sinks at {level}");
        let twice = fixture.sinks_gradient(level, &expected, &[1.0, -2.0]);
        for ((twice, once), before) in twice.iter().zip(&expected.dsinks).zip([1.0, -2.0]) {
            assert!((twice - once - before).abs() < 1e-5, "{twice} is not {before} + {once} at {level}");
        }
    }
}

/// Returns the tokens `tokens` of each sequence of a tensor of `[sequences · len, width]`.
fn slice_tokens(x: &[f32], len: usize, width: usize, tokens: Range<usize>) -> Vec<f32> {
    x.chunks(len * width)
        .flat_map(|sequence| &sequence[tokens.start * width..tokens.end * width])
        .copied()
        .collect()
}

#[test]
fn a_prefill_in_chunks_gives_the_outputs_of_one_call() {
    let plain = Case { window: Some(90), ..causal(2, 150, 4, 2, 32) };
    for (whole, level) in
        [plain.clone(), decoder(plain)].iter().flat_map(|case| levels().map(move |level| (case, level)))
    {
        let all = Inputs::<f32>::random(whole, 9);
        let expected = Fixture::new(whole, Inputs::<f32>::random(whole, 9)).run(level, 1).out;
        for tokens in [0..1, 1..64, 64..65, 65..149, 149..150] {
            let (width, key_width) = (4 * 32, 2 * 32);
            let case = Case {
                query_len: tokens.len(),
                query_start: tokens.start,
                key_len: tokens.end,
                ..whole.clone()
            };
            let inputs = Inputs {
                q: slice_tokens(&all.q, 150, width, tokens.clone()),
                k: slice_tokens(&all.k, 150, key_width, 0..tokens.end),
                v: slice_tokens(&all.v, 150, key_width, 0..tokens.end),
                dout: slice_tokens(&all.dout, 150, width, tokens.clone()),
            };
            let out = Fixture::new(&case, inputs).run(level, 1).out;
            let expected = slice_tokens(&expected, 150, width, tokens.clone());
            for (actual, expected) in out.iter().zip(&expected) {
                assert!((actual - expected).abs() < 1e-5, "{actual} != {expected}: {tokens:?} at {level}");
            }
        }
    }
}

#[test]
fn emulated_tiles_agree_with_the_definition_of_the_variants() {
    let level = CpuLevel::AmxBf16;
    if level <= CpuLevel::detect() || emulated(level, 1, &Arena::new()).is_none() {
        return;
    }
    let key_mask = Some(random_mask(6, 70, 0.7));
    check::<bf16>(&decoder(Case { key_mask, ..bidirectional(1, 70, 2, 1, 33) }), level, 3);
    check::<bf16>(&decoder(Case { window: Some(20), ..causal(1, 140, 1, 1, 64) }), level, 3);
}

#[test]
fn any_number_of_threads_gives_the_same_bits_of_every_variant() {
    let key_mask = Some(random_mask(7, 2 * 333, 0.8));
    let case = decoder(Case { key_mask, dropout: 0.3, ..bidirectional(2, 333, 6, 2, 40) });
    for level in levels() {
        let run = |threads| Fixture::new(&case, Inputs::<bf16>::random(&case, 8)).run(level, threads);
        let one = run(1);
        assert!(one == run(2) && one == run(3), "threads change bits at {level}");
    }
}

#[test]
fn a_nan_passes_the_cap_and_sinks() {
    let case = decoder(causal(1, 70, 1, 1, 16));
    for level in levels() {
        for which in 0..2 {
            let mut inputs = Inputs::<f32>::random(&case, 7);
            let operand = [&mut inputs.q, &mut inputs.k];
            operand.into_iter().nth(which).unwrap()[66 * 16 + 3] = f32::NAN;
            let Outputs { out, dq, dsinks, .. } = Fixture::new(&case, inputs).run(level, 1);
            let row = 66 * 16..67 * 16;
            assert!(out[row.clone()].iter().any(|x| x.is_nan()), "operand {which} at {level}");
            assert!(dq[row].iter().any(|x| x.is_nan()), "operand {which} at {level}");
            assert!(dsinks[0].is_nan(), "operand {which} at {level}");
            assert!(out[..64 * 16].iter().all(|x| x.is_finite()), "operand {which} at {level}");
        }
    }
}

/// Compares the gradients of the reference with central differences of its outputs.
fn check_differences(case: &Case) {
    let draw = |seed: u64, n: usize| -> Vec<f64> {
        (0..n as u64).map(|i| f64::from(Philox::new(seed).normal(i))).collect()
    };
    let (queries, keys) = (case.query_elements(), case.key_elements());
    let inputs = [draw(1, queries), draw(2, keys), draw(3, keys), case.sinks.clone().unwrap_or_default()];
    let dout = draw(4, queries);
    let gradients = case.backward([&inputs[0], &inputs[1], &inputs[2]], &dout, None);
    let loss = |x: &[Vec<f64>; 4]| -> f64 {
        let case = Case { sinks: case.sinks.as_ref().map(|_| x[3].clone()), ..case.clone() };
        case.forward(&x[0], &x[1], &x[2]).0.iter().zip(&dout).map(|(out, dout)| out * dout).sum()
    };
    let step = 1e-5;
    for (operand, gradient) in gradients.iter().enumerate() {
        for (i, analytic) in gradient.iter().enumerate() {
            let at = |offset: f64| {
                let mut x = inputs.clone();
                x[operand][i] += offset;
                loss(&x)
            };
            // The error of central differences is about step² = 1e-10 and 1e-16 / step = 1e-11.
            let numeric = (at(step) - at(-step)) / (2.0 * step);
            assert!(
                (numeric - analytic).abs() < 1e-8,
                "operand {operand}, element {i}: {analytic} analytic, {numeric} numeric, {case:?}"
            );
        }
    }
}

#[test]
fn the_reference_backward_is_the_derivative_of_the_reference_forward() {
    let starts = [[0, 0, 3, 3, 3, 3, 8], [0, 0, 0, 0, 0, 7, 7]].concat();
    let ends = [[3, 3, 8, 8, 8, 8, 9], [7, 7, 7, 7, 7, 9, 9]].concat();
    let plain = Case { window: Some(5), dropout: 0.3, query_start: 2, key_len: 9, ..causal(2, 7, 4, 2, 3) };
    let plain = Case { document_starts: Some(starts), document_ends: Some(ends), ..plain };
    let both_sides = Case { direction: AttentionDirection::Bidirectional, ..plain.clone() };
    for case in [
        plain.clone(),
        both_sides.clone(),
        Case { key_mask: Some(random_mask(8, 18, 0.6)), ..both_sides.clone() },
        Case { alibi_slopes: Some(alibi_slopes(4)), ..both_sides.clone() },
        Case { soft_cap: Some(1.5), ..plain.clone() },
        Case { sinks: Some(sinks(4)), ..plain },
        decoder(Case { key_mask: Some(random_mask(9, 18, 0.6)), ..both_sides }),
    ] {
        check_differences(&case);
    }
}

fn run_portable(case: &Case) {
    Fixture::new(case, Inputs::<f32>::random(case, 15)).run(CpuLevel::Portable, 1);
}

#[test]
#[should_panic(
    expected = "bidirectional attention needs both the starts and the ends of documents, or neither"
)]
fn bidirectional_documents_without_ends_are_refused() {
    run_portable(&Case { document_starts: Some(vec![0, 1, 1]), ..bidirectional(1, 3, 1, 1, 8) });
}

#[test]
#[should_panic(expected = "the key mask of attention is u32 [5]; it needs 2 rows of at least 3 positions")]
fn a_mask_of_another_shape_is_refused() {
    run_portable(&Case { key_mask: Some(vec![1; 5]), ..causal(2, 3, 1, 1, 8) });
}

#[test]
#[should_panic(expected = "attention needs one slope for each head")]
fn slopes_of_other_heads_are_refused() {
    run_portable(&Case { alibi_slopes: Some(vec![0.5; 3]), ..causal(1, 3, 2, 1, 8) });
}

#[test]
#[should_panic(expected = "attention needs one sink for each head, not f32 [3]")]
fn sinks_of_other_heads_are_refused() {
    run_portable(&Case { sinks: Some(vec![0.5; 3]), ..causal(1, 3, 2, 1, 8) });
}

#[test]
#[should_panic(expected = "scores cannot be capped to 0")]
fn a_cap_of_zero_is_refused() {
    run_portable(&Case { soft_cap: Some(0.0), ..causal(1, 3, 2, 1, 8) });
}

#[test]
#[should_panic(expected = "the gradient of sinks needs an attention that has them")]
fn a_gradient_of_no_sinks_is_refused() {
    let case = causal(1, 3, 1, 1, 8);
    let fixture = Fixture::new(&case, Inputs::<f32>::random(&case, 16));
    let outputs = fixture.run(CpuLevel::Portable, 1);
    fixture.sinks_gradient(CpuLevel::Portable, &outputs, &[0.0]);
}

/// The optional parts of a variant, by chance.
#[derive(Debug, Clone, Copy)]
struct Parts {
    is_bidirectional: bool,
    mask: Option<f64>,
    has_slopes: bool,
    soft_cap: Option<f32>,
    has_sinks: bool,
}

fn parts() -> impl Strategy<Value = Parts> {
    let mask = proptest::option::of(prop_oneof![Just(0.03), 0.0..1.0]);
    let soft_cap = proptest::option::of(0.2..60.0_f32);
    let any = proptest::bool::ANY;
    (any, mask, any, soft_cap, any).prop_map(|(is_bidirectional, mask, has_slopes, soft_cap, has_sinks)| {
        Parts { is_bidirectional, mask, has_slopes, soft_cap, has_sinks }
    })
}

impl Parts {
    /// Adds the parts to a case.
    fn of(self, case: Case, seed: u64) -> Case {
        let (mask, heads) = (self.mask, case.heads);
        let directions = [AttentionDirection::Causal, AttentionDirection::Bidirectional];
        Case {
            direction: directions[usize::from(self.is_bidirectional)],
            key_mask: mask.map(|share| random_mask(seed, case.sequences * case.key_len, share)),
            alibi_slopes: self.has_slopes.then(|| alibi_slopes(heads)),
            soft_cap: self.soft_cap,
            sinks: self.has_sinks.then(|| sinks(heads)),
            ..case
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_variant_of_any_geometry_agrees_with_the_definition(
        parts in parts(),
        (sequences, query_len, query_start) in (1..3_usize, 1..100_usize, 0..100_usize),
        more_keys in 0..80_usize,
        (group, key_value_heads, head_dim) in (1..5_usize, 1..3_usize, 1..70_usize),
        window in proptest::option::of(1..200_usize),
        dropout in prop_oneof![Just(0.0_f32), 0.0..0.95_f32],
        lengths in proptest::option::of(proptest::collection::vec(1..120_usize, 1..8)),
        seed in 0..u64::MAX,
    ) {
        let (heads, key_len) = (group * key_value_heads, query_start + query_len + more_keys);
        let starts = lengths.map(|lengths| document_starts(key_len, &lengths));
        let ends = starts.as_ref().map(|starts| document_ends(starts, key_len));
        let of_queries = |bounds: Option<Vec<u32>>| {
            bounds.map(|bounds| bounds[query_start..query_start + query_len].repeat(sequences))
        };
        let case = Case {
            key_len,
            query_start,
            window,
            dropout,
            document_starts: of_queries(starts),
            document_ends: of_queries(ends),
            ..causal(sequences, query_len, heads, key_value_heads, head_dim)
        };
        let case = parts.of(case, seed);
        for level in levels() {
            check::<f32>(&case, level, 12);
            check::<bf16>(&case, level, 13);
        }
        check::<f16>(&case, CpuLevel::detect(), 14);
    }
}

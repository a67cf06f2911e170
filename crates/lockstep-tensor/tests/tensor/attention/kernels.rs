//! The kernels against the reference on every CPU level, and properties other than values.

use half::bf16;
use lockstep_plan::{DType, MemoryCategory, random::Philox};
use lockstep_tensor::{
    Arena, Attention, AttentionDirection, AttentionKernels, AttentionVariant, AttentionWrite, CpuLevel,
    CpuQueue, Dropout, Element, Tensor, TokenSpan, Write,
};
use proptest::prelude::*;

use super::reference::Case;
use crate::testing::{self, Float, emulated, normals};

const CATEGORY: MemoryCategory = MemoryCategory::Activations;

/// Returns a plain causal attention over `len` tokens.
pub(crate) fn causal(
    sequences: usize,
    len: usize,
    heads: usize,
    key_value_heads: usize,
    head_dim: usize,
) -> Case {
    Case {
        sequences,
        query_len: len,
        key_len: len,
        query_start: 0,
        heads,
        key_value_heads,
        head_dim,
        scale: (head_dim as f32).powf(-0.5),
        window: None,
        document_starts: None,
        first_head: 0,
        dropout: 0.0,
        site: 3,
        direction: AttentionDirection::Causal,
        document_ends: None,
        key_mask: None,
        alibi_slopes: None,
        soft_cap: None,
        sinks: None,
    }
}

/// Inputs of the kernels and the reference, rounded to `T`.
pub(crate) struct Inputs<T> {
    pub(crate) q: Vec<T>,
    pub(crate) k: Vec<T>,
    pub(crate) v: Vec<T>,
    pub(crate) dout: Vec<T>,
}

impl<T: Float> Inputs<T> {
    pub(crate) fn random(case: &Case, seed: u64) -> Self {
        let draw = |which: u64, elements: usize| {
            let philox = Philox::new(seed * 4 + which);
            normals(philox, elements).map(T::store).collect()
        };
        Self {
            q: draw(0, case.query_elements()),
            k: draw(1, case.key_elements()),
            v: draw(2, case.key_elements()),
            dout: draw(3, case.query_elements()),
        }
    }
}

/// Outputs of the kernels.
#[derive(PartialEq, Debug)]
pub(crate) struct Outputs {
    pub(crate) out: Vec<f32>,
    pub(crate) log_sum_exp: Vec<f32>,
    pub(crate) dq: Vec<f32>,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
    /// Empty without sinks.
    pub(crate) dsinks: Vec<f32>,
}

/// Tensors of a case's variant.
pub(crate) struct VariantTensors {
    document_ends: Option<Tensor>,
    pub(crate) key_mask: Option<Tensor>,
    alibi_slopes: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
}

impl VariantTensors {
    pub(crate) fn new(case: &Case, document_ends: Option<&[u32]>, arena: &Arena) -> Self {
        fn tensor<T: Element>(arena: &Arena, elements: &[T]) -> Tensor {
            Tensor::from_slice(arena, [elements.len()], elements, CATEGORY).unwrap()
        }
        let narrow = |sinks: &Vec<f64>| sinks.iter().map(|sink| *sink as f32).collect::<Vec<_>>();
        Self {
            document_ends: document_ends.map(|ends| tensor(arena, ends)),
            key_mask: case.key_mask.as_ref().map(|mask| tensor(arena, mask)),
            alibi_slopes: case.alibi_slopes.as_ref().map(|slopes| tensor(arena, slopes)),
            sinks: case.sinks.as_ref().map(narrow).map(|sinks| tensor(arena, &sinks)),
        }
    }

    pub(crate) fn variant(&self, case: &Case) -> AttentionVariant<'_> {
        AttentionVariant {
            direction: case.direction,
            document_ends: self.document_ends.as_ref().map(Tensor::view),
            key_mask: self.key_mask.as_ref().map(Tensor::view),
            alibi_slopes: self.alibi_slopes.as_ref().map(Tensor::view),
            soft_cap: case.soft_cap,
            sinks: self.sinks.as_ref().map(Tensor::view),
        }
    }
}

/// Tensors and dropout keys of a case, on an arena of their own.
pub(crate) struct Fixture<T> {
    case: Case,
    pub(crate) arena: Arena,
    keys: Tensor,
    document_starts: Option<Tensor>,
    inputs: Inputs<T>,
    pub(crate) variant: VariantTensors,
}

impl<T: Float> Fixture<T> {
    pub(crate) fn new(case: &Case, inputs: Inputs<T>) -> Self {
        let arena = Arena::new();
        let words: Vec<_> = (0..case.sequences)
            .flat_map(|sequence| [Case::key(sequence) as u32, (Case::key(sequence) >> 32) as u32])
            .collect();
        let keys = Tensor::from_slice(&arena, [case.sequences, 2], &words, CATEGORY).unwrap();
        let document_starts = case
            .document_starts
            .as_ref()
            .map(|starts| Tensor::from_slice(&arena, [starts.len()], starts, CATEGORY).unwrap());
        let variant = VariantTensors::new(case, case.document_ends.as_deref(), &arena);
        Self { case: case.clone(), arena, keys, document_starts, inputs, variant }
    }

    fn attention(&self) -> Attention<'_> {
        let case = &self.case;
        Attention {
            sequences: case.sequences,
            queries: TokenSpan { position: case.query_start, ..TokenSpan::whole(case.query_len) },
            keys: TokenSpan::whole(case.key_len),
            heads: case.heads,
            key_value_heads: case.key_value_heads,
            head_dim: case.head_dim,
            scale: case.scale,
            window: case.window,
            document_starts: self.document_starts.as_ref().map(Tensor::view),
            first_head: case.first_head,
            dropout: (case.dropout > 0.0).then(|| Dropout {
                probability: case.dropout,
                site: case.site,
                keys: self.keys.view(),
            }),
            variant: self.variant.variant(case),
        }
    }

    fn tensor(&self, elements: &[T]) -> Tensor {
        Tensor::from_slice(&self.arena, [elements.len()], elements, CATEGORY).unwrap()
    }

    pub(crate) fn run(&self, level: CpuLevel, threads: usize) -> Outputs {
        let queue = if level <= CpuLevel::detect() {
            CpuQueue::with_level(threads, &self.arena, level).unwrap()
        } else {
            emulated(level, threads, &self.arena).expect("the caller has found that it can be emulated")
        };
        let attention = self.attention();
        let Inputs { q, k, v, dout } = &self.inputs;
        let [q, k, v, dout] = [q, k, v, dout].map(|elements| self.tensor(elements));
        // Outputs start as NaN: every element must be written.
        let [out, dq] = [(); 2].map(|()| self.tensor(&vec![T::store(f32::NAN); self.case.query_elements()]));
        let [dk, dv] = [(); 2].map(|()| self.tensor(&vec![T::store(f32::NAN); self.case.key_elements()]));
        let statistics = self.case.statistic_elements();
        let log_sum_exp = Tensor::zeros(&self.arena, DType::F32, [statistics], CATEGORY).unwrap();
        let write = Write::Overwrite;
        queue.attention(&attention, q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(), write);
        queue.attention_backward(
            &attention,
            q.view(),
            k.view(),
            v.view(),
            out.view(),
            log_sum_exp.view(),
            dout.view(),
            dq.view(),
            dk.view(),
            dv.view(),
            AttentionWrite::OVERWRITE,
        );
        let sinks = self.variant.sinks.as_ref().map_or(0, |sinks| sinks.view().elements());
        let dsinks = Tensor::zeros(&self.arena, DType::F32, [sinks], CATEGORY).unwrap();
        if sinks > 0 {
            let [out, statistics, dout, dsinks] = [&out, &log_sum_exp, &dout, &dsinks].map(Tensor::view);
            queue.attention_sinks_backward(&attention, out, statistics, dout, dsinks);
        }
        let widened = |tensor: &Tensor| tensor.view().to_vec::<T>().into_iter().map(T::load).collect();
        Outputs {
            out: widened(&out),
            log_sum_exp: log_sum_exp.view().to_vec(),
            dq: widened(&dq),
            dk: widened(&dk),
            dv: widened(&dv),
            dsinks: dsinks.view().to_vec(),
        }
    }

    /// Returns `before` with the gradients of the sinks added, for outputs of an earlier run.
    pub(crate) fn sinks_gradient(&self, level: CpuLevel, outputs: &Outputs, before: &[f32]) -> Vec<f32> {
        let queue = CpuQueue::with_level(1, &self.arena, level).unwrap();
        let narrow = |x: &[f32]| self.tensor(&x.iter().map(|x| T::store(*x)).collect::<Vec<_>>());
        let f32s = |x: &[f32]| Tensor::from_slice(&self.arena, [x.len()], x, CATEGORY).unwrap();
        let (out, dout) = (narrow(&outputs.out), self.tensor(&self.inputs.dout));
        let (statistics, dsinks) = (f32s(&outputs.log_sum_exp), f32s(before));
        let [out, statistics, dout, view] = [&out, &statistics, &dout, &dsinks].map(Tensor::view);
        queue.attention_sinks_backward(&self.attention(), out, statistics, dout, view);
        dsinks.view().to_vec()
    }
}

/// Returns the CPU levels that attention distinguishes and this CPU has.
pub(crate) fn levels() -> impl Iterator<Item = CpuLevel> {
    testing::levels()
}

/// Panics unless the gradients of the sinks are those of the formula for the outputs at hand, rounded or not.
fn assert_sinks_agree(case: &Case, level: CpuLevel, actual: &Outputs, dout: &[f64]) {
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let [gradients, roundings] = case.sinks_backward(&wide(&actual.out), &wide(&actual.log_sum_exp), dout);
    assert_eq!(actual.dsinks.len(), gradients.len());
    for ((actual, expected), rounding) in actual.dsinks.iter().zip(gradients).zip(roundings) {
        // A few roundings of 6e-8 for each term, and of differences of log-sum-exps.
        let bound = 1e-6 * (rounding + expected.abs());
        let error = (f64::from(*actual) - expected).abs();
        assert!(error <= bound, "dsinks: {actual} instead of {expected} at {level}, {case:?}");
    }
}

fn assert_close(name: &str, case: &Case, level: CpuLevel, actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    // Where everything cancels (the gradient is zero if one key is visible), rounding errors are measured against 1.
    let scale = norm(&mut expected.iter().copied()) + (expected.len() as f64).sqrt() * 0.1;
    let error = norm(&mut actual.iter().zip(expected).map(|(a, e)| f64::from(*a) - e)) / scale;
    assert!(error <= tolerance, "{name}: relative error {error:.3e} > {tolerance:e} at {level}, {case:?}");
}

/// Compares all outputs at a level with the reference.
pub(crate) fn check<T: Float>(case: &Case, level: CpuLevel, seed: u64) {
    let actual = Fixture::new(case, Inputs::<T>::random(case, seed)).run(level, 2);
    assert_agrees(case, level, &Inputs::<T>::random(case, seed), &actual);
}

/// Panics unless the outputs agree with the reference.
pub(crate) fn assert_agrees<T: Float>(case: &Case, level: CpuLevel, inputs: &Inputs<T>, actual: &Outputs) {
    let wide = |x: &[T]| x.iter().map(|x| f64::from(x.load())).collect::<Vec<_>>();
    let (q, k, v, dout) = (wide(&inputs.q), wide(&inputs.k), wide(&inputs.v), wide(&inputs.dout));
    let (out, log_sum_exp) = case.forward(&q, &k, &v);
    // f32: a few hundred roundings of 6e-8, which add up like a random walk. bf16: inputs are exact, matrix
    // instructions round probabilities and all levels outputs, each by up to 2^-9 relative; the backward reads the
    // rounded output in rowsum(dO ∘ O).
    let (forward, backward) = if T::DTYPE == DType::F32 { (1e-6, 4e-6) } else { (4e-3, 6e-3) };
    let kernel_out: Vec<f64> = actual.out.iter().map(|x| f64::from(*x)).collect();
    let rounded_out = (T::DTYPE != DType::F32).then_some(&kernel_out[..]);
    let [dq, dk, dv, dsinks] = case.backward([&q, &k, &v], &dout, rounded_out);
    assert_close("out", case, level, &actual.out, &out, forward);
    assert_close("dq", case, level, &actual.dq, &dq, backward);
    assert_close("dk", case, level, &actual.dk, &dk, backward);
    assert_close("dv", case, level, &actual.dv, &dv, backward);
    let [_, roundings] = case.sinks_backward(&out, &log_sum_exp, &dout);
    for ((actual, expected), rounding) in actual.dsinks.iter().zip(&dsinks).zip(roundings) {
        let error = (f64::from(*actual) - expected).abs();
        let bound = backward * (rounding + expected.abs() + 0.1);
        assert!(error <= bound, "dsinks: {actual} instead of {expected} at {level}, {case:?}");
    }
    assert_sinks_agree(case, level, actual, &dout);
    for (actual, expected) in actual.log_sum_exp.iter().zip(&log_sum_exp) {
        let error = (f64::from(*actual) - expected).abs();
        let agree = f64::from(*actual) == *expected || error < 1e-5;
        assert!(agree, "log-sum-exp {actual} instead of {expected} at {level}, {case:?}");
    }
}

pub(crate) fn check_everywhere(case: &Case) {
    for level in levels() {
        check::<f32>(case, level, 1);
        check::<bf16>(case, level, 2);
    }
}

#[test]
fn blocks_agree_with_the_definition_for_any_length_and_head_size() {
    for (len, head_dim) in
        [(1, 1), (2, 3), (63, 16), (64, 64), (65, 80), (130, 7), (128, 33), (200, 128), (300, 17)]
    {
        check_everywhere(&causal(2, len, 2, 2, head_dim));
    }
}

#[test]
fn emulated_tiles_agree_with_the_definition() {
    let level = CpuLevel::AmxBf16;
    if level <= CpuLevel::detect() || emulated(level, 1, &Arena::new()).is_none() {
        return;
    }
    for case in [
        causal(1, 70, 2, 1, 33),
        Case { window: Some(20), ..causal(1, 140, 1, 1, 64) },
        Case { dropout: 0.3, ..causal(2, 64, 1, 1, 16) },
    ] {
        check::<bf16>(&case, level, 3);
    }
}

#[test]
fn query_heads_share_key_heads() {
    for group in [1, 2, 3, 8] {
        check_everywhere(&causal(2, 75, 2 * group, 2, 24));
    }
}

#[test]
fn a_window_hides_old_keys() {
    for window in [1, 2, 3, 17, 63, 64, 65, 100, 149, 150, 1000] {
        check_everywhere(&Case { window: Some(window), ..causal(1, 150, 2, 1, 16) });
    }
}

/// Returns the first token of each token's document, for consecutive documents of these lengths; the last one extends
/// to the end of the sequence.
pub(crate) fn document_starts(len: usize, lengths: &[usize]) -> Vec<u32> {
    let mut starts = Vec::new();
    for &length in lengths {
        let first = starts.len();
        starts.resize(len.min(first + length), first as u32);
    }
    let last = starts.last().copied().unwrap_or(0);
    starts.resize(len, last);
    starts
}

#[test]
fn a_query_sees_nothing_before_its_document() {
    for lengths in [&[150][..], &[1; 150], &[64, 64], &[63, 2, 64], &[1, 148], &[149], &[10; 15], &[100, 7]] {
        // The second sequence has other documents.
        let starts = [document_starts(150, lengths), document_starts(150, &[70, 30])].concat();
        let case = Case { document_starts: Some(starts), ..causal(2, 150, 4, 2, 24) };
        check_everywhere(&case);
        check_everywhere(&Case { window: Some(40), dropout: 0.2, ..case });
    }
}

#[test]
fn one_document_gives_the_bits_of_no_documents() {
    let none = Case { window: Some(90), ..causal(2, 140, 4, 2, 32) };
    let one = Case { document_starts: Some(vec![0; 280]), ..none.clone() };
    for level in levels() {
        let run = |case: &Case| Fixture::new(case, Inputs::<f32>::random(case, 13)).run(level, 2);
        assert!(run(&none) == run(&one), "bits differ at {level}");
    }
}

#[test]
fn what_stands_in_another_document_changes_no_bit() {
    let starts = document_starts(200, &[90, 60]);
    let case = Case { document_starts: Some(starts), ..causal(1, 200, 2, 1, 16) };
    for level in levels() {
        let run = |first: f32| {
            let mut inputs = Inputs::<f32>::random(&case, 14);
            for x in [&mut inputs.q, &mut inputs.dout] {
                x[..90 * 32].fill(first);
            }
            for x in [&mut inputs.k, &mut inputs.v] {
                x[..90 * 16].fill(first);
            }
            let Outputs { out, dq, dk, dv, .. } = Fixture::new(&case, inputs).run(level, 2);
            [out[90 * 32..].to_vec(), dq[90 * 32..].to_vec(), dk[90 * 16..].to_vec(), dv[90 * 16..].to_vec()]
        };
        assert!(run(0.5) == run(-3.0), "the first document is seen from the others at {level}");
    }
}

#[test]
#[should_panic(expected = "the documents of a sequence of attention must follow each other")]
fn documents_that_go_back_are_refused() {
    let case = Case { document_starts: Some(vec![0, 1, 0]), ..causal(1, 3, 1, 1, 8) };
    Fixture::new(&case, Inputs::<f32>::random(&case, 15)).run(CpuLevel::Portable, 1);
}

#[test]
fn queries_may_start_after_cached_keys() {
    for (query_start, query_len) in [(1, 1), (63, 1), (64, 1), (100, 1), (50, 20), (129, 70)] {
        let key_len = query_start + query_len;
        let case = Case { query_start, query_len, key_len, ..causal(2, 1, 6, 2, 64) };
        check_everywhere(&case);
        check_everywhere(&Case { window: Some(40), ..case });
    }
}

#[test]
fn a_query_that_sees_no_key_gives_zeros() {
    let case = Case { query_start: 40, query_len: 5, key_len: 10, window: Some(33), ..causal(1, 1, 2, 1, 8) };
    check_everywhere(&case);
    let out = Fixture::new(&case, Inputs::<f32>::random(&case, 3)).run(CpuLevel::detect(), 1).out;
    assert_eq!(out[2 * 2 * 8..], vec![0.0; 3 * 2 * 8]);
}

#[test]
fn keys_beyond_the_last_query_are_ignored() {
    check_everywhere(&Case { query_len: 70, key_len: 140, ..causal(1, 1, 2, 2, 32) });
}

#[test]
fn dropout_drops_the_same_probabilities_in_forward_and_backward() {
    for dropout in [0.1, 0.5, 0.9] {
        check_everywhere(&Case { dropout, ..causal(2, 90, 2, 1, 32) });
        let cached = Case { query_start: 33, query_len: 50, key_len: 83, ..causal(1, 1, 3, 3, 16) };
        check_everywhere(&Case { dropout, window: Some(70), first_head: 9, ..cached });
    }
}

#[test]
fn dropout_keeps_the_expected_share() {
    // With values of one, an output is the sum of the kept probabilities over 1 - p: its mean is one.
    let case = Case { dropout: 0.2, ..causal(2, 256, 4, 4, 16) };
    for level in levels() {
        let mut inputs = Inputs::<f32>::random(&case, 5);
        inputs.q.fill(0.0);
        inputs.v.fill(1.0);
        let out = Fixture::new(&case, inputs).run(level, 2).out;
        let mean = out.iter().map(|x| f64::from(*x)).sum::<f64>() / out.len() as f64;
        // Row t has variance p/(1-p)/t: over 8 heads of 256 rows the mean's deviation is about 0.006.
        assert!((mean - 1.0).abs() < 0.03, "mean {mean} at {level}");
    }
}

#[test]
fn huge_scores_do_not_overflow() {
    let case = Case { scale: 1e3, ..causal(1, 100, 1, 1, 16) };
    for level in levels() {
        let outputs = Fixture::new(&case, Inputs::<f32>::random(&case, 6)).run(level, 1);
        for (name, values) in [("out", outputs.out), ("dq", outputs.dq), ("dk", outputs.dk)] {
            assert!(values.iter().all(|x| x.is_finite()), "{name} is not finite at {level}");
        }
    }
}

#[test]
fn a_nan_in_an_input_reaches_the_output() {
    let case = causal(1, 70, 1, 1, 16);
    for level in levels() {
        for which in 0..3 {
            let mut inputs = Inputs::<f32>::random(&case, 7);
            let operand = [&mut inputs.q, &mut inputs.k, &mut inputs.v];
            operand.into_iter().nth(which).unwrap()[66 * 16 + 3] = f32::NAN;
            let out = Fixture::new(&case, inputs).run(level, 1).out;
            assert!(out[66 * 16..67 * 16].iter().any(|x| x.is_nan()), "operand {which} at {level}");
            // A weight of zero times NaN is NaN, so rows in the same block as the key may become NaN too.
            assert!(out[..64 * 16].iter().all(|x| x.is_finite()), "operand {which} at {level}");
        }
    }
}

#[test]
fn a_nan_in_an_input_reaches_the_gradients() {
    let case = causal(1, 70, 1, 1, 16);
    let query = 66 * 16..67 * 16;
    for level in levels() {
        for which in 0..4 {
            let mut inputs = Inputs::<f32>::random(&case, 7);
            let operand = [&mut inputs.q, &mut inputs.k, &mut inputs.v, &mut inputs.dout];
            operand.into_iter().nth(which).unwrap()[66 * 16 + 3] = f32::NAN;
            let Outputs { dq, dk, dv, .. } = Fixture::new(&case, inputs).run(level, 1);
            for (name, gradient) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
                // The gradient of the values does not depend on the values.
                let expected = name != "dv" || which != 2;
                let found = gradient[query.clone()].iter().any(|x| x.is_nan());
                assert!(found || !expected, "operand {which}: {name} hides it at {level}");
            }
            assert!(dq[..64 * 16].iter().all(|x| x.is_finite()), "operand {which} at {level}");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let case = Case { dropout: 0.3, ..causal(3, 333, 6, 2, 40) };
    for level in levels() {
        let run = |threads| Fixture::new(&case, Inputs::<f32>::random(&case, 8)).run(level, threads);
        let one = run(1);
        assert!(one == run(2) && one == run(3), "threads change bits at {level}");
    }
}

#[test]
fn scratch_does_not_grow_with_the_length_forward_and_at_most_linearly_backward() {
    let workspace = |len| {
        let case = causal(1, len, 1, 1, 16);
        let fixture = Fixture::new(&case, Inputs::<f32>::random(&case, 10));
        let queue = CpuQueue::new(1, &fixture.arena).unwrap();
        // Memory that the queue holds for other kernels does not count.
        let kept = fixture.arena.in_use()[MemoryCategory::Workspace];
        let peak = || fixture.arena.peak()[MemoryCategory::Workspace] - kept;
        let x = fixture.tensor(&fixture.inputs.q);
        let [out, dq, dk, dv] = [(); 4].map(|()| fixture.tensor(&fixture.inputs.q));
        let statistics = Tensor::zeros(&fixture.arena, DType::F32, [len], CATEGORY).unwrap();
        let attention = fixture.attention();
        let write = Write::Overwrite;
        queue.attention(&attention, x.view(), x.view(), x.view(), out.view(), statistics.view(), write);
        let forward = peak();
        queue.attention_backward(
            &attention,
            x.view(),
            x.view(),
            x.view(),
            out.view(),
            statistics.view(),
            x.view(),
            dq.view(),
            dk.view(),
            dv.view(),
            AttentionWrite::OVERWRITE,
        );
        assert_eq!(fixture.arena.in_use()[MemoryCategory::Workspace], kept);
        (forward, peak())
    };
    let (short, long) = (workspace(512), workspace(2048));
    assert_eq!(short.0, long.0, "forward scratch");
    assert!(long.1 <= 4 * short.1, "backward scratch grew from {} to {} bytes", short.1, long.1);
}

#[test]
#[should_panic(expected = "k of attention is f32 [64]; the geometry says 128 elements")]
fn a_shape_that_does_not_fit_is_named() {
    let case = causal(1, 8, 2, 2, 8);
    let mut inputs = Inputs::<f32>::random(&case, 11);
    inputs.k.truncate(64);
    Fixture::new(&case, inputs).run(CpuLevel::Portable, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_geometry_agrees_with_the_definition(
        sequences in 1..3_usize,
        query_len in 1..100_usize,
        query_start in 0..150_usize,
        fewer_keys in 0..4_usize,
        (group, key_value_heads) in (1..5_usize, 1..3_usize),
        head_dim in 1..70_usize,
        window in proptest::option::of(1..200_usize),
        dropout in prop_oneof![Just(0.0_f32), 0.0..0.95_f32],
        site in 0..u32::MAX,
        lengths in proptest::option::of(proptest::collection::vec(1..120_usize, 1..8)),
    ) {
        let heads = group * key_value_heads;
        let key_len = (query_start + query_len).saturating_sub(fewer_keys).max(1);
        let plain = causal(sequences, query_len, heads, key_value_heads, head_dim);
        // Documents are positions of keys; a query belongs to the document at its position.
        let starts = lengths.map(|lengths| {
            document_starts(query_start + query_len, &lengths)[query_start..].repeat(sequences)
        });
        let case = Case { key_len, query_start, window, dropout, site, document_starts: starts, ..plain };
        for level in levels() {
            check::<f32>(&case, level, 12);
        }
    }
}

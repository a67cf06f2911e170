//! Attention variants agree with PyTorch's and transformers' (numbers of `tests/fixtures/attention.py`), forward and
//! backward, on every level of this CPU.

use std::path::Path;

use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{
    Arena, Attention, AttentionDirection, AttentionKernels, AttentionVariant, AttentionWrite, CpuLevel,
    CpuQueue, Tensor, TokenSpan, Write, alibi_slopes,
};
use safetensors::SafeTensors;

const CATEGORY: MemoryCategory = MemoryCategory::Activations;
const SEQUENCES: usize = 2;
const TOKENS: usize = 70;
const HEADS: usize = 3;
const KEY_HEADS: usize = 1;
const DIM: usize = 8;

/// Reference numbers, and the arena of the tensors made of them.
struct Reference<'a> {
    file: SafeTensors<'a>,
    arena: Arena,
}

impl Reference<'_> {
    fn f32s(&self, name: &str) -> Vec<f32> {
        let bytes = self.file.tensor(name).unwrap().data().to_vec();
        bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn tensor(&self, name: &str) -> Tensor {
        let values = self.f32s(name);
        Tensor::from_slice(&self.arena, [values.len()], &values, CATEGORY).unwrap()
    }

    fn zeros(&self, elements: usize) -> Tensor {
        Tensor::zeros(&self.arena, DType::F32, [elements], CATEGORY).unwrap()
    }

    /// Runs a variant forward and backward, and compares all results.
    fn check(&self, name: &str, level: CpuLevel, window: Option<usize>, variant: AttentionVariant<'_>) {
        let queue = CpuQueue::with_level(2, &self.arena, level).unwrap();
        let attention = Attention {
            sequences: SEQUENCES,
            queries: TokenSpan::whole(TOKENS),
            keys: TokenSpan::whole(TOKENS),
            heads: HEADS,
            key_value_heads: KEY_HEADS,
            head_dim: DIM,
            scale: (DIM as f32).powf(-0.5),
            window,
            document_starts: None,
            first_head: 0,
            dropout: None,
            variant,
        };
        let inputs = ["q", "k", "v", "dout"].map(|input| self.tensor(input));
        let [q, k, v, dout] = inputs.each_ref().map(Tensor::view);
        let rows = SEQUENCES * TOKENS;
        let outputs = [HEADS, HEADS, KEY_HEADS, KEY_HEADS].map(|heads| self.zeros(rows * heads * DIM));
        let [out, dq, dk, dv] = outputs.each_ref().map(Tensor::view);
        let (log_sum_exp, dsinks) = (self.zeros(rows * HEADS), self.zeros(HEADS));
        let (log_sum_exp, dsinks) = (log_sum_exp.view(), dsinks.view());
        queue.attention(&attention, q, k, v, out, log_sum_exp, Write::Overwrite);
        let write = AttentionWrite::OVERWRITE;
        queue.attention_backward(&attention, q, k, v, out, log_sum_exp, dout, dq, dk, dv, write);
        let mut results = vec![("out", out), ("dq", dq), ("dk", dk), ("dv", dv)];
        if variant.sinks.is_some() {
            queue.attention_sinks_backward(&attention, out, log_sum_exp, dout, dsinks);
            results.push(("dsinks", dsinks));
        }
        for (result, view) in results {
            let (actual, expected) = (view.to_vec::<f32>(), self.f32s(&format!("{name}.{result}")));
            assert_eq!(actual.len(), expected.len(), "{name}: {result}");
            for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                let bound = 2e-6 + 4e-6 * expected.abs();
                let error = (actual - expected).abs();
                assert!(error <= bound, "{name}: {result}[{i}] is {actual}, not {expected}, at {level}");
            }
        }
    }
}

fn with_reference(check: impl FnOnce(Reference<'_>)) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/attention.safetensors");
    let bytes = std::fs::read(path).unwrap();
    check(Reference { file: SafeTensors::deserialize(&bytes).unwrap(), arena: Arena::new() });
}

#[test]
fn variants_agree_with_pytorch() {
    with_reference(|reference| {
        let mask = reference.file.tensor("mask").unwrap().data();
        let mask = Tensor::from_slice(&reference.arena, [SEQUENCES, TOKENS], mask, CATEGORY).unwrap();
        let slopes = Tensor::from_slice(&reference.arena, [HEADS], &alibi_slopes(HEADS), CATEGORY).unwrap();
        let sinks = reference.tensor("sinks");
        let plain = AttentionVariant::default();
        let bidirectional = AttentionVariant {
            direction: AttentionDirection::Bidirectional,
            key_mask: Some(mask.view()),
            ..plain
        };
        for level in CpuLevel::available() {
            reference.check("bidirectional", level, None, bidirectional);
            let alibi_slopes = Some(slopes.view());
            reference.check("alibi", level, None, AttentionVariant { alibi_slopes, ..plain });
            let soft_cap = Some(2.0);
            reference.check("soft_cap", level, Some(30), AttentionVariant { soft_cap, ..plain });
            let sinks = Some(sinks.view());
            reference.check("sinks", level, None, AttentionVariant { sinks, ..plain });
        }
    });
}

#[test]
fn slopes_agree_with_bloom() {
    with_reference(|reference| {
        for heads in [1, 3, 8, 12, 16, 71] {
            let expected = reference.f32s(&format!("slopes.{heads}"));
            for (actual, expected) in alibi_slopes(heads).iter().zip(&expected) {
                // BLOOM takes powers of an f32 base.
                let error = (actual - expected).abs() / expected;
                assert!(error < 2e-6, "{actual} is not {expected} of {heads} heads");
            }
            assert_eq!(alibi_slopes(heads).len(), expected.len());
        }
    });
}

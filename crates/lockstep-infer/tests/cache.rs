//! Reading token by token through the key-value cache gives the logits that transformers computes for the whole sequence at once.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::path::{Path, PathBuf};

use lockstep_checkpoint::safetensors::SafetensorsFile;
use lockstep_infer::{Generator, InferError, LoadedModel};

const FAMILIES: [&str; 28] = [
    "gpt2",
    "llama",
    "llama_bias",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v3_yarn",
    "qwen3_yarn",
    "gpt_neox",
    "gpt_neox_sequential",
    "falcon",
    "falcon_grouped",
    "falcon_one_norm",
    "falcon_alibi",
    "opt",
    "opt_post_norm",
    "bloom",
    "bloom_post_norm",
    "gemma",
    "gemma2",
    "gemma3",
    "olmo2",
    "phi3",
    "gpt_oss",
];
const SEQ_LEN: usize = 24;

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(family)
}

/// Returns the first sequence of a fixture, and the logits after each of its tokens.
fn expected(family: &str) -> (Vec<u32>, Vec<Vec<f32>>) {
    let file = SafetensorsFile::open(&fixture(family).join("expected.safetensors")).unwrap();
    let ids = file.tensor("ids").unwrap().bytes;
    let ids = ids.chunks_exact(8).map(|word| u32::from_le_bytes(word[..4].try_into().unwrap()));
    let logits = file.tensor("logits").unwrap();
    let vocabulary = logits.shape[2];
    let rows = (0..SEQ_LEN)
        .map(|row| {
            let mut out = vec![0.0; vocabulary];
            file.read_f32_at("logits", row * vocabulary, &mut out).unwrap();
            out
        })
        .collect();
    (ids.take(SEQ_LEN).collect(), rows)
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    let scale = expected.iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
    for (index, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() < 1e-4 * scale, "{what}: logit {index} is {a}, transformers has {b}");
    }
}

#[test]
fn one_token_at_a_time_gives_the_logits_of_the_whole_sequence() {
    for family in FAMILIES {
        let (ids, logits) = expected(family);
        let model = LoadedModel::open(&fixture(family), 1).unwrap();
        for prompt in [1, 7, SEQ_LEN] {
            let mut generator = Generator::new(&model, SEQ_LEN).unwrap();
            generator.read(&ids[..prompt]).unwrap();
            assert_close(generator.logits(), &logits[prompt - 1], &format!("{family}, prompt of {prompt}"));
            for at in prompt..SEQ_LEN {
                generator.step(ids[at]).unwrap();
                assert_close(
                    generator.logits(),
                    &logits[at],
                    &format!("{family}, token {at} after {prompt}"),
                );
            }
        }
    }
}

/// Chunks of one token, of few rows (thin products), of many, and the whole prompt.
#[test]
fn chunks_of_the_prompt_and_threads_change_no_bit_of_the_logits() {
    for family in FAMILIES {
        let (ids, _) = expected(family);
        let whole = logits_in_chunks(family, &ids, SEQ_LEN, 1);
        for (chunk, threads) in [(1, 1), (5, 1), (11, 1), (SEQ_LEN, 2), (7, 2)] {
            let logits = logits_in_chunks(family, &ids, chunk, threads);
            let differs = logits.iter().zip(&whole).position(|(a, b)| a.to_bits() != b.to_bits());
            assert!(
                differs.is_none(),
                "{family}, chunks of {chunk}, {threads} threads: logit {differs:?} is {:?} instead of {:?}",
                differs.map(|at| logits[at]),
                differs.map(|at| whole[at])
            );
        }
    }
}

/// Returns the logits after the last token, with the prompt read in chunks.
fn logits_in_chunks(family: &str, ids: &[u32], chunk: usize, threads: usize) -> Vec<f32> {
    let model = LoadedModel::open(&fixture(family), threads).unwrap();
    let mut generator = Generator::new(&model, ids.len()).unwrap();
    ids.chunks(chunk).for_each(|ids| generator.read(ids).unwrap());
    generator.logits().to_vec()
}

#[test]
fn more_tokens_than_positions_are_refused() {
    let model = LoadedModel::open(&fixture("gpt2"), 1).unwrap();
    let Err(error) = Generator::new(&model, 33) else { panic!("33 tokens do not fit 32 positions") };
    assert!(matches!(error, InferError::TooLong { tokens: 33, allowed: 32 }), "{error}");
}

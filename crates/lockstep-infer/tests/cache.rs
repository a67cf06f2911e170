//! Reading token by token through the key-value cache gives the logits that transformers computes for the whole sequence at once.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod common;
mod gguf;

use std::{
    fs,
    ops::{ControlFlow, Range},
    path::{Path, PathBuf},
};

use lockstep_checkpoint::{DType, ModelDirectory, safetensors::SafetensorsFile};
use lockstep_infer::{
    BeamOptions, Event, FinishReason, Generator, InferError, LoadOptions, LoadedModel, Request, Sampling,
    Scheduler, SchedulerOptions, beam_search,
};
use lockstep_plan::KvCacheType;
use lockstep_tensor::PAGE_TOKENS;

#[path = "cache/calibrated.rs"]
mod calibrated;

#[path = "cache/latents.rs"]
mod latents;

#[path = "cache/long_rope.rs"]
mod long_rope;

#[path = "cache/placed.rs"]
mod placed;

#[path = "cache/placed_quantized.rs"]
mod placed_quantized;

#[path = "cache/quantized.rs"]
mod quantized;

#[path = "cache/quantized_experts.rs"]
mod quantized_experts;

#[path = "cache/streamed_experts.rs"]
mod streamed_experts;

const FAMILIES: [&str; 29] = include!("../../../tests/fixtures/families.rs");
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
        let [one, two] = [1, 2].map(|threads| LoadedModel::open(&fixture(family), threads).unwrap());
        let whole = logits_of(&one, &ids, SEQ_LEN);
        let chunks = [(&one, 1), (&one, 5), (&one, 11), (&two, SEQ_LEN), (&two, 7)];
        assert_chunks_change_nothing(&whole, &ids, &chunks, family);
    }
}

/// Checks that the logits after prompts in chunks have the bits of `whole`.
fn assert_chunks_change_nothing(whole: &[f32], ids: &[u32], chunks: &[(&LoadedModel, usize)], family: &str) {
    for &(model, chunk) in chunks {
        let found = logits_of(model, ids, chunk);
        let differs = found.iter().zip(whole).position(|(a, b)| a.to_bits() != b.to_bits());
        let (dtype, threads) = (model.dtype(), model.threads());
        assert!(
            differs.is_none(),
            "{family} {dtype}, chunks of {chunk}, {threads} threads: logit {differs:?} is {:?} instead of {:?}",
            differs.map(|at| found[at]),
            differs.map(|at| whole[at])
        );
    }
}

/// Returns the logits after the last token, with the prompt read in chunks.
fn logits_of(model: &LoadedModel, ids: &[u32], chunk: usize) -> Vec<f32> {
    let mut generator = Generator::new(model, ids.len()).unwrap();
    ids.chunks(chunk).for_each(|ids| generator.read(ids).unwrap());
    generator.logits().to_vec()
}

/// Families with fused and transposed tensors, stacked experts, a latent cache, sinks and windows.
const NARROWED: [&str; 8] =
    ["gpt2", "llama", "mixtral", "deepseek_v3", "gpt_oss", "gemma2", "phi3", "phi3_long"];

#[test]
fn narrow_weights_are_used_as_they_are_stored() {
    for family in NARROWED {
        let (ids, logits) = expected(family);
        for (dtype, bound) in [(DType::BF16, 0.05), (DType::F16, 0.01)] {
            let dir = tempfile::tempdir().unwrap();
            let out = dir.path().join("model");
            ModelDirectory::open(&fixture(family)).unwrap().export_hf(dtype, &out).unwrap();
            let [one, two] = [1, 2].map(|threads| LoadedModel::open(&out, threads).unwrap());
            assert_eq!(one.dtype(), dtype, "{family}");
            let [in_place, converted] = one.weight_bytes();
            assert!(in_place > 0, "{family}: {in_place} bytes in place, {converted} converted");
            if family == "llama" {
                assert_eq!(converted, 0, "{family}: every tensor is as the model reads it");
            }
            let whole = logits_of(&one, &ids, SEQ_LEN);
            let scale = logits[SEQ_LEN - 1].iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
            for (index, (a, b)) in whole.iter().zip(&logits[SEQ_LEN - 1]).enumerate() {
                assert!(
                    (a - b).abs() < bound * scale,
                    "{family} {dtype}: logit {index} is {a} instead of {b}"
                );
            }
            assert_chunks_change_nothing(&whole, &ids, &[(&one, 1), (&one, 9), (&two, 5)], family);
        }
    }
}

/// Sequences of several blocks of keys, with latent caches, windows, sinks, capped scores and experts.
#[test]
fn chunks_of_long_prompts_change_no_bit() {
    const LONG: usize = 150;
    for family in ["llama", "deepseek_v3", "gpt_oss", "gemma2", "mixtral"] {
        let dir = tempfile::tempdir().unwrap();
        let config = fs::read_to_string(fixture(family).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
        config["max_position_embeddings"] = LONG.into();
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        fs::copy(fixture(family).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let (ids, _) = expected(family);
        let ids: Vec<u32> = (0..LONG).map(|at| ids[at * 7 % SEQ_LEN]).collect();
        for dtype in [DType::F32, DType::BF16] {
            let directory = ModelDirectory::open(dir.path()).unwrap();
            let [one, two] = [1, 2].map(|threads| {
                LoadedModel::load(&directory, LoadOptions::new(threads).with_dtype(dtype)).unwrap()
            });
            let whole = logits_of(&one, &ids, LONG);
            let chunks = [(&one, 1), (&one, 33), (&two, 64), (&two, LONG), (&two, 3)];
            assert_chunks_change_nothing(&whole, &ids, &chunks, family);
            for (kv_cache, bound) in [(KvCacheType::Int8, 0.03), (KvCacheType::Fp8, 0.1)] {
                let [one, two] = [1, 2].map(|threads| {
                    let options = LoadOptions::new(threads).with_dtype(dtype);
                    let options = LoadOptions { kv_cache: Some(kv_cache), ..options };
                    LoadedModel::load(&directory, options).unwrap()
                });
                let narrow = logits_of(&one, &ids, LONG);
                let chunks = [(&one, 1), (&two, 33), (&two, 64)];
                assert_chunks_change_nothing(&narrow, &ids, &chunks, &format!("{family}, cache {kv_cache}"));
                let error = relative_distance(&narrow, &whole);
                assert!(error > 0.0 && error < bound, "{family} {dtype}, cache {kv_cache}: error {error}");
            }
        }
    }
}

fn relative_distance(found: &[f32], expected: &[f32]) -> f32 {
    let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}

#[test]
fn a_cache_that_is_wider_than_the_computation_is_refused() {
    let directory = ModelDirectory::open(&fixture("llama")).unwrap();
    let options = LoadOptions::new(1).with_dtype(DType::BF16);
    let options = LoadOptions { kv_cache: Some(KvCacheType::F32), ..options };
    let Err(error) = LoadedModel::load(&directory, options) else { panic!("an f32 cache is accepted") };
    assert!(error.to_string().contains("allowed are auto, bf16, int8, fp8"), "{error}");
}

#[test]
fn weights_can_be_widened_to_another_type() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    ModelDirectory::open(&fixture("llama")).unwrap().export_hf(DType::BF16, &out).unwrap();
    let directory = ModelDirectory::open(&out).unwrap();
    let model = LoadedModel::load(&directory, LoadOptions::new(1).with_dtype(DType::F32)).unwrap();
    assert_eq!((model.dtype(), model.weight_bytes()[0]), (DType::F32, 0));
}

#[test]
fn more_tokens_than_positions_are_refused() {
    let model = LoadedModel::open(&fixture("gpt2"), 1).unwrap();
    let Err(error) = Generator::new(&model, 33) else { panic!("33 tokens do not fit 32 positions") };
    assert!(matches!(error, InferError::TooLong { tokens: 33, allowed: 32 }), "{error}");
}

#[test]
fn encoders_and_classifiers_are_refused_by_name() {
    for (model, model_type) in
        [("bert", "bert"), ("bert_classifier", "bert"), ("llama_classifier", "llama"), ("vit", "vit")]
    {
        let Err(error) = LoadedModel::open(&fixture(model), 1) else { panic!("{model} generates") };
        assert!(
            error.to_string().contains(&format!("model of type {model_type} generates no text")),
            "{error}"
        );
    }
}

/// Returns the tokens and their log-probabilities of requests that a scheduler generates together.
fn scheduled(model: &LoadedModel, requests: Vec<Request>, options: SchedulerOptions) -> Vec<Vec<(u32, u32)>> {
    let mut scheduler = Scheduler::new(model, options).unwrap();
    let mut texts = vec![Vec::new(); requests.len()];
    for (number, request) in requests.into_iter().enumerate() {
        assert_eq!(scheduler.add(request).unwrap(), number);
    }
    let mut finished = vec![0; texts.len()];
    scheduler
        .run::<InferError>(|request, event| {
            match event {
                Event::Token(drawn) => {
                    texts[request].push((drawn.id, drawn.logprob.unwrap().to_bits()));
                    // One request is ended by the receiver of its tokens.
                    if request == 2 && texts[2].len() == 3 {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                Event::Finished(reason) => {
                    finished[request] += 1;
                    let expected = if request == 2 { FinishReason::Stop } else { FinishReason::Length };
                    assert_eq!(reason, expected, "request {request}");
                }
            }
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
    assert!(finished.iter().all(|&times| times == 1), "each request ends once: {finished:?}");
    texts
}

/// Requests of unlike lengths, some greedy and some sampled, one for no tokens, and one that outgrows the model's positions.
fn requests(ids: &[u32], positions: usize) -> Vec<Request> {
    let sampled = |seed| Sampling { temperature: 0.9, top_k: 20, seed, ..Sampling::default() };
    let greedy = Sampling::greedy;
    let request = |range: Range<usize>, max_new_tokens: usize, sampling: Sampling| Request {
        prompt: ids[range].to_vec(),
        max_new_tokens,
        sampling: Sampling { logprobs: Some(0), ..sampling },
        kept: None,
    };
    // Few positions are outgrown soon.
    let more = if positions <= PAGE_TOKENS { positions + 4 } else { 12 };
    let sliding = Request { kept: Some(5), ..request(3..9, more, sampled(5)) };
    vec![
        request(0..1, 9, greedy()),
        request(0..17, 6, sampled(1)),
        request(2..5, 8, sampled(2)),
        request(4..5, 0, greedy()),
        sliding,
        request(1..20, 4, greedy()),
        request(7..9, 11, sampled(3)),
    ]
}

#[test]
fn a_request_has_the_same_bits_alone_and_in_any_batch() {
    for family in FAMILIES {
        let (ids, _) = expected(family);
        let [one, two] = [1, 2].map(|threads| LoadedModel::open(&fixture(family), threads).unwrap());
        assert_batches_change_nothing(&[&one, &two], &ids, family);
    }
    for family in NARROWED {
        let (ids, _) = expected(family);
        let directory = ModelDirectory::open(&fixture(family)).unwrap();
        for dtype in [DType::BF16, DType::F16] {
            let model = LoadedModel::load(&directory, LoadOptions::new(2).with_dtype(dtype)).unwrap();
            assert_batches_change_nothing(&[&model], &ids, &format!("{family} {dtype}"));
        }
    }
}

fn assert_batches_change_nothing(models: &[&LoadedModel], ids: &[u32], what: &str) {
    let positions = models[0].config().max_position_embeddings();
    let all = |max_sequences, max_step_tokens, pages: usize| SchedulerOptions {
        max_sequences,
        max_step_tokens,
        cache_tokens: pages * PAGE_TOKENS,
    };
    let alone = scheduled(models[0], requests(ids, positions), all(1, 512, 1));
    for model in models {
        // All at once; small steps; few places; a cache with room for three at a time.
        for options in [all(32, 512, 32), all(32, 5, 32), all(2, 7, 32), all(32, 512, 3)] {
            let together = scheduled(model, requests(ids, positions), options);
            for (request, (found, expected)) in together.iter().zip(&alone).enumerate() {
                let threads = model.threads();
                assert_eq!(found, expected, "{what}, request {request}, {options:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn a_request_that_never_fits_the_cache_is_refused_and_disturbs_no_other() {
    let model = LoadedModel::open(&fixture("llama"), 1).unwrap();
    let (ids, _) = expected("llama");
    let options = SchedulerOptions { max_sequences: 4, max_step_tokens: 8, cache_tokens: 0 };
    let mut scheduler = Scheduler::new(&model, options).unwrap();
    let request = || requests(&ids, 64).remove(1);
    assert!(matches!(scheduler.add(request()), Err(InferError::CacheFull { tokens: 0 })));
    let empty = Request { prompt: Vec::new(), ..request() };
    assert!(matches!(scheduler.add(empty), Err(InferError::EmptyPrompt)));
    let long = Request { max_new_tokens: 1000, ..request() };
    assert!(matches!(scheduler.add(long), Err(InferError::TooLong { tokens: 1017, .. })));
    assert!(scheduler.is_idle());
}

#[test]
fn beam_searches_find_the_texts_of_transformers() {
    let cases = fs::read_to_string(fixture("beams.json")).unwrap();
    let cases: Vec<serde_json::Value> = serde_json::from_str(&cases).unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let ids = |value: &serde_json::Value| -> Vec<u32> {
            value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let model = LoadedModel::open(&fixture(case["model"].as_str().unwrap()), 2).unwrap();
        let options = BeamOptions {
            beams: case["num_beams"].as_u64().unwrap() as usize,
            max_new_tokens: case["max_new_tokens"].as_u64().unwrap() as usize,
            length_penalty: case["length_penalty"].as_f64().unwrap() as f32,
            early_stopping: case["early_stopping"].as_bool().unwrap(),
            end: ids(&case["end"]),
        };
        let found = beam_search(&model, &ids(&case["prompt"]), &options).unwrap();
        let expected = case["found"].as_array().unwrap();
        assert_eq!(found.len(), expected.len(), "{options:?}");
        for (rank, (found, expected)) in found.iter().zip(expected).enumerate() {
            let score = expected["score"].as_f64().unwrap() as f32;
            let is_close = (found.score - score).abs() <= 2e-5 * score.abs();
            assert!(
                found.tokens == ids(&expected["tokens"]) && is_close,
                "{} with {options:?}: text {rank} is {found:?} instead of {expected}",
                case["model"]
            );
        }
    }
}

//! Context-parallel ranks, over which the rows of each pass and the pages of the cache are sharded, generate the tokens of one rank.

use std::{fs, path::Path};

use lockstep_checkpoint::{DType, ModelDirectory};
use lockstep_infer::{
    Batch, BeamOptions, Generator, InferError, LoadOptions, LoadedModel, NewTokens, PlannedWork, Request,
    Sampling, Scheduler, SchedulerOptions, beam_search, check_plan, plan_over,
};
use lockstep_plan::{CheckedPlan, Degrees, KvCacheType, Plan};
use lockstep_tensor::PAGE_TOKENS;
use serde_json::Value;

use super::{
    EXACT, FAMILIES, Found, assert_found, assert_ranks_agree, collect_tokens, common::random_model,
    config_of, fixture, on_ranks, on_ranks_with,
};

/// Positions of models for prompts of several pages.
const POSITIONS: usize = 512;

/// A step reads pages in parts, and rows that the ranks do not divide.
const STEP_TOKENS: usize = 77;

fn sharded_over(ranks: usize) -> Degrees {
    Degrees { context: ranks, ..Degrees::default() }
}

/// Writes a model of a family with random weights and [`POSITIONS`] positions.
fn long_model(out: &Path, family: &str) {
    let text = fs::read_to_string(fixture(family).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for key in ["max_position_embeddings", "n_positions"] {
        if config.get(key).is_some() {
            config[key] = POSITIONS.into();
        }
    }
    random_model(out, &config);
}

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|at| (at * at + 7 * at + seed) % 100).collect()
}

/// Generates from prompts of unlike lengths, some of several pages.
fn long_found_by(model: &LoadedModel) -> Found {
    let prompts = [prompt(230, 1), prompt(3, 2), prompt(130, 3)];
    let cache_tokens = 2 * model.whole_pages(240);
    let options = SchedulerOptions { max_sequences: 3, max_step_tokens: STEP_TOKENS, cache_tokens };
    let mut scheduler = Scheduler::new(model, options).unwrap();
    for prompt in &prompts {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        scheduler.add(Request { prompt: prompt.clone(), max_new_tokens: 7, sampling, kept: None }).unwrap();
    }
    let tokens = collect_tokens(&mut scheduler, prompts.len());
    let mut generator = Generator::new(model, 256).unwrap();
    generator.read(&prompts[0]).unwrap();
    Found { tokens, logits: generator.logits().to_vec() }
}

fn plan_of(model: &LoadedModel, mesh: Degrees) -> CheckedPlan {
    check_plan(model.config(), &Plan { mesh, ..Plan::default() }, PlannedWork::Generation).unwrap()
}

/// All tokens are on the first page, which one rank has: the others see no key.
#[test]
fn ranks_without_pages_of_a_sequence_generate_its_tokens_as_well() {
    for family in FAMILIES {
        for ranks in [2, 3] {
            let plan = Plan { mesh: sharded_over(ranks), ..Plan::default() };
            assert_ranks_agree(&fixture(family), &plan, EXACT);
        }
    }
}

/// Windows, documents of one sequence, slopes of ALiBi, sinks and latents, with and without the rotary embedding.
#[test]
fn prompts_of_several_pages_have_the_tokens_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let path = dir.path().join(family);
        long_model(&path, family);
        let options = LoadOptions::new(1).with_dtype(DType::F32);
        let one = LoadedModel::load(&ModelDirectory::open(&path).unwrap(), options).unwrap();
        let expected = long_found_by(&one);
        let plan = plan_of(&one, sharded_over(2));
        let found = on_ranks_with(&path, &plan, options, long_found_by);
        assert_found(&found, &expected, 2.0 * EXACT, &format!("{family} on two ranks"));
    }
}

#[test]
fn the_cache_is_sharded_beside_tensor_parallel_ranks_stages_and_replicas() {
    let dir = tempfile::tempdir().unwrap();
    let meshes = [
        sharded_over(3),
        Degrees { tensor: 2, ..sharded_over(2) },
        Degrees { pipeline: 2, ..sharded_over(2) },
        Degrees { pipeline: 2, tensor: 2, ..sharded_over(2) },
        Degrees { replicate: 2, ..sharded_over(2) },
    ];
    for family in ["llama", "mixtral", "deepseek_v3"] {
        let path = dir.path().join(family);
        long_model(&path, family);
        let options = LoadOptions::new(1).with_dtype(DType::F32);
        let one = LoadedModel::load(&ModelDirectory::open(&path).unwrap(), options).unwrap();
        let expected = long_found_by(&one);
        for mesh in meshes {
            let found = on_ranks_with(&path, &plan_of(&one, mesh), options, long_found_by);
            assert_found(&found, &expected, 2.0 * EXACT, &format!("{family} on {mesh:?}"));
        }
    }
}

/// Experts that a plan says nothing about are sharded over the tensor-parallel ranks.
#[test]
fn experts_and_quantized_caches_are_on_ranks_with_a_sharded_cache() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mixtral");
    long_model(&path, "mixtral");
    for kv_cache in [None, Some(KvCacheType::Int8)] {
        let options = LoadOptions { kv_cache, ..LoadOptions::new(1).with_dtype(DType::F32) };
        let one = LoadedModel::load(&ModelDirectory::open(&path).unwrap(), options).unwrap();
        let expected = long_found_by(&one);
        let plan = Plan { mesh: sharded_over(2), ..Plan::default() };
        let plan = plan_over(one.config(), &plan, 4);
        assert_eq!((plan.mesh.tensor, plan.mesh.expert_tensor), (2, 2));
        let plan = check_plan(one.config(), &plan, PlannedWork::Generation).unwrap();
        let found = on_ranks_with(&path, &plan, options, long_found_by);
        assert_found(&found, &expected, 2.0 * EXACT, &format!("cache {kv_cache:?}"));
    }
}

#[test]
fn neither_chunks_nor_other_sequences_change_a_bit_on_a_sharded_cache() {
    let dir = tempfile::tempdir().unwrap();
    let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
    let alone = |model: &LoadedModel, chunk: usize| {
        let mut generator = Generator::new(model, 256).unwrap();
        prompt(230, 1).chunks(chunk).for_each(|ids| generator.read(ids).unwrap());
        bits(generator.logits())
    };
    let in_a_batch = |model: &LoadedModel| {
        let mut batch = Batch::new(model, 3 * model.whole_pages(256)).unwrap();
        let prompts = [prompt(37, 5), prompt(230, 1), prompt(100, 4)];
        let sequences = [(); 3].map(|()| batch.open(256));
        let mut found = Vec::new();
        for step in 0..4 {
            let part = |prompt: &[u32]| (step * 60).min(prompt.len())..((step + 1) * 60).min(prompt.len());
            let new: Vec<NewTokens<'_>> = (prompts.iter().zip(sequences))
                .map(|(prompt, sequence)| NewTokens {
                    sequence,
                    ids: &prompt[part(prompt)],
                    wants_logits: true,
                })
                .filter(|new| !new.ids.is_empty())
                .collect();
            let at = new.iter().position(|new| new.sequence == sequences[1]).unwrap();
            found = bits(batch.read(&new).unwrap().nth(at).unwrap());
        }
        found
    };
    for (family, dtype) in [("llama", DType::F32), ("llama", DType::BF16), ("gpt_oss", DType::BF16)] {
        let path = dir.path().join(format!("{family}-{dtype}"));
        long_model(&path, family);
        let options = LoadOptions::new(1).with_dtype(dtype);
        let one = LoadedModel::load(&ModelDirectory::open(&path).unwrap(), options).unwrap();
        let is_same = |model: &LoadedModel| {
            let expected = alone(model, 230);
            [alone(model, 1) == expected, alone(model, 63) == expected, in_a_batch(model) == expected]
        };
        for found in on_ranks_with(&path, &plan_of(&one, sharded_over(2)), options, is_same) {
            assert_eq!(found, [true; 3], "{family} {dtype}");
        }
    }
}

#[test]
fn beams_share_pages_of_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("llama");
    long_model(&path, "llama");
    let find = |model: &LoadedModel| {
        let options = BeamOptions {
            beams: 3,
            max_new_tokens: 6,
            length_penalty: 1.0,
            early_stopping: true,
            end: Vec::new(),
        };
        let found = beam_search(model, &prompt(150, 1), &options).unwrap();
        found.into_iter().map(|hypothesis| hypothesis.tokens).collect::<Vec<_>>()
    };
    let one = LoadedModel::open(&path, 1).unwrap();
    let expected = find(&one);
    for found in on_ranks(&path, &plan_of(&one, sharded_over(2)), None, find) {
        assert_eq!(found, expected);
    }
}

#[test]
fn each_rank_has_its_part_of_the_pages() {
    let one = LoadedModel::open(&fixture("llama"), 1).unwrap();
    let page = one.kv_cache_bytes(PAGE_TOKENS);
    let bytes = |model: &LoadedModel| {
        let whole = |tokens: usize| model.kv_cache_bytes(tokens * PAGE_TOKENS);
        (model.page_tokens(), [1, 2, 3, 4].map(whole))
    };
    for found in on_ranks(&fixture("llama"), &plan_of(&one, sharded_over(2)), None, bytes) {
        assert_eq!(found, (2 * PAGE_TOKENS, [page, page, 2 * page, 2 * page]));
    }
    // A request that needs more pages than the pool of all ranks has is refused.
    let refuse = |model: &LoadedModel| {
        let options = SchedulerOptions { max_sequences: 1, max_step_tokens: 8, cache_tokens: PAGE_TOKENS };
        let mut scheduler = Scheduler::new(model, options).unwrap();
        let request =
            Request { prompt: vec![1; 3], max_new_tokens: 4, sampling: Sampling::default(), kept: None };
        matches!(scheduler.add(request), Err(InferError::CacheFull { tokens: PAGE_TOKENS }))
    };
    let plan = check_plan(
        &config_of("llama"),
        &Plan { mesh: sharded_over(2), ..Plan::default() },
        PlannedWork::Generation,
    );
    assert_eq!(on_ranks(&fixture("llama"), &plan.unwrap(), None, refuse), [true; 2]);
}

//! The cache of multi-head latent attention holds a latent and a rotary key for each token, whatever the number of heads.

use lockstep_checkpoint::{DType, ModelDirectory, WeightQuantization, WeightType};
use lockstep_infer::{
    Batch, BeamOptions, DeviceMap, Generator, Hypothesis, InferencePlan, LoadOptions, LoadedModel, MapChoice,
    MemoryLimits, PlanRequest, Workload, beam_search,
};
use lockstep_plan::{KvCacheType, MemoryCategory, booked_bytes};
use lockstep_tensor::{BlockActivations, PAGE_TOKENS};
use serde_json::json;

use super::{
    assert_chunks_change_nothing,
    common::{config, random_model},
    expected, fixture, logits_of, relative_distance,
};

/// Elements of a token in a layer of the fixture: `kv_lora_rank` 16 and `qk_rope_head_dim` 8.
const ELEMENTS: usize = 24;
const LAYERS: usize = 2;

fn load(directory: &ModelDirectory, dtype: DType, kv_cache: KvCacheType) -> LoadedModel {
    let options = LoadOptions { kv_cache: Some(kv_cache), ..LoadOptions::new(2).with_dtype(dtype) };
    LoadedModel::load(directory, options).unwrap()
}

/// Bytes of a token in all layers of the fixture, by type.
const BYTES: [(DType, KvCacheType, usize); 5] = [
    (DType::F32, KvCacheType::F32, LAYERS * ELEMENTS * 4),
    (DType::F32, KvCacheType::Bf16, LAYERS * ELEMENTS * 2),
    (DType::BF16, KvCacheType::Bf16, LAYERS * ELEMENTS * 2),
    (DType::BF16, KvCacheType::Int8, LAYERS * (ELEMENTS + 4)),
    (DType::BF16, KvCacheType::Fp8, LAYERS * (ELEMENTS + 4)),
];

#[test]
fn a_token_takes_the_bytes_of_its_latent_and_rotary_key() {
    let directory = ModelDirectory::open(&fixture("deepseek_v3")).unwrap();
    for (dtype, kv_cache, bytes) in BYTES {
        let what = format!("{dtype}, cache {kv_cache}");
        let allocated = |pages: usize| {
            let model = load(&directory, dtype, kv_cache);
            assert_eq!(model.kv_cache_bytes(PAGE_TOKENS), (PAGE_TOKENS * bytes) as u64, "{what}");
            drop(Batch::new(&model, pages * PAGE_TOKENS).unwrap());
            model.peak_memory().0[MemoryCategory::Activations]
        };
        let booked = |pages: usize| LAYERS * booked_bytes(pages * PAGE_TOKENS * bytes / LAYERS);
        assert_eq!(allocated(700) - allocated(1), booked(700) - booked(1), "{what}");
    }
}

#[test]
fn plans_predict_the_bytes_of_latents() {
    let directory = ModelDirectory::open(&fixture("deepseek_v3")).unwrap();
    for (dtype, kv_cache, bytes) in BYTES {
        let request = PlanRequest {
            map: MapChoice::Given {
                map: DeviceMap::parse(r#"{"": "cpu"}"#).unwrap(),
                origin: "map.json".to_owned(),
            },
            limits: MemoryLimits::default(),
            offload_dir: None,
            kv_cache: Some(kv_cache),
            activations: None,
            quantize: None,
            workload: Workload::Generation { sequences: 3, context: 60 },
            process_bytes: 20 << 20,
            threads: 1,
        };
        let plan = InferencePlan::new(&directory, dtype, &request).unwrap();
        assert_eq!(plan.memory.kv_cache, (3 * PAGE_TOKENS * bytes) as u64, "{dtype}, cache {kv_cache}");
    }
}

/// Beams share full pages and copy the last one: their scores are those of their texts alone.
#[test]
fn beams_have_the_scores_of_their_texts_read_alone() {
    let (ids, _) = expected("deepseek_v3");
    let directory = ModelDirectory::open(&fixture("deepseek_v3")).unwrap();
    for kv_cache in [KvCacheType::F32, KvCacheType::Int8] {
        let model = load(&directory, DType::F32, kv_cache);
        let options = BeamOptions {
            beams: 3,
            max_new_tokens: 8,
            length_penalty: 0.0,
            early_stopping: false,
            end: Vec::new(),
        };
        let found = beam_search(&model, &ids, &options).unwrap();
        assert_eq!(found.len(), 3, "cache {kv_cache}");
        for Hypothesis { tokens, score } in found {
            let mut generator = Generator::new(&model, ids.len() + tokens.len()).unwrap();
            generator.read(&ids).unwrap();
            let mut sum = 0.0;
            for &token in &tokens {
                let logits = generator.logits();
                let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
                sum += f64::from(logits[token as usize]) - total.ln();
                generator.step(token).unwrap();
            }
            assert!(
                (f64::from(score) - sum).abs() < 1e-4,
                "cache {kv_cache}, {tokens:?}: {score} instead of {sum}"
            );
        }
    }
}

/// Layers that are applied to queries and outputs are decoded from the blocks that other layers multiply, in any order of the blocks.
#[test]
fn quantized_projections_of_latents_are_applied_to_heads() {
    let dir = tempfile::tempdir().unwrap();
    let hf = dir.path().join("model");
    let mut table = config("deepseek_v3");
    let latent = json!({
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64, "n_shared_experts": 1,
    });
    table.as_object_mut().unwrap().extend(latent.as_object().unwrap().clone());
    random_model(&hf, &table);
    let directory = ModelDirectory::open(&hf).unwrap();
    let ids: Vec<u32> = (0..40).map(|at| at * at * 7 % 256).collect();
    for dtype in [DType::F32, DType::BF16] {
        let loaded = |threads: usize, activations, to: Option<WeightType>| {
            let quantize = to.map(|to| WeightQuantization { to, group_size: None });
            let options =
                LoadOptions { quantize, activations, ..LoadOptions::new(threads).with_dtype(dtype) };
            LoadedModel::load(&directory, options).unwrap()
        };
        let whole = logits_of(&loaded(1, None, None), &ids, ids.len());
        for (to, limit) in [(WeightType::Int8, 0.05), (WeightType::Int4, 0.4), (WeightType::Nf4, 0.4)] {
            for activations in [BlockActivations::Float, BlockActivations::Int8] {
                let [one, two] = [1, 2].map(|threads| loaded(threads, Some(activations), Some(to)));
                let found = logits_of(&one, &ids, ids.len());
                let what = format!("{dtype} {to:?} {activations:?}");
                assert_chunks_change_nothing(&found, &ids, &[(&one, 1), (&two, 7)], &what);
                let error = relative_distance(&found, &whole);
                assert!(error > 0.0 && error < limit, "{what}: error {error}");
            }
        }
    }
}

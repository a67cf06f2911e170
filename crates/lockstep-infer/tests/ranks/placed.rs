//! Stages, replicas and context-parallel ranks keep their weights under limits of their own, and generate what one rank generates.

use std::path::Path;

use lockstep_checkpoint::{DType, ModelDirectory};
use lockstep_engine::Ranks;
use lockstep_infer::{
    Batch, DeviceMap, InferError, InferencePlan, LoadOptions, LoadedModel, MapChoice, MemoryLimits,
    NewTokens, PlanRequest, PlannedWork, Workload, check_placed, check_plan,
};
use lockstep_plan::{CheckedPlan, Degrees, MemoryCategory, Plan};

use super::{
    EXACT, FAMILIES, assert_found,
    common::{config, random_model, with_experts},
    config_of, fixture, found_by, on_each_rank,
};

/// Bytes that the buffers of a stage's resident and converted weights have at least.
const LEAST_BUFFER_BYTES: u64 = (2 << 20) + 4096;

/// Bytes of a process besides its model.
const PROCESS_BYTES: u64 = 20 << 20;

fn request(map: MapChoice, offload_dir: Option<&Path>) -> PlanRequest {
    PlanRequest {
        map,
        limits: MemoryLimits::default(),
        offload_dir: offload_dir.map(Path::to_owned),
        kv_cache: None,
        activations: None,
        quantize: None,
        workload: Workload::Generation { sequences: 2, context: 64 },
        process_bytes: PROCESS_BYTES,
        threads: 1,
    }
}

fn given(map: &str) -> MapChoice {
    MapChoice::Given { map: DeviceMap::parse(map).unwrap(), origin: "map.json".to_owned() }
}

/// Returns this rank's plan for a request, on which all ranks agree.
fn placed(directory: &ModelDirectory, request: &PlanRequest, ranks: &Ranks) -> InferencePlan {
    let mut plan = InferencePlan::on_rank(directory, DType::F32, request, ranks).unwrap();
    plan.agree(ranks).unwrap();
    plan
}

fn plan_of(directory: &ModelDirectory, mesh: Degrees) -> CheckedPlan {
    let plan = Plan { mesh, ..Plan::default() };
    let plan = check_plan(directory.config(), &plan, PlannedWork::Generation).unwrap();
    check_placed(&plan, PlannedWork::Generation).unwrap();
    plan
}

/// Weights that no stage can read from disk as they are stored are written by one rank first.
#[test]
fn stages_on_disk_have_the_bits_of_one_rank_in_memory() {
    let mesh = Degrees { pipeline: 2, ..Degrees::default() };
    for family in FAMILIES {
        let path = fixture(family);
        let directory = ModelDirectory::open(&path).unwrap();
        let offload = tempfile::tempdir().unwrap();
        let request = request(given(r#"{"": "disk"}"#), Some(offload.path()));
        let on_disk = InferencePlan::new(&directory, DType::F32, &request).unwrap();
        drop(LoadedModel::load_placed(&directory, on_disk).unwrap());
        let one = LoadedModel::load(&directory, LoadOptions::new(1).with_dtype(DType::F32)).unwrap();
        let expected = found_by(&one);
        let found = on_each_rank(&path, &plan_of(&directory, mesh), |directory, ranks| {
            let plan = placed(directory, &request, &ranks);
            assert!(plan.disk_bytes > 0, "{family}");
            found_by(&LoadedModel::load_placed_on(directory, plan, ranks).unwrap())
        });
        assert_found(&found, &expected, 0.0, family);
    }
}

/// Reads two sequences of 64 tokens, as many as the plans are for, in chunks.
fn fill(model: &LoadedModel) {
    let ids: Vec<u32> = (0..64).collect();
    let mut batch = Batch::new(model, 2 * model.whole_pages(64)).unwrap();
    let sequences = [batch.open(64), batch.open(64)];
    for ids in ids.chunks(model.chunk_tokens() / 2) {
        let new = sequences.map(|sequence| NewTokens { sequence, ids, wants_logits: true });
        drop(batch.read(&new).unwrap());
    }
}

/// Returns a request whose limit is halfway between the least one and that without which everything is in memory.
fn halfway(directory: &ModelDirectory, ranks: &Ranks) -> PlanRequest {
    let mut request = request(MapChoice::Balanced, None);
    request.limits.cpu = Some(u64::MAX);
    let all = placed(directory, &request, ranks);
    request.limits.cpu = Some(all.least_bytes + (all.memory.total() - all.least_bytes) / 2);
    request
}

#[test]
fn every_rank_keeps_a_limit_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let stages = Degrees { pipeline: 2, ..Degrees::default() };
    let meshes = [
        (stages, 0.0),
        (Degrees { pipeline: 3, ..Degrees::default() }, 0.0),
        (Degrees { replicate: 2, ..Degrees::default() }, 0.0),
        (Degrees { context: 2, ..stages }, EXACT),
    ];
    for (name, mut config) in [
        ("llama", config("llama")),
        // The output layer is the embedding of the first stage.
        ("qwen3", config("qwen3")),
        ("mixtral", with_experts("mixtral")),
    ] {
        config["num_hidden_layers"] = 6.into();
        let path = dir.path().join(name);
        random_model(&path, &config);
        let directory = ModelDirectory::open(&path).unwrap();
        let one = LoadedModel::load(&directory, LoadOptions::new(1).with_dtype(DType::F32)).unwrap();
        let expected = found_by(&one);
        for (mesh, tolerance) in meshes {
            let what = format!("{name} on {mesh:?}");
            let found = on_each_rank(&path, &plan_of(&directory, mesh), |directory, ranks| {
                let request = halfway(directory, &ranks);
                let plan = placed(directory, &request, &ranks);
                let (limit, memory) = (request.limits.cpu.unwrap(), plan.memory);
                let sizes = [plan.model_bytes(), plan.disk_bytes];
                assert!(memory.total() <= limit, "{what}: {memory:?} of {limit}");
                let model = LoadedModel::load_placed_on(directory, plan, ranks).unwrap();
                fill(&model);
                let peak = model.peak_memory().0;
                let weights = memory.weights + memory.streaming + memory.experts;
                // Chunks are as short as the shortest of all ranks, so that others need less.
                for (category, predicted) in [
                    (MemoryCategory::Activations, memory.kv_cache + memory.activations),
                    (MemoryCategory::Parameters, weights + LEAST_BUFFER_BYTES),
                    // Scratch of attention is not predicted.
                    (MemoryCategory::Workspace, memory.workspace * 103 / 100),
                ] {
                    let found = peak[category] as u64;
                    assert!(found <= predicted, "{what}: {category:?}: {peak:?}, predicted {memory:?}");
                }
                let found = found_by(&model);
                let read_bytes = model.take_disk_traffic().read_bytes;
                (found, sizes, read_bytes)
            });
            let (found, sizes): (Vec<_>, Vec<_>) =
                found.into_iter().map(|(found, sizes, read_bytes)| (found, (sizes, read_bytes))).unzip();
            assert_found(&found, &expected, tolerance, &what);
            // A stage of few units may be as small with all of them in memory.
            assert!(sizes.iter().any(|&([_, on_disk], _)| on_disk > 0), "{what}: {sizes:?}");
            let is_read = |&([_, on_disk], read_bytes): &([u64; 2], u64)| (on_disk > 0) == (read_bytes > 0);
            assert!(sizes.iter().all(is_read), "{what}: {sizes:?}");
        }
    }
}

#[test]
fn stages_have_the_weights_of_their_units() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama", "qwen3"] {
        let path = dir.path().join(name);
        random_model(&path, &config(name));
        let directory = ModelDirectory::open(&path).unwrap();
        let everything = request(given(r#"{"": "cpu"}"#), None);
        let whole = InferencePlan::new(&directory, DType::F32, &everything).unwrap();
        let mesh = Degrees { pipeline: 2, ..Degrees::default() };
        let found = on_each_rank(&path, &plan_of(&directory, mesh), |directory, ranks| {
            let plan = placed(directory, &everything, &ranks);
            let modules: Vec<String> = plan.modules.iter().map(|module| module.name.clone()).collect();
            (plan.model_bytes(), plan.memory.kv_cache, modules)
        });
        // A table that two stages read is on both.
        let table = if name == "qwen3" { 260 * 256 * 4 } else { 0 };
        assert_eq!(found[0].0 + found[1].0, whole.model_bytes() + table, "{name}");
        assert_eq!(found[0].1 + found[1].1, whole.memory.kv_cache, "{name}");
        let modules = [&found[0].2[..], &found[1].2].concat();
        let expected: Vec<String> = whole.modules.iter().map(|module| module.name.clone()).collect();
        assert_eq!(modules, expected, "{name}");
    }
}

/// The output layer of the last stage is the embedding of the first, and each solves for itself.
#[test]
fn a_solved_map_of_stages_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qwen3");
    random_model(&path, &config("qwen3"));
    let directory = ModelDirectory::open(&path).unwrap();
    let plan = plan_of(&directory, Degrees { pipeline: 2, ..Degrees::default() });
    let map =
        r#"{"model.embed_tokens": "disk", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}"#;
    let everything = request(given(map), None);
    let found = on_each_rank(&path, &plan, |directory, ranks| {
        let plan = placed(directory, &everything, &ranks);
        let map = plan.map.to_json().to_string();
        (map, found_by(&LoadedModel::load_placed_on(directory, plan, ranks).unwrap()))
    });
    let (maps, found): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    assert!(
        maps[0].contains(r#""model.embed_tokens":"disk""#) && maps[1].contains(r#""lm_head":"cpu""#),
        "{maps:?}"
    );
    let one = LoadedModel::load(&directory, LoadOptions::new(1).with_dtype(DType::F32)).unwrap();
    assert_found(&found, &found_by(&one), 0.0, "qwen3");
    let InferError::DeviceMap { problems, .. } =
        InferencePlan::new(&directory, DType::F32, &everything).unwrap_err()
    else {
        panic!("one rank has one table");
    };
    assert!(problems[0].contains("tied"), "{problems:?}");
}

#[test]
fn plans_that_shard_weights_and_weights_that_must_be_made_are_refused() {
    let config = config_of("llama");
    let refused = |mesh: Degrees, work: PlannedWork| {
        let plan = check_plan(&config, &Plan { mesh, ..Plan::default() }, work).unwrap();
        check_placed(&plan, work).unwrap_err().to_string()
    };
    let tensor = Degrees { tensor: 2, pipeline: 2, ..Degrees::default() };
    let message = refused(tensor, PlannedWork::Generation);
    assert!(message.contains("tensor_parallel 2") && !message.contains("pipeline_parallel 2"), "{message}");
    let message = refused(tensor, PlannedWork::Evaluation { seq_len: 16 });
    assert!(
        message.contains("pipeline_parallel 2") && message.contains("data_parallel_replicate"),
        "{message}"
    );
    let path = fixture("gpt2");
    let offload = tempfile::tempdir().unwrap();
    let directory = ModelDirectory::open(&path).unwrap();
    let plan = plan_of(&directory, Degrees { pipeline: 2, ..Degrees::default() });
    let refused = request(given(r#"{"": "disk"}"#), Some(offload.path()));
    for found in on_each_rank(&path, &plan, |directory, ranks| {
        InferencePlan::on_rank(directory, DType::F32, &refused, &ranks).unwrap_err()
    }) {
        let InferError::DeviceMap { origin, problems } = found else { panic!("{found}") };
        assert!(origin == "map.json" && problems[0].contains("one rank"), "{origin}: {problems:?}");
    }
    // What stays in memory is made there.
    let everything = request(given(r#"{"": "cpu"}"#), Some(offload.path()));
    let expected = found_by(&LoadedModel::open(&path, 1).unwrap());
    let found = on_each_rank(&path, &plan, |directory, ranks| {
        let plan = placed(directory, &everything, &ranks);
        found_by(&LoadedModel::load_placed_on(directory, plan, ranks).unwrap())
    });
    assert_found(&found, &expected, 0.0, "gpt2");
}

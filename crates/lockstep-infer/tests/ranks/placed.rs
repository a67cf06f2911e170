//! Stages, replicas and ranks that share a cache keep their weights under limits of their own, and generate what one rank generates.

use std::path::Path;

use lockstep_checkpoint::{DType, ModelDirectory};
use lockstep_engine::Ranks;
use lockstep_infer::{
    DeviceMap, InferError, InferencePlan, LoadOptions, LoadedModel, MapChoice, MemoryLimits, PlanRequest,
    PlannedWork, Workload, check_placed, check_plan,
};
use lockstep_plan::{CheckedPlan, Degrees, Plan};

use super::{
    EXACT, FAMILIES, assert_found,
    common::{config, random_model, with_experts},
    config_of, fixture, found_by, on_each_rank,
};

/// Bytes that the buffer of a stage's resident weights has at least, more than those of these models.
const LEAST_BUFFER_BYTES: u64 = 2 << 20;

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
            let plan = InferencePlan::on_rank(directory, DType::F32, &request, &ranks).unwrap();
            assert!(plan.disk_bytes > 0, "{family}");
            found_by(&LoadedModel::load_placed_on(directory, plan, ranks).unwrap())
        });
        assert_found(&found, &expected, 0.0, family);
    }
}

/// Returns a request whose limit is halfway between the least one and that without which everything is in memory.
fn halfway(directory: &ModelDirectory, ranks: &Ranks) -> PlanRequest {
    let mut request = request(MapChoice::Balanced, None);
    request.limits.cpu = Some(u64::MAX);
    let all = InferencePlan::on_rank(directory, DType::F32, &request, ranks).unwrap();
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
                let plan = InferencePlan::on_rank(directory, DType::F32, &request, &ranks).unwrap();
                let (limit, memory) = (request.limits.cpu.unwrap(), plan.memory);
                let sizes = [plan.model_bytes(), plan.disk_bytes];
                assert!(memory.total() <= limit, "{what}: {memory:?} of {limit}");
                let model = LoadedModel::load_placed_on(directory, plan, ranks).unwrap();
                let found = found_by(&model);
                let (peak, total) = model.peak_memory();
                let most = memory.total() - PROCESS_BYTES + LEAST_BUFFER_BYTES;
                assert!(total as u64 <= most, "{what}: {peak:?}, predicted {memory:?}");
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
            let plan = InferencePlan::on_rank(directory, DType::F32, &everything, &ranks).unwrap();
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
    let request = request(given(r#"{"": "disk"}"#), Some(offload.path()));
    let directory = ModelDirectory::open(&path).unwrap();
    let plan = plan_of(&directory, Degrees { pipeline: 2, ..Degrees::default() });
    for found in on_each_rank(&path, &plan, |directory, ranks| {
        InferencePlan::on_rank(directory, DType::F32, &request, &ranks).unwrap_err()
    }) {
        let InferError::DeviceMap { origin, problems } = found else { panic!("{found}") };
        assert!(origin == "--offload-dir" && problems[0].contains("one rank"), "{origin}: {problems:?}");
    }
}

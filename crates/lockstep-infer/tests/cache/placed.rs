//! Models under device maps and memory limits: the same bits as in memory, and the memory that the plan predicts.

use std::{collections::BTreeMap, fs, path::Path};

use lockstep_checkpoint::{
    DType, ModelDirectory, WeightQuantization, WeightType,
    hf::{ExportData, ExportTensor, HfExport, SINGLE_FILE},
};
use lockstep_infer::{
    Device, DeviceMap, Generator, InferError, InferencePlan, LoadOptions, LoadedModel, MapChoice,
    MemoryLimits, PlanRequest, Workload,
};
use lockstep_model::HfMapping;
use lockstep_plan::{KvCacheType, MemoryCategory};

use super::{FAMILIES, SEQ_LEN, expected, fixture, logits_of};

/// Returns a request without limits on a map in JSON.
pub(crate) fn request(map: &str, offload_dir: &Path) -> PlanRequest {
    PlanRequest {
        map: MapChoice::Given { map: DeviceMap::parse(map).unwrap(), origin: "map.json".to_owned() },
        limits: MemoryLimits::default(),
        offload_dir: Some(offload_dir.to_owned()),
        kv_cache: None,
        activations: None,
        quantize: None,
        workload: Workload::Generation { sequences: 1, context: SEQ_LEN },
        process_bytes: 20 << 20,
        threads: 2,
    }
}

pub(crate) fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    let differs = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
    let values = differs.map(|at| (found[at], expected[at]));
    assert!(differs.is_none(), "{what}: logit {differs:?} is {values:?} instead");
}

#[test]
fn weights_on_disk_change_no_bit_of_the_logits() {
    for family in FAMILIES {
        let (ids, _) = expected(family);
        let directory = ModelDirectory::open(&fixture(family)).unwrap();
        let offload = tempfile::tempdir().unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let options = LoadOptions::new(1).with_dtype(dtype);
            let whole = logits_of(&LoadedModel::load(&directory, options).unwrap(), &ids, SEQ_LEN);
            for map in [r#"{"": "disk"}"#, r#"{"": "cpu"}"#] {
                let plan = InferencePlan::new(&directory, dtype, &request(map, offload.path())).unwrap();
                let is_on_disk = plan.disk_bytes > 0;
                assert_eq!(is_on_disk, map.contains("disk"), "{family}");
                let model = LoadedModel::load_placed(&directory, plan).unwrap();
                for chunk in [SEQ_LEN, 5, 1] {
                    let found = logits_of(&model, &ids, chunk);
                    assert_same_bits(&found, &whole, &format!("{family} {dtype} {map}, chunks of {chunk}"));
                }
                assert_eq!(model.take_disk_traffic().read_bytes > 0, is_on_disk, "{family} {dtype} {map}");
            }
        }
        let written = fs::read_dir(offload.path()).unwrap().count();
        assert!(written <= 2, "{family}: one directory for each type, not {written}");
    }
}

/// Writes a Llama of several MiB with tied embeddings in bf16, of a width.
pub(crate) fn write_model(dir: &Path, hidden_size: usize) -> ModelDirectory {
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 9000, "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": 9,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": true,
    });
    fs::create_dir(dir).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let config = lockstep_model::ModelConfig::from_file(&dir.join("config.json")).unwrap();
    let tensor = |tensor: &lockstep_model::HfTensor| ExportTensor {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        data: ExportData::Values(Box::new(|start, out: &mut [f32]| {
            let value = |at: usize| ((start + at) * 37 % 101) as f32 / 1000.0 - 0.05;
            out.iter_mut().enumerate().for_each(|(at, out)| *out = value(at));
            Ok(())
        })),
    };
    let texts =
        BTreeMap::from([("config.json".to_owned(), fs::read_to_string(dir.join("config.json")).unwrap())]);
    fs::remove_dir_all(dir).unwrap();
    HfExport {
        tensors: HfMapping::new(&config).tensors().iter().map(tensor).collect(),
        dtype: Some(DType::BF16),
        file: SINGLE_FILE,
        texts,
        copies: BTreeMap::new(),
        shard_bytes: u64::MAX,
    }
    .write(dir)
    .unwrap();
    ModelDirectory::open(dir).unwrap()
}

/// Returns a request with a limit of so many bytes above the process's own.
pub(crate) fn limited(map: MapChoice, limit: u64) -> PlanRequest {
    let limits = MemoryLimits { cpu: Some(limit), ..MemoryLimits::default() };
    let workload = Workload::Generation { sequences: 1, context: 600 };
    PlanRequest {
        map,
        limits,
        offload_dir: None,
        kv_cache: None,
        activations: None,
        quantize: None,
        workload,
        process_bytes: 20 << 20,
        threads: 2,
    }
}

#[test]
fn a_limit_is_kept_by_what_is_allocated_and_the_least_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    let directory = write_model(&dir.path().join("model"), 256);
    let plan = |map, limit, dtype| InferencePlan::new(&directory, dtype, &limited(map, limit));
    for dtype in [DType::BF16, DType::F32] {
        let roomy = plan(MapChoice::Balanced, 1 << 40, dtype).unwrap();
        assert_eq!((roomy.disk_bytes, roomy.buffers()), (0, 0), "{dtype}");
        let least = roomy.least_bytes;
        let error = plan(MapChoice::Balanced, least - 1, dtype).unwrap_err();
        let InferError::LimitTooSmall { least_mib, .. } = &error else { panic!("{error}") };
        assert!(least_mib << 20 > least, "{dtype}: {least_mib} MiB, {least} bytes");
        plan(MapChoice::Balanced, least, dtype).expect("the least that would do");
        let ids: Vec<u32> = (0..600).map(|at| at * 7 % 9000).collect();
        let options = LoadOptions::new(2).with_dtype(dtype);
        let whole = logits_of(&LoadedModel::load(&directory, options).unwrap(), &ids, 600);
        for map in [MapChoice::Balanced, MapChoice::Sequential] {
            let limit = roomy.memory.total() - roomy.model_bytes() / 5;
            let plan = plan(map.clone(), limit, dtype).unwrap();
            assert!(
                plan.memory.total() <= limit && plan.buffers() == 3,
                "{dtype} {limit} {map:?}: {:?}",
                plan.memory
            );
            let kept = roomy.model_bytes() - plan.disk_bytes;
            assert!(plan.disk_bytes > 0 && kept > 0, "{dtype} {map:?}: {kept} bytes stay in memory");
            let predicted = plan.memory;
            let model = LoadedModel::load_placed(&directory, plan).unwrap();
            let mut generator = Generator::new(&model, 600).unwrap();
            generator.read(&ids).unwrap();
            assert_same_bits(generator.logits(), &whole, &format!("{dtype} {map:?}"));
            let (peak, total) = model.peak_memory();
            let run = predicted.activations + predicted.kv_cache;
            let weights = predicted.weights + predicted.streaming;
            for (what, found, predicted) in [
                ("weights", peak[MemoryCategory::Parameters] as u64, weights),
                ("all", total as u64, weights + run + predicted.workspace),
            ] {
                let off = found as f64 / predicted as f64 - 1.0;
                assert!(
                    off.abs() < 0.03,
                    "{dtype} {map:?}: {what} take {found} bytes, {predicted} predicted; {peak:?}"
                );
            }
        }
    }
}

#[test]
fn a_cache_of_each_type_takes_what_the_plan_predicts() {
    let dir = tempfile::tempdir().unwrap();
    let directory = write_model(&dir.path().join("model"), 256);
    let ids: Vec<u32> = (0..600).map(|at| at * 7 % 9000).collect();
    for dtype in [DType::BF16, DType::F32] {
        let mut caches = BTreeMap::new();
        for kv_cache in KvCacheType::ALL.into_iter().filter(|kv_cache| kv_cache.holds(dtype)) {
            let request = PlanRequest { kv_cache: Some(kv_cache), ..limited(MapChoice::Balanced, 1 << 40) };
            let plan = InferencePlan::new(&directory, dtype, &request).unwrap();
            let predicted = plan.memory;
            let model = LoadedModel::load_placed(&directory, plan).unwrap();
            Generator::new(&model, 600).unwrap().read(&ids).unwrap();
            let found = model.peak_memory().0[MemoryCategory::Activations] as u64;
            let expected = predicted.activations + predicted.kv_cache;
            let off = found as f64 / expected as f64 - 1.0;
            assert!(off.abs() < 0.03, "{dtype}, cache {kv_cache}: {found} bytes, {expected} predicted");
            caches.insert(kv_cache.name(), predicted.kv_cache);
        }
        let wide = KvCacheType::of(dtype).unwrap().name();
        assert!(
            4 * caches["int8"] < 3 * caches[wide] && caches["int8"] == caches["fp8"],
            "{dtype}: {caches:?}"
        );
    }
}

/// Returns the limit in MiB that an error names for an option.
fn named_limit(error: &InferError, option: &str) -> u64 {
    let text = error.to_string();
    let limit = text.split(&format!("with {option} cpu=")).nth(1).and_then(|rest| rest.split("MiB").next());
    limit.and_then(|limit| limit.parse().ok()).unwrap_or_else(|| panic!("{option}: {text}"))
}

#[test]
fn a_limit_that_is_too_small_names_the_options_that_would_do_with_less() {
    let dir = tempfile::tempdir().unwrap();
    let directory = write_model(&dir.path().join("model"), 512);
    let dtype = DType::BF16;
    let plan = |request: &PlanRequest| InferencePlan::new(&directory, dtype, request);
    let least = plan(&limited(MapChoice::Balanced, 1 << 40)).unwrap().least_bytes;
    let refused = limited(MapChoice::Balanced, least - 1);
    let error = plan(&refused).unwrap_err();
    let at = |limit_mib: u64| MemoryLimits { cpu: Some(limit_mib << 20), ..MemoryLimits::default() };
    let narrow = named_limit(&error, "--kv-cache int8");
    let request = PlanRequest { limits: at(narrow), kv_cache: Some(KvCacheType::Int8), ..refused.clone() };
    plan(&request).unwrap();
    let int4 = WeightQuantization { to: WeightType::Int4, group_size: None };
    let quantized = named_limit(&error, "--quantize int4 --offload-dir DIR");
    let offload_dir = Some(dir.path().join("offload"));
    let request = PlanRequest { limits: at(quantized), quantize: Some(int4), offload_dir, ..refused };
    plan(&request).unwrap();
    assert!(quantized << 20 < least && narrow << 20 < least + (2 << 20), "{error}");
    // An option that is in use is not named.
    let error = plan(&PlanRequest { limits: at(1), ..request }).unwrap_err().to_string();
    assert!(!error.contains("--quantize") && error.contains("--kv-cache int8"), "{error}");
}

#[test]
fn every_problem_of_a_map_is_named_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let directory = ModelDirectory::open(&fixture("qwen3")).unwrap();
    let map = r#"{"model.embed_tokens": "cpu", "model.layers.0": 1, "model.layerz.1": "disk", "model.rotary_emb": "cpu"}"#;
    let error = InferencePlan::new(&directory, DType::F32, &request(map, dir.path())).unwrap_err();
    let InferError::DeviceMap { origin, problems } = &error else { panic!("{error}") };
    assert_eq!((origin.as_str(), problems.len()), ("map.json", 3), "{problems:?}");
    for (problem, parts) in problems.iter().zip([
        &["no module model.layerz.1", "model.layers.0", "lm_head"][..],
        &["no GPU 1", "cpu and disk"],
        &["no entry covers model.layers.1.", "more"],
    ]) {
        parts.iter().for_each(|part| assert!(problem.contains(part), "{problem}"));
    }
    let tied = r#"{"transformer": "cpu", "lm_head": "disk"}"#;
    let directory = ModelDirectory::open(&fixture("gpt2")).unwrap();
    let error =
        InferencePlan::new(&directory, DType::F32, &request(tied, dir.path())).unwrap_err().to_string();
    assert!(
        error.contains("lm_head.weight is on disk and transformer.wte.weight on cpu, but they are tied"),
        "{error}"
    );
    let fused = PlanRequest { offload_dir: None, ..request(r#"{"": "disk"}"#, dir.path()) };
    let error = InferencePlan::new(&directory, DType::F32, &fused).unwrap_err().to_string();
    assert!(error.contains("c_attn.weight") && error.contains("--offload-dir"), "{error}");
    let gpu = MemoryLimits { gpus: vec![(0, 1 << 30)], ..MemoryLimits::default() };
    let request = PlanRequest { limits: gpu, ..request("{}", dir.path()) };
    let error = InferencePlan::new(&directory, DType::F32, &request).unwrap_err().to_string();
    assert!(error.contains("--max-memory: there is no GPU 0"), "{error}");
}

#[test]
fn a_map_has_the_modules_of_accelerate_with_their_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let directory = ModelDirectory::open(&fixture("gpt2")).unwrap();
    let map = r#"{"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.h": "disk", "transformer.ln_f": "cpu"}"#;
    let plan = InferencePlan::new(&directory, DType::F32, &request(map, dir.path())).unwrap();
    let names: Vec<&str> = plan.modules.iter().map(|module| module.name.as_str()).collect();
    assert_eq!(names[..3], ["transformer.wte", "transformer.wpe", "transformer.h.0"]);
    assert_eq!(names[names.len() - 2..], ["transformer.ln_f", "lm_head"]);
    let last = &plan.modules[names.len() - 1];
    assert_eq!((last.bytes, last.tied_to.as_deref()), (0, Some("transformer.wte")));
    let parameters: u64 = directory.config().parameter_count();
    assert_eq!(plan.model_bytes(), 4 * parameters);
    assert_eq!(plan.map.device_of("transformer.h.0.attn.c_attn.weight"), Some(Device::Disk));
    assert_eq!(plan.map.to_json()["lm_head"], "cpu");
}

#[test]
fn a_configuration_alone_is_planned_as_its_weights_are() {
    // Both files have the same tensors, at other places within pages.
    const PAGE: u64 = 4096;
    for family in FAMILIES {
        let written = ModelDirectory::open(&fixture(family)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::copy(fixture(family).join("config.json"), dir.path().join("config.json")).unwrap();
        let described = ModelDirectory::described(dir.path()).unwrap();
        assert!(written.has_weights() && !described.has_weights(), "{family}");
        let offload = tempfile::tempdir().unwrap();
        for map in [r#"{"": "disk"}"#, r#"{"": "cpu"}"#] {
            let plan = |of| InferencePlan::new(of, DType::F32, &request(map, offload.path())).unwrap();
            let (found, expected) = (plan(&described), plan(&written));
            let rounded = PAGE * found.modules.len() as u64;
            for ((name, found), (_, expected)) in
                found.memory.by_name().into_iter().zip(expected.memory.by_name())
            {
                assert!(
                    found.abs_diff(expected) <= rounded,
                    "{family} {map}: {name} is {found} B, and {expected} B with the weights"
                );
            }
            assert_eq!(found.modules, expected.modules, "{family} {map}");
            assert_eq!(found.disk_bytes, expected.disk_bytes, "{family} {map}");
        }
        let error = ModelDirectory::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("neither model.safetensors nor"), "{family}: {error}");
    }
}

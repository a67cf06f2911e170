//! Mixtures of experts under memory limits: experts are read when rows are routed to them, and change no bit.

use std::{fs::OpenOptions, path::Path};

use lockstep_checkpoint::{DType, ModelDirectory, WeightQuantization, WeightType, hf::SINGLE_FILE};
use lockstep_infer::{
    Device, Generator, InferError, InferencePlan, LoadOptions, LoadedModel, MapChoice, PlanRequest,
};
use lockstep_plan::MemoryCategory;

use super::{
    assert_batches_change_nothing, logits_of,
    placed::{assert_same_bits, limited, request},
};
use crate::common::{config, random_model};

const EXPERTS: u64 = 8;
const PER_TOKEN: u64 = 2;
const LAYERS: u64 = 3;
/// Bytes of a matrix of an expert in bf16.
const MATRIX_BYTES: u64 = 2 * 256 * 512;
const STACKS: u64 = 3 * LAYERS;

fn ids() -> Vec<u32> {
    (0..40).map(|at| at * at * 7 % 260).collect()
}

/// Writes a mixture of experts in bf16, whose experts are stored one by one.
fn mixture(dir: &Path) -> ModelDirectory {
    let mut config = config("mixtral");
    config["num_hidden_layers"] = LAYERS.into();
    (config["num_local_experts"], config["num_experts_per_tok"]) = (EXPERTS.into(), PER_TOKEN.into());
    random_model(&dir.join("numbers"), &config);
    let out = dir.join("bf16");
    ModelDirectory::open(&dir.join("numbers")).unwrap().export_hf(DType::BF16, &out).unwrap();
    ModelDirectory::open(&out).unwrap()
}

fn plan(directory: &ModelDirectory, limit: u64, request: &PlanRequest) -> InferencePlan {
    let request = PlanRequest { limits: limited(MapChoice::Balanced, limit).limits, ..request.clone() };
    InferencePlan::new(directory, DType::BF16, &request).unwrap()
}

/// Returns limits from the least to one in which nearly all experts fit.
fn limits(directory: &ModelDirectory, request: &PlanRequest) -> [u64; 3] {
    let roomy = plan(directory, 1 << 40, request);
    assert_eq!(roomy.disk_bytes, 0);
    let most = roomy.memory.total() - 8 * MATRIX_BYTES;
    [roomy.least_bytes, roomy.least_bytes.midpoint(most), most]
}

#[test]
fn experts_that_are_read_as_they_are_used_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let stored = mixture(dir.path());
    let numbers = ModelDirectory::open(&dir.path().join("numbers")).unwrap();
    let int4 = WeightQuantization { to: WeightType::Int4, group_size: None };
    let ids = ids();
    for (name, directory, quantize) in [("one by one", &stored, None), ("int4 at load", &numbers, Some(int4))]
    {
        let options = LoadOptions { quantize, ..LoadOptions::new(1).with_dtype(DType::BF16) };
        let whole = logits_of(&LoadedModel::load(directory, options).unwrap(), &ids, ids.len());
        let offload_dir = quantize.map(|_| dir.path().join("offload"));
        let free = limited(MapChoice::Balanced, 0);
        for limit in
            limits(directory, &PlanRequest { quantize, offload_dir: offload_dir.clone(), ..free.clone() })
        {
            for threads in [1, 2] {
                let request =
                    PlanRequest { threads, quantize, offload_dir: offload_dir.clone(), ..free.clone() };
                let plan = plan(directory, limit, &request);
                let cached =
                    plan.cached_experts().unwrap_or_else(|| panic!("{name} {limit}: {:?}", plan.memory));
                let what = format!("{name}, {threads} threads, room for {cached:.2} of the experts");
                let model = LoadedModel::load_placed(directory, plan).unwrap();
                for chunk in [ids.len(), 7, 1, 40] {
                    let found = logits_of(&model, &ids, chunk);
                    assert_same_bits(&found, &whole, &format!("{what}, chunks of {chunk}"));
                }
                if threads == 2 {
                    assert_batches_change_nothing(&[&model], &ids, &what);
                }
            }
        }
    }
}

#[test]
fn a_token_reads_its_own_experts_and_none_that_are_cached() {
    let dir = tempfile::tempdir().unwrap();
    let directory = mixture(dir.path());
    let request = limited(MapChoice::Balanced, 0);
    let [least, half, most] = limits(&directory, &request);
    // An expert's matrix touches a block of the disk more than it fills.
    let slot = MATRIX_BYTES + 4096;
    for (limit, reads) in [(least, STACKS * PER_TOKEN * slot), (half, STACKS * PER_TOKEN * slot), (most, 0)] {
        let plan = plan(&directory, limit, &request);
        let (cached, predicted) = (plan.cached_experts().unwrap(), plan.read_bytes(1));
        assert!(plan.memory.total() <= limit && plan.buffers() == 0 || limit == least, "{:?}", plan.memory);
        let model = LoadedModel::load_placed(&directory, plan).unwrap();
        let mut generator = Generator::new(&model, 40).unwrap();
        generator.read(&ids()[..30]).unwrap();
        for at in 30..40 {
            model.take_disk_traffic();
            generator.step(ids()[at]).unwrap();
        }
        let found = model.take_disk_traffic().read_bytes;
        let slack = if limit == most { 4 * slot } else { 0 };
        assert!(
            found <= reads + slack || limit == least,
            "room for {cached:.2}: a token read {found} bytes, at most {reads} are its own"
        );
        let all = STACKS * EXPERTS * MATRIX_BYTES;
        assert!(predicted < all / 2, "room for {cached:.2}: {predicted} bytes predicted of {all}");
    }
}

#[test]
fn a_limit_on_experts_is_kept_and_predicted() {
    let dir = tempfile::tempdir().unwrap();
    let directory = mixture(dir.path());
    let request = limited(MapChoice::Balanced, 0);
    let least = limits(&directory, &request)[0];
    let refused = PlanRequest { limits: limited(MapChoice::Balanced, least - 1).limits, ..request.clone() };
    let error = InferencePlan::new(&directory, DType::BF16, &refused).unwrap_err();
    assert!(matches!(error, InferError::LimitTooSmall { .. }), "{error}");
    for limit in limits(&directory, &request) {
        let plan = plan(&directory, limit, &request);
        let memory = plan.memory;
        assert!(memory.total() <= limit && limit - memory.total() < (2 << 20), "{limit}: {memory:?}");
        assert_eq!(
            plan.map.device_of("model.layers.1.block_sparse_moe.experts.3.w1.weight"),
            Some(Device::Disk)
        );
        assert!(plan.map.device_of("model.layers.1.block_sparse_moe.gate.weight").is_some());
        let model = LoadedModel::load_placed(&directory, plan).unwrap();
        Generator::new(&model, 40).unwrap().read(&ids()).unwrap();
        let (peak, total) = model.peak_memory();
        let weights = memory.weights + memory.streaming + memory.experts;
        let run = memory.activations + memory.kv_cache + memory.workspace;
        for (what, found, predicted) in [
            ("weights", peak[MemoryCategory::Parameters] as u64, weights),
            ("all", total as u64, weights + run),
        ] {
            // Buffers that are read into are whole pages of 2 MiB.
            let off = found.abs_diff(predicted);
            assert!(
                off < predicted / 33 + (6 << 20),
                "{what} take {found} bytes, {predicted} predicted; {peak:?}, {memory:?}"
            );
        }
    }
}

/// A map that is given decides; experts may be in memory layer by layer.
#[test]
fn a_map_places_experts_of_single_layers() {
    let dir = tempfile::tempdir().unwrap();
    let directory = mixture(dir.path());
    let whole = LoadedModel::load(&directory, LoadOptions::new(2).with_dtype(DType::BF16)).unwrap();
    let whole = logits_of(&whole, &ids(), 40);
    for (map, stacks) in [
        (r#"{"": "disk"}"#, STACKS),
        (r#"{"": "cpu", "model.layers.1.block_sparse_moe.experts": "disk"}"#, 3),
        (r#"{"": "cpu", "model.layers.0.block_sparse_moe.experts": "disk", "model.layers.2": "disk"}"#, 6),
    ] {
        let request = PlanRequest { offload_dir: None, ..request(map, dir.path()) };
        let plan = InferencePlan::new(&directory, DType::BF16, &request).unwrap();
        let experts = plan
            .modules
            .iter()
            .zip(plan.map.entries())
            .filter(|(module, (_, device))| module.name.ends_with(".experts") && *device == Device::Disk);
        let bytes: u64 = experts.map(|(module, _)| module.bytes).sum();
        assert_eq!(bytes, stacks * EXPERTS * MATRIX_BYTES, "{map}: {:?}", plan.modules);
        let model = LoadedModel::load_placed(&directory, plan).unwrap();
        for chunk in [40, 3] {
            assert_same_bits(&logits_of(&model, &ids(), chunk), &whole, &format!("{map}, chunks of {chunk}"));
        }
    }
}

#[test]
fn an_expert_that_cannot_be_read_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let directory = mixture(dir.path());
    // Everything else is in memory, so that only reads of experts touch the file.
    let map = r#"{"": "cpu", "model.layers.2.block_sparse_moe.experts": "disk"}"#;
    let request = PlanRequest { offload_dir: None, ..request(map, dir.path()) };
    let plan = InferencePlan::new(&directory, DType::BF16, &request).unwrap();
    let model = LoadedModel::load_placed(&directory, plan).unwrap();
    let file = dir.path().join("bf16").join(SINGLE_FILE);
    OpenOptions::new().write(true).open(file).unwrap().set_len(4096).unwrap();
    let mut generator = Generator::new(&model, 40).unwrap();
    let error = generator.read(&ids()).unwrap_err().to_string();
    assert!(error.contains(SINGLE_FILE), "{error}");
}

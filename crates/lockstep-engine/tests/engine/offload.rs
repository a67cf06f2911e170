//! Tests of offload to disk: it changes no bit of a run, it needs memory for a few windows only, and a failing disk
//! ends the step.

use std::path::Path;
use std::time::Duration;

use lockstep_engine::{
    Engine, EngineError, EngineOptions, HostBatch, Offload, Optimizer, RoundingMode, Snapshot, StateKind,
    Storage, Update, WeightStorage,
};
use lockstep_graph::Seed;
use lockstep_model::ModelConfig;
use lockstep_plan::{DType, MemoryCategory, Plan, Residence, Residences};
use lockstep_tensor::{Arena, DiskError, DiskIo};
use serde_json::json;

use crate::common;

const ADAMW: Optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8 };
const TOKENS: usize = 32;
const VOCABULARY: u32 = 97;

fn model(ties: bool) -> ModelConfig {
    let config = json!({
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 16, "tie_word_embeddings": ties,
    });
    ModelConfig::from_table(config.as_object().unwrap(), "test").unwrap()
}

/// Settings of a test run.
#[derive(Clone)]
struct Setting {
    ties: bool,
    dtype: DType,
    optimizer: Optimizer,
    storage: Storage,
    residence: Residences,
    micro_batches: usize,
}

impl Setting {
    fn engine(&self) -> Result<Engine, EngineError> {
        let (model, storage) = (model(self.ties), self.storage.clone());
        let plan = Plan { residence: self.residence, ..Plan::default() };
        let plan = common::one_rank(&model, plan, [2, 16], self.micro_batches);
        let (dtype, optimizer) = (self.dtype, self.optimizer);
        let options = EngineOptions { dtype, optimizer, storage, seed: 1, threads: 2 };
        Engine::builder(&model, plan).options(options).build(&Arena::new())
    }

    fn on_disk(&self, directory: &Path, [gradients, parameters]: [Residence; 2], fraction: f64) -> Self {
        let offload =
            Offload { directory: directory.to_owned(), window_elements: 2048, ..Offload::default() };
        let optimizer = Residence::Disk;
        let residence = Residences { optimizer, gradients, parameters, fraction, ..Residences::default() };
        Self { storage: Storage { offload, ..self.storage.clone() }, residence, ..self.clone() }
    }

    /// Returns settings that differ in the state that they keep.
    fn all() -> Vec<Self> {
        let narrow = Storage {
            weights: WeightStorage::Kernels,
            state: DType::BF16,
            rounding: RoundingMode::Stochastic,
            ..Storage::default()
        };
        let plain = Self {
            ties: false,
            dtype: DType::F32,
            optimizer: ADAMW,
            storage: Storage::default(),
            residence: Residences::default(),
            micro_batches: 1,
        };
        vec![
            plain.clone(),
            Self { ties: true, dtype: DType::BF16, micro_batches: 3, ..plain.clone() },
            Self { dtype: DType::BF16, storage: narrow, ..plain.clone() },
            Self { optimizer: Optimizer::Lion { betas: [0.9, 0.99] }, micro_batches: 2, ..plain.clone() },
            Self { ties: true, optimizer: Optimizer::Sgd { momentum: 0.9 }, ..plain.clone() },
            Self { dtype: DType::BF16, optimizer: Optimizer::Sgd { momentum: 0.0 }, ..plain },
        ]
    }
}

/// Runs a step and returns its gradient norm.
fn step(engine: &mut Engine, setting: &Setting, step: u64) -> Result<f64, EngineError> {
    let ids = |batch: u32| -> Vec<u32> {
        (0..TOKENS as u32).map(|i| (i * 7 + batch * 13 + step as u32 * 5) % VOCABULARY).collect()
    };
    let ids: Vec<Vec<u32>> = (0..setting.micro_batches as u32).map(ids).collect();
    let labels: Vec<i32> = (0..TOKENS as i32).map(|i| (i * 3 + 1) % VOCABULARY as i32).collect();
    let positions: Vec<u32> = (0..TOKENS as u32).map(|i| i % 16).collect();
    let (labels, positions) = (&labels, &positions);
    let batch = |ids| HostBatch {
        ids,
        labels,
        positions,
        document_starts: &[0; TOKENS],
        sample_numbers: &[0, 1],
        inputs: &[],
    };
    let tokens = (TOKENS * setting.micro_batches) as f32;
    let seed = Seed::new(1.0 / tokens, 1.0);
    engine.forward_backward(ids.iter().map(|ids| batch(ids)), seed)?;
    let norm = engine.finish_gradients()?;
    engine.update(&Update { learning_rate: 0.01, weight_decay: 0.1, gradient_scale: 0.7, step })?;
    Ok(norm)
}

/// Returns true if gradients are accumulated with the same rounding as in memory. In memory a matrix product may
/// accumulate directly; a gradient on disk gets the finished product added.
fn is_exact(setting: &Setting, engine: &Engine) -> bool {
    setting.micro_batches == 1 || !engine.has_gradients_on_disk()
}

type State = Vec<(String, StateKind, Vec<f32>)>;

/// Returns all tensors that a checkpoint would hold, by name and kind.
fn state(engine: &mut Engine) -> State {
    let tensors = engine.state_tensors();
    let mut state: State =
        tensors.iter().map(|t| (t.record.name.clone(), t.kind, t.to_vec().unwrap())).collect();
    state.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    state
}

#[test]
fn no_bit_depends_on_where_the_state_is() {
    let directory = tempfile::tempdir().unwrap();
    for (number, setting) in Setting::all().into_iter().enumerate() {
        let mut in_memory = setting.engine().unwrap();
        in_memory.initialize(1).unwrap();
        let places = [
            ([Residence::Memory; 2], 1.0),
            ([Residence::Disk, Residence::Memory], 1.0),
            ([Residence::Disk, Residence::Memory], 0.4),
            ([Residence::Memory, Residence::Disk], 1.0),
            ([Residence::Disk; 2], 1.0),
            ([Residence::Memory, Residence::Disk], 0.4),
        ];
        let mut others: Vec<(Engine, String)> = places
            .into_iter()
            .map(|(others, share)| {
                let mut engine = setting.on_disk(directory.path(), others, share).engine().unwrap();
                engine.initialize(1).unwrap();
                assert!(engine.disk_bytes() > 0);
                (engine, format!("setting {number}, gradients and parameters {others:?}, share {share}"))
            })
            .collect();
        for number in 1..=3 {
            let norm = step(&mut in_memory, &setting, number).unwrap();
            let ids: Vec<_> = in_memory.trained_ids().collect();
            for (engine, what) in &mut others {
                let found = step(engine, &setting, number).unwrap();
                if !is_exact(&setting, engine) {
                    assert!((found - norm).abs() < 1e-3 * norm, "{what}, step {number}: {found}, {norm}");
                    continue;
                }
                assert_eq!(found, norm, "{what}, step {number}");
                for id in &ids {
                    let (found, expected) = (engine.gradient(*id).unwrap(), in_memory.gradient(*id).unwrap());
                    assert!(found == expected, "{what}: gradient {}", engine.records()[id.0].name);
                }
                assert!(engine.take_disk_traffic().read_bytes > 0, "{what}");
            }
        }
        let expected = state(&mut in_memory);
        for (engine, what) in others.iter_mut().filter(|(engine, _)| is_exact(&setting, engine)) {
            let found = state(engine);
            assert_eq!(found.len(), expected.len(), "{what}");
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found == expected, "{what}: {} {:?}", expected.0, expected.1);
            }
        }
    }
}

#[test]
fn no_bit_depends_on_where_activations_are() {
    let directory = tempfile::tempdir().unwrap();
    for (number, setting) in Setting::all().into_iter().enumerate() {
        let mut in_memory = setting.engine().unwrap();
        in_memory.initialize(1).unwrap();
        let mut on_disk = setting.clone();
        on_disk.storage.offload.directory = directory.path().to_owned();
        on_disk.residence.activations = Residence::Disk;
        let mut on_disk = on_disk.engine().unwrap();
        on_disk.initialize(1).unwrap();
        assert!(on_disk.disk_bytes() > 0);
        Snapshot::new(&on_disk).unwrap();
        for step_number in 1..=3 {
            let norm = step(&mut in_memory, &setting, step_number).unwrap();
            assert_eq!(step(&mut on_disk, &setting, step_number).unwrap(), norm, "setting {number}");
            let traffic = on_disk.take_disk_traffic();
            assert!(traffic.written_bytes > 0 && traffic.read_bytes == traffic.written_bytes, "{traffic:?}");
        }
        assert!(state(&mut on_disk) == state(&mut in_memory), "setting {number}");
    }
}

#[test]
fn state_on_disk_is_loaded_as_it_was_saved() {
    let directory = tempfile::tempdir().unwrap();
    for setting in Setting::all() {
        let setting = setting.on_disk(directory.path(), [Residence::Disk; 2], 1.0);
        let mut engine = setting.engine().unwrap();
        engine.initialize(1).unwrap();
        step(&mut engine, &setting, 1).unwrap();
        let saved = state(&mut engine);
        let mut fresh = setting.engine().unwrap();
        for (name, kind, values) in &saved {
            let id = fresh.parameter_ids().find(|id| fresh.records()[id.0].name == *name).unwrap();
            fresh.write_state(id, *kind, values).unwrap();
        }
        for number in 2..=3 {
            let norm = step(&mut engine, &setting, number).unwrap();
            assert_eq!(step(&mut fresh, &setting, number).unwrap(), norm);
        }
        assert!(state(&mut fresh) == state(&mut engine), "{:?}", setting.optimizer);
    }
}

#[test]
fn a_gradient_that_is_replaced_counts_in_the_norm() {
    let directory = tempfile::tempdir().unwrap();
    let setting = Setting::all()[0].on_disk(directory.path(), [Residence::Disk; 2], 1.0);
    let mut engine = setting.engine().unwrap();
    engine.initialize(1).unwrap();
    step(&mut engine, &setting, 1).unwrap();
    for id in engine.trained_ids().collect::<Vec<_>>() {
        let zeros = vec![0.0; engine.gradient(id).unwrap().len()];
        engine.write_gradient(id, &zeros).unwrap();
    }
    assert_eq!(engine.finish_gradients().unwrap(), 0.0);
    let id = engine.trained_ids().nth(5).unwrap();
    let mut gradient = engine.gradient(id).unwrap();
    (gradient[0], gradient[1]) = (3.0, -4.0);
    engine.write_gradient(id, &gradient).unwrap();
    assert_eq!(engine.finish_gradients().unwrap(), 5.0);
    gradient[2] = f32::NAN;
    engine.write_gradient(id, &gradient).unwrap();
    assert!(engine.finish_gradients().unwrap().is_nan());
}

#[test]
fn what_is_on_disk_takes_no_memory_but_for_windows() {
    let directory = tempfile::tempdir().unwrap();
    let setting = Setting { dtype: DType::BF16, ..Setting::all()[0].clone() };
    let memory = |setting: &Setting| setting.engine().unwrap().arena().in_use();
    let (before, after) =
        (memory(&setting), memory(&setting.on_disk(directory.path(), [Residence::Disk; 2], 1.0)));
    let rest = 1 << 10;
    assert!(before[MemoryCategory::Optimizer] > 400_000, "{before:?}");
    assert!(after[MemoryCategory::Optimizer] < rest && after[MemoryCategory::Gradients] < rest, "{after:?}");
    assert!(after[MemoryCategory::Parameters] < rest, "{after:?}");
    let engine = setting.on_disk(directory.path(), [Residence::Disk; 2], 1.0).engine().unwrap();
    assert!(matches!(Snapshot::new(&engine), Err(EngineError::OnDisk)));
    let by_half = setting.on_disk(directory.path(), [Residence::Memory; 2], 0.5).engine().unwrap();
    let share = by_half.disk_bytes() as f64 / engine.disk_bytes() as f64 * 18.0 / 12.0;
    assert!((0.5..0.8).contains(&share), "{share} of the state is on disk");
}

#[test]
fn a_full_disk_is_found_before_the_run() {
    let setting = Setting::all()[0].on_disk(Path::new("/proc/no-such-place"), [Residence::Disk; 2], 1.0);
    let error = setting.engine().err().unwrap().to_string();
    assert!(error.contains("/proc/no-such-place"), "{error}");
    let mut setting = Setting::all()[0].clone();
    setting.residence.activations = Residence::Disk;
    setting.storage.offload.directory = "/proc/no-such-place".into();
    let error = setting.engine().err().unwrap().to_string();
    assert!(error.contains("/proc/no-such-place"), "{error}");
    if let Some(disk) = SmallDisk::of_bytes(300_000) {
        setting.storage.offload.directory = disk.directory.path().to_owned();
        let error = setting.engine().err().unwrap();
        assert!(matches!(error, EngineError::Disk(DiskError::Full { .. })), "{error}");
        let setting = Setting::all()[0].on_disk(disk.directory.path(), [Residence::Disk; 2], 1.0);
        let error = setting.engine().err().unwrap();
        assert!(matches!(error, EngineError::Disk(DiskError::Full { .. })), "{error}");
        assert_eq!(std::fs::read_dir(disk.directory.path()).unwrap().count(), 0);
    }
}

#[test]
fn both_ways_to_the_disk_give_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let of_method = |method| {
        let mut setting = Setting::all()[1].on_disk(directory.path(), [Residence::Disk; 2], 1.0);
        setting.storage.offload.method = method;
        setting.storage.offload.limit = Duration::from_secs(20);
        let mut engine = setting.engine()?;
        engine.initialize(1)?;
        for number in 1..=2 {
            step(&mut engine, &setting, number)?;
        }
        Ok::<_, EngineError>(state(&mut engine))
    };
    let threads = of_method(DiskIo::Threads).unwrap();
    match of_method(DiskIo::IoUring) {
        Ok(ring) => assert!(ring == threads),
        Err(error) => println!("SKIPPED: io_uring: {error}"),
    }
}

/// A file system of a few pages; available only if this process may mount one.
struct SmallDisk {
    directory: tempfile::TempDir,
}

impl SmallDisk {
    fn of_bytes(bytes: usize) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(directory.path())
            .output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            println!("SKIPPED: mounting a tmpfs needs root and the right to mount");
            return None;
        }
        Some(Self { directory })
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg(self.directory.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "the small disk stays mounted");
    }
}

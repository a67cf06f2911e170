//! Reference numbers from `tests/fixtures/`, and training steps as the scripts there run them.

use std::path::{Path, PathBuf};

use lockstep_checkpoint::safetensors::SafetensorsFile;
use lockstep_engine::{Engine, HostBatch, Update};
use lockstep_graph::{BlockShape, Seed};
use lockstep_plan::DType;

/// Shape of the batches in the scripts.
pub(crate) const SHAPE: BlockShape = BlockShape { sequences: 2, seq_len: 24, dtype: DType::F32 };

/// Returns the path of a fixture's file or directory.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// The reference values in an `expected.safetensors`.
pub(crate) struct Expected(SafetensorsFile);

impl Expected {
    pub(crate) fn open(family: &str) -> Self {
        Self(SafetensorsFile::open(&fixture(family).join("expected.safetensors")).unwrap())
    }

    pub(crate) fn f32(&self, name: &str) -> Vec<f32> {
        let mut out = vec![0.0; self.0.tensor(name).unwrap().elements()];
        self.0.read_f32_at(name, 0, &mut out).unwrap();
        out
    }

    pub(crate) fn f64(&self, name: &str) -> Vec<f64> {
        let bytes = self.0.tensor(name).unwrap().bytes;
        bytes.chunks_exact(8).map(|word| f64::from_le_bytes(word.try_into().unwrap())).collect()
    }

    pub(crate) fn i64(&self, name: &str) -> Vec<i64> {
        let bytes = self.0.tensor(name).unwrap().bytes;
        bytes.chunks_exact(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect()
    }
}

/// A batch in the types of the engine.
pub(crate) struct Batch {
    ids: Vec<u32>,
    labels: Vec<i32>,
    positions: Vec<u32>,
    document_starts: Vec<u32>,
    sample_numbers: Vec<u64>,
}

impl Batch {
    pub(crate) fn new(ids: &[i64], labels: &[i64]) -> Self {
        Self {
            ids: ids.iter().map(|&id| id as u32).collect(),
            labels: labels.iter().map(|&label| label as i32).collect(),
            positions: (0..ids.len()).map(|i| (i % SHAPE.seq_len) as u32).collect(),
            document_starts: vec![0; ids.len()],
            sample_numbers: vec![0, 1],
        }
    }

    pub(crate) fn valid(&self) -> usize {
        self.labels.iter().filter(|&&label| label != -100).count()
    }

    pub(crate) fn seed(&self) -> Seed {
        Seed::new(1.0 / self.valid() as f32, 1.0 / self.sample_numbers.len() as f32)
    }

    pub(crate) fn host(&self) -> HostBatch<'_> {
        HostBatch {
            ids: &self.ids,
            labels: &self.labels,
            positions: &self.positions,
            document_starts: &self.document_starts,
            sample_numbers: &self.sample_numbers,
            inputs: &[],
        }
    }
}

/// Returns ‖a − b‖ / ‖b‖.
pub(crate) fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    (difference / norm.max(1e-30)).sqrt()
}

/// Runs one step as the fixtures' scripts do; returns loss and gradient norm.
pub(crate) fn training_step(engine: &mut Engine, batch: &Batch, learning_rate: f64, step: u64) -> (f64, f64) {
    engine.begin_step();
    let loss = engine.accumulate(&batch.host(), batch.seed()).unwrap() / batch.valid() as f64;
    let norm = engine.finish_gradients().unwrap();
    engine
        .update(&Update {
            learning_rate,
            weight_decay: 0.1,
            gradient_scale: (1.0 / (norm + 1e-6)).min(1.0) as f32,
            step,
        })
        .unwrap();
    (loss, norm)
}

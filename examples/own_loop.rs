//! A training loop of one's own: the loader gives each rank its share of a global batch, the engine computes, the loop decides,
//! saves, and goes on from its newest checkpoint, on any number of ranks.
//!
//! ```text
//! cargo run --release --example own_loop -- --nproc_per_node=2
//! ```

use std::process::ExitCode;
use std::sync::Arc;

use lockstep::samples::{EpochEnd, Loader, LoaderOptions, SampleOrder, SampleSequence, TensorDataset};
use lockstep::{
    DType, Engine, Error, InputDeclaration, LABELS, Model, NamedTensor, Optimizer, Recorder, Settings, Sizes,
    TensorData, Transforms, Unit, Value, World,
};
use serde_json::{Map, Value as Json};

const FEATURES: usize = 8;
const SAMPLES: usize = 512;
const GLOBAL_BATCH: usize = 32;
const STEPS: usize = 10 * SAMPLES / GLOBAL_BATCH;
const CHECKPOINTS: &str = "checkpoints/own_loop";

/// A regression: two linear layers with a ReLU between them.
#[derive(Debug)]
struct Regression;

impl Model for Regression {
    fn model_type(&self) -> &str {
        "regression"
    }

    fn units(&self) -> Vec<Unit> {
        vec![Unit { prefix: String::new(), kind: 0, layer: Some(0) }]
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        vec![
            InputDeclaration::new("features", DType::F32, &[FEATURES]),
            InputDeclaration::new(LABELS, DType::F32, &[1]),
        ]
    }

    fn record(&self, _: usize, g: &mut Recorder) -> Value {
        let x = g.data("features");
        let x = g.dense(x, "hidden", 32);
        let x = g.relu(x);
        let y = g.dense(x, "output", 1);
        g.squared_error(y)
    }

    fn sizes(&self) -> Sizes {
        Sizes { layers: 1, fixed_seq_len: Some(1), ..Sizes::default() }
    }

    fn table(&self) -> Map<String, Json> {
        Map::new()
    }
}

/// Returns points of a parabola through random-looking features.
fn points() -> Result<TensorDataset, Error> {
    let feature = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
    let features: Vec<f32> = (0..SAMPLES * FEATURES).map(feature).collect();
    let target = |row: &[f32]| row[0] * row[0] + 0.5 * row[1];
    let labels = features.chunks(FEATURES).map(target).collect();
    Ok(TensorDataset::new(vec![
        NamedTensor::new("features", &[SAMPLES, FEATURES], TensorData::F32(features)),
        NamedTensor::new(LABELS, &[SAMPLES, 1], TensorData::F32(labels)),
    ])?)
}

fn train(world: &World) -> Result<(), Error> {
    let settings = Settings {
        global_batch: GLOBAL_BATCH,
        optimizer: Optimizer::AdamW { betas: [0.9, 0.999], eps: 1e-8 },
        max_grad_norm: 1.0,
        ..Settings::default()
    };
    let mut engine = Engine::new(world, Regression, settings)?;
    let sequence = SampleSequence::new(SampleOrder::Shuffle { seed: 1 }, SAMPLES as u64, EpochEnd::Continue)?;
    let done = engine.resume(CHECKPOINTS)? as usize;
    // The global batch is the same on any number of ranks; this rank reads its micro-batches of it.
    let shards: Vec<_> = engine.shard().collect();
    let of_step = shards.clone();
    let ranges = (done..STEPS).flat_map(move |step| {
        let first = step * GLOBAL_BATCH;
        of_step.clone().into_iter().map(move |range| (first + range.start) as u64..(first + range.end) as u64)
    });
    let options = LoaderOptions::default();
    let mut loader = Loader::start(Arc::new(points()?), Transforms::new(), sequence, ranges, options)?;
    for step in done + 1..=STEPS {
        let mut batches = Vec::with_capacity(shards.len());
        while batches.len() < shards.len() {
            batches.extend(loader.next_batch()?);
        }
        let loss = engine.forward_backward(&batches)?;
        let taken = engine.step(3e-3)?;
        if step % (STEPS / 10) == 0 {
            engine.save(CHECKPOINTS)?;
            if world.is_first() {
                println!("step {step}: loss {loss:.5}, gradient norm {:.4}", taken.grad_norm);
            }
        }
        batches.into_iter().for_each(|batch| loader.recycle(batch));
    }
    Ok(())
}

fn main() -> ExitCode {
    lockstep::launch(train)
}

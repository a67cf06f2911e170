//! ResNet against the numbers of torchvision: loss, every gradient, running statistics, evaluation, and 20 steps.
//!
//! `tests/fixtures/resnet.py` makes the numbers.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod common;

use std::path::{Path, PathBuf};

use lockstep_engine::{Engine, EngineOptions, HostBatch, Optimizer, StateKind, Update};
use lockstep_graph::{Recompute, Seed};
use lockstep_model::ModelConfig;
use lockstep_plan::Plan;
use lockstep_tensor::{Arena, NamedTensor, TensorData};
use safetensors::SafeTensors;

/// Names of the fixtures: two kinds of blocks, two stems.
const MODELS: [&str; 2] = ["resnet_basic", "resnet_bottleneck"];
const IMAGES: usize = 6;

struct Fixture {
    model: ModelConfig,
    bytes: Vec<u8>,
}

impl Fixture {
    fn load(name: &str) -> Self {
        let dir: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
        let model = ModelConfig::from_file(&dir.join("config.json")).unwrap();
        Self { model, bytes: std::fs::read(dir.join("expected.safetensors")).unwrap() }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let all = SafeTensors::deserialize(&self.bytes).unwrap();
        let (numbers, _) = all.tensor(name).unwrap().data().as_chunks::<4>();
        numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn doubles(&self, name: &str) -> Vec<f64> {
        let all = SafeTensors::deserialize(&self.bytes).unwrap();
        let (numbers, _) = all.tensor(name).unwrap().data().as_chunks::<8>();
        numbers.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
    }

    fn inputs(&self) -> Vec<NamedTensor> {
        let all = SafeTensors::deserialize(&self.bytes).unwrap();
        let (labels, _) = all.tensor("labels").unwrap().data().as_chunks::<8>();
        let labels = labels.iter().map(|bytes| i64::from_le_bytes(*bytes) as i32).collect();
        let pixels = self.floats("pixels");
        let shape = [IMAGES, pixels.len() / IMAGES];
        vec![
            NamedTensor::new("pixel_values", &shape, TensorData::F32(pixels)),
            NamedTensor::new("labels", &[IMAGES], TensorData::I32(labels)),
        ]
    }

    /// Returns an engine with the fixture's weights.
    fn engine(&self, recompute: Recompute) -> Engine {
        let plan = Plan { recompute: recompute.into(), ..Plan::default() };
        let plan = common::one_rank(&self.model, plan, [IMAGES, 1], 1);
        let optimizer = Optimizer::Sgd { momentum: 0.9 };
        let options = EngineOptions { optimizer, threads: 2, ..EngineOptions::default() };
        let mut engine = Engine::builder(&self.model, plan).options(options).build(&Arena::new()).unwrap();
        for id in engine.parameter_ids().collect::<Vec<_>>() {
            let values = self.floats(&format!("weight.{}", engine.records()[id.0].name));
            engine.write_state(id, StateKind::Parameter, &values).unwrap();
        }
        engine
    }
}

fn batch(inputs: &[NamedTensor]) -> HostBatch<'_> {
    HostBatch { sample_numbers: &[0, 1, 2, 3, 4, 5], inputs, ..HostBatch::default() }
}

/// Runs forward and backward of the batch and returns the mean loss.
fn forward_backward(engine: &mut Engine, inputs: &[NamedTensor]) -> f64 {
    let batch = batch(inputs);
    let targets = batch.targets(engine.model()) as f64;
    assert_eq!(targets, 5.0, "one of six labels is masked");
    let seed = Seed::of_tokens((1.0 / targets) as f32);
    engine.forward_backward([batch].into_iter(), seed).unwrap() / targets
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

fn assert_near(found: &[f32], expected: &[f32], tolerance: f64, what: &str) {
    let difference: Vec<f32> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
    let (error, size) = (norm(&difference), norm(expected));
    assert!(error <= tolerance * size + 1e-6, "{what}: off by {error} of {size}");
}

#[test]
fn loss_gradients_and_running_statistics_are_those_of_torchvision() {
    for name in MODELS {
        let fixture = Fixture::load(name);
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let mut engine = fixture.engine(recompute);
            let loss = forward_backward(&mut engine, &fixture.inputs());
            let expected = fixture.doubles("loss")[0];
            assert!((loss - expected).abs() < 1e-5 * expected, "{name}: loss {loss}, {expected} expected");
            for id in engine.trained_ids().collect::<Vec<_>>() {
                let parameter = engine.records()[id.0].name.clone();
                if parameter.contains("running") {
                    continue;
                }
                let expected = fixture.floats(&format!("grad.{parameter}"));
                assert_near(&engine.gradient(id).unwrap(), &expected, 2e-4, &format!("{name}: {parameter}"));
            }
        }
    }
}

#[test]
fn training_and_evaluation_follow_torchvision() {
    for name in MODELS {
        let fixture = Fixture::load(name);
        let inputs = fixture.inputs();
        let mut engine = fixture.engine(Recompute::None);
        let step = |engine: &mut Engine, number: u64, learning_rate: f64| {
            let loss = forward_backward(engine, &inputs);
            engine.finish_gradients().unwrap();
            let update = Update { learning_rate, weight_decay: 0.0, gradient_scale: 1.0, step: number };
            engine.update(&update).unwrap();
            loss
        };
        // A step of length zero moves the running statistics alone.
        step(&mut engine, 1, 0.0);
        for tensor in engine.state_tensors() {
            if tensor.kind == StateKind::Parameter && tensor.record.name.contains("running") {
                let expected = fixture.floats(&format!("running.{}", tensor.record.name));
                assert_near(&tensor.to_vec().unwrap(), &expected, 1e-5, &tensor.record.name);
            }
        }
        let evaluated = engine.evaluate(&batch(&inputs)).unwrap() / 5.0;
        let expected = f64::from(fixture.floats("eval")[0]);
        assert!((evaluated - expected).abs() < 1e-4 * expected, "{name}: {evaluated}, {expected} expected");

        let mut engine = fixture.engine(Recompute::None);
        for (number, expected) in (1..).zip(fixture.doubles("train.loss")) {
            let loss = step(&mut engine, number, 0.05);
            assert!(
                (loss / expected - 1.0).abs() < 1e-3,
                "{name}, step {number}: {loss}, {expected} expected"
            );
        }
    }
}

//! ResNet against the numbers of torchvision: loss, every gradient, running statistics, evaluation, and 20 steps.
//!
//! `tests/fixtures/resnet.py` makes the numbers.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use lockstep_comm::{World, WorldOptions};
use lockstep_engine::{Engine, EngineOptions, Groups, HostBatch, Optimizer, StateKind, Update};
use lockstep_graph::{Recompute, Seed};
use lockstep_model::ModelConfig;
use lockstep_plan::{Degrees, MemoryCategory, ParameterId, Plan, ZeroStage};
use lockstep_tensor::{Arena, NamedTensor, TensorData};
use safetensors::SafeTensors;
use serde_json::json;

use crate::common;

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
        let mut engine = Engine::builder(&self.model, plan).options(options()).build(&Arena::new()).unwrap();
        self.load_weights(&mut engine);
        engine
    }

    fn load_weights(&self, engine: &mut Engine) {
        for id in engine.parameter_ids().collect::<Vec<_>>() {
            let values = self.floats(&format!("weight.{}", engine.records()[id.0].name));
            engine.write_state(id, StateKind::Parameter, &values).unwrap();
        }
    }

    /// Returns the model with batch norms whose data-parallel ranks share their statistics.
    fn synchronized(&self) -> ModelConfig {
        let overrides = json!({ "sync_batch_norm": true });
        self.model.with_overrides(overrides.as_object().unwrap(), "test").unwrap()
    }

    /// Runs two data-parallel ranks, each with half of the images, for two steps. Returns the losses of the steps, and the
    /// running statistics and the gradients of rank 0 after the first.
    fn on_two_ranks(&self, degrees: Degrees, zero_stage: ZeroStage, recompute: Recompute) -> OfTwoSteps {
        let model = self.synchronized();
        let (zero_stage, recompute) = (zero_stage.number(), recompute.into());
        let plan = Plan { mesh: degrees, zero_stage, recompute, micro_batch: Some(3), ..Plan::default() };
        let plan = model.check_plan(&plan, [IMAGES, 1]).unwrap();
        let groups = World::in_process(2, WorldOptions::default()).unwrap();
        let mut of_ranks: Vec<OfTwoSteps> = thread::scope(|scope| {
            let rank = |group: lockstep_comm::Group| {
                let (model, plan) = (&model, plan.rank(group.rank()));
                scope.spawn(move || {
                    let arena = group.arena(&[MemoryCategory::Gradients, MemoryCategory::Parameters]);
                    let half = 3 * group.rank()..3 * group.rank() + 3;
                    let groups = Groups::new(group, plan.clone(), Duration::from_secs(60)).unwrap();
                    let builder = Engine::builder(model, plan).options(options()).groups(groups);
                    let mut engine = builder.build(&arena).unwrap();
                    self.load_weights(&mut engine);
                    two_steps(&mut engine, &self.inputs(), half)
                })
            };
            let threads: Vec<_> = groups.into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let [losses, other] = [of_ranks[0].losses, of_ranks[1].losses];
        OfTwoSteps { losses: [losses[0] + other[0], losses[1] + other[1]], ..of_ranks.swap_remove(0) }
    }
}

/// Numbers of two training steps.
struct OfTwoSteps {
    /// Sum of the losses of each step, divided by the labels of all ranks.
    losses: [f64; 2],
    /// Running statistics after the first step, by name.
    running: Vec<(String, Vec<f32>)>,
    /// Gradients of the first step that the rank holds, by name.
    gradients: Vec<(String, Vec<f32>)>,
}

fn options() -> EngineOptions {
    let optimizer = Optimizer::Sgd { momentum: 0.9 };
    EngineOptions { optimizer, threads: 2, ..EngineOptions::default() }
}

/// Trains two steps on some of the images.
fn two_steps(engine: &mut Engine, inputs: &[NamedTensor], images: Range<usize>) -> OfTwoSteps {
    let inputs: Vec<NamedTensor> = inputs.iter().map(|input| rows(input, images.clone())).collect();
    let numbers: Vec<u64> = images.map(|image| image as u64).collect();
    let mut found = OfTwoSteps { losses: [0.0; 2], running: Vec::new(), gradients: Vec::new() };
    for step in 0..2 {
        let batch = HostBatch { sample_numbers: &numbers, inputs: &inputs, ..HostBatch::default() };
        found.losses[step] =
            engine.forward_backward([batch].into_iter(), Seed::of_tokens(0.2)).unwrap() / 5.0;
        engine.finish_gradients().unwrap();
        if step == 0 {
            let ids: Vec<_> = engine.trained_ids().collect();
            let named = |id: ParameterId| engine.records()[id.0].name.clone();
            found.gradients =
                ids.into_iter().filter_map(|id| Some((named(id), engine.gradient(id).ok()?))).collect();
        }
        let step = step as u64 + 1;
        let update = Update { learning_rate: 0.1, weight_decay: 0.0, gradient_scale: 1.0, step };
        engine.update(&update).unwrap();
        engine.wait_for_weights().unwrap();
        if found.running.is_empty() {
            let tensors = engine.state_tensors();
            let running = tensors.into_iter().filter(|tensor| {
                tensor.kind == StateKind::Parameter && tensor.record.name.contains("running")
            });
            found.running =
                running.map(|tensor| (tensor.record.name.clone(), tensor.to_vec().unwrap())).collect();
        }
    }
    found
}

/// Returns some rows of an input.
fn rows(input: &NamedTensor, rows: Range<usize>) -> NamedTensor {
    let of_each: usize = input.shape[1..].iter().product();
    let elements = rows.start * of_each..rows.end * of_each;
    let data = match &input.data {
        TensorData::F32(values) => TensorData::F32(values[elements].to_vec()),
        TensorData::I32(values) => TensorData::I32(values[elements].to_vec()),
        other => panic!("{other:?}"),
    };
    let shape = [&[rows.len()], &input.shape[1..]].concat();
    NamedTensor::new(&*input.name, &shape, data)
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
fn batch_norms_that_share_their_statistics_give_two_ranks_the_numbers_of_one() {
    let fixture = Fixture::load("resnet_basic");
    let alone = two_steps(&mut fixture.engine(Recompute::None), &fixture.inputs(), 0..IMAGES);
    let replicas = Degrees { replicate: 2, ..Degrees::default() };
    let shards = Degrees { shard: 2, ..Degrees::default() };
    for (degrees, zero_stage, recompute) in [
        (replicas, ZeroStage::Nothing, Recompute::None),
        (replicas, ZeroStage::Nothing, Recompute::Full),
        (shards, ZeroStage::Optimizer, Recompute::Selective),
        (shards, ZeroStage::Parameters, Recompute::Full),
    ] {
        let what = format!("{degrees:?}, {zero_stage:?}, {recompute:?}");
        let found = fixture.on_two_ranks(degrees, zero_stage, recompute);
        for (found, expected) in found.losses.into_iter().zip(alone.losses) {
            assert!((found / expected - 1.0).abs() < 1e-5, "{what}: loss {found}, {expected} on one rank");
        }
        assert!(!found.running.is_empty(), "{what}");
        for (name, found) in &found.running {
            let (_, expected) = alone.running.iter().find(|(other, _)| other == name).unwrap();
            assert_near(found, expected, 1e-5, &format!("{what}: {name}"));
        }
        if degrees == replicas {
            assert_eq!(found.gradients.len(), alone.gradients.len());
            for ((name, found), (_, expected)) in found.gradients.iter().zip(&alone.gradients) {
                assert_near(found, expected, 1e-4, &format!("{what}: {name}"));
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

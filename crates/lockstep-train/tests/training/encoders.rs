//! BERT, ViT and the classifier of Llama have the losses, logits, gradients and training steps of transformers.
//!
//! The reference numbers come from `tests/fixtures/encoders.py`; CI needs no Python.

use std::collections::HashMap;

use crate::reference::{Expected, fixture, relative};
use lockstep_checkpoint::{CheckpointError, ModelDirectory};
use lockstep_config::RunConfig;
use lockstep_data::MicroBatch;
use lockstep_engine::{Engine, EngineError, EngineOptions, Ranks, Runner, StateKind, StateStore, Update};
use lockstep_graph::{BlockShape, Mode, Recompute, Seed};
use lockstep_model::{HeadOutput, HfMapping, RecordedModel};
use lockstep_plan::{DType, MemoryCategory, ParameterId, Plan};
use lockstep_tensor::{Arena, CpuQueue, NamedTensor, TensorData};
use lockstep_train::verify::{SAMPLE_RUN, watch};
use lockstep_train::{StepObserver, host_batch};

const MODELS: [&str; 4] = ["bert", "bert_classifier", "vit", "llama_classifier"];
const SHAPE: BlockShape = BlockShape { sequences: 3, seq_len: 10, dtype: DType::F32 };

/// Returns the batch of a fixture as named tensors of samples.
fn batch(name: &str) -> MicroBatch {
    let expected = Expected::open(name);
    let of_model: &[&str] = match name {
        "vit" => &[],
        "llama_classifier" => &["input_ids", "last_token"],
        _ => &["input_ids", "attention_mask", "token_type_ids"],
    };
    let named = |name: &str, data: TensorData| NamedTensor::new(name, &[3, data.len() / 3], data);
    let numbers = |name: &str| expected.i64(name).into_iter();
    let unsigned = |name: &&str| named(name, TensorData::U32(numbers(name).map(|n| n as u32).collect()));
    let mut inputs: Vec<NamedTensor> = of_model.iter().map(unsigned).collect();
    if name == "vit" {
        inputs.push(named("pixel_values", TensorData::F32(expected.f32("pixel_values"))));
    }
    inputs.push(named("labels", TensorData::I32(numbers("labels").map(|n| n as i32).collect())));
    MicroBatch { sample_numbers: vec![0, 1, 2], inputs, sequences: 3, seq_len: 10, ..MicroBatch::default() }
}

fn engine(name: &str, recompute: Recompute) -> Engine {
    let directory = ModelDirectory::open(&fixture(name)).unwrap();
    let plan = Plan { micro_batch: Some(3), recompute: recompute.into(), ..Plan::default() };
    let plan = directory.config().check_plan(&plan, [3, SHAPE.seq_len]).unwrap().rank(0);
    let options = EngineOptions { threads: 2, ..EngineOptions::default() };
    let mut engine = Engine::builder(directory.config(), plan).options(options).build(&Arena::new()).unwrap();
    let ids: HashMap<String, ParameterId> =
        engine.parameter_ids().map(|id| (engine.records()[id.0].name.clone(), id)).collect();
    directory
        .for_each_parameter(|name, values| {
            engine.write_state(ids[name], StateKind::Parameter, values).unwrap();
            Ok::<(), CheckpointError>(())
        })
        .unwrap();
    engine
}

/// Runs forward and backward; returns the mean loss and the norm of the gradients.
fn forward_backward(engine: &mut Engine, batch: &MicroBatch) -> Result<(f64, f64), EngineError> {
    let batch = host_batch(batch);
    let targets = batch.targets(engine.model()) as f64;
    engine.begin_step();
    let loss = engine.accumulate(&batch, Seed::of_tokens((1.0 / targets) as f32))? / targets;
    Ok((loss, engine.finish_gradients()?))
}

#[test]
fn losses_and_every_gradient_agree_with_transformers_under_every_recomputation() {
    for name in MODELS {
        let (expected, batch) = (Expected::open(name), batch(name));
        let directory = ModelDirectory::open(&fixture(name)).unwrap();
        let mapping = HfMapping::new(directory.config());
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let mut engine = engine(name, recompute);
            let (loss, of_model) = forward_backward(&mut engine, &batch).unwrap();
            let reference = expected.f64("loss")[0];
            assert!((loss - reference).abs() < 1e-5 * reference, "{name}: loss {loss}, {reference} expected");
            let mut compared = 0;
            for id in engine.parameter_ids().collect::<Vec<_>>() {
                let parameter = engine.records()[id.0].name.clone();
                let gradient = engine.gradient(id).unwrap();
                let mut reference = vec![f32::NAN; gradient.len()];
                for place in mapping.places_of(&parameter) {
                    let stored = expected.f32(&format!("grad.{}", place.tensor));
                    place.read(&stored, &mut reference[place.part()]).unwrap();
                    compared += 1;
                }
                let square =
                    |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
                let error =
                    square(&mut gradient.iter().zip(&reference).map(|(&a, &b)| f64::from(a) - f64::from(b)));
                let norm = square(&mut reference.iter().map(|&b| f64::from(b)));
                // Some gradients (key biases) are zero in exact arithmetic, so they are compared with the model's norm.
                let allowed = 1e-4 * norm + 1e-6 * of_model;
                assert!(error <= allowed, "{name}, {recompute:?}: {parameter} is off by {error} of {norm}");
            }
            assert_eq!(compared, mapping.tensors().len(), "{name}: every tensor has been compared");
        }
    }
}

#[test]
fn logits_agree_with_transformers() {
    for name in MODELS {
        let directory = ModelDirectory::open(&fixture(name)).unwrap();
        let arena = Arena::new();
        let (config, recompute) = (directory.config(), Recompute::None);
        let model = RecordedModel::new(config, Mode::Inference, SHAPE, recompute, HeadOutput::Logits);
        let weights =
            StateStore::zeros(&arena, model.records(), DType::F32, MemoryCategory::Parameters).unwrap();
        directory
            .for_each_parameter(|name, values| {
                let id = model.records().iter().position(|record| record.name == name).unwrap();
                weights.view(ParameterId(id)).copy_from(values);
                Ok::<(), CheckpointError>(())
            })
            .unwrap();
        let queue = CpuQueue::new(2, &arena).unwrap();
        let mut runner = Runner::new(&model, &arena, 0).unwrap();
        let batch = batch(name);
        runner.forward(&model, &queue, (&weights).into(), &host_batch(&batch)).unwrap();
        let logits = runner.output(&model).to_vec::<f32>();
        let error = relative(&logits, &Expected::open(name).f32("logits"));
        assert!(error < 1e-5, "{name}: logits differ by {error}");
    }
}

#[test]
fn twenty_training_steps_follow_transformers() {
    for name in MODELS {
        let (expected, batch) = (Expected::open(name), batch(name));
        let mut engine = engine(name, Recompute::None);
        let references = expected.f64("train.loss").into_iter().zip(expected.f64("train.grad_norm"));
        for (step, (reference, reference_norm)) in (1..).zip(references) {
            let (loss, norm) = forward_backward(&mut engine, &batch).unwrap();
            let gradient_scale = (1.0 / (norm + 1e-6)).min(1.0) as f32;
            engine.update(&Update { learning_rate: 1e-3, weight_decay: 0.1, gradient_scale, step }).unwrap();
            let near = |found: f64, expected: f64, most: f64| (found - expected).abs() < most * expected;
            assert!(near(loss, reference, 1e-3), "{name}, step {step}: loss {loss}, {reference} expected");
            assert!(
                near(norm, reference_norm, 5e-3),
                "{name}, step {step}: norm {norm}, {reference_norm} expected"
            );
        }
    }
}

#[test]
fn an_export_has_the_tensors_and_the_configuration_of_transformers() {
    for name in MODELS {
        let directory = ModelDirectory::open(&fixture(name)).unwrap();
        let out = tempfile::tempdir().unwrap();
        directory.export_hf(DType::F32, out.path()).unwrap();
        let read = |dir: &std::path::Path, file: &str| std::fs::read(dir.join(file)).unwrap();
        let json = |dir: &std::path::Path| -> serde_json::Value {
            serde_json::from_slice(&read(dir, "config.json")).unwrap()
        };
        let (written, given) = (json(out.path()), json(&fixture(name)));
        for key in ["architectures", "id2label", "label2id", "model_type", "hidden_act"] {
            assert_eq!(written.get(key), given.get(key), "{name}: {key}");
        }
        let again = ModelDirectory::open(out.path()).unwrap();
        assert_eq!(again.config(), directory.config(), "{name}");
        let tensors = |dir: &std::path::Path| {
            let bytes = read(dir, "model.safetensors");
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let mut all: Vec<_> = file
                .iter()
                .map(|(name, view)| (name.to_owned(), view.shape().to_vec(), view.data().to_vec()))
                .collect();
            all.sort();
            all
        };
        assert!(tensors(out.path()) == tensors(&fixture(name)), "{name}: the same tensors");
    }
}

#[test]
fn inputs_that_are_missing_or_out_of_range_are_refused() {
    let refusal = |name: &str, change: &dyn Fn(&mut MicroBatch)| {
        let mut batch = batch(name);
        change(&mut batch);
        forward_backward(&mut engine(name, Recompute::None), &batch).unwrap_err().to_string()
    };
    let without =
        |name: &'static str| move |batch: &mut MicroBatch| batch.inputs.retain(|input| &*input.name != name);
    let with = |name: &'static str, number: u32| {
        move |batch: &mut MicroBatch| {
            let input = batch.inputs.iter_mut().find(|input| &*input.name == name).unwrap();
            if let TensorData::U32(numbers) = &mut input.data {
                numbers[1] = number;
            }
        }
    };
    for (message, parts) in [
        (refusal("bert", &without("input_ids")), ["input_ids", "without tokens"]),
        (refusal("bert", &without("attention_mask")), ["attention_mask", "30 elements of u32"]),
        (refusal("bert", &with("input_ids", 61)), ["the id 61", "a vocabulary of 61"]),
        (refusal("bert_classifier", &with("token_type_ids", 3)), ["the number 3", "below 3"]),
        (refusal("llama_classifier", &with("last_token", 10)), ["the number 10", "below 10"]),
        (refusal("vit", &without("pixel_values")), ["pixel_values", "1296 elements of f32"]),
    ] {
        assert!(parts.iter().all(|part| message.contains(part)), "{message} has {parts:?}");
    }
}

/// Returns the configuration of a classifier that starts from the weights of the masked language model.
fn from_language_model(dir: &std::path::Path, more: &[&str]) -> RunConfig {
    let of_model = [
        format!("model.path={:?}", fixture("bert")),
        format!("metrics.dir={:?}", dir.join("runs")),
        format!("checkpoint.dir={:?}", dir.join("checkpoints")),
    ];
    let settings =
        ["model.from_pretrained=true", "train.steps=2", "train.seq_len=10", "metrics.tensorboard=false"];
    let settings: Vec<&str> =
        of_model.iter().map(String::as_str).chain(settings).chain(more.iter().copied()).collect();
    RunConfig::parse(SAMPLE_RUN, "a test", &settings).unwrap()
}

#[test]
fn a_classifier_starts_from_the_weights_of_a_language_model_with_a_new_head() {
    /// Weights at the start of a run.
    #[derive(Default)]
    struct First(HashMap<String, Vec<f32>>);
    impl StepObserver for First {
        fn gradients_ready(&mut self, _: u64, _: &mut Engine) -> Result<(), lockstep_train::Error> {
            Ok(())
        }

        fn begins(&mut self, engine: &mut Engine) {
            for tensor in
                engine.state_tensors().into_iter().filter(|tensor| tensor.kind == StateKind::Parameter)
            {
                self.0.insert(tensor.record.name.clone(), tensor.to_vec().unwrap());
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let classifier = ["model.architectures=[\"BertForSequenceClassification\"]", "model.num_labels=4"];
    let config = from_language_model(dir.path(), &classifier);
    let mut first = First::default();
    watch(&config, &Ranks::alone(), &mut first).unwrap();
    let mut compared = 0;
    ModelDirectory::open(&fixture("bert"))
        .unwrap()
        .for_each_parameter(|name, values| {
            if !name.starts_with("cls.") {
                assert_eq!(first.0[name], values, "{name}");
                compared += 1;
            }
            Ok::<(), CheckpointError>(())
        })
        .unwrap();
    assert_eq!(compared, 5 + 2 * 16);
    for (name, elements) in [("bert.pooler.dense.weight", 32 * 32), ("classifier.weight", 4 * 32)] {
        let values = &first.0[name];
        assert!(values.len() == elements && values.iter().any(|x| *x != 0.0), "{name} has initial values");
    }
    // A head that is never trained would stay random.
    let frozen = from_language_model(
        dir.path(),
        &[&classifier[..], &["fine_tune.freeze=[\"classifier.*\"]"]].concat(),
    );
    let message = watch(&frozen, &Ranks::alone(), &mut First::default()).unwrap_err().to_string();
    assert!(message.contains("classifier.weight"), "{message}");
}

//! Losses, gradients and training steps agree with Hugging Face transformers, for each model family.
//!
//! The reference numbers come from `tests/fixtures/make.py`; CI needs no Python.

use std::collections::HashMap;

use lockstep_checkpoint::{CheckpointError, ModelDirectory, hf::HfCheckpoint};
use lockstep_engine::{Engine, EngineOptions, Runner, StateKind, StateStore};
use lockstep_graph::{Mode, Recompute};
use lockstep_model::{HeadOutput, HfMapping, ModelConfig, RecordedModel};
use lockstep_plan::{DType, MemoryCategory, ParameterId, Plan};
use lockstep_tensor::{Arena, CpuQueue};

use crate::reference::{Batch, Expected, SHAPE, fixture, relative, training_step};

const FAMILIES: [&str; 29] = include!("../../../../tests/fixtures/families.rs");

fn engine(family: &str, recompute: Recompute) -> Engine {
    let directory = ModelDirectory::open(&fixture(family)).unwrap();
    let plan = Plan { micro_batch: Some(SHAPE.sequences), recompute: recompute.into(), ..Plan::default() };
    let plan = directory.config().check_plan(&plan, [4 * SHAPE.sequences, SHAPE.seq_len]).unwrap().rank(0);
    let builder = Engine::builder(directory.config(), plan);
    let options = EngineOptions { threads: 2, ..EngineOptions::default() };
    let mut engine = builder.options(options).build(&Arena::new()).unwrap();
    let ids: HashMap<String, ParameterId> =
        engine.parameter_ids().map(|id| (engine.records()[id.0].name.clone(), id)).collect();
    let mut loaded = 0;
    directory
        .for_each_parameter(|name, values| {
            engine.write_state(ids[name], StateKind::Parameter, values).unwrap();
            loaded += 1;
            Ok::<(), CheckpointError>(())
        })
        .unwrap();
    assert_eq!(loaded, ids.len(), "{family}: every parameter is loaded");
    engine
}

#[test]
fn losses_agree_with_transformers() {
    for family in FAMILIES {
        let expected = Expected::open(family);
        let batch = Batch::new(&expected.i64("ids"), &expected.i64("labels"));
        let loss = engine(family, Recompute::None).evaluate(&batch.host()).unwrap() / batch.valid() as f64;
        let reference = expected.f64("loss")[0];
        let error = (loss - reference).abs() / reference;
        assert!(error < 1e-5, "{family}: loss {loss}, transformers {reference}");
    }
}

#[test]
fn logits_agree_with_transformers() {
    for family in FAMILIES {
        let expected = Expected::open(family);
        let batch = Batch::new(&expected.i64("ids"), &expected.i64("labels"));
        let directory = ModelDirectory::open(&fixture(family)).unwrap();
        let arena = Arena::new();
        let model = RecordedModel::new(
            directory.config(),
            Mode::Inference,
            SHAPE,
            Recompute::None,
            HeadOutput::Logits,
        );
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
        runner.forward(&model, &queue, (&weights).into(), &batch.host()).unwrap();
        let logits = runner.output(&model).to_vec::<f32>();
        let error = relative(&logits, &expected.f32("logits"));
        assert!(error < 1e-5, "{family}: logits differ by {error}");
    }
}

#[test]
fn every_gradient_agrees_with_transformers() {
    for family in FAMILIES {
        let expected = Expected::open(family);
        let batch = Batch::new(&expected.i64("ids"), &expected.i64("labels"));
        let mut engine = engine(family, Recompute::None);
        engine.begin_step();
        engine.accumulate(&batch.host(), batch.seed()).unwrap();
        engine.finish_gradients().unwrap();

        let config = ModelConfig::from_file(&fixture(family).join("config.json")).unwrap();
        let mapping = HfMapping::new(&config);
        let model_norm: f64 = engine
            .parameter_ids()
            .flat_map(|id| engine.gradient(id).unwrap())
            .map(|g| f64::from(g) * f64::from(g))
            .sum::<f64>()
            .sqrt();
        for id in engine.parameter_ids() {
            let name = &engine.records()[id.0].name;
            let gradient = engine.gradient(id).unwrap();
            let mut reference = vec![f32::NAN; gradient.len()];
            for place in mapping.places_of(name) {
                let stored = expected.f32(&format!("grad.{}", place.tensor));
                place.read(&stored, &mut reference[place.part()]).unwrap();
            }
            let difference: f64 = gradient
                .iter()
                .zip(&reference)
                .map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2))
                .sum::<f64>()
                .sqrt();
            let norm = reference.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
            // Some gradients (key biases) are zero in exact arithmetic, so they are compared with the model's norm.
            let allowed = 1e-4 * norm + 1e-6 * model_norm;
            assert!(difference <= allowed, "{family}: {name} differs by {difference} (norm {norm})");
        }
    }
}

#[test]
fn twenty_training_steps_follow_transformers() {
    for family in FAMILIES {
        let expected = Expected::open(family);
        let (ids, labels) = (expected.i64("train.ids"), expected.i64("train.labels"));
        let (losses, norms) = (expected.f64("train.loss"), expected.f64("train.grad_norm"));
        let mut engine = engine(family, Recompute::None);
        let tokens = SHAPE.tokens();
        for step in 0..20 {
            let range = step * tokens..(step + 1) * tokens;
            let batch = Batch::new(&ids[range.clone()], &labels[range]);
            let (loss, norm) = training_step(&mut engine, &batch, 1e-3, step as u64 + 1);
            let loss_error = (loss - losses[step]).abs() / losses[step];
            let norm_error = (norm - norms[step]).abs() / norms[step];
            assert!(loss_error < 1e-4, "{family} step {step}: loss {loss}, transformers {}", losses[step]);
            assert!(norm_error < 1e-3, "{family} step {step}: norm {norm}, transformers {}", norms[step]);
        }
    }
}

#[test]
fn recomputation_changes_no_bit() {
    for family in FAMILIES {
        let expected = Expected::open(family);
        let batch = Batch::new(&expected.i64("ids"), &expected.i64("labels"));
        let gradients = |recompute| {
            let mut engine = engine(family, recompute);
            engine.begin_step();
            let loss = engine.accumulate(&batch.host(), batch.seed()).unwrap();
            engine.finish_gradients().unwrap();
            let gradients: Vec<_> = engine.parameter_ids().map(|id| engine.gradient(id).unwrap()).collect();
            (loss, gradients)
        };
        let reference = gradients(Recompute::None);
        for recompute in [Recompute::Selective, Recompute::Full] {
            assert!(gradients(recompute) == reference, "{family}: {recompute:?} changes bits");
        }
    }
}

#[test]
fn predicted_activations_are_the_measured_ones() {
    for family in FAMILIES {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let engine = engine(family, recompute);
            let measured = engine.arena().in_use()[MemoryCategory::Activations];
            let predicted = Runner::predicted_activation_bytes(engine.model());
            assert_eq!(measured, predicted, "{family} {recompute:?}");
        }
    }
}

#[test]
fn an_exported_directory_holds_the_same_weights() {
    for family in FAMILIES {
        let config = ModelConfig::from_file(&fixture(family).join("config.json")).unwrap();
        let files = HfCheckpoint::open(&fixture(family)).unwrap();
        let written =
            ModelConfig::from_json_text(&config.to_json(DType::F32).to_string(), "written").unwrap();
        assert_eq!(written, config, "{family}: config.json survives a round trip");
        assert!(files.names().count() > 0);
    }
}

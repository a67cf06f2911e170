//! Agreement with PEFT: logits of its adapter, further training of it, and PEFT reading one of ours.
//!
//! The reference numbers come from `tests/fixtures/make_peft.py`; CI needs no Python.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_checkpoint::{CheckpointError, DType, ModelDirectory, PeftAdapter};
use lockstep_engine::{Engine, EngineOptions, Runner, StateKind, StateStore};
use lockstep_graph::{Mode, Recompute};
use lockstep_model::{Adapter, HeadOutput, ModelConfig, RecordedModel, Tuning, parameter_records};
use lockstep_plan::{MemoryCategory, ParameterId, Plan};
use lockstep_tensor::{Arena, CpuQueue};

use crate::reference::{Batch, Expected, SHAPE, fixture, relative, training_step};

const FAMILIES: [&str; 2] = ["gpt2", "llama"];

fn model(family: &str) -> ModelConfig {
    ModelConfig::from_file(&fixture(family).join("config.json")).unwrap()
}

fn adapter(family: &str) -> PeftAdapter {
    PeftAdapter::open(&fixture("peft").join(family), &model(family)).unwrap()
}

/// Returns the logits of the model in `directory`.
fn logits(directory: &ModelDirectory, batch: &Batch) -> Vec<f32> {
    let arena = Arena::new();
    let (mode, output) = (Mode::Inference, HeadOutput::Logits);
    let model = RecordedModel::new(directory.config(), mode, SHAPE, Recompute::None, output);
    let category = MemoryCategory::Parameters;
    let weights = StateStore::zeros(&arena, model.records(), DType::F32, category).unwrap();
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
    runner.output(&model).to_vec()
}

/// Returns an engine with the base model and PEFT's adapter.
fn engine(family: &str, recompute: Recompute) -> Engine {
    let (config, adapter) = (model(family), adapter(family));
    let frozen: BTreeSet<String> = parameter_records(&config).into_iter().map(|record| record.name).collect();
    let tuning = Tuning { frozen, adapter: Some(adapter.adapter().clone()), ..Tuning::default() };
    let plan = Plan { micro_batch: Some(SHAPE.sequences), recompute: recompute.into(), ..Plan::default() };
    let plan = config.check_plan(&plan, [4 * SHAPE.sequences, SHAPE.seq_len]).unwrap().rank(0);
    let builder = Engine::builder(&config, plan).tuning(&tuning);
    let options = EngineOptions { threads: 2, ..EngineOptions::default() };
    let mut engine = builder.options(options).build(&Arena::new()).unwrap();
    let ids: BTreeMap<String, ParameterId> =
        engine.parameter_ids().map(|id| (engine.records()[id.0].name.clone(), id)).collect();
    let base = ModelDirectory::open(&fixture(family)).unwrap();
    let mut write = |name: &str, values: &[f32]| {
        engine.write_state(ids[name], StateKind::Parameter, values).unwrap();
        Ok::<(), CheckpointError>(())
    };
    base.for_each_parameter(&mut write).unwrap();
    adapter.parameters().for_each(|(name, values)| write(name, values).unwrap());
    engine
}

#[test]
fn an_adapter_merged_into_the_weights_gives_the_logits_of_peft() {
    for family in FAMILIES {
        let inputs = Expected::open(family);
        let expected = Expected::open(&format!("peft/{family}"));
        let batch = Batch::new(&inputs.i64("ids"), &inputs.i64("labels"));
        let base = ModelDirectory::open(&fixture(family)).unwrap();
        let merged = base.with_adapter(&fixture("peft").join(family)).unwrap();
        let error = relative(&logits(&merged, &batch), &expected.f32("logits"));
        assert!(error < 1e-5, "{family}: logits differ by {error}");
        let effect = relative(&inputs.f32("logits"), &expected.f32("logits"));
        assert!(effect > 0.05, "{family}: the adapter does nothing ({effect})");
    }
}

#[test]
fn twenty_steps_of_an_adapter_follow_peft() {
    for family in FAMILIES {
        let (inputs, expected) = (Expected::open(family), Expected::open(&format!("peft/{family}")));
        let (ids, labels) = (inputs.i64("train.ids"), inputs.i64("train.labels"));
        let (losses, norms) = (expected.f64("train.loss"), expected.f64("train.grad_norm"));
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let mut engine = engine(family, recompute);
            let tokens = SHAPE.tokens();
            for step in 0..20 {
                let range = step * tokens..(step + 1) * tokens;
                let batch = Batch::new(&ids[range.clone()], &labels[range]);
                let (loss, norm) = training_step(&mut engine, &batch, 1e-2, step as u64 + 1);
                let loss_error = (loss - losses[step]).abs() / losses[step];
                let norm_error = (norm - norms[step]).abs() / norms[step];
                assert!(loss_error < 1e-4, "{family} step {step}: loss {loss}, peft {}", losses[step]);
                assert!(norm_error < 1e-3, "{family} step {step}: norm {norm}, peft {}", norms[step]);
            }
            let batch = Batch::new(&inputs.i64("ids"), &inputs.i64("labels"));
            let loss = engine.evaluate(&batch.host()).unwrap() / batch.valid() as f64;
            let reference = cross_entropy(&expected.f32("trained.logits"), &inputs.i64("labels"));
            assert!((loss - reference).abs() < 1e-3 * reference, "{family}: loss {loss}, peft {reference}");
        }
    }
}

/// Returns the mean cross-entropy of logits over the unmasked labels.
fn cross_entropy(logits: &[f32], labels: &[i64]) -> f64 {
    let columns = logits.len() / labels.len();
    let losses: Vec<f64> = labels
        .iter()
        .zip(logits.chunks_exact(columns))
        .filter(|(label, _)| **label >= 0)
        .map(|(label, row)| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            sum.ln() - f64::from(row[*label as usize])
        })
        .collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn only_the_adapter_is_trained_and_a_new_one_changes_nothing() {
    let config = model("gpt2");
    let mut engine = engine("gpt2", Recompute::None);
    assert!(engine.trained_ids().all(|id| Adapter::owns(&engine.records()[id.0].name)));
    let inputs = Expected::open("gpt2");
    let batch = Batch::new(&inputs.i64("ids"), &inputs.i64("labels"));
    let with = engine.evaluate(&batch.host()).unwrap();
    let ids: Vec<ParameterId> = engine.trained_ids().collect();
    for id in ids {
        engine.initialize_parameter(id, 3).unwrap();
    }
    let new = engine.evaluate(&batch.host()).unwrap() / batch.valid() as f64;
    assert!((new - inputs.f64("loss")[0]).abs() < 1e-5 * new, "{new}, with an adapter {with}");
    let adapter_elements: usize = engine.trained_ids().map(|id| engine.records()[id.0].elements()).sum();
    assert!(adapter_elements < parameter_records(&config).iter().map(|r| r.elements()).sum::<usize>() / 10);
}

#[test]
fn an_adapter_for_another_model_or_of_another_kind_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = fixture("peft").join("llama");
    let refused = |model: &ModelConfig, expected: &str| {
        let error = PeftAdapter::open(dir.path(), model).unwrap_err();
        assert!(matches!(error, CheckpointError::Adapter { .. }), "{error:?}");
        assert!(error.is_corrupt() && error.to_string().contains(expected), "{expected}: {error}");
    };
    let file = |name: &str| dir.path().join(name);
    std::fs::copy(source.join("adapter_model.safetensors"), file("adapter_model.safetensors")).unwrap();
    let text = std::fs::read_to_string(source.join("adapter_config.json")).unwrap();
    std::fs::write(file("adapter_config.json"), &text).unwrap();
    refused(&model("gpt2"), "another model");
    let wider = model("llama")
        .with_overrides(serde_json::json!({ "intermediate_size": 96 }).as_object().unwrap(), "test");
    refused(&wider.unwrap(), "lora_B.weight is [88, 3], the model needs [96, 3]");
    let changes = [
        (r#""r": 3"#, r#""r": 4"#, "[3, 48], the model needs [4, 48]"),
        (r#""r": 3"#, r#""r": 0"#, "r is 0"),
        (r#""use_dora": false"#, r#""use_dora": true"#, "use_dora = true is not supported"),
        (r#""bias": "none""#, r#""bias": "all""#, "bias"),
        (r#""peft_type": "LORA""#, r#""peft_type": "IA3""#, "IA3"),
        (r#""rank_pattern": {}"#, r#""rank_pattern": {"q_proj": 2}"#, "rank_pattern"),
        (r#""lora_alpha": 6"#, r#""lora_alpha": "six""#, "lora_alpha"),
        ("{", "", "adapter_config.json"),
    ];
    for (from, to, expected) in changes {
        assert!(text.contains(from), "{from}");
        std::fs::write(file("adapter_config.json"), text.replacen(from, to, 1)).unwrap();
        refused(&model("llama"), expected);
    }
}

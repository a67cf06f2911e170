//! Tests of fine-tuning with frozen parameters: trained parameters get the same gradients as in full training, and
//! frozen ones cost nothing.

use std::collections::BTreeSet;

use lockstep_engine::{Engine, EngineOptions, HostBatch, Optimizer, StateKind, Update};
use lockstep_graph::{BlockShape, Recompute, Seed};
use lockstep_model::{ModelConfig, Tuning, parameter_records};
use lockstep_plan::{DType, MemoryCategory, ParameterId, Plan};
use lockstep_tensor::Arena;
use serde_json::json;

use crate::common;

fn model(tied: bool) -> ModelConfig {
    let config = json!({
        "model_type": "qwen2", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 16, "tie_word_embeddings": tied,
    });
    ModelConfig::from_table(config.as_object().unwrap(), "test").unwrap()
}

fn frozen(model: &ModelConfig, is_frozen: impl Fn(&str) -> bool) -> Tuning {
    let names = parameter_records(model).into_iter().map(|record| record.name);
    Tuning { frozen: names.filter(|name| is_frozen(name)).collect(), ..Tuning::default() }
}

fn engine(model: &ModelConfig, tuning: &Tuning, dtype: DType, recompute: Recompute) -> Engine {
    let shape = BlockShape { sequences: 2, seq_len: 8, dtype };
    let optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8 };
    let plan = Plan { recompute: recompute.into(), ..Plan::default() };
    let plan = common::one_rank(model, plan, [shape.sequences, shape.seq_len], 4);
    let options =
        EngineOptions { dtype: shape.dtype, optimizer, seed: 1, threads: 2, ..EngineOptions::default() };
    let builder = Engine::builder(model, plan).tuning(tuning).options(options);
    let mut engine = builder.build(&Arena::new()).unwrap();
    engine.initialize(1).unwrap();
    engine
}

/// Returns the loss, the gradient norm and the gradients by name of a fixed batch.
fn gradients(engine: &mut Engine) -> (f64, f64, Vec<(String, Vec<f32>)>) {
    let ids: Vec<u32> = (0..16).map(|i| i * 7 % 40).collect();
    let labels: Vec<i32> = ids.iter().map(|&id| (id as i32 + 3) % 40).collect();
    let positions: Vec<u32> = (0..16).map(|i| i % 8).collect();
    let batch = HostBatch {
        ids: &ids,
        labels: &labels,
        positions: &positions,
        document_starts: &[0; 16],
        sample_numbers: &[0, 1],
        inputs: &[],
    };
    engine.begin_step();
    let loss = engine.accumulate(&batch, Seed::of_tokens(0.1)).unwrap();
    let norm = engine.finish_gradients().unwrap();
    let gradient = |id: ParameterId| (engine.records()[id.0].name.clone(), engine.gradient(id).unwrap());
    (loss, norm, engine.trained_ids().map(gradient).collect())
}

/// Predicate on parameter names; true for frozen parameters.
type Choice = fn(&str) -> bool;

const CHOICES: [(&str, Choice); 6] = [
    ("the embedding", |name| name.contains("embed_tokens")),
    ("all but biases", |name| !name.ends_with("bias")),
    ("the first layers", |name| {
        !name.contains("layers.2.") && name.contains("model.") && !name.contains("norm")
    }),
    ("all but one norm", |name| name != "model.layers.1.input_layernorm.weight"),
    ("all but the last norm", |name| name != "model.norm.weight"),
    ("every second layer", |name| name.contains("layers.1.") || name.contains("embed")),
];

#[test]
fn the_trained_part_has_the_gradients_it_has_in_the_whole() {
    for tied in [false, true] {
        let model = model(tied);
        for dtype in [DType::F32, DType::BF16] {
            let (loss, _, whole) = gradients(&mut engine(&model, &Tuning::default(), dtype, Recompute::None));
            for (choice, is_frozen) in CHOICES {
                for recompute in [Recompute::None, Recompute::Full] {
                    let tuning = frozen(&model, is_frozen);
                    let mut part = engine(&model, &tuning, dtype, recompute);
                    let (part_loss, _, found) = gradients(&mut part);
                    assert_eq!(part_loss.to_bits(), loss.to_bits(), "{choice}, {dtype}, tied {tied}");
                    assert!(!found.is_empty());
                    for (name, gradient) in found {
                        let (_, expected) = whole.iter().find(|(whole, _)| *whole == name).unwrap();
                        assert!(gradient == *expected, "{name}: {choice} frozen, {dtype}, tied {tied}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_frozen_keeps_its_bits_and_has_neither_gradients_nor_state_nor_backward() {
    let model = model(false);
    for dtype in [DType::F32, DType::BF16] {
        let whole = engine(&model, &Tuning::default(), dtype, Recompute::None);
        let tuning = frozen(&model, |name| !name.starts_with("model.layers.2.") && name != "lm_head.weight");
        let mut part = engine(&model, &tuning, dtype, Recompute::None);
        let (before, after) = (whole.arena().in_use(), part.arena().in_use());
        for category in [MemoryCategory::Gradients, MemoryCategory::Optimizer, MemoryCategory::Activations] {
            let (before, after) = (before[category], after[category]);
            assert!(2 * after < before + before / 5, "{category:?}: {after} of {before}, {dtype}");
        }
        assert_eq!(part.model().first_trained_unit(), Some(3));
        assert!(part.model().training_flops() < whole.model().training_flops());
        let (loss, ..) = gradients(&mut part);
        part.update(&Update { learning_rate: 0.1, weight_decay: 0.1, gradient_scale: 1.0, step: 1 }).unwrap();
        let saved: BTreeSet<String> =
            part.state_tensors().iter().map(|tensor| tensor.record.name.clone()).collect();
        assert!(saved.iter().all(|name| !tuning.frozen.contains(name)), "{saved:?}");
        // With all trained parameters restored, the loss is the original one.
        let (fresh, ids) = (whole.records().to_vec(), part.trained_ids().collect::<Vec<_>>());
        let (changed, ..) = gradients(&mut part);
        for id in ids {
            let mut values = vec![0.0; fresh[id.0].elements()];
            fresh[id.0].initializer.fill(1, &fresh[id.0].name, 0, &mut values);
            part.write_state(id, StateKind::Parameter, &values).unwrap();
        }
        let (again, ..) = gradients(&mut part);
        assert!(changed != loss && again.to_bits() == loss.to_bits(), "{loss}, {changed}, {again}, {dtype}");
    }
}

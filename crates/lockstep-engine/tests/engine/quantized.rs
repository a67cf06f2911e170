//! Tests of fine-tuning over quantized frozen matrices (QLoRA): adapters get the gradients that they have over the decoded
//! matrices, and the blocks take the bytes that the layout predicts.

use std::collections::BTreeMap;

use lockstep_engine::{Engine, EngineError, EngineOptions, HostBatch, StateKind, Update};
use lockstep_graph::{Recompute, Seed};
use lockstep_model::{ALL_LINEAR, Adapter, LoraConfig, LoraScaling, ModelConfig, Tuning, parameter_records};
use lockstep_plan::{BlockFormat, DType, MemoryCategory, ParameterId, Plan};
use lockstep_tensor::Arena;
use serde_json::json;

use crate::common;

const SEED: u64 = 1;
const TOKENS: usize = 32;

fn model() -> ModelConfig {
    let config = json!({
        "model_type": "qwen2", "vocab_size": 40, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 16, "tie_word_embeddings": false,
    });
    ModelConfig::from_table(config.as_object().unwrap(), "test").unwrap()
}

/// Returns an adapter of all linear layers over a frozen model, whose matrices in blocks have the format, if one is given.
fn tuning(model: &ModelConfig, format: Option<BlockFormat>) -> Tuning {
    let (scaling, targets) = (LoraScaling::Standard, vec![ALL_LINEAR.to_owned()]);
    let lora = LoraConfig { rank: 4, alpha: 8.0, dropout: 0.0, scaling, targets };
    let records = parameter_records(model);
    let is_linear = |name: &str, shape: &[usize]| name.contains(".layers.") && shape.len() == 2;
    let linear = records.iter().filter(|record| is_linear(&record.name, &record.shape));
    let quantized = linear.filter_map(|record| Some((record.name.clone(), format?))).collect();
    let frozen = records.iter().map(|record| record.name.clone()).collect();
    Tuning { frozen, quantized, adapter: Some(Adapter::new(lora, model).unwrap()) }
}

fn engine(model: &ModelConfig, tuning: &Tuning, dtype: DType, recompute: Recompute) -> Engine {
    let plan = Plan { recompute: recompute.into(), ..Plan::default() };
    let plan = common::one_rank(model, plan, [2, TOKENS / 2], 1);
    let options = EngineOptions { dtype, seed: SEED, threads: 2, ..EngineOptions::default() };
    let mut engine =
        Engine::builder(model, plan).tuning(tuning).options(options).build(&Arena::new()).unwrap();
    engine.initialize(SEED).unwrap();
    // With the initial zeros of B, no gradient would reach A.
    let ids: Vec<ParameterId> = engine.trained_ids().collect();
    for id in ids {
        let values: Vec<f32> = initial(&engine, id, |record| record.name.replace("lora_B", "lora_A"));
        engine.write_state(id, StateKind::Parameter, &values).unwrap();
    }
    engine
}

/// Returns the initial values of a parameter, or those that a parameter of another name would have.
fn initial(
    engine: &Engine,
    id: ParameterId,
    name: impl Fn(&lockstep_plan::ParameterRecord) -> String,
) -> Vec<f32> {
    let record = &engine.records()[id.0];
    let initializer = match record.initializer {
        lockstep_plan::Initializer::Zeros => lockstep_plan::Initializer::Uniform { bound: 0.2 },
        other => other,
    };
    let mut values = vec![0.0; record.elements()];
    initializer.fill(SEED, &name(record), 0, &mut values);
    values
}

/// Replaces matrices by the values of their blocks.
fn round_to_blocks(engine: &mut Engine, quantized: &BTreeMap<String, BlockFormat>) {
    for index in 0..engine.records().len() {
        let record = &engine.records()[index];
        let Some(&format) = quantized.get(&record.name) else { continue };
        let mut values = vec![0.0; record.elements()];
        record.initializer.fill(SEED, &record.name, 0, &mut values);
        let mut blocks = vec![0; format.bytes(values.len()).unwrap()];
        format.quantize(&values, &mut blocks);
        format.dequantize(&blocks, &mut values);
        engine.write_state(ParameterId(index), StateKind::Parameter, &values).unwrap();
    }
}

/// Returns the loss and the gradients by name of a fixed batch.
fn gradients(engine: &mut Engine) -> (f64, Vec<(String, Vec<f32>)>) {
    let ids: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7 % 40).collect();
    let labels: Vec<i32> = ids.iter().map(|&id| (id as i32 + 3) % 40).collect();
    let positions: Vec<u32> = (0..TOKENS as u32).map(|i| i % (TOKENS as u32 / 2)).collect();
    let batch = HostBatch {
        ids: &ids,
        labels: &labels,
        positions: &positions,
        document_starts: &[0; TOKENS],
        sample_numbers: &[0, 1],
        inputs: &[],
    };
    engine.begin_step();
    let loss = engine.accumulate(&batch, Seed::of_tokens(1.0 / TOKENS as f32)).unwrap();
    engine.finish_gradients().unwrap();
    let gradient = |id: ParameterId| (engine.records()[id.0].name.clone(), engine.gradient(id).unwrap());
    (loss, engine.trained_ids().map(gradient).collect())
}

#[test]
fn adapters_over_blocks_have_the_gradients_that_they_have_over_the_decoded_matrices() {
    let model = model();
    for format in [BlockFormat::Nf4G64, BlockFormat::Int4G64, BlockFormat::Int8G128, BlockFormat::Q8_0] {
        for dtype in [DType::F32, DType::BF16] {
            for recompute in [Recompute::None, Recompute::Full] {
                let tuning = tuning(&model, Some(format));
                let mut quantized = engine(&model, &tuning, dtype, recompute);
                let dense = Tuning { quantized: BTreeMap::new(), ..tuning.clone() };
                let mut dense = engine(&model, &dense, dtype, recompute);
                let unrounded = gradients(&mut dense).0;
                round_to_blocks(&mut dense, &tuning.quantized);
                for step in 1..=2 {
                    let ((loss, found), (expected_loss, expected)) =
                        (gradients(&mut quantized), gradients(&mut dense));
                    let case = format!("{format}, {dtype}, {recompute:?}, step {step}");
                    assert_eq!(loss.to_bits(), expected_loss.to_bits(), "{case}: {loss} for {expected_loss}");
                    assert!(step > 1 || loss != unrounded, "{case}: rounding to blocks changes the loss");
                    assert!(found.iter().any(|(_, gradient)| gradient.iter().any(|value| *value != 0.0)));
                    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                        let wrong =
                            found.iter().zip(expected).position(|(found, expected)| found != expected);
                        let values = wrong.map(|at| (at, found[at], expected[at]));
                        assert_eq!(values, None, "{case}: {name}: element, gradient, expected gradient");
                    }
                    let update = Update { learning_rate: 0.01, weight_decay: 0.0, gradient_scale: 1.0, step };
                    quantized.update(&update).unwrap();
                    dense.update(&update).unwrap();
                }
            }
        }
    }
}

#[test]
fn blocks_take_their_bytes_and_are_predicted() {
    let model = model();
    for dtype in [DType::F32, DType::BF16] {
        let memory = |format: Option<BlockFormat>| {
            let engine = engine(&model, &tuning(&model, format), dtype, Recompute::None);
            let used = engine.arena().in_use()[MemoryCategory::Parameters];
            let predicted = engine.predicted_memory().by_category()[MemoryCategory::Parameters];
            assert_eq!(used, predicted, "{format:?}, {dtype}");
            used
        };
        let [dense, quantized] = [memory(None), memory(Some(BlockFormat::Nf4G64))];
        let matrices = tuning(&model, Some(BlockFormat::Nf4G64)).quantized;
        let records = parameter_records(&model);
        let in_matrices = records.iter().filter(|record| matrices.contains_key(&record.name));
        let elements: usize = in_matrices.map(|record| record.elements()).sum();
        let saved = elements * dtype.size_bytes() - BlockFormat::Nf4G64.bytes(elements).unwrap();
        let error = (dense - quantized) as f64 / saved as f64 - 1.0;
        assert!(error.abs() < 0.05, "{dtype}: {dense} bytes, {quantized} quantized; saved should be {saved}");
    }
}

#[test]
fn blocks_are_replaced_as_a_whole() {
    let model = model();
    let tuning = tuning(&model, Some(BlockFormat::Nf4G64));
    let mut engine = engine(&model, &tuning, DType::F32, Recompute::None);
    let before = gradients(&mut engine).0;
    let name = "model.layers.0.self_attn.q_proj.weight";
    let id = ParameterId(engine.records().iter().position(|record| record.name == name).unwrap());
    let elements = engine.records()[id.0].elements();
    let mut blocks = vec![0; BlockFormat::Nf4G64.bytes(elements).unwrap()];
    BlockFormat::Nf4G64.quantize(&vec![0.5; elements], &mut blocks);
    engine.write_blocks(id, &blocks).unwrap();
    assert_ne!(gradients(&mut engine).0, before);
    let few = engine.write_blocks(id, &blocks[1..]).unwrap_err();
    assert!(matches!(few, EngineError::WrongSize { .. }), "{few}");
    let of_numbers = engine.write_blocks(ParameterId(0), &blocks).unwrap_err();
    assert!(matches!(of_numbers, EngineError::WrongSize { .. }), "{of_numbers}");
}

//! Documents packed into one sequence must train as if each were a sequence of its own.

use lockstep_engine::{Engine, EngineOptions, HostBatch, Optimizer};
use lockstep_graph::{BlockShape, Seed};
use lockstep_model::ModelConfig;
use lockstep_plan::{DType, ParameterId, Plan};
use lockstep_tensor::Arena;
use serde_json::json;

use crate::common;

/// Lengths of the documents in one sequence.
const LENGTHS: [usize; 3] = [70, 1, 25];

fn models() -> [ModelConfig; 2] {
    let llama = json!({
        "model_type": "mistral", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 128, "sliding_window": 66,
    });
    let gpt2 = json!({
        "model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 128,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
    });
    [llama, gpt2].map(|table| ModelConfig::from_table(table.as_object().unwrap(), "test").unwrap())
}

/// Returns the loss and gradients of documents of these lengths, packed into one sequence.
fn train(config: &ModelConfig, ids: &[u32], lengths: &[usize]) -> (f64, Vec<Vec<f32>>) {
    let shape = BlockShape { sequences: 1, seq_len: lengths.iter().sum(), dtype: DType::F32 };
    let optimizer = Optimizer::Sgd { momentum: 0.0 };
    let plan = common::one_rank(config, Plan::default(), [shape.sequences, shape.seq_len], 4);
    let options = EngineOptions { optimizer, seed: 1, threads: 2, ..EngineOptions::default() };
    let mut engine = Engine::builder(config, plan).options(options).build(&Arena::new()).unwrap();
    engine.initialize(1).unwrap();
    let (mut positions, mut starts) = (Vec::new(), Vec::new());
    for &length in lengths {
        starts.extend(std::iter::repeat_n(positions.len() as u32, length));
        positions.extend(0..length as u32);
    }
    let labels: Vec<i32> = ids.iter().map(|&id| (id as i32 * 3 + 1) % 11).collect();
    let batch = HostBatch {
        ids,
        labels: &labels,
        positions: &positions,
        document_starts: &starts,
        sample_numbers: &[0],
        inputs: &[],
    };
    let loss = engine.accumulate(&batch, Seed::of_tokens(0.01)).unwrap();
    (loss, (0..engine.records().len()).map(|id| engine.gradient(ParameterId(id)).unwrap()).collect())
}

#[test]
fn packed_documents_have_the_losses_and_gradients_of_documents_alone() {
    for config in models() {
        let ids: Vec<u32> = (0..LENGTHS.iter().sum::<usize>() as u32).map(|i| i * i % 11).collect();
        let (packed_loss, packed) = train(&config, &ids, &LENGTHS);
        let mut rest = ids.as_slice();
        let mut loss = 0.0;
        let mut gradients: Vec<Vec<f32>> = packed.iter().map(|gradient| vec![0.0; gradient.len()]).collect();
        for length in LENGTHS {
            let (document, later) = rest.split_at(length);
            rest = later;
            let (alone, of_document) = train(&config, document, &[length]);
            loss += alone;
            for (sum, term) in gradients.iter_mut().flatten().zip(of_document.iter().flatten()) {
                *sum += term;
            }
        }
        let name = config.model_type();
        assert!((packed_loss - loss).abs() < 1e-5 * loss, "{name}: {packed_loss} packed, {loss} alone");
        for (parameter, (packed, alone)) in packed.iter().zip(&gradients).enumerate() {
            for (a, b) in packed.iter().zip(alone) {
                assert!(
                    (a - b).abs() < 1e-6,
                    "{name}: gradient {a} packed, {b} alone, parameter {parameter}"
                );
            }
        }
        let (joined, _) = train(&config, &ids, &[ids.len()]);
        assert!((joined - loss).abs() > 1e-4 * loss, "{name}: the documents do not matter: {joined}, {loss}");
    }
}

//! Tests of parameter placement in memory, and of the effect of one step of a tiny model.

use lockstep_engine::{
    Engine, EngineOptions, Granularity, HostBatch, MuonScale, Optimizer, RoundingMode, Snapshot, StateKind,
    StateStore, StateTensor, Storage, Update, WeightStorage,
};
use lockstep_graph::{Cost, Pass, Recompute, Seed, Span};
use lockstep_model::ModelConfig;
use lockstep_plan::{DType, MemoryCategory, ParameterId, Plan, RankPlan};
use lockstep_tensor::Arena;
use serde_json::json;

use crate::common;

/// Returns a plan of one rank with four micro-batches of two sequences of 5 tokens.
fn one_rank(model: &ModelConfig, recompute: Recompute) -> RankPlan {
    common::one_rank(model, Plan { recompute: recompute.into(), ..Plan::default() }, [2, 5], 4)
}

fn built(options: EngineOptions, recompute: Recompute, arena: &Arena) -> Engine {
    let model = model();
    Engine::builder(&model, one_rank(&model, recompute)).options(options).build(arena).unwrap()
}

/// Returns a Llama whose output layer is tied to its embedding.
fn model() -> ModelConfig {
    model_with(Embedding::Tied)
}

#[derive(Clone, Copy, PartialEq)]
enum Embedding {
    Tied,
    Apart,
}

fn model_with(embedding: Embedding) -> ModelConfig {
    let config = json!({
        "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 16, "tie_word_embeddings": embedding == Embedding::Tied,
    });
    ModelConfig::from_table(config.as_object().unwrap(), "test").unwrap()
}

/// Returns an engine for [`model`] with gradient descent.
fn engine() -> Engine {
    engine_of(&model())
}

fn engine_of(model: &ModelConfig) -> Engine {
    let optimizer = Optimizer::Sgd { momentum: 0.0 };
    let options = EngineOptions { optimizer, seed: 1, threads: 2, ..EngineOptions::default() };
    let builder = Engine::builder(model, one_rank(model, Recompute::None));
    let mut engine = builder.options(options).build(&Arena::new()).unwrap();
    engine.initialize(1).unwrap();
    engine
}

/// Runs forward and backward of a fixed batch, whose first `masked` labels are masked.
fn accumulate(engine: &mut Engine, masked: usize) -> f64 {
    accumulate_ids(engine, std::array::from_fn(|i| i as u32 * 7 % 11), masked)
}

fn accumulate_ids(engine: &mut Engine, ids: [u32; 10], masked: usize) -> f64 {
    let mut labels: Vec<i32> = ids.iter().map(|&id| (id as i32 + 3) % 11).collect();
    labels[..masked].fill(-100);
    let positions: Vec<u32> = (0..10).map(|i| i % 5).collect();
    let batch = HostBatch {
        ids: &ids,
        labels: &labels,
        positions: &positions,
        document_starts: &[0; 10],
        sample_numbers: &[0, 1],
        inputs: &[],
    };
    engine.accumulate(&batch, Seed::of_tokens(0.1)).unwrap()
}

fn weights(engine: &mut Engine) -> Vec<(String, Vec<f32>)> {
    let tensors = engine.state_tensors().into_iter();
    tensors
        .filter(|tensor| tensor.kind == StateKind::Parameter)
        .map(|tensor| (tensor.record.name.clone(), tensor.to_vec().unwrap()))
        .collect()
}

#[test]
fn parameters_start_at_multiples_of_1024_elements_of_their_unit() {
    let engine = engine();
    let arena = Arena::new();
    let records = engine.records();
    let category = MemoryCategory::Parameters;
    let mut store = StateStore::zeros(&arena, records, DType::F32, category).unwrap();
    let mut unit_start = 0;
    let mut unit = usize::MAX;
    for (id, _, bytes) in store.parts() {
        let (record, start) = (&records[id.0], bytes.as_ptr() as usize / size_of::<f32>());
        if record.unit != unit {
            (unit, unit_start) = (record.unit, start);
        }
        assert_eq!((start - unit_start) % 1024, 0, "{}", record.name);
    }
}

#[test]
fn tied_parameters_share_their_weights() {
    let engine = engine();
    let arena = Arena::new();
    let records = engine.records();
    let head = records.iter().position(|record| record.tie.is_some()).unwrap();
    let target = records[head].tie.unwrap();
    let store = StateStore::zeros(&arena, records, DType::F32, MemoryCategory::Parameters).unwrap();
    store.view(target).copy_from(&vec![1.0_f32; records[target.0].elements()]);
    assert!(store.view(ParameterId(head)).to_vec::<f32>().iter().all(|&value| value == 1.0));
}

#[test]
fn a_tied_gradient_is_the_sum_of_what_both_uses_accumulate_apart() {
    let mut tied = engine_of(&model_with(Embedding::Tied));
    let mut apart = engine_of(&model_with(Embedding::Apart));
    let values: Vec<_> = weights(&mut tied);
    for id in apart.parameter_ids().collect::<Vec<_>>() {
        let name = apart.records()[id.0].name.clone();
        // The output layer of the untied model starts from the table of the tied one.
        let source = if name == "lm_head.weight" { "model.embed_tokens.weight" } else { &name };
        let (_, values) = values.iter().find(|(name, _)| name == source).unwrap();
        apart.write_state(id, StateKind::Parameter, values).unwrap();
    }
    // Two steps: the second must not see gradients of the first.
    for step in 0..2 {
        for engine in [&mut tied, &mut apart] {
            engine.begin_step();
            for batch in 0..3 {
                // Token ids that occur twice in a batch, in one batch only, or in all.
                let ids = std::array::from_fn(|i| (i as u32 * (batch + 2) + step) % 9);
                accumulate_ids(engine, ids, batch as usize);
            }
            engine.finish_gradients().unwrap();
        }
        let gradient = |engine: &Engine, name: &str| {
            let id = engine.records().iter().position(|record| record.name == name).unwrap();
            engine.gradient(ParameterId(id)).unwrap()
        };
        let [head, embedding] =
            ["lm_head.weight", "model.embed_tokens.weight"].map(|name| gradient(&apart, name));
        let expected: Vec<f32> = head.iter().zip(&embedding).map(|(head, row)| head + row).collect();
        assert_eq!(gradient(&tied, "model.embed_tokens.weight"), expected, "step {step}");
    }
}

#[test]
fn the_norm_counts_every_element_once_and_a_tied_gradient_is_the_sum_of_both_uses() {
    let mut engine = engine();
    engine.begin_step();
    accumulate(&mut engine, 0);
    let norm = engine.finish_gradients().unwrap();
    let squares = engine
        .parameter_ids()
        .flat_map(|id| engine.gradient(id).unwrap())
        .map(|g| f64::from(g) * f64::from(g));
    let expected = squares.sum::<f64>().sqrt();
    assert!((norm - expected).abs() <= 1e-12 * norm, "{norm}, expected {expected}");
    // Id 4 is no input, so its row has a gradient from the output layer only.
    let embedding = engine.gradient(ParameterId(0)).unwrap();
    assert!(embedding[4 * 8..5 * 8].iter().any(|&g| g != 0.0), "{embedding:?}");
}

#[test]
fn gradient_descent_moves_each_weight_by_its_scaled_gradient_and_decay() {
    let mut engine = engine();
    let before = weights(&mut engine);
    engine.begin_step();
    accumulate(&mut engine, 4);
    engine.finish_gradients().unwrap();
    let ids: Vec<_> = engine.parameter_ids().collect();
    let gradients: Vec<_> = ids.iter().map(|&id| engine.gradient(id).unwrap()).collect();
    let decays: Vec<_> = ids.iter().map(|&id| engine.records()[id.0].decay).collect();
    let (learning_rate, weight_decay, gradient_scale) = (0.5, 0.1, 0.25);
    engine.update(&Update { learning_rate, weight_decay, gradient_scale, step: 1 }).unwrap();
    let after = weights(&mut engine);
    assert_eq!((before.len(), after.len()), (ids.len(), ids.len()));
    for (index, (name, old)) in before.iter().enumerate() {
        let decay = if decays[index] { weight_decay } else { 0.0 };
        for (element, &weight) in old.iter().enumerate() {
            let gradient = f64::from(gradient_scale * gradients[index][element]) + decay * f64::from(weight);
            let (found, expected) =
                (f64::from(after[index].1[element]), f64::from(weight) - learning_rate * gradient);
            assert!((found - expected).abs() <= 1e-6, "{name}[{element}]: {found}, expected {expected}");
        }
    }
}

#[test]
fn masked_labels_count_in_neither_the_loss_nor_a_gradient() {
    let mut engine = engine();
    engine.begin_step();
    let all = accumulate(&mut engine, 0);
    let most = accumulate(&mut engine, 9);
    assert!(most > 0.0 && most < all, "{most} of {all}");
    engine.begin_step();
    assert_eq!(accumulate(&mut engine, 10), 0.0);
    assert_eq!(engine.finish_gradients().unwrap(), 0.0);
}

#[test]
fn a_gradient_that_is_not_finite_shows_in_the_norm() {
    let mut engine = engine();
    let mut values = vec![0.0; engine.records()[0].elements()];
    values[0] = f32::NAN;
    engine.write_state(ParameterId(0), StateKind::Parameter, &values).unwrap();
    engine.begin_step();
    accumulate(&mut engine, 0);
    let norm = engine.finish_gradients().unwrap();
    assert!(norm.is_nan(), "{norm}");
}

#[test]
fn a_weight_that_is_not_finite_is_found_by_name() {
    let mut engine = engine();
    assert_eq!(StateTensor::first_not_finite(&engine.state_tensors()), None);
    for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![f32::MAX; engine.records()[0].elements()];
        values[87] = broken;
        engine.write_state(ParameterId(0), StateKind::Parameter, &values).unwrap();
        let found = StateTensor::first_not_finite(&engine.state_tensors()).map(str::to_owned);
        assert_eq!(found.as_deref(), Some("model.embed_tokens.weight"));
    }
}

#[test]
fn a_snapshot_keeps_the_state_while_the_engine_goes_on_and_gives_it_back() {
    for dtype in [DType::F32, DType::BF16] {
        let arena = Arena::new();
        let options = EngineOptions { dtype, seed: 1, threads: 2, ..EngineOptions::default() };
        let mut engine = built(options, Recompute::None, &arena);
        engine.initialize(1).unwrap();
        let step = |engine: &mut Engine, step| {
            engine.begin_step();
            let loss = accumulate(engine, 0);
            engine.finish_gradients().unwrap();
            engine
                .update(&Update { learning_rate: 0.1, weight_decay: 0.1, gradient_scale: 1.0, step })
                .unwrap();
            loss
        };
        step(&mut engine, 1);
        let state = |tensors: Vec<StateTensor<'_>>| -> Vec<(String, StateKind, Vec<f32>)> {
            let owned = |t: StateTensor<'_>| (t.record.name.clone(), t.kind, t.to_vec().unwrap());
            tensors.into_iter().map(owned).collect()
        };
        let before = state(engine.state_tensors());
        let mut snapshot = Snapshot::new(&engine).unwrap();
        assert_eq!(arena.in_use()[MemoryCategory::Snapshot], Snapshot::bytes_for(&engine));
        snapshot.take(&engine);
        let loss = step(&mut engine, 2);
        assert!(state(snapshot.tensors()) == before && state(engine.state_tensors()) != before, "{dtype}");
        snapshot.restore(&mut engine).unwrap();
        assert!(state(engine.state_tensors()) == before, "{dtype}");
        // The rounded weights that kernels read are restored as well.
        assert_eq!(step(&mut engine, 2).to_bits(), loss.to_bits(), "{dtype}");
    }
}

#[test]
fn a_tensor_of_the_wrong_size_is_refused_by_name() {
    let mut engine = engine();
    let error = engine.write_state(ParameterId(0), StateKind::Parameter, &[1.0]).unwrap_err().to_string();
    assert!(error.contains("model.embed_tokens.weight") && error.contains("88"), "{error}");
}

/// Runs one step of a model with one block; returns the engine and the spans of its timeline.
fn recorded_step(recompute: Recompute) -> (Engine, Vec<Span>) {
    let optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8 };
    let options = EngineOptions { optimizer, seed: 1, ..EngineOptions::default() };
    let mut engine = built(options, recompute, &Arena::new());
    engine.initialize(1).unwrap();
    engine.timeline().start();
    engine.begin_step();
    accumulate(&mut engine, 0);
    engine.finish_gradients().unwrap();
    engine.update(&Update { learning_rate: 0.1, weight_decay: 0.0, gradient_scale: 1.0, step: 1 }).unwrap();
    let spans = engine.timeline().stop();
    (engine, spans)
}

#[test]
fn every_operation_of_a_recorded_step_is_a_span_with_the_work_that_its_shapes_ask_for() {
    let (engine, spans) = recorded_step(Recompute::None);
    let calls = |name: &str, pass: Option<Pass>| {
        spans.iter().filter(|span| span.activity.name == name && span.activity.pass == pass).count()
    };
    // The block has seven linear layers; the output layer runs entirely in the backward.
    for pass in [Pass::Forward, Pass::BackwardInputs, Pass::BackwardWeights] {
        assert_eq!(calls("linear", Some(pass)), 7, "{pass:?}");
        assert_eq!(calls("RMSNorm", Some(pass)), 3, "{pass:?}");
    }
    assert_eq!(calls("attention", Some(Pass::BackwardInputs)), 1);
    assert_eq!(calls("output layer and loss", Some(Pass::BackwardInputs)), 1);
    assert_eq!(calls("output layer and loss", Some(Pass::Forward)), 0);
    assert_eq!(calls("optimizer", None), engine.parameter_ids().count());
    for name in ["load batch", "sum losses", "add tied gradients", "gradient norm"] {
        assert_eq!(calls(name, None), 1, "{name}");
    }
    assert!(spans.is_sorted_by_key(|span| span.start), "one thread does one thing after the other");

    let flops = |is_counted: fn(&Span) -> bool| -> u64 {
        spans.iter().filter(|span| is_counted(span)).map(|span| span.cost.product_flops).sum()
    };
    let attention =
        flops(|span| span.activity.name == "attention" && span.activity.pass == Some(Pass::Forward));
    // The backward of attention recomputes the scores.
    assert_eq!(flops(|_| true), engine.model().training_flops() + attention / 2);

    let gate = spans.iter().find(|span| {
        let unit = span.activity.unit.filter(|&unit| unit == 1);
        let name = unit
            .zip(span.activity.parameter)
            .map(|(unit, parameter)| engine.model().program(unit).parameters()[parameter.0].name.as_str());
        name == Some("mlp.gate_proj.weight")
    });
    // 10 tokens, 8 inputs, 12 outputs.
    let expected = Cost { product_flops: 2 * 10 * 8 * 12, vector_flops: 0, bytes: 4 * (80 + 120 + 96) };
    assert_eq!(gate.map(|span| span.cost), Some(expected));
}

#[test]
fn what_is_computed_again_is_recorded_as_such() {
    for (recompute, again) in [(Recompute::None, 0), (Recompute::Selective, 0), (Recompute::Full, 7)] {
        let (_, spans) = recorded_step(recompute);
        let is_again =
            |span: &&Span| span.activity.pass == Some(Pass::Recompute) && span.activity.name == "linear";
        let found = spans.iter().filter(is_again).count();
        assert!(
            found <= again && (found > 0) == (again > 0),
            "{found} linear layers again with {recompute:?}"
        );
    }
}

/// Returns weights and optimizer state after some steps on the same batch; `between` may replace the engine on the way.
fn after_steps(optimizer: Optimizer, storage: Storage, between: impl Fn(Engine) -> Engine) -> Vec<Vec<f32>> {
    let dtype = if storage.weights == WeightStorage::Kernels { DType::BF16 } else { DType::F32 };
    let options = EngineOptions { dtype, optimizer, storage, seed: 1, threads: 2 };
    let mut engine = built(options, Recompute::None, &Arena::new());
    engine.initialize(1).unwrap();
    for step in 1..=6 {
        if step == 4 {
            engine = between(engine);
        }
        engine.begin_step();
        accumulate(&mut engine, 0);
        engine.finish_gradients().unwrap();
        engine.update(&Update { learning_rate: 0.01, weight_decay: 0.1, gradient_scale: 1.0, step }).unwrap();
    }
    engine.state_tensors().iter().map(|tensor| tensor.to_vec().unwrap()).collect()
}

const MUON: Optimizer = Optimizer::Muon {
    momentum: 0.95,
    scale: MuonScale::MatchAdamW,
    betas: [0.9, 0.95],
    eps: 1e-8,
    adam_ratio: 0.5,
};
fn narrow() -> Storage {
    Storage {
        weights: WeightStorage::Kernels,
        state: DType::BF16,
        rounding: RoundingMode::Stochastic,
        ..Storage::default()
    }
}

#[test]
fn every_optimizer_goes_on_from_what_it_has_saved_in_every_precision() {
    let adamw = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8 };
    let optimizers = [adamw, Optimizer::Sgd { momentum: 0.9 }, Optimizer::Lion { betas: [0.9, 0.99] }, MUON];
    for (optimizer, storage) in
        optimizers.into_iter().flat_map(|o| [Storage::default(), narrow()].map(|s| (o, s)))
    {
        let whole = after_steps(optimizer, storage.clone(), |engine| engine);
        let resumed = after_steps(optimizer, storage.clone(), |mut engine| {
            let saved: Vec<_> = engine
                .state_tensors()
                .iter()
                .map(|tensor| (tensor.record.name.clone(), tensor.kind, tensor.to_vec().unwrap()))
                .collect();
            let dtype = if storage.weights == WeightStorage::Kernels { DType::BF16 } else { DType::F32 };
            let storage = storage.clone();
            let options = EngineOptions { dtype, optimizer, storage, seed: 1, threads: 1 };
            let mut fresh = built(options, Recompute::None, &Arena::new());
            for (name, kind, values) in saved {
                let id = fresh.parameter_ids().find(|id| fresh.records()[id.0].name == name).unwrap();
                assert!(fresh.state_kinds(id).any(|kept| kept == kind), "{name}: {kind:?}");
                fresh.write_state(id, kind, &values).unwrap();
            }
            fresh
        });
        assert!(whole == resumed, "{optimizer:?}, {storage:?}");
    }
}

#[test]
fn muon_takes_the_matrices_of_blocks_and_adamw_the_rest() {
    let options = EngineOptions { optimizer: MUON, seed: 1, ..EngineOptions::default() };
    let mut engine = built(options, Recompute::None, &Arena::new());
    let kinds = |name: &str| -> Vec<StateKind> {
        let id = engine.parameter_ids().find(|id| engine.records()[id.0].name == name).unwrap();
        engine.state_kinds(id).collect()
    };
    let adamw = [StateKind::Parameter, StateKind::ExpAvg, StateKind::ExpAvgSq];
    for name in ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight"] {
        assert_eq!(kinds(name), adamw, "{name}");
    }
    for name in ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"] {
        assert_eq!(kinds(name), [StateKind::Parameter, StateKind::MomentumBuffer], "{name}");
    }
    let elements: usize = engine.records().iter().filter(|r| r.tie.is_none()).map(|r| r.elements()).sum();
    let kept: usize = engine.state_tensors().iter().map(|tensor| tensor.len_bytes() / 4).sum();
    let matrices: usize = engine
        .state_tensors()
        .iter()
        .filter(|tensor| tensor.kind == StateKind::MomentumBuffer)
        .map(|tensor| tensor.len_bytes() / 4)
        .sum();
    assert_eq!(kept, 3 * elements - matrices, "no memory for moments that nobody reads");
    assert_eq!(
        (MUON.granularity(), Optimizer::Lion { betas: [0.9; 2] }.granularity()),
        (Granularity::WholeMatrix, Granularity::Elementwise)
    );
}

#[test]
fn state_in_bf16_takes_half_the_memory() {
    let memory = |storage: Storage| {
        let arena = Arena::new();
        let options = EngineOptions { dtype: DType::BF16, storage, ..EngineOptions::default() };
        let _engine = built(options, Recompute::None, &arena);
        arena.in_use()[MemoryCategory::Optimizer]
    };
    let all = memory(Storage::default());
    assert_eq!(
        memory(Storage { state: DType::BF16, ..Storage::default() }) * 3,
        all * 2,
        "master and moments"
    );
    assert_eq!(memory(Storage { weights: WeightStorage::Kernels, ..Storage::default() }) * 3, all * 2);
    assert_eq!(memory(narrow()) * 3, all, "moments of two bytes");
}

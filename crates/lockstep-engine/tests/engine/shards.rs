//! Tests of sharded model state: its size on each rank is that of the ZeRO paper, and every element has exactly one
//! owner.

use std::{thread, time::Duration};

use lockstep_comm::{World, WorldOptions};
use lockstep_engine::{Engine, EngineOptions, Groups};
use lockstep_model::{ModelConfig, Tuning, parameter_records};
use lockstep_plan::{DType, Degrees, MemoryCategory, ParameterId, Plan, ZeroStage};
use serde_json::json;

const STAGES: [ZeroStage; 4] =
    [ZeroStage::Nothing, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

fn model(is_tied: bool, hidden: usize) -> ModelConfig {
    let config = json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 16, "tie_word_embeddings": is_tied,
    });
    ModelConfig::from_table(config.as_object().unwrap(), "test").unwrap()
}

/// Returns the result of `look` on the engine of each rank.
fn on_ranks<T: Send>(
    model: &ModelConfig,
    dtype: DType,
    degrees: Degrees,
    zero_stage: ZeroStage,
    look: impl Fn(&Engine) -> T + Sync,
) -> Vec<T> {
    on_ranks_that_train(&Tuning::default(), model, dtype, degrees, zero_stage, look)
}

/// As [`on_ranks`], with a part of the model trained.
fn on_ranks_that_train<T: Send>(
    tuning: &Tuning,
    model: &ModelConfig,
    dtype: DType,
    degrees: Degrees,
    zero_stage: ZeroStage,
    look: impl Fn(&Engine) -> T + Sync,
) -> Vec<T> {
    let plan = Plan {
        mesh: degrees,
        micro_batch: Some(1),
        sequence_parallel: degrees.tensor > 1,
        zero_stage: zero_stage.number(),
        bucket_mb: 1.0,
        ..Plan::default()
    };
    let parts = degrees.replicate * degrees.shard;
    let plan = model.check_plan(&plan, [8 / parts * parts, 8]).unwrap();
    let world = WorldOptions { arena_bytes: 1 << 28, ..WorldOptions::default() };
    let groups = World::in_process(plan.mesh().world_size(), world).unwrap();
    thread::scope(|scope| {
        let rank = |group: lockstep_comm::Group| {
            let (look, plan) = (&look, plan.rank(group.rank()));
            scope.spawn(move || {
                let arena = group.arena(&[MemoryCategory::Gradients, MemoryCategory::Parameters]);
                let groups = Groups::new(group, plan.clone(), Duration::from_secs(60)).unwrap();
                let options = EngineOptions { dtype, seed: 1, ..EngineOptions::default() };
                let builder = Engine::builder(model, plan).tuning(tuning).options(options);
                let engine = builder.groups(groups).build(&arena).unwrap();
                look(&engine)
            })
        };
        let threads: Vec<_> = groups.into_iter().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_holds_what_its_stage_says_within_three_percent() {
    let model = model(false, 256);
    for (dtype, of_kernels, of_optimizer) in [(DType::F32, 4, 8), (DType::BF16, 2, 12)] {
        for ranks in [2, 4, 8] {
            for stage in STAGES {
                let degrees = Degrees { shard: ranks, ..Degrees::default() };
                let elements = |engine: &Engine| -> usize {
                    engine.trained_ids().map(|id| engine.records()[id.0].elements()).sum()
                };
                let held = on_ranks(&model, dtype, degrees, stage, |engine| {
                    (elements(engine), engine.arena().in_use())
                });
                for (rank, (elements, memory)) in held.into_iter().enumerate() {
                    let shares = |from: ZeroStage| if stage >= from { ranks } else { 1 };
                    let expected = [
                        (MemoryCategory::Parameters, of_kernels * elements / shares(ZeroStage::Parameters)),
                        (MemoryCategory::Gradients, 4 * elements / shares(ZeroStage::Gradients)),
                        (MemoryCategory::Optimizer, of_optimizer * elements / shares(ZeroStage::Optimizer)),
                    ];
                    for (category, expected) in expected {
                        let error = memory[category] as f64 / expected as f64 - 1.0;
                        assert!(
                            error.abs() < 0.03,
                            "{dtype}, {stage:?}, rank {rank} of {ranks}: {category:?} {} bytes, by theory {expected}",
                            memory[category],
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_trained_is_shared_out_with_the_parameters() {
    let model = model(false, 256);
    let names = parameter_records(&model).into_iter().map(|record| record.name);
    let frozen = names.filter(|name| !name.contains("layers.1.")).collect();
    let tuning = Tuning { frozen, ..Tuning::default() };
    for (stage, owners) in [(ZeroStage::Gradients, 1), (ZeroStage::Parameters, 4)] {
        let degrees = Degrees { shard: 4, ..Degrees::default() };
        let held = on_ranks_that_train(&tuning, &model, DType::BF16, degrees, stage, |engine| {
            let elements: usize = engine.records().iter().map(|record| record.elements()).sum();
            (2 * elements / owners, engine.arena().in_use()[MemoryCategory::Parameters])
        });
        for (rank, (expected, found)) in held.into_iter().enumerate() {
            let error = found as f64 / expected as f64 - 1.0;
            assert!(error.abs() < 0.03, "{stage:?}, rank {rank}: {found} bytes, by theory {expected}");
        }
    }
}

#[test]
fn every_element_has_one_owner_in_each_replica() {
    let shards = Degrees { replicate: 2, shard: 3, ..Degrees::default() };
    let with_tensor = Degrees { shard: 2, tensor: 2, ..Degrees::default() };
    for (is_tied, degrees) in [(false, shards), (true, shards), (true, with_tensor), (false, with_tensor)] {
        let model = model(is_tied, 24);
        let owned = on_ranks(&model, DType::F32, degrees, ZeroStage::Gradients, |engine| {
            let ids = engine.trained_ids().filter(|id| engine.is_primary_owner(*id));
            let of_parameter = |id: ParameterId| {
                let record = engine.records()[id.0].clone();
                let part = record.share.element_ranges_of_part(&record.shape, engine.owned_range(id));
                (record.name.clone(), record.elements(), part.collect::<Vec<_>>())
            };
            ids.map(of_parameter).collect::<Vec<_>>()
        });
        let mut owners = std::collections::BTreeMap::new();
        for (name, elements, flat_parameters) in owned.into_iter().flatten() {
            let counts = owners.entry(name).or_insert_with(|| vec![0; elements]);
            for (first, len) in flat_parameters {
                counts[first..first + len].iter_mut().for_each(|count| *count += 1);
            }
        }
        for (name, counts) in owners {
            let wrong = counts.iter().position(|count| *count != degrees.replicate);
            assert_eq!(wrong.map(|element| (element, counts[element])), None, "{name}, {degrees:?}");
        }
    }
}

//! Memory of the model state per rank: one model with data parallelism and ZeRO's three stages, on two and on four ranks,
//! compared with the formulas of Rajbhandari et al. (2020, section 5).
//!
//! ```text
//! cargo run --release -p lockstep-engine --example fsdp_memory
//! ```
//!
//! Ranks are threads here. Each runs a real step on random tokens; the table shows the bytes booked in its ledger afterwards, the
//! maximum over ranks. Gradients are kept in f32, so a parameter in bf16 takes 2 + 4 + 12 bytes where the paper's fp16 takes 2 +
//! 2 + 12.

use std::{error::Error, thread, time::Duration};

use lockstep_comm::{Group, World, WorldOptions};
use lockstep_engine::{Engine, EngineOptions, Groups, HostBatch, Update};
use lockstep_graph::Seed;
use lockstep_model::ModelConfig;
use lockstep_plan::{DType, Degrees, MemoryBytes, MemoryCategory, Plan, RankPlan, ZeroStage};

/// A byte-level model, so that the tied embedding is small.
const MODEL: &str = "llama-15m";
const SEQ_LEN: usize = 32;
const STAGES: [(&str, ZeroStage); 4] = [
    ("copies (DDP)", ZeroStage::Nothing),
    ("ZeRO 1", ZeroStage::Optimizer),
    ("ZeRO 2", ZeroStage::Gradients),
    ("ZeRO 3 (FSDP)", ZeroStage::Parameters),
];

/// State held by a rank after a step.
struct Held {
    elements: usize,
    memory: MemoryBytes,
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let model = ModelConfig::preset(MODEL)?;
    for (dtype, [of_kernels, of_gradients, of_optimizer]) in
        [(DType::F32, [4, 4, 8]), (DType::BF16, [2, 4, 12])]
    {
        println!("\n{MODEL}, {dtype}, AdamW: MB on a rank, measured / by theory");
        println!(
            "{:<8}{:<16}{:>19}{:>19}{:>19}{:>19}{:>9}",
            "ranks", "", "parameters", "gradients", "optimizer", "together", "off"
        );
        for ranks in [2, 4] {
            for (name, stage) in STAGES {
                let held = on_ranks(&model, dtype, ranks, stage)?;
                let elements = held[0].elements;
                let shares = |from: ZeroStage| if stage >= from { ranks } else { 1 };
                let measured =
                    [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer]
                        .map(|category| held.iter().map(|held| held.memory[category]).max().unwrap_or(0));
                let theory = [
                    of_kernels * elements / shares(ZeroStage::Parameters),
                    of_gradients * elements / shares(ZeroStage::Gradients),
                    of_optimizer * elements / shares(ZeroStage::Optimizer),
                ];
                let both =
                    |measured: usize, theory: usize| format!("{:.2} / {:.2}", mb(measured), mb(theory));
                let [parameters, gradients, optimizer] =
                    [0, 1, 2].map(|index| both(measured[index], theory[index]));
                let (all, expected) = (measured.iter().sum(), theory.iter().sum());
                println!(
                    "{ranks:<8}{name:<16}{parameters:>19}{gradients:>19}{optimizer:>19}{:>19}{:>8.2}%",
                    both(all, expected),
                    100.0 * (mb(all) / mb(expected) - 1.0),
                );
            }
        }
    }
    Ok(())
}

fn mb(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

/// Returns the state of each of `ranks` ranks after a step.
fn on_ranks(
    model: &ModelConfig,
    dtype: DType,
    ranks: usize,
    zero_stage: ZeroStage,
) -> Result<Vec<Held>, Box<dyn Error + Send + Sync>> {
    let plan = Plan {
        mesh: Degrees { shard: ranks, ..Degrees::default() },
        zero_stage: zero_stage.number(),
        ..Plan::default()
    };
    let plan = model.check_plan(&plan, [ranks, SEQ_LEN])?;
    let world = WorldOptions { arena_bytes: 1 << 30, ..WorldOptions::default() };
    let groups = World::in_process(ranks, world)?;
    thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let plan = plan.rank(group.rank());
                scope.spawn(move || after_a_step(model, dtype, plan, group))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

fn after_a_step(
    model: &ModelConfig,
    dtype: DType,
    plan: RankPlan,
    group: Group,
) -> Result<Held, Box<dyn Error + Send + Sync>> {
    let ranks = group.size();
    let arena =
        group.arena(&[MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Communication]);
    let groups = Groups::new(group, plan.clone(), Duration::from_secs(60))?;
    let options = EngineOptions { dtype, ..EngineOptions::default() };
    let mut engine = Engine::builder(model, plan).options(options).groups(groups).build(&arena)?;
    engine.initialize(1)?;
    let ids: [u32; SEQ_LEN] = std::array::from_fn(|token| token as u32 * 7 % 256);
    let batch = HostBatch {
        ids: &ids,
        labels: &ids.map(u32::cast_signed),
        positions: &std::array::from_fn::<u32, SEQ_LEN, _>(|token| token as u32),
        document_starts: &[0; SEQ_LEN],
        sample_numbers: &[0],
        inputs: &[],
    };
    let seed = Seed::of_tokens(1.0 / (ranks * SEQ_LEN) as f32);
    engine.forward_backward([batch].into_iter(), seed)?;
    engine.finish_gradients()?;
    engine.update(&Update { learning_rate: 1e-3, weight_decay: 0.1, gradient_scale: 1.0, step: 1 })?;
    let elements = engine.trained_ids().map(|id| engine.records()[id.0].elements()).sum();
    Ok(Held { elements, memory: arena.in_use() })
}

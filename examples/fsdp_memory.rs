//! Memory of DDP and FSDP: GPT-2 with 24 layers (355 million parameters), trained for two steps under data parallelism and
//! each of ZeRO's stages. Prints the bytes of each category, the most that any rank booked.
//!
//! ```text
//! cargo run --release --example fsdp_memory -- --nproc_per_node=2
//! cargo run --release --example fsdp_memory -- --nproc_per_node=4 --hidden 256 --seq_len 64
//! ```
//!
//! `--json` prints the table as JSON; `benches/peers/compare_memory.py` sets PyTorch's DDP and FSDP beside it.

use std::process::ExitCode;

use lockstep::{
    Degrees, Engine, Error, MemoryCategory, MicroBatch, ModelConfig, Plan, Settings, World, arguments,
};
use serde_json::{Map, Value as Json, json};

/// Name, ZeRO stage, and whether the ranks are shards of one model state or replicas.
const LAYOUTS: [(&str, u8); 4] = [("DDP", 0), ("ZeRO 1", 1), ("ZeRO 2", 2), ("FSDP (ZeRO 3)", 3)];
const CATEGORIES: [MemoryCategory; 6] = [
    MemoryCategory::Parameters,
    MemoryCategory::Gradients,
    MemoryCategory::Optimizer,
    MemoryCategory::Activations,
    MemoryCategory::Communication,
    MemoryCategory::Workspace,
];

type Problem = Box<dyn std::error::Error + Send + Sync>;

/// Returns the number after a flag of the command line.
fn number(flag: &str, default: usize) -> Result<usize, Problem> {
    let given = arguments();
    let Some(pair) = given.windows(2).find(|pair| pair[0] == flag) else { return Ok(default) };
    pair[1].parse().map_err(|_| format!("{flag} takes a number, not {}", pair[1]).into())
}

fn model(hidden: usize) -> Result<ModelConfig, Error> {
    let config = json!({
        "model_type": "gpt2", "n_layer": 24, "n_embd": hidden, "n_head": hidden / 64, "n_positions": 1024, "vocab_size": 50257,
        "activation_function": "gelu_new", "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
    });
    Ok(ModelConfig::from_json_text(&config.to_string(), "the example")?)
}

/// Trains two steps under a layout, and returns the peak of each category and of all together in MB, the maximum over ranks.
fn peaks(world: &World, stage: u8) -> Result<Vec<f64>, Problem> {
    let seq_len = number("--seq_len", 128)?;
    let plan = Plan {
        mesh: match stage {
            0 => Degrees { replicate: world.size(), ..Degrees::default() },
            _ => Degrees { shard: world.size(), ..Degrees::default() },
        },
        zero_stage: stage,
        ..Plan::default()
    };
    let settings = Settings { plan, global_batch: world.size(), seq_len, ..Settings::default() };
    let mut engine = Engine::new(world, model(number("--hidden", 1024)?)?, settings)?;
    for step in 0..2 {
        let batches: Vec<MicroBatch> = engine.shard().map(|range| tokens(step, range, seq_len)).collect();
        engine.forward_backward(&batches)?;
        engine.step(1e-4)?;
    }
    let memory = engine.memory();
    let bytes = CATEGORIES.map(|category| memory.peak[category]).into_iter().chain([memory.peak_bytes]);
    bytes.map(|bytes| Ok(world.maximum(bytes as f64)? / 1e6)).collect()
}

/// Returns one sequence for each position of `range`.
fn tokens(step: usize, range: std::ops::Range<usize>, seq_len: usize) -> MicroBatch {
    let sequences = range.len();
    let token = |at: usize| (at * 7919 + step * 31 + range.start) % 50_257;
    MicroBatch {
        ids: (0..sequences * seq_len).map(|at| token(at) as u32).collect(),
        labels: (0..sequences * seq_len).map(|at| token(at + 1) as i32).collect(),
        positions: (0..sequences * seq_len).map(|at| (at % seq_len) as u32).collect(),
        document_starts: vec![0; sequences * seq_len],
        sample_numbers: range.map(|sample| sample as u64).collect(),
        inputs: Vec::new(),
        skipped: 0,
        sequences,
        seq_len,
    }
}

fn compare(world: &World) -> Result<(), Problem> {
    let is_json = arguments().iter().any(|argument| argument == "--json");
    let mut table = Vec::new();
    for (name, stage) in LAYOUTS {
        let peaks = peaks(world, stage)?;
        if !world.is_first() {
            continue;
        }
        let names = CATEGORIES.map(|category| category.to_string()).into_iter().chain(["all".to_owned()]);
        if !is_json && table.is_empty() {
            print!("{:<16}", format!("MB on {} ranks", world.size()));
            names.clone().for_each(|name| print!("{name:>15}"));
            println!();
        }
        if !is_json {
            print!("{name:<16}");
            peaks.iter().for_each(|peak| print!("{peak:>15.1}"));
            println!();
        }
        let peaks = names.zip(peaks.iter().map(|peak| json!(peak)));
        table.push(peaks.chain([("layout".to_owned(), json!(name))]).collect::<Map<String, Json>>());
    }
    if world.is_first() && is_json {
        println!("{}", json!(table));
    }
    Ok(())
}

fn main() -> ExitCode {
    lockstep::launch(compare)
}

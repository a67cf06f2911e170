//! A run from a plan file: `lockstep plan -o plan.json` writes one, a person may edit it, and the engine executes it as it
//! stands. Each rank's memory is compared with what the plan predicts.
//!
//! ```text
//! cargo run --release --example from_plan -- --nproc_per_node=2 --plan plan.json
//! ```
//!
//! Without `--plan` it writes a plan of its own first: ZeRO 3 over all ranks, with every block recomputed.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lockstep::{Degrees, Engine, Error, MicroBatch, ModelConfig, Plan, Recompute, Settings, World};

const SEQ_LEN: usize = 64;
const GLOBAL_BATCH: usize = 8;

fn train(world: &World) -> Result<(), Error> {
    let path = plan_file(world)?;
    let text = read(&path)?;
    let plan = Plan::from_json(&text)?;
    let model = ModelConfig::preset("llama-15m")?;
    let settings = Settings { plan, global_batch: GLOBAL_BATCH, seq_len: SEQ_LEN, ..Settings::default() };
    let mut engine = Engine::new(world, model, settings)?;
    if world.is_first() {
        let plan = engine.plan();
        println!("{}: {:?}, micro-batches of {}", path.display(), plan.plan().mesh, plan.micro_batch());
    }
    for step in 0..3 {
        let batches: Vec<MicroBatch> = engine.shard().map(|range| tokens(step, range)).collect();
        let loss = engine.forward_backward(&batches)?;
        engine.step(1e-3)?;
        if world.is_first() {
            println!("step {}: loss {loss:.5}", engine.steps());
        }
    }
    let memory = engine.memory();
    let mb = |bytes: usize| bytes as f64 / 1e6;
    let (rank, predicted, peak) = (world.rank(), mb(memory.predicted.total()), mb(memory.peak_bytes));
    println!("rank {rank}: {predicted:.1} MB predicted, {peak:.1} MB at most");
    Ok(())
}

/// Returns the path of the plan, which rank 0 writes if the arguments name none.
fn plan_file(world: &World) -> Result<PathBuf, Error> {
    let given = lockstep::arguments();
    if let Some(pair) = given.windows(2).find(|pair| pair[0] == "--plan") {
        return Ok(PathBuf::from(&pair[1]));
    }
    let path = Path::new("plan.json");
    if world.is_first() {
        let mesh = Degrees { shard: world.size(), ..Degrees::default() };
        let plan = Plan { mesh, zero_stage: 3, recompute: Recompute::Full.into(), ..Plan::default() };
        std::fs::write(path, plan.to_json()?).map_err(|source| Error::Io { path: path.into(), source })?;
    }
    world.barrier()?;
    Ok(path.to_owned())
}

fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })
}

/// Returns sequences of bytes that count upwards.
fn tokens(step: usize, range: std::ops::Range<usize>) -> MicroBatch {
    let sequences = range.len();
    let all = || range.clone().flat_map(|sample| (0..SEQ_LEN).map(move |at| sample + step + at));
    MicroBatch {
        ids: all().map(|at| (at % 256) as u32).collect(),
        labels: all().map(|at| ((at + 1) % 256) as i32).collect(),
        positions: (0..sequences * SEQ_LEN).map(|at| (at % SEQ_LEN) as u32).collect(),
        document_starts: vec![0; sequences * SEQ_LEN],
        sample_numbers: range.map(|sample| (step * GLOBAL_BATCH + sample) as u64).collect(),
        inputs: Vec::new(),
        skipped: 0,
        sequences,
        seq_len: SEQ_LEN,
    }
}

fn main() -> ExitCode {
    lockstep::launch(train)
}

//! `lockstep bench step|gemm`.

use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, Subcommand, ValueEnum};
use lockstep_engine::{Engine, EngineOptions, HostBatch, Optimizer, Update};
use lockstep_graph::{BlockShape, Recompute};
use lockstep_model::ModelConfig;
use lockstep_plan::{DType, MemoryCategory, random::Philox};
use lockstep_tensor::{Arena, CpuQueue, Gemm, GemmLayout, Kernels, Tensor, Write};
use serde_json::json;

use crate::exit::{FAILED, Failure};
use crate::infer::threads;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Time training steps on random tokens
    Step(StepArguments),
    /// Time the matrix products of a transformer
    Gemm(GemmArguments),
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Precision {
    F32,
    Bf16,
}

impl From<Precision> for DType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::BF16,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct StepArguments {
    /// A preset, such as baby-gpt
    #[arg(long)]
    model: String,
    /// Arithmetic
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    precision: Precision,
    /// Sequences per step
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens per sequence [default: the model's maximum, at most 1024]
    #[arg(long)]
    seq_len: Option<usize>,
    /// Compute threads [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Timed steps, after one that is not counted
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GemmArguments {
    /// Compute threads [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Arithmetic
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    precision: Precision,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Step(arguments) => step(arguments)?,
        Command::Gemm(arguments) => gemm(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Most tokens in one forward, as in training.
const MAX_TOKENS: usize = 1 << 31;

fn step(arguments: &StepArguments) -> Result<(), Failure> {
    let config = ModelConfig::preset(&arguments.model)?;
    let longest = config.max_position_embeddings();
    let seq_len = arguments.seq_len.unwrap_or(longest.min(1024));
    if seq_len == 0 || seq_len > longest {
        return Err(Failure::configuration(format!("--seq-len {seq_len}: allowed is 1 to {longest}")));
    }
    let most_sequences = MAX_TOKENS / seq_len;
    if arguments.batch == 0 || arguments.batch > most_sequences {
        let message = format!("--batch {}: allowed is 1 to {most_sequences}", arguments.batch);
        return Err(Failure::configuration(message));
    }
    if arguments.steps == 0 {
        return Err(Failure::configuration("--steps 0: allowed is 1 or more"));
    }
    let shape = BlockShape { sequences: arguments.batch, seq_len, dtype: arguments.precision.into() };
    let options = EngineOptions {
        shape,
        recompute: Recompute::None,
        optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8 },
        seed: 1337,
        threads: threads(arguments.threads)?,
    };
    let failed = |error: lockstep_engine::EngineError| Failure { message: error.to_string(), code: FAILED };
    let mut engine = Engine::new(&config, options, &Arena::new()).map_err(failed)?;
    engine.initialize(options.seed).map_err(failed)?;
    let tokens = shape.tokens();
    let random = Philox::new(1);
    let (mut losses, mut times_ms) = (Vec::new(), Vec::new());
    for step in 0..=arguments.steps as u64 {
        let ids: Vec<u32> = (0..=tokens as u64)
            .map(|i| random.at(step * (tokens as u64 + 1) + i)[0] % config.vocab_size() as u32)
            .collect();
        let labels: Vec<i32> = ids[1..].iter().map(|&id| id as i32).collect();
        let positions: Vec<u32> = (0..tokens).map(|i| (i % seq_len) as u32).collect();
        let sample_numbers: Vec<u64> = (0..arguments.batch as u64).collect();
        let batch = HostBatch {
            ids: &ids[..tokens],
            labels: &labels,
            positions: &positions,
            sample_numbers: &sample_numbers,
        };
        let begin = Instant::now();
        engine.zero_gradients();
        let loss = engine.accumulate(&batch, 1.0 / tokens as f32) / tokens as f64;
        let norm = engine.finish_gradients();
        engine.update(&Update {
            learning_rate: 3e-4,
            weight_decay: 0.1,
            gradient_scale: (1.0 / (norm + 1e-6)).min(1.0) as f32,
            step: step + 1,
        });
        if step > 0 {
            times_ms.push(begin.elapsed().as_secs_f64() * 1e3);
            losses.push(loss);
        }
    }
    times_ms.sort_by(f64::total_cmp);
    let step_ms = times_ms[times_ms.len() / 2];
    let tokens_per_s = tokens as f64 / step_ms * 1e3;
    let flops = engine.model().training_flops() as f64;
    let peak_rss_bytes = peak_rss_bytes();
    if arguments.json {
        println!(
            "{}",
            json!({
                "tokens_per_s": tokens_per_s, "step_ms": step_ms, "peak_rss_bytes": peak_rss_bytes, "loss": losses,
                "flops_per_s": flops / step_ms * 1e3, "level": engine.queue().level().to_string(),
            })
        );
    } else {
        println!(
            "{} {} {} x {seq_len}, {} threads, {}: {tokens_per_s:.0} tokens/s, {step_ms:.1} ms a step, {:.1} GFLOP/s",
            arguments.model,
            shape.dtype,
            arguments.batch,
            options.threads,
            engine.queue().level(),
            flops / step_ms / 1e6,
        );
    }
    Ok(())
}

/// The most memory this process ever had resident; 0 where the system does not say.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}

/// (name, m, n, k): the products of `baby-gpt` (8 × 256) and `gpt2-124m` (2 × 512), as a linear layer sees them.
const SHAPES: [(&str, usize, usize, usize); 6] = [
    ("baby-gpt projection", 2048, 384, 384),
    ("baby-gpt feed-forward", 2048, 1536, 384),
    ("gpt2-124m projection", 1024, 768, 768),
    ("gpt2-124m feed-forward", 1024, 3072, 768),
    ("gpt2-124m output layer", 1024, 50257, 768),
    ("square", 1024, 1024, 1024),
];

fn gemm(arguments: &GemmArguments) -> Result<(), Failure> {
    let failed = |error: lockstep_tensor::TensorError| Failure { message: error.to_string(), code: FAILED };
    let arena = Arena::new();
    let queue = CpuQueue::new(threads(arguments.threads)?, &arena).map_err(failed)?;
    let dtype = DType::from(arguments.precision);
    let mut rows = Vec::new();
    for (name, m, n, k) in SHAPES {
        for layout in [GemmLayout::NT, GemmLayout::NN, GemmLayout::TN] {
            // The forward, the gradient of the input, and the gradient of the weight of one layer.
            let ((m, n, k), out) = match layout {
                GemmLayout::NT => ((m, n, k), dtype),
                GemmLayout::NN => ((m, k, n), dtype),
                GemmLayout::TN => ((n, k, m), DType::F32),
            };
            let tensor =
                |dtype, shape: [usize; 2]| Tensor::zeros(&arena, dtype, shape, MemoryCategory::Workspace);
            let a = tensor(dtype, if layout == GemmLayout::TN { [k, m] } else { [m, k] }).map_err(failed)?;
            let b = tensor(dtype, if layout == GemmLayout::NT { [n, k] } else { [k, n] }).map_err(failed)?;
            let c = tensor(out, [m, n]).map_err(failed)?;
            let call =
                Gemm { layout, a: a.view(), b: b.view(), c: c.view(), bias: None, write: Write::Overwrite };
            let mut best_s = f64::INFINITY;
            for _ in 0..5 {
                let begin = Instant::now();
                queue.gemm(call);
                best_s = best_s.min(begin.elapsed().as_secs_f64());
            }
            let gflops = 2.0 * m as f64 * n as f64 * k as f64 / best_s / 1e9;
            rows.push(json!({
                "name": name, "layout": format!("{layout:?}"), "m": m, "n": n, "k": k, "dtype": dtype.to_string(),
                "ms": best_s * 1e3, "gflops": gflops,
            }));
            if !arguments.json {
                println!(
                    "{name:24} {layout:?} {m:>6} x {n:>6} x {k:>6}  {:>9.3} ms  {gflops:>8.1} GFLOP/s",
                    best_s * 1e3
                );
            }
        }
    }
    if arguments.json {
        println!("{}", json!(rows));
    }
    Ok(())
}

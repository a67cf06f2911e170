//! `lockstep bench step|gemm|collectives`.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use lockstep_graph::BlockShape;
use lockstep_model::ModelConfig;
use lockstep_plan::DType;
use lockstep_train::benchmark::{GemmTime, StepTimes, time_gemms, time_steps};
use lockstep_train::human;
use lockstep_train::roofline::Detail;
use serde_json::json;

use crate::collectives;
use crate::exit::{FAILED, Failure};
use crate::infer::threads;
use crate::output::say;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Time training steps on random tokens
    Step(StepArguments),
    /// Time the matrix products of a transformer
    Gemm(GemmArguments),
    /// Time operations between ranks of this machine, in the manner of nccl-tests
    Collectives(collectives::Arguments),
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Precision {
    F32,
    Bf16,
    F16,
}

impl From<Precision> for DType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::BF16,
            Precision::F16 => Self::F16,
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
    /// Show where the time of the median step goes, against what this machine can do at best
    #[arg(long, value_enum, value_name = "DETAIL", num_args = 0..=1, require_equals = true, default_missing_value = "kinds")]
    roofline: Option<RooflineDetail>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RooflineDetail {
    /// One row for each kind of operation
    Kinds,
    /// Linear layers by name
    Layers,
}

impl From<RooflineDetail> for Detail {
    fn from(detail: RooflineDetail) -> Self {
        match detail {
            RooflineDetail::Kinds => Self::Kinds,
            RooflineDetail::Layers => Self::Layers,
        }
    }
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
        Command::Collectives(arguments) => return collectives::run(arguments),
    }
    Ok(ExitCode::SUCCESS)
}

fn step(arguments: &StepArguments) -> Result<(), Failure> {
    let config = ModelConfig::preset(&arguments.model)?;
    let longest = config.max_position_embeddings();
    let seq_len = arguments.seq_len.unwrap_or(longest.min(1024));
    if seq_len == 0 || seq_len > longest {
        return Err(Failure::configuration(format!("--seq-len {seq_len}: allowed is 1 to {longest}")));
    }
    let most_sequences = BlockShape::MAX_TOKENS / seq_len;
    if arguments.batch == 0 || arguments.batch > most_sequences {
        let message = format!("--batch {}: allowed is 1 to {most_sequences}", arguments.batch);
        return Err(Failure::configuration(message));
    }
    if arguments.steps == 0 {
        return Err(Failure::configuration("--steps 0: allowed is 1 or more"));
    }
    let shape = BlockShape { sequences: arguments.batch, seq_len, dtype: arguments.precision.into() };
    let threads = threads(arguments.threads)?;
    let times = time_steps(&config, shape, threads, arguments.steps, arguments.roofline.map(Detail::from))
        .map_err(|error| Failure { message: error.to_string(), code: FAILED })?;
    let StepTimes { level, step_ms, tokens_per_s, flops_per_s, losses, roofline, .. } = times;
    if arguments.json {
        let mut document = json!({
            "tokens_per_s": tokens_per_s, "step_ms": step_ms, "peak_rss_bytes": peak_rss_bytes(), "loss": losses,
            "flops_per_s": flops_per_s, "level": level.to_string(),
        });
        if let Some(roofline) = roofline {
            document["roofline"] = json!(roofline);
        }
        say!("{document}");
    } else {
        say!(
            "{} {} {} x {seq_len}, {}, {level}: {tokens_per_s:.0} tokens/s, {step_ms:.1} ms a step, {:.1} GFLOP/s",
            arguments.model,
            shape.dtype,
            arguments.batch,
            human::plural(threads, "thread"),
            flops_per_s / 1e9,
        );
        if let Some(roofline) = roofline {
            say!("{roofline}");
        }
    }
    Ok(())
}

/// The most memory this process ever had resident; 0 where the system does not say.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}

fn gemm(arguments: &GemmArguments) -> Result<(), Failure> {
    let dtype = DType::from(arguments.precision);
    let mut rows = Vec::new();
    time_gemms(dtype, threads(arguments.threads)?, |time| {
        let GemmTime { name, layout, m, n, k, ms, gflops, peak_gflops } = time;
        let share_of_peak = gflops / peak_gflops;
        rows.push(json!({
            "name": name, "layout": format!("{layout:?}"), "m": m, "n": n, "k": k, "dtype": dtype.to_string(),
            "ms": ms, "gflops": gflops, "share_of_peak": share_of_peak,
        }));
        if !arguments.json {
            say!("{name:24} {layout:?} {m:>6} x {n:>6} x {k:>6}  {ms:>9.3} ms  {gflops:>8.1} GFLOP/s  {:>4.0} %", 100.0 * share_of_peak);
        }
    })
    .map_err(|error| Failure { message: error.to_string(), code: FAILED })?;
    if arguments.json {
        say!("{}", json!(rows));
    }
    Ok(())
}

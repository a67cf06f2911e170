//! `lockstep bench step|generate|gemm|collectives|pipeline|machine`.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use lockstep_comm::TransportKind;
use lockstep_config::plan::{check, checked_plan};
use lockstep_config::{
    NamedModel, RunConfig, find_model, human, offload_to_existing_directory, resolve_model,
};
use lockstep_engine::Ranks;
use lockstep_graph::BlockShape;
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::{JoinOptions, is_launched, started_group};
use lockstep_model::Tuning;
use lockstep_observe::metrics::{CommunicationUse, DiskUse};
use lockstep_observe::roofline::Detail;
use lockstep_plan::DType;
use lockstep_planner::fit::require_for_benchmark;
use lockstep_tensor::CpuLevel;
use lockstep_tensor::cpu::{Peak, measure_peak};
use lockstep_train::benchmark::{
    GemmTime, StepBenchmark, StepTimes, benchmark_model, time_gemms, time_steps,
};
use lockstep_train::ranks_of_model;
use serde_json::json;

use crate::exit::{FAILED, Failure};
use crate::output::say;
use crate::thread_count::threads;
use crate::{bench_generate, collectives, measured, pipelines, ranks};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Time training steps on random tokens
    Step(StepArguments),
    /// Time a prompt and the tokens after it, on random token ids
    Generate(Box<bench_generate::Arguments>),
    /// Time the matrix products of a transformer
    Gemm(GemmArguments),
    /// Time collectives between ranks of this machine, in the manner of nccl-tests
    Collectives(collectives::Arguments),
    /// Compare pipeline schedules with their simulation: real ranks and messages, compute replaced by sleeping
    Pipeline(pipelines::Arguments),
    /// Measure this machine in half a minute, and write it as a cluster file for `lockstep plan --cluster`
    Machine(measured::Arguments),
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
    /// A preset, such as baby-gpt, a directory, a checkpoint, or a repository of Hugging Face (org/name)
    #[arg(long, value_name = "MODEL")]
    model: String,
    /// Arithmetic of the model: f32, bf16 or f16
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    precision: Precision,
    /// Sequences in a micro-batch of a replica
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Micro-batches of a replica in a step
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// Ranks on this machine: a number, or auto (one for each memory node if there are several, otherwise for each core)
    #[arg(long, value_name = "N|auto", default_value = "1", value_parser = ranks::number)]
    nproc_per_node: usize,
    /// Parallelism and changes of the model, as in a run's configuration: --set parallel.tensor_parallel=2 --set
    /// model.n_positions=4096; the remaining ranks are replicas
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    settings: Vec<String>,
    /// Tokens per sequence [default: the model's maximum, at most 1024]
    #[arg(long)]
    seq_len: Option<usize>,
    /// Compute threads of a rank [default: all cores, or its share of them]
    #[arg(long)]
    threads: Option<usize>,
    /// Timed steps, after one that is not counted
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Show the time of the median step by operation, compared with the limits of this machine
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
    /// Arithmetic of the products: f32, bf16 or f16
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    precision: Precision,
    /// Time the kernels of every level that this CPU has, each beside the measured limit of its instructions
    #[arg(long)]
    peaks: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Step(arguments) => step(arguments),
        Command::Generate(arguments) => bench_generate::run(arguments),
        Command::Gemm(arguments) => gemm(arguments).map(|()| ExitCode::SUCCESS),
        Command::Collectives(arguments) => collectives::run(arguments),
        Command::Pipeline(arguments) => pipelines::run(arguments),
        Command::Machine(arguments) => measured::run(arguments).map(|()| ExitCode::SUCCESS),
    }
}

/// Returns the configuration of a benchmark: the given settings, with the remaining ranks as replicas.
fn layout(
    arguments: &StepArguments,
    model: &NamedModel,
    said: &RunConfig,
    seq_len: usize,
) -> Result<RunConfig, Failure> {
    let ranks = arguments.nproc_per_node.max(said.ranks());
    let parts = said.replicas_of(ranks)? * said.plan.mesh.shard;
    let batch = [
        format!("train.global_batch={}", parts * arguments.batch * arguments.accumulation),
        format!("train.micro_batch={}", arguments.batch),
        format!("train.seq_len={seq_len}"),
        model.setting(),
        said.setting_for_ranks(ranks)?,
    ];
    let mut config = settings(&[&arguments.settings[..], &batch].concat())?;
    offload_to_existing_directory(&mut config);
    // Reports an invalid layout before ranks are started.
    resolve_model(&config)?;
    Ok(config)
}

fn settings(settings: &[String]) -> Result<RunConfig, Failure> {
    Ok(RunConfig::parse("", "lockstep bench step", settings).map_err(lockstep_train::Error::from)?)
}

fn step(arguments: &StepArguments) -> Result<ExitCode, Failure> {
    let said = settings(&arguments.settings)?;
    let named = find_model(&arguments.model)?;
    let model = benchmark_model(&named, &said)?;
    let longest = model.max_position_embeddings();
    let seq_len = arguments.seq_len.unwrap_or(longest.min(1024));
    if seq_len == 0 || seq_len > longest {
        return Err(Failure::configuration(format!("--seq-len {seq_len}: allowed is 1 to {longest}")));
    }
    let most_sequences = BlockShape::MAX_TOKENS / seq_len;
    if arguments.batch == 0 || arguments.batch > most_sequences {
        let message = format!("--batch {}: allowed is 1 to {most_sequences}", arguments.batch);
        return Err(Failure::configuration(message));
    }
    for (name, value) in [("steps", arguments.steps), ("accumulation", arguments.accumulation)] {
        if value == 0 {
            return Err(Failure::configuration(format!("--{name} 0: allowed is 1 or more")));
        }
    }
    let config = layout(arguments, &named, &said, seq_len)?;
    let threads = threads(arguments.threads)?;
    let benchmark_of = |config: &RunConfig| -> Result<StepBenchmark, lockstep_config::Error> {
        Ok(StepBenchmark {
            plan: checked_plan(config, &model, &Tuning::default())?,
            options: StepBenchmark::engine_options(config, arguments.precision.into(), threads),
            steps: arguments.steps,
            roofline: arguments.roofline.map(Detail::from),
        })
    };
    if !is_launched() {
        require_for_benchmark(&config, &|config| {
            check(config)?;
            benchmark_of(config)?.forecast(config, &model)
        })?;
    }
    let benchmark = benchmark_of(&config)?;
    let ranks = match started_group(JoinOptions::default()).map_err(|error| ranks::told_by(error, 0))? {
        Some(group) => ranks_of_model(group, &config, &model, &Tuning::default())?,
        None if config.ranks() > 1 => {
            let start = ranks::Start::here(config.ranks(), TransportKind::Auto)?;
            return ranks::run(start, &Interrupt::default());
        }
        None => Ranks::alone(),
    };
    let times =
        time_steps(&model, &benchmark, &ranks).map_err(|error| ranks::told_by(error, ranks.rank()))?;
    if ranks.is_first() {
        show(arguments, &benchmark, &ranks, &times);
    }
    Ok(ExitCode::SUCCESS)
}

fn show(arguments: &StepArguments, benchmark: &StepBenchmark, ranks: &Ranks, times: &StepTimes) {
    let StepTimes { level, step_ms, tokens_per_s, flops_per_s, losses, peak_bytes, comm, roofline, .. } =
        times;
    let StepTimes { memory_by_rank, memory_predicted_by_rank, disk, disk_in_passes, update_ms, .. } = times;
    if arguments.json {
        let mut document = json!({
            "tokens_per_s": tokens_per_s, "step_ms": step_ms, "peak_rss_bytes": peak_bytes, "loss": losses,
            "flops_per_s": flops_per_s, "level": level.to_string(), "ranks": ranks.size(), "comm": comm,
            "memory_by_rank": memory_by_rank, "memory_predicted_by_rank": memory_predicted_by_rank,
            "update_ms": update_ms,
        });
        if let Some(disk) = disk {
            document["disk"] = json!(disk);
            document["disk_in_passes"] = json!(disk_in_passes);
        }
        if let Some(roofline) = roofline {
            document["roofline"] = json!(roofline);
        }
        say!("{document}");
        return;
    }
    let BlockShape { sequences, seq_len, dtype } = benchmark.shape();
    let times_of = |number: usize, thing: &str| match number {
        1 => String::new(),
        number => format!("{} x ", human::plural(number, thing)),
    };
    say!(
        "{} {dtype} {}{}{sequences} x {seq_len}, {}, {level}: {tokens_per_s:.0} tokens/s, {step_ms:.1} ms a step, {:.1} GFLOP/s",
        arguments.model,
        times_of(ranks.size(), "rank"),
        times_of(benchmark.accumulation(), "micro-batch"),
        human::plural(benchmark.options.threads, "thread"),
        flops_per_s / 1e9,
    );
    if ranks.size() > 1 {
        let CommunicationUse { bytes, busy_ms, exposed_ms } = *comm;
        say!(
            "between ranks: {} a step, {busy_ms:.1} ms busy, {exposed_ms:.1} ms exposed",
            human::bytes(bytes)
        );
    }
    let sum = |bytes: &mut dyn Iterator<Item = usize>| human::bytes(bytes.sum::<usize>() as u64);
    say!(
        "memory: {} predicted, {} booked, {} of processes (PSS)",
        sum(&mut memory_predicted_by_rank.iter().map(|memory| memory.0.total())),
        sum(&mut memory_by_rank.iter().map(|memory| memory.by_category.total())),
        sum(&mut memory_by_rank.iter().map(|memory| memory.process_pss)),
    );
    if let Some(DiskUse { bytes, read_bytes, written_bytes, .. }) = *disk {
        let moved = read_bytes + written_bytes;
        let of_update = format!(
            "; the update reads {} and writes {} in {update_ms:.1} ms, {:.2} GB/s",
            human::bytes(read_bytes),
            human::bytes(written_bytes),
            moved as f64 / update_ms / 1e6,
        );
        say!("on disk: {}{}", human::bytes(bytes), if moved > 0 { of_update } else { String::new() });
    }
    if let Some(DiskUse { read_bytes, written_bytes, exposed_ms, .. }) =
        disk_in_passes.filter(|disk| disk.read_bytes + disk.written_bytes > 0)
    {
        say!(
            "forwards and backwards read {} and write {} there, and wait {exposed_ms:.1} ms for it",
            human::bytes(read_bytes),
            human::bytes(written_bytes),
        );
    }
    if let Some(roofline) = roofline {
        say!("{roofline}");
    }
}

fn gemm(arguments: &GemmArguments) -> Result<(), Failure> {
    let (dtype, threads) = (DType::from(arguments.precision), threads(arguments.threads)?);
    let levels: Vec<_> = match arguments.peaks {
        true => CpuLevel::available().collect(),
        false => vec![CpuLevel::detect()],
    };
    let peaks: Vec<_> = levels.into_iter().map(|level| (level, measure_peak(level, threads))).collect();
    if arguments.peaks && !arguments.json {
        say!("measured limits on {threads} threads, GFLOP/s without memory traffic:");
        for (level, Peak { f32_gflops, bf16_gflops }) in &peaks {
            say!("{level:16} f32 {f32_gflops:>8.1}   bf16 {bf16_gflops:>8.1}");
        }
    }
    let mut rows = Vec::new();
    for (level, peak) in &peaks {
        if arguments.peaks && !arguments.json {
            say!("\n{dtype} by the kernels of {level}:");
        }
        time_gemms(dtype, *level, threads, |time| {
            let GemmTime { name, layout, m, n, k, ms, gflops } = time;
            let share_of_peak = gflops / peak.gflops(dtype);
            rows.push(json!({
                "name": name, "layout": format!("{layout:?}"), "m": m, "n": n, "k": k, "dtype": dtype.to_string(),
                "level": level.word(), "ms": ms, "gflops": gflops, "share_of_peak": share_of_peak,
            }));
            if !arguments.json {
                let share = 100.0 * share_of_peak;
                say!("{name:24} {layout:?} {m:>6} x {n:>6} x {k:>6}  {ms:>9.3} ms  {gflops:>8.1} GFLOP/s  {share:>4.0} %");
            }
        })
        .map_err(|error| Failure { message: error.to_string(), code: FAILED })?;
    }
    if arguments.json && arguments.peaks {
        let peaks = peaks.iter().map(|(level, Peak { f32_gflops, bf16_gflops })| {
            json!({ "level": level.word(), "f32_gflops": f32_gflops, "bf16_gflops": bf16_gflops })
        });
        say!("{}", json!({ "peaks": peaks.collect::<Vec<_>>(), "products": rows }));
    } else if arguments.json {
        say!("{}", json!(rows));
    }
    Ok(())
}

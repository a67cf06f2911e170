//! `lockstep bench generate`: the times of a prompt and of the tokens after it, on random token ids.

use std::{ops::ControlFlow, process::ExitCode, time::Instant};

use clap::Args;
use lockstep_config::human;
use lockstep_infer::{
    Batch, InferError, InferencePlan, LoadedModel, NewTokens, PlannedWork, SequenceId, Workload,
};
use lockstep_plan::{DType, KvCacheType, random::Philox};
use lockstep_tensor::host::{peak_resident_bytes, proportional_bytes};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::infer::{KvCacheArguments, ModelArguments};
use crate::output::say;
use crate::placement::{Placed, PlacedModel};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    kv_cache: KvCacheArguments,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one())]
    prompt_tokens: u64,
    /// Tokens generated after it, one at a time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one())]
    new_tokens: u64,
    /// Sequences at a time, of each data-parallel replica
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one())]
    sequences: u64,
    /// Runs; the fastest of each time counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one())]
    repeats: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

fn at_least_one() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..)
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let report = match measure(arguments)? {
        ControlFlow::Continue(report) => report,
        ControlFlow::Break(code) => return Ok(code),
    };
    if arguments.json {
        say!("{}", report.document());
    } else {
        report.print(arguments);
    }
    Ok(ExitCode::SUCCESS)
}

/// Results of all runs.
struct Report {
    ranks: usize,
    replicas: usize,
    threads: usize,
    dtype: DType,
    kv_cache: KvCacheType,
    /// Bytes of the keys and values of a replica's sequences.
    kv_cache_bytes: u64,
    load_ms: f64,
    first_prefill_ms: f64,
    fastest: Run,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    /// Bytes of weights that stay in their files, and of those in memory.
    weight_bytes: [usize; 2],
    /// Bandwidth of reads of weights by one sequence.
    weights_gb_per_s: f64,
    /// Placement under limits on memory.
    placed: Option<Placed>,
    pss_bytes: u64,
    peak_rss_bytes: u64,
    /// Bandwidth of the disk while nothing runs, if weights are on it.
    disk_alone_gb_per_s: Option<f64>,
}

/// Measures a model. Breaks with the exit code of the ranks that this process has started.
fn measure(arguments: &Arguments) -> Result<ControlFlow<ExitCode, Report>, Failure> {
    let mut found = arguments.model.find()?;
    found.options.kv_cache = arguments.kv_cache.stored();
    let ranks = match arguments.model.join(&mut found, PlannedWork::Generation)? {
        ControlFlow::Continue(ranks) => ranks,
        ControlFlow::Break(code) => return Ok(ControlFlow::Break(code)),
    };
    let world_size = ranks.size();
    let context = arguments.context();
    let workload = Workload::Generation { sequences: arguments.sequences as usize, context };
    let plan = found.plan(workload, &ranks)?;
    // Ranks that read at the same time would measure each other.
    let alone = plan.as_ref().filter(|_| world_size == 1);
    let before = read_alone(alone)?;
    let start = Instant::now();
    let PlacedModel { model, placed } = found.load(workload, ranks)?;
    let load_ms = milliseconds(start);
    let first = time_run(&model, arguments)?;
    let first_prefill_ms = first.prefill_ms;
    let mut runs = (1..arguments.repeats).map(|_| time_run(&model, arguments));
    let fastest = runs.try_fold(first, |best, run| run.map(|run| best.fastest(&run)))?;
    let sequences = arguments.sequences * model.ranks().replicas() as u64;
    let tokens_per_s = |tokens: u64, ms: f64| (sequences * tokens) as f64 * 1e3 / ms;
    let decode_tokens_per_s = tokens_per_s(arguments.new_tokens, fastest.decode_ms);
    let weight_bytes = weight_bytes_of_all(&model)?;
    let weights = match &placed {
        Some(placed) => placed.weights.iter().sum(),
        None => weight_bytes.iter().sum::<usize>() as u64,
    };
    let mut report = Report {
        ranks: world_size,
        threads: model.threads(),
        dtype: model.dtype(),
        kv_cache: model.kv_cache(),
        replicas: model.ranks().replicas(),
        kv_cache_bytes: cache_bytes_of_replica(&model, arguments)?,
        load_ms,
        first_prefill_ms,
        prefill_tokens_per_s: tokens_per_s(arguments.prompt_tokens, fastest.prefill_ms),
        decode_tokens_per_s,
        fastest,
        weight_bytes,
        weights_gb_per_s: weights as f64 * decode_tokens_per_s / sequences as f64 / 1e9,
        placed,
        pss_bytes: proportional_bytes(),
        peak_rss_bytes: peak_resident_bytes(),
        disk_alone_gb_per_s: None,
    };
    // Under a limit there is no room for the model and the buffers of another measurement.
    drop(model);
    if let Some(before) = before {
        let after = read_alone(alone)?.unwrap_or(before);
        report.disk_alone_gb_per_s = Some((before + after) / 2.0);
    }
    Ok(ControlFlow::Continue(report))
}

impl Arguments {
    /// Returns the tokens of a sequence.
    fn context(&self) -> usize {
        (self.prompt_tokens + self.new_tokens) as usize
    }
}

impl Report {
    fn document(&self) -> Value {
        let [in_place, converted] = self.weight_bytes;
        json!({
            "dtype": self.dtype.to_string(), "kv_cache": self.kv_cache.to_string(), "kv_cache_bytes": self.kv_cache_bytes,
            "ranks": self.ranks, "replicas": self.replicas, "threads": self.threads, "load_ms": self.load_ms, "first_prefill_ms": self.first_prefill_ms,
            "prefill_ms": self.fastest.prefill_ms, "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s, "weights_in_place_bytes": in_place,
            "weights_converted_bytes": converted, "weights_gb_per_s": self.weights_gb_per_s,
            "peak_rss_bytes": self.peak_rss_bytes, "pss_bytes": self.pss_bytes,
            "predicted_bytes": self.placed.as_ref().map(|placed| placed.predicted_bytes),
            "disk_gb_per_s": self.fastest.read_gb_per_s, "disk_alone_gb_per_s": self.disk_alone_gb_per_s,
        })
    }

    fn print(&self, arguments: &Arguments) {
        let several = self.ranks > 1;
        let of_ranks = if several { format!("{} ranks of ", self.ranks) } else { String::new() };
        let of_ranks =
            if self.replicas > 1 { format!("{} replicas on {of_ranks}", self.replicas) } else { of_ranks };
        let (model, threads) = (&arguments.model.model, human::plural(self.threads, "thread"));
        say!("{model} {}, cache {}, {of_ranks}{threads}", self.dtype, self.kv_cache);
        let load_ms = self.load_ms;
        match &self.placed {
            Some(placed) => {
                let [resident, on_disk] = placed.weights.map(human::bytes);
                say!("weights: {resident} in memory, {on_disk} on disk; loaded in {load_ms:.0} ms");
            }
            None => {
                let [in_place, converted] = self.weight_bytes.map(|bytes| human::bytes(bytes as u64));
                say!("weights: {in_place} in place, {converted} converted; opened in {load_ms:.0} ms");
            }
        }
        say!("keys and values of {} tokens: {}", arguments.context(), human::bytes(self.kv_cache_bytes));
        say!(
            "prompt of {}: {:.1} tokens/s ({:.0} ms at first)",
            arguments.prompt_tokens,
            self.prefill_tokens_per_s,
            self.first_prefill_ms
        );
        say!(
            "then {}: {:.2} tokens/s, {:.1} GB/s of weights",
            arguments.new_tokens,
            self.decode_tokens_per_s,
            self.weights_gb_per_s
        );
        if let Some(alone) = self.disk_alone_gb_per_s {
            let read = self.fastest.read_gb_per_s;
            let percent = 100.0 * read / alone;
            say!(
                "read from disk meanwhile: {read:.2} GB/s, {percent:.0} % of {alone:.2} GB/s without a model"
            );
        }
        let of_which = if several { " of the first rank" } else { "" };
        if let Some(placed) = &self.placed {
            let (found, predicted) = (self.pss_bytes, placed.predicted_bytes);
            let off = 100.0 * (found as f64 / predicted as f64 - 1.0);
            let (found, predicted) = (human::bytes(found), human::bytes(predicted));
            say!("memory of the process (PSS){of_which}: {found}, predicted {predicted} ({off:+.1} %)");
        }
        let peak = human::bytes(self.peak_rss_bytes);
        say!("peak of resident memory{of_which}, pages of mapped files included: {peak}");
    }
}

/// Returns the bytes of weights of all ranks that stay in their files, and of those in memory.
fn weight_bytes_of_all(model: &LoadedModel) -> Result<[usize; 2], Failure> {
    let [in_place, converted] = model.weight_bytes();
    let sum = |own: usize| model.ranks().sum_of_all(own as u64).map_err(InferError::from);
    Ok([sum(in_place)? as usize, sum(converted)? as usize])
}

/// Returns the bytes of the keys and values of a replica's sequences, on all of its ranks.
fn cache_bytes_of_replica(model: &LoadedModel, arguments: &Arguments) -> Result<u64, Failure> {
    let own = arguments.sequences * model.kv_cache_bytes(arguments.context());
    let all = model.ranks().sum_of_all(own).map_err(InferError::from)?;
    Ok(all / model.ranks().replicas() as u64)
}

/// Times of one run.
struct Run {
    prefill_ms: f64,
    decode_ms: f64,
    /// Bandwidth of reads of weights during the decoding steps.
    read_gb_per_s: f64,
}

impl Run {
    /// Returns the faster one of each time.
    fn fastest(&self, other: &Self) -> Self {
        Self {
            prefill_ms: self.prefill_ms.min(other.prefill_ms),
            decode_ms: self.decode_ms.min(other.decode_ms),
            read_gb_per_s: self.read_gb_per_s.max(other.read_gb_per_s),
        }
    }
}

fn time_run(model: &LoadedModel, arguments: &Arguments) -> Result<Run, Failure> {
    let Arguments { prompt_tokens, new_tokens, .. } = *arguments;
    let random = Philox::new(0);
    let vocab_size = model.config().vocab_size() as f64;
    let ids: Vec<u32> =
        (0..prompt_tokens + new_tokens).map(|at| (random.uniform(at) * vocab_size) as u32).collect();
    let (prompt, rest) = ids.split_at(prompt_tokens as usize);
    let mut batch = Batch::new(model, arguments.sequences as usize * model.whole_pages(ids.len()))?;
    let sequences: Vec<SequenceId> = (0..arguments.sequences).map(|_| batch.open(ids.len())).collect();
    let mut read = |ids: &[u32]| {
        let tokens = |&sequence| NewTokens { sequence, ids, wants_logits: true };
        batch.read(&sequences.iter().map(tokens).collect::<Vec<_>>()).map(drop)
    };
    // Replicas run at the same time.
    model.ranks().barrier().map_err(InferError::from)?;
    let start = Instant::now();
    prompt.chunks((model.chunk_tokens() / sequences.len()).max(1)).try_for_each(&mut read)?;
    let prefill_ms = slowest_ms(model, start)?;
    let start = Instant::now();
    model.take_disk_traffic();
    rest.chunks(1).try_for_each(&mut read)?;
    let (decode_ms, own_bytes) = (slowest_ms(model, start)?, model.take_disk_traffic().read_bytes);
    let read_bytes = model.ranks().sum_of_all(own_bytes).map_err(InferError::from)?;
    Ok(Run { prefill_ms, decode_ms, read_gb_per_s: read_bytes as f64 / decode_ms / 1e6 })
}

/// Returns the bandwidth, in GB/s, of reads of the model's files while nothing runs; `None` if none of it is on disk.
fn read_alone(plan: Option<&InferencePlan>) -> Result<Option<f64>, Failure> {
    const TIMED_BYTES: usize = 1 << 30;
    let Some(plan) = plan.filter(|plan| plan.read_bytes(1) > 0) else { return Ok(None) };
    Ok(plan.measure_disk(TIMED_BYTES)?.map(|bytes_per_s| bytes_per_s / 1e9))
}

/// Returns the milliseconds since `start` on the rank that took longest.
fn slowest_ms(model: &LoadedModel, start: Instant) -> Result<f64, Failure> {
    let nanoseconds = start.elapsed().as_nanos() as u64;
    let all = model.ranks().all_numbers(nanoseconds).map_err(InferError::from)?;
    Ok(all.into_iter().max().unwrap_or_default() as f64 / 1e6)
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

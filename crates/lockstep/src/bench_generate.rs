//! `lockstep bench generate`: the times of a prompt and of the tokens after it, on random token ids.

use std::{process::ExitCode, time::Instant};

use clap::Args;
use lockstep_config::human;
use lockstep_infer::{Generator, LoadedModel};
use lockstep_plan::random::Philox;
use lockstep_tensor::host::peak_resident_bytes;
use serde_json::json;

use crate::exit::Failure;
use crate::infer::ModelArguments;
use crate::output::say;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one())]
    prompt_tokens: u64,
    /// Tokens generated after it, one at a time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one())]
    new_tokens: u64,
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
    let start = Instant::now();
    let model = arguments.model.open()?;
    let load_ms = milliseconds(start);
    let [mut first_ms, mut prefill_ms, mut decode_ms] = [f64::INFINITY; 3];
    for _ in 0..arguments.repeats {
        let run = time_run(&model, arguments)?;
        if first_ms.is_infinite() {
            first_ms = run.prefill_ms;
        }
        (prefill_ms, decode_ms) = (prefill_ms.min(run.prefill_ms), decode_ms.min(run.decode_ms));
    }
    let [in_place, converted] = model.weight_bytes();
    let tokens_per_s = |tokens: u64, ms: f64| tokens as f64 * 1e3 / ms;
    let prefill = tokens_per_s(arguments.prompt_tokens, prefill_ms);
    let decode = tokens_per_s(arguments.new_tokens, decode_ms);
    let weights_gb_per_s = (in_place + converted) as f64 * decode / 1e9;
    let (dtype, threads, peak) = (model.dtype(), model.threads(), peak_resident_bytes());
    if arguments.json {
        say!(
            "{}",
            json!({
                "dtype": dtype.to_string(), "threads": threads, "load_ms": load_ms, "first_prefill_ms": first_ms,
                "prefill_ms": prefill_ms, "prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode,
                "weights_in_place_bytes": in_place, "weights_converted_bytes": converted,
                "weights_gb_per_s": weights_gb_per_s, "peak_rss_bytes": peak,
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    let bytes = |bytes: usize| human::bytes(bytes as u64);
    say!("{} {dtype}, {}", arguments.model.model, human::plural(threads, "thread"));
    say!("weights: {} in place, {} converted; opened in {load_ms:.0} ms", bytes(in_place), bytes(converted));
    say!("prompt of {}: {prefill:.1} tokens/s ({first_ms:.0} ms at first)", arguments.prompt_tokens);
    say!("then {}: {decode:.2} tokens/s, {weights_gb_per_s:.1} GB/s of weights", arguments.new_tokens);
    say!("peak of resident memory, pages of mapped files included: {}", human::bytes(peak));
    Ok(ExitCode::SUCCESS)
}

/// Times of one run.
struct Run {
    prefill_ms: f64,
    decode_ms: f64,
}

fn time_run(model: &LoadedModel, arguments: &Arguments) -> Result<Run, Failure> {
    let Arguments { prompt_tokens, new_tokens, .. } = *arguments;
    let random = Philox::new(0);
    let vocab_size = model.config().vocab_size() as f64;
    let ids: Vec<u32> =
        (0..prompt_tokens + new_tokens).map(|at| (random.uniform(at) * vocab_size) as u32).collect();
    let (prompt, rest) = ids.split_at(prompt_tokens as usize);
    let mut generator = Generator::new(model, ids.len())?;
    let start = Instant::now();
    generator.read(prompt)?;
    let prefill_ms = milliseconds(start);
    let start = Instant::now();
    for &id in rest {
        generator.step(id)?;
    }
    Ok(Run { prefill_ms, decode_ms: milliseconds(start) })
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

//! `lockstep verify`: compares a plan's numbers with those of one rank.

use std::process::ExitCode;

use clap::Args;
use lockstep_config::plan::check;
use lockstep_config::{DataSource, Origin, Precision, RunConfig, Transport, human, resolve_model};
use lockstep_engine::Ranks;
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::{is_launched, started_group};
use lockstep_plan::{Quantization, QuantizedType, TensorDimensions};
use lockstep_planner::fit::require;
use lockstep_planner::{Forecast, residence_in_words};
use lockstep_train::ranks_of;
use lockstep_train::verify::{
    ComparedGradient, ComparedStep, Comparison, NARROW_FACTOR, Numbers, ROUTER_MARGIN, SAMPLE_RUN,
    TINY_LLAMA, Tolerance, alone, exact, first_numbers, sample_text,
};
use serde_json::json;

use crate::exit::{FAILED, Failure, INTERRUPTED};
use crate::output::say;
use crate::planned::PlannedRun;
use crate::ranks::{self, blamed};

/// Number of gradients that are printed.
const SHOWN_GRADIENTS: usize = 5;
/// Number of values outside the tolerance that are printed.
const SHOWN_FAILURES: usize = 10;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    planned: PlannedRun,
    /// Number of steps to compare, from the first
    #[arg(long, value_name = "K", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let mut config = configuration(arguments)?;
    let interrupt = Interrupt::on_signals()?;
    let is_of_mpi = config.parallel.transport == Transport::Mpi;
    if !is_launched() {
        require(&config, &resolve_model(&config)?, ranks::seen_to(config.ranks())?)?;
    }
    if !is_launched() && lockstep_launch::place()?.is_none() && config.ranks() > 1 && !is_of_mpi {
        let start = ranks::Start::here(config.ranks(), config.parallel.transport.into())?;
        return ranks::run(start, &interrupt);
    }
    let join = ranks::join_options(&config);
    let _sample = arguments.planned.run.is_none().then(|| sample(&mut config)).transpose()?;
    let ranks = match started_group(join).map_err(|error| ranks::told_by(error, 0))? {
        Some(group) if group.size() > 1 || config.ranks() > 1 => ranks_of(group, &config)?,
        _ => Ranks::alone(),
    };
    let found = first_numbers(&config, arguments.steps, &ranks, &interrupt)
        .map_err(|error| ranks::ended_by(error, ranks.rank(), |code| ranks.abort(code)))?;
    // The other ranks need not wait for the comparison.
    drop(ranks);
    let Some(found) = found else { return Ok(ExitCode::SUCCESS) };
    let expected = |config: &RunConfig| -> Result<Numbers, Failure> {
        let found = first_numbers(&alone(config), arguments.steps, &Ranks::alone(), &interrupt)?;
        Ok(found.unwrap_or_default())
    };
    let one_rank = expected(&config)?;
    let comparison = match config.train.precision {
        _ if is_lossy(&config) => {
            Comparison::of_f32(&found, &one_rank, Tolerance::of(config.plan.quantization()))
        }
        Precision::F32 => Comparison::of_f32(&found, &one_rank, Tolerance::F32),
        Precision::BF16 | Precision::F16 => {
            Comparison::of_narrow(&found, &one_rank, &expected(&exact(&config))?)
        }
    };
    if interrupt.is_requested() {
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if arguments.json {
        print_json(&config, &comparison);
    } else {
        print(&config, &comparison);
    }
    Ok(ExitCode::from(if comparison.is_within() { 0 } else { FAILED }))
}

/// Returns the run to verify, with saving and evaluation disabled. Refuses settings that do not fit the model.
fn configuration(arguments: &Arguments) -> Result<RunConfig, Failure> {
    let plan = arguments.planned.plan()?;
    let mut settings = Vec::new();
    let names_model = |setting: &String| {
        ["model.preset=", "model.path=", "model.model_type="].iter().any(|key| setting.starts_with(key))
    };
    if arguments.planned.run.is_none() && !arguments.planned.settings.iter().any(names_model) {
        settings.extend(TINY_LLAMA.map(str::to_owned));
    }
    settings.extend(arguments.planned.settings.iter().cloned());
    let config = match &arguments.planned.run {
        Some(path) => RunConfig::load_with(Some(path), &[], plan.as_ref(), &settings),
        None => RunConfig::parse_with(SAMPLE_RUN, "the built-in run", &[], plan.as_ref(), &settings)
            .map_err(Into::into),
    };
    let mut config = config.map_err(|error| blamed(plan.as_ref(), error))?;
    // The built-in run has micro-batches of one sequence, but two-dimensional tensor parallelism needs one per row of the square.
    let is_built_in =
        arguments.planned.run.is_none() && matches!(config.origin("train.micro_batch"), Origin::File { .. });
    if is_built_in && config.plan.tensor_layout == TensorDimensions::Two {
        config.plan.micro_batch = None;
    }
    match &plan {
        Some(file) => {
            file.check(&config)?;
            if !is_launched() {
                ranks::warn_if_outdated(Some(file), &Forecast::of(&config, &resolve_model(&config)?)?);
            }
        }
        None => drop(check(&config)?),
    }
    config.train.eval_every = 0;
    config.metrics.trace_steps = None;
    Ok(config)
}

/// Writes the built-in text to a temporary directory of this rank, unless the settings name other data.
fn sample(config: &mut RunConfig) -> Result<Option<tempfile::TempDir>, Failure> {
    if !config.data.train.is_empty() {
        return Ok(None);
    }
    let failed = |error: std::io::Error| Failure {
        message: format!("cannot write the built-in text to {}: {error}", std::env::temp_dir().display()),
        code: FAILED,
    };
    let dir = tempfile::Builder::new().prefix("lockstep-verify-").tempdir().map_err(failed)?;
    let path = dir.path().join("text.jsonl");
    std::fs::write(&path, sample_text()).map_err(failed)?;
    config.data.train = vec![DataSource::Plain(path.display().to_string())];
    config.data.cache_dir = Some(dir.path().join("cache"));
    Ok(Some(dir))
}

/// Describes the plan in a few words: `2 replicas of 2 tensor-parallel ranks with sequence parallelism`.
pub(crate) fn plan_in_words(config: &RunConfig) -> String {
    let plan = &config.plan;
    let mut words = Vec::new();
    if plan.mesh.replicate > 1 {
        words.push(human::plural(plan.mesh.replicate, "replica").to_string());
    }
    if plan.mesh.shard > 1 {
        words.push(format!("{} data-parallel ranks", plan.mesh.shard));
    }
    if plan.mesh.expert * plan.mesh.expert_tensor > 1 {
        let parts = match plan.mesh.expert_tensor {
            1 => String::new(),
            parts => format!(" in {parts} parts each"),
        };
        words.push(format!("experts on {} ranks{parts}", plan.mesh.expert));
    }
    if plan.mesh.pipeline > 1 {
        let (stages, schedule) = (plan.mesh.pipeline, plan.schedule.name());
        words.push(format!("{stages} pipeline ranks ({schedule})"));
    }
    if plan.mesh.context > 1 {
        let method = plan.context_method.name();
        words.push(format!("{} context-parallel ranks ({method})", plan.mesh.context));
    }
    if plan.mesh.tensor > 1 {
        let by_tokens = match (plan.tensor_layout, plan.sequence_parallel) {
            (TensorDimensions::Two, _) => " in two dimensions",
            (TensorDimensions::One, true) => " with sequence parallelism",
            (TensorDimensions::One, false) => "",
        };
        let chunks = plan.tensor_chunks.filter(|chunks| *chunks > 1);
        let in_chunks = chunks.map_or(String::new(), |chunks| format!(", exchanges in {chunks} chunks"));
        let slices = if plan.partition_activations { " keeping slices" } else { "" };
        words.push(format!("{} tensor-parallel ranks{by_tokens}{slices}{in_chunks}", plan.mesh.tensor));
    }
    let shared_out = match config.zero_stage().number() {
        0 => String::new(),
        stage => format!(", ZeRO stage {stage}"),
    };
    let on_disk =
        residence_in_words(&config.plan.residence).map_or(String::new(), |words| format!(", {words}"));
    if words.is_empty() {
        "one rank".to_owned() + &on_disk
    } else {
        words.join(" of ") + &shared_out + &quantized(config) + &on_disk
    }
}

/// Returns true if the plan quantizes communication, as its user has asked for.
fn is_lossy(config: &RunConfig) -> bool {
    config.plan.quantization().weights.is_some() || config.plan.quantization().gradients.is_some()
}

/// Describes the quantized communication.
fn quantized(config: &RunConfig) -> String {
    let Quantization { weights, gradients, .. } = config.plan.quantization();
    let words = |what: &str, kind: Option<QuantizedType>| {
        kind.map_or(String::new(), |kind| format!(", {what} sent as {kind}"))
    };
    words("weights", weights) + &words("gradients", gradients)
}

fn print(config: &RunConfig, comparison: &Comparison) {
    let precision = config.train.precision;
    let steps = comparison.steps.len() / 2;
    say!(
        "plan       {}, recompute {}, {}; {}",
        plan_in_words(config),
        config.plan.recompute,
        precision.word(),
        human::plural(steps, "step"),
    );
    match precision {
        _ if is_lossy(config) => {
            say!(
                "against    the same run on one rank, within what codes of so few bits lose: the plan is lossy by choice"
            );
        }
        Precision::F32 => say!("against    the same run on one rank"),
        _ => say!(
            "against    one rank in f32: {NARROW_FACTOR} times as far as one rank in {} is allowed",
            precision.word()
        ),
    }
    say!("");
    let is_narrow = precision != Precision::F32 && !is_lossy(config);
    let exact = |text: &str| if is_narrow { format!("{text:>12}") } else { String::new() };
    say!("step                  {:>12}{:>12}{}  difference  allowed", "plan", "one rank", exact("f32"));
    for ComparedStep { step, what, plan, one_rank, f32, difference, allowed } in &comparison.steps {
        let exact = f32.map_or(String::new(), |exact| format!("{exact:>12.7}"));
        let allowed = allowed.map_or("not judged".to_owned(), |allowed| format!("{allowed:.1e}"));
        say!("{step:>4}  {what:<14}  {plan:>12.7}{one_rank:>12.7}{exact}  {difference:>10.1e}  {allowed}");
    }
    let shown = comparison.gradients.len().min(SHOWN_GRADIENTS);
    say!("\ngradients of step 1 that differ most, against what is allowed");
    say!("{:>10}{:>12}{:>10}  of {} parameters", "norm", "difference", "allowed", comparison.parameters());
    for ComparedGradient { name, norm, difference, allowed, .. } in &comparison.gradients[..shown] {
        say!("{norm:>10.3e}{difference:>12.1e}{allowed:>10.1e}  {name}");
    }
    if let Some(margin) = comparison.router_margin {
        say!("\nrouters    each token's last expert is {margin:.1e} or more ahead of the next one, by score");
    }
    say!("");
    let failures = &comparison.failures;
    if failures.is_empty() {
        if is_lossy(config) {
            say!("verdict    the plan computes what one rank computes, but for what its codes lose");
            say!(
                "           (to verify it to the last digits, set parallel.quantize_weights=none, parallel.quantize_gradients=none)"
            );
        } else {
            say!("verdict    the plan computes what one rank computes");
        }
        if config.ranks() == 1 {
            say!("           (it is one rank: choose a plan, e.g. --set parallel.tensor_parallel=2)");
        }
        return;
    }
    say!("verdict    NOT what one rank computes: {} outside", human::plural(failures.len(), "number"));
    for failure in failures.iter().take(SHOWN_FAILURES) {
        say!("           {failure}");
    }
    if let Some(more) = failures.len().checked_sub(SHOWN_FAILURES + 1) {
        say!("           and {} more", more + 1);
    }
    if comparison.router_margin.is_some_and(|margin| margin < ROUTER_MARGIN) {
        say!(
            "           (a token is so near to choosing other experts that rounding may have sent it there)"
        );
    }
}

fn print_json(config: &RunConfig, comparison: &Comparison) {
    let Comparison { steps, gradients, router_margin, failures } = comparison;
    let word = |kind: Option<QuantizedType>| kind.map_or("none", QuantizedType::name);
    say!(
        "{}",
        json!({
            "within": comparison.is_within(), "ranks": config.ranks(), "mesh": config.degrees(),
            "sequence_parallel": config.plan.sequence_parallel, "tensor_layout": config.plan.tensor_layout,
            "tensor_chunks": config.plan.tensor_chunks, "partition_activations": config.plan.partition_activations,
            "context_parallel_method": config.plan.context_method, "recompute": config.plan.recompute,
            "precision": config.train.precision, "quantize_weights": word(config.plan.quantize_weights),
            "quantize_gradients": word(config.plan.quantize_gradients), "steps": steps, "gradients": gradients,
            "router_margin": router_margin, "failures": failures,
        })
    );
}

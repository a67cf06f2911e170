//! `lockstep train`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueHint};
use lockstep_comm::{JoinOptions, Output, Way, is_launched};
use lockstep_infer::{LoadedModel, Sampling};
use lockstep_train::config::{Origin, Transport};
use lockstep_train::fit::require;
use lockstep_train::interrupt::Interrupt;
use lockstep_train::launch::started_group;
use lockstep_train::plan::check;
use lockstep_train::planner::{Choice, Evaluated, Reason, choose};
use lockstep_train::progress::Progress;
use lockstep_train::{
    Error, Forecast, PlanFile, Ranks, Resume, RunConfig, Summary, engine_options, human, train,
};

use crate::exit::{Failure, INTERRUPTED, PEER_LOST};
use crate::infer::{Length, continue_text, show};
use crate::nodes::Nodes;
use crate::output::say;
use crate::planned::PlannedRun;
use crate::ranks::{self, blamed};
use crate::verify::plan_in_words;

/// The built-in demonstration: what `lockstep train` does without a file.
const DEMONSTRATION: &str = include_str!("demonstration.toml");
/// Tokens of the sample that a demonstration ends with.
const SAMPLE_TOKENS: usize = 160;
/// What `--nproc-per-node` sets.
const REPLICAS: &str = "parallel.data_parallel_replicate";
/// What the launcher has the first rank say of the plan that it chose.
const CHOSEN_VARIABLE: &str = "LOCKSTEP_CHOSEN_PLAN";
const SAMPLE_PROMPT: &str = "pub fn ";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    planned: PlannedRun,
    /// Where to begin: the newest good checkpoint (auto), the start (never), or a checkpoint's directory
    #[arg(long, default_value = "auto", value_name = "auto|never|PATH")]
    resume: String,
    /// Ranks on this machine, each with the whole model and its share of the batch: a number, or one for each core (auto)
    #[arg(long, value_name = "N|auto", alias = "nproc_per_node", value_parser = ranks::number)]
    nproc_per_node: Option<usize>,
    #[command(flatten)]
    nodes: Nodes,
    /// Append what each rank prints to rank-00000.out and .err, ... in DIR; rank 0 is shown as well. Without it, lines of
    /// the other ranks are shown as "[rank 1] ..."
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    log_dir: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let started = lockstep_comm::place()?.and_then(|place| place.world_size);
    let resume = match arguments.resume.as_str() {
        "auto" => Resume::Auto,
        "never" => Resume::Never,
        path => Resume::From(path.into()),
    };
    let mut plan = arguments.planned.plan()?;
    let mut chosen = std::env::var(CHOSEN_VARIABLE).ok();
    if plan.is_none() && started.is_none() && !arguments.nodes.are_several() {
        (plan, chosen) = choice(arguments, &resume)?.unzip();
    }
    let config = configuration(arguments, plan.as_ref(), started)?;
    if !is_launched()
        && let Some(exit) = launch(arguments, &config, plan.as_ref(), chosen.as_deref(), started.is_some())?
    {
        return Ok(exit);
    }
    let join = JoinOptions { mpi: ranks::mpi(), ..config.join_options() };
    let ranks = match started_group(join).map_err(|error| ranks::told_by(error, 0))? {
        Some(group) if group.size() > 1 || config.ranks() > 1 => Ranks::of(group, &config)?,
        _ => Ranks::alone(),
    };
    let interrupt = Interrupt::on_signals()?;
    let show = |steps| {
        if let Some(chosen) = &chosen {
            eprintln!("{chosen}");
        }
        Progress::on_stderr(steps)
    };
    let summary = train(&config, &resume, &ranks, &interrupt, show)
        .inspect_err(|error| ranks::leave_records(&ranks, error, &config.metrics.dir))
        .map_err(|error| ranks::ended_by(error, ranks.rank(), |code| ranks.abort(code)))?;
    if ranks.is_first() {
        report(&config, &resume, &summary);
    }
    if summary.interrupted {
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if arguments.planned.run.is_none() && ranks.is_first() {
        eprintln!("\na sample:");
        sample(&summary.checkpoint, engine_options(&config).threads)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts this command once for each rank of this machine, if there are to be several and nobody else has started them.
fn launch(
    arguments: &Arguments,
    config: &RunConfig,
    plan: Option<&PlanFile>,
    chosen: Option<&str>,
    is_started: bool,
) -> Result<Option<ExitCode>, Failure> {
    let all = config.ranks();
    // One message before anything is started, and not one of each rank.
    if let Some(plan) = plan {
        plan.check(config)?;
    }
    let (_, model) = check(config)?;
    if plan.is_some() {
        ranks::warn_if_outdated(plan, &Forecast::of(config, &model)?);
    }
    // mpirun has started them, or there is one.
    if config.parallel.transport == Transport::Mpi {
        return Ok(None);
    }
    let here = arguments.nproc_per_node.unwrap_or(if arguments.nodes.are_several() { 1 } else { all });
    let start = match arguments.nodes.meet(here)? {
        Some(placement) => {
            require(config, &model, placement.first_rank..placement.first_rank + here)?;
            ranks::Start { placement, ..ranks::Start::here(here, Way::Auto)? }
        }
        None if is_started => {
            require(config, &model, ranks::seen_to(all)?)?;
            return Ok(None);
        }
        None => {
            require(config, &model, 0..all)?;
            if all == 1 && arguments.log_dir.is_none() {
                return Ok(None);
            }
            ranks::Start::here(all, config.parallel.transport.into())?
        }
    };
    // A rank that is given the keys of a plan chooses none.
    let keys = plan.map_or(&[][..], PlanFile::settings);
    let told = chosen.map(|chosen| (CHOSEN_VARIABLE.into(), chosen.into()));
    let start = ranks::Start {
        environment: arguments.nodes.environment().into_iter().chain(told).collect(),
        arguments: keys.iter().flat_map(|key| ["--set".into(), key.into()]).collect(),
        output: arguments.log_dir.clone().map_or(Output::Labelled, Output::Files),
        records: Some(arguments.log_dir.clone().unwrap_or_else(|| config.metrics.dir.clone())),
        ..start
    };
    ranks::run(start, &Interrupt::on_signals()?).map(Some).map_err(resumable)
}

/// The plan of a run on this machine that says nothing of how to split it, and why it is this one, in words; none where the run says it, or
/// where nothing fits, for that has a message of its own.
fn choice(arguments: &Arguments, resume: &Resume) -> Result<Option<(PlanFile, String)>, Failure> {
    let config = load(arguments, &arguments.planned.settings)?;
    if config.says_how_to_split() || config.parallel.transport == Transport::Mpi {
        return Ok(None);
    }
    let Some(Choice { plan, reason }) = choose(&config, resume, arguments.nproc_per_node)? else {
        return Ok(None);
    };
    let words = match reason {
        Reason::Checkpoint(path) => {
            let planned = config.with_settings(plan.settings()).map_err(Error::from)?;
            format!("plan       {}, as {}", plan_in_words(&planned), path.display())
        }
        Reason::Search { chosen, rival, candidates, ms, doubt } => {
            let words = |found: &Evaluated| {
                let sequences = human::plural(found.config.micro_batch(), "sequence");
                format!("{}, micro-batches of {sequences}", plan_in_words(&found.config))
            };
            let step_ms = chosen.step.step_ms;
            let rival = rival.map_or(String::new(), |rival| {
                let off = 100.0 * (rival.step.step_ms / step_ms - 1.0);
                let than = if off < 0.0 { "less, but is less simple" } else { "more" };
                format!("; the next ({}) takes {:.1} % {than}", words(&rival), off.abs())
            });
            format!(
                "plan       {}: {} a step {}\n           the best of {} in {}{rival}{}",
                words(&chosen),
                human::milliseconds(step_ms),
                if doubt.is_some() { "by guesses" } else { "as this machine was measured" },
                human::count(candidates as f64),
                human::milliseconds(ms),
                doubt.map_or(String::new(), |doubt| format!("\n           {doubt}")),
            )
        }
    };
    Ok(Some((plan, words)))
}

/// The run, with some keys set.
fn load(arguments: &Arguments, settings: &[String]) -> Result<RunConfig, Error> {
    match &arguments.planned.run {
        Some(path) => RunConfig::load(Some(path), settings),
        None => RunConfig::parse(DEMONSTRATION, "the built-in demonstration", settings).map_err(Error::from),
    }
}

/// The configuration of a run on `started` ranks: unless it says otherwise, they are as many replicas as they make. Before they
/// are started, `--nproc-per-node` says how many.
fn configuration(
    arguments: &Arguments,
    plan: Option<&PlanFile>,
    started: Option<usize>,
) -> Result<RunConfig, Failure> {
    let mut settings = arguments.planned.settings_with(plan);
    let config = load(arguments, &settings).map_err(|error| blamed(plan, error))?;
    let Some(ranks) = started.or(arguments.nproc_per_node) else { return Ok(config) };
    let found = config.ranks();
    if config.origin(REPLICAS) == Origin::Default {
        settings.push(format!("{REPLICAS}={}", config.replicas_of(ranks)?));
        return Ok(load(arguments, &settings)?);
    }
    if found != ranks && started.is_none() && !arguments.nodes.are_several() {
        let message = match config.ranks_of_a_replica() {
            1 => format!("--nproc-per-node is {ranks}, and {REPLICAS} is {found}: leave one of them out"),
            _ => format!(
                "--nproc-per-node is {ranks}, and [parallel] is for {found} ranks: leave one of them out"
            ),
        };
        return Err(Failure::configuration(message));
    }
    Ok(config)
}

/// A loss is no fault of the run's: it can go on.
fn resumable(failure: Failure) -> Failure {
    match failure {
        Failure { message, code: PEER_LOST } if !message.is_empty() => Failure {
            message: message + "; the same command goes on from the last checkpoint",
            code: PEER_LOST,
        },
        failure => failure,
    }
}

/// How the run ended, and what can be done next.
fn report(config: &RunConfig, resume: &Resume, summary: &Summary) {
    let checkpoint = summary.checkpoint.display();
    if summary.interrupted {
        let (step, steps) = (summary.step, config.train.steps);
        let how = match resume {
            Resume::Auto => "the same command resumes",
            _ => "with --resume auto the same command resumes",
        };
        eprintln!("interrupted at step {step} of {steps}; {how} from {checkpoint}");
        return;
    }
    if summary.steps_made == 0 {
        let step = summary.step;
        eprintln!(
            "all {step} steps were made before; raise train.steps to go on, or use --resume never to begin anew"
        );
        return;
    }
    let loss =
        summary.loss.map_or("no loss: every step was skipped".to_owned(), |loss| format!("loss {loss:.4}"));
    let eval = summary.eval_loss.map_or(String::new(), |loss| format!(", eval loss {loss:.4}"));
    let mut refused = String::new();
    if summary.skipped > 0 {
        refused = format!(", {} skipped", human::plural(summary.skipped as usize, "step"));
    }
    if summary.rollbacks > 0 {
        refused += &format!(", {}", human::plural(summary.rollbacks as usize, "rollback"));
    }
    eprintln!(
        "done       {} steps in {}, {} tokens/s; {loss}{eval}{refused}",
        summary.steps_made,
        human::seconds(summary.seconds),
        human::count(summary.tokens as f64 / summary.seconds),
    );
    if let Some(report) = &summary.report {
        eprintln!("report     {}", report.display());
    }
    eprintln!("next       lockstep generate --model {checkpoint} --prompt ...");
    eprintln!("           lockstep checkpoint export {checkpoint} --hf DIR");
}

/// Prints a sample of generated text to standard output.
fn sample(checkpoint: &Path, threads: usize) -> Result<(), Failure> {
    let model = LoadedModel::open(checkpoint, threads)?;
    if model.config().max_position_embeddings() <= SAMPLE_PROMPT.len() {
        return Ok(());
    }
    let sampling = Sampling { temperature: 0.8, top_k: 40, ..Sampling::default() };
    continue_text(&model, SAMPLE_PROMPT, Length::UpTo(SAMPLE_TOKENS), sampling, show)?;
    say!("");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demonstration_can_be_as_short_as_one_likes() {
        for setting in ["train.steps=1", "train.steps=20", "train.steps=5000"] {
            RunConfig::parse(DEMONSTRATION, "the built-in demonstration", &[setting]).unwrap();
        }
    }
}

//! `lockstep train`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use lockstep_checkpoint::Checkpoint;
use lockstep_comm::environment::{self, ProcessPlace};
use lockstep_comm::{Elastic, JoinOptions, Output, Way, is_launched};
use lockstep_import::{AutoValues, Format, Import, Options};
use lockstep_infer::{LoadedModel, Sampling};
use lockstep_train::config::{Imported, Origin, Transport};
use lockstep_train::fit::require;
use lockstep_train::interrupt::Interrupt;
use lockstep_train::launch::started_group;
use lockstep_train::plan::check;
use lockstep_train::planner::{Choice, Evaluated, Reason, choose};
use lockstep_train::progress::{Detail, Progress};
use lockstep_train::{
    Error, Forecast, PlanFile, Ranks, ResolvedModel, Resume, RunConfig, Summary, engine_options, human,
    screen, train,
};

use crate::error_file;
use crate::exit::{self, CORRUPT_INPUT, Failure, INTERRUPTED, PEER_LOST};
use crate::generate::show_sample;
use crate::hosts::Hosts;
use crate::import;
use crate::launching::{First, Flags, Launching, variable};
use crate::nodes::{Met, Nodes};
use crate::output::{field, note, say, warning};
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
    #[command(flatten)]
    nodes: Nodes,
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    hosts: Hosts,
    /// Steps of the run, for --set train.steps=N. More of them than before let a finished run go on
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Print the configuration of the run, resolved, as the TOML that RUN.toml could have, and end
    #[arg(long)]
    print_config: bool,
    /// A DeepSpeed configuration, whose values stand between those of RUN.toml and of --set; see docs/coming-from-deepspeed.md
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, alias = "deepspeed_config")]
    deepspeed: Option<PathBuf>,
    /// Say more before the first step: the plan and why it was chosen, the work of a step, memory by category
    #[arg(short, long)]
    verbose: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let place = lockstep_comm::place()?;
    let started = place.as_ref().and_then(|place| place.world_size);
    // A rank of ours has the launcher's flags without being asked to start anything.
    let launching = match is_launched() {
        true => Launching::default(),
        false => arguments.flags.settle(&variable)?,
    };
    let import = imported(arguments, &launching, started)?;
    let imported = import.as_ref().map_or(Vec::new(), import::values);
    if arguments.print_config {
        let plan = arguments.planned.plan()?;
        say!(
            "{}",
            configuration(arguments, &launching, &imported, plan.as_ref(), started)?.to_toml().trim_end()
        );
        return Ok(ExitCode::SUCCESS);
    }
    if !is_launched()
        && let Some(code) = arguments.hosts.run(launching.ranks, &arguments.nodes, started.is_some())?
    {
        return Ok(code);
    }
    let resume = match arguments.resume.as_str() {
        "auto" => Resume::Auto,
        "never" => Resume::Never,
        path => Resume::From(path.into()),
    };
    if let Resume::From(path) = &resume {
        require_checkpoint(path)?;
    }
    let mut plan = arguments.planned.plan()?;
    let mut chosen = std::env::var(CHOSEN_VARIABLE).ok();
    if plan.is_none() && started.is_none() && !arguments.nodes.are_several(&launching) {
        (plan, chosen) = choice(arguments, &imported, &launching, &resume)?.unzip();
    }
    let config = configuration(arguments, &launching, &imported, plan.as_ref(), started)?;
    for line in import.iter().filter(|_| !is_launched()).flat_map(|import| import::table(import, &config)) {
        note!("{line}");
    }
    if !is_launched()
        && !arguments.nodes.are_several(&launching)
        && let Some(note) = config.idle_zero_stage()
    {
        note!("note: {note}");
    }
    if !is_launched() {
        let launcher = Launcher {
            arguments,
            launching: &launching,
            config: &config,
            plan: plan.as_ref(),
            chosen: chosen.as_deref(),
        };
        launcher.check(&resume, place.filter(|_| started.is_some()))?;
        if let Some(exit) = launcher.run(started.is_some())? {
            return Ok(exit);
        }
    }
    let join = JoinOptions { mpi: ranks::mpi(), ..config.join_options() };
    let ranks = match started_group(join).map_err(|error| ranks::told_by(error, 0))? {
        Some(group) if group.size() > 1 || config.ranks() > 1 => Ranks::of(group, &config)?,
        _ => Ranks::alone(),
    };
    let interrupt = Interrupt::on_signals()?;
    if ranks.is_first() {
        say_if_threads_differ(engine_options(&config).threads);
    }
    let show = |steps| {
        let detail = if arguments.verbose { Detail::Everything } else { Detail::Summary };
        let mut progress = Progress::on_stderr(steps).with_detail(detail);
        for line in chosen.iter().flat_map(|chosen| chosen.lines()) {
            let (label, text) = line.split_once('\t').unwrap_or(("plan", line));
            progress.detail(label, text);
        }
        progress
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
    if arguments.planned.run.is_none() && arguments.resumed().is_none() && ranks.is_first() {
        note!("\na sample:");
        sample(&summary.checkpoint, engine_options(&config).threads)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Says that `OMP_NUM_THREADS` has no effect, where it names another number than `threads`. torchrun sets it to 1 by itself.
fn say_if_threads_differ(threads: usize) {
    let Ok(asked) = std::env::var("OMP_NUM_THREADS") else { return };
    if !asked.is_empty() && asked != threads.to_string() {
        let used = human::plural(threads, "thread");
        field(
            "threads",
            &format!("OMP_NUM_THREADS={asked} is not read: {used} a rank; train.threads sets them"),
        );
    }
}

/// The command as the launcher of its own ranks.
struct Launcher<'a> {
    arguments: &'a Arguments,
    launching: &'a Launching,
    config: &'a RunConfig,
    plan: Option<&'a PlanFile>,
    chosen: Option<&'a str>,
}

/// Longest pause before ranks are started again.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Launcher<'_> {
    /// Refuses flags that contradict each other, or whoever has started this process as a rank.
    fn check(&self, resume: &Resume, place: Option<ProcessPlace>) -> Result<(), Failure> {
        if self.launching.max_restarts > 0 && *resume != Resume::Auto {
            return Err(Failure::configuration(
                "--max-restarts goes on from the newest checkpoint: leave --resume out, or make it auto",
            ));
        }
        let Some(place) = place else { return Ok(()) };
        // Of SLURM's and mpirun's processes each may be the launcher of a machine.
        let nodes = self.arguments.nodes.first_given();
        let is_of_torchrun = place.launcher == environment::Launcher::Torchrun;
        let is_one_of_nodes = !is_of_torchrun && nodes.is_some();
        let flag = self.arguments.flags.first_given().or(nodes).filter(|_| !is_one_of_nodes);
        match flag {
            None => Ok(()),
            Some(flag) => Err(Failure::configuration(format!(
                "{flag} asks for ranks to be started, and this process is one: rank {} of {}, started by {}; leave {flag} out, or unset its variables",
                place.rank,
                place.world_size.unwrap_or(0),
                place.launcher,
            ))),
        }
    }

    /// Starts this command once for each rank of this machine, if there are to be several and nobody else has started them; again
    /// after a failure, as often as that is wanted.
    fn run(&self, is_started: bool) -> Result<Option<ExitCode>, Failure> {
        // One message before anything is started, and not one of each rank.
        if let Some(plan) = self.plan {
            plan.check(self.config)?;
        }
        let (_, model) = check(self.config)?;
        if self.plan.is_some() {
            ranks::warn_if_outdated(self.plan, &Forecast::of(self.config, &model)?);
        }
        // mpirun has started them, or there is one.
        if self.config.parallel.transport == Transport::Mpi {
            return Ok(None);
        }
        let mut interrupt = None;
        let mut restarts = 0;
        loop {
            let Some((start, met)) = self.start(&model, is_started, restarts)? else { return Ok(None) };
            let interrupt = match &interrupt {
                Some(interrupt) => interrupt,
                None => {
                    self.launching.without_effect().iter().for_each(|text| note!("{text}"));
                    interrupt.insert(Interrupt::on_signals()?)
                }
            };
            let ended = ranks::run(start, interrupt);
            drop(met);
            match ended {
                Err(failure) if self.may_restart(&failure, restarts) && !interrupt.is_requested() => {
                    restarts += 1;
                    say_restart(&failure, restarts, self.launching.max_restarts);
                    std::thread::sleep(LONGEST_PAUSE.min(Duration::from_millis(100 << restarts.min(10))));
                }
                ended => {
                    let dir = &self.config.checkpoint.dir;
                    return ended.map(Some).map_err(|failure| resumable(failure, dir));
                }
            }
        }
    }

    /// The ranks of this machine and the keeper of their secret, once all machines have met; `None` if this process is to be the
    /// only one.
    fn start(
        &self,
        model: &ResolvedModel,
        is_started: bool,
        restarts: usize,
    ) -> Result<Option<(ranks::Start, Option<Met>)>, Failure> {
        let Self { arguments, launching, config, plan, chosen } = self;
        let all = config.ranks();
        let several = arguments.nodes.are_several(launching);
        let here = launching.ranks.unwrap_or(if several { 1 } else { all });
        let records = launching.log_dir.clone().unwrap_or_else(|| config.metrics.dir.clone());
        // What ranks print to files without a directory goes beside the metrics.
        let output = |ranks, first| launching.output(ranks, first, &records.join("ranks"));
        let met = arguments.nodes.meet(here, launching)?;
        let (start, output) = match &met {
            Some(Met { placement, .. }) => {
                require(config, model, placement.first_rank..placement.first_rank + here)?;
                let first = if placement.first_rank == 0 { First::Here } else { First::Elsewhere };
                let placement = placement.clone();
                (ranks::Start { placement, ..ranks::Start::here(here, Way::Auto)? }, output(here, first)?)
            }
            None if is_started => {
                require(config, model, ranks::seen_to(all)?)?;
                return Ok(None);
            }
            None => {
                require(config, model, 0..all)?;
                let output = output(all, First::Here)?;
                let is_watched = launching.max_restarts > 0 || launching.role.is_some();
                if all == 1 && output == Output::Labelled && !is_watched {
                    return Ok(None);
                }
                (ranks::Start::here(all, config.parallel.transport.into())?, output)
            }
        };
        // A rank that is given the keys of a plan chooses none.
        let keys = plan.map_or(&[][..], PlanFile::settings);
        let told = chosen.map(|chosen| (CHOSEN_VARIABLE.into(), chosen.into()));
        let of_nodes = met.as_ref().map_or(&[][..], |met| &met.environment);
        let start = ranks::Start {
            environment: of_nodes.iter().cloned().chain(told).collect(),
            arguments: keys.iter().flat_map(|key| ["--set".into(), key.into()]).collect(),
            output,
            records: Some(records.clone()),
            elastic: Elastic {
                role: launching.role.clone().unwrap_or(Elastic::default().role),
                restart_count: restarts,
                max_restarts: launching.max_restarts,
                errors: self.errors(),
            },
            ..start
        };
        Ok(Some((start, met)))
    }

    /// Where ranks say why they fail: beside what they print, or, where only this process is asked to say it, beside its own file.
    fn errors(&self) -> Option<PathBuf> {
        let own = || error_file::path().map(|path| path.with_extension("ranks"));
        self.launching.log_dir.clone().or_else(own)
    }

    /// Whether another try may end better: not where the configuration is wrong or something is missing.
    fn may_restart(&self, failure: &Failure, restarts: usize) -> bool {
        restarts < self.launching.max_restarts
            && !matches!(failure.code, exit::CONFIGURATION | exit::MISSING | exit::CORRUPT_INPUT)
    }
}

fn say_restart(failure: &Failure, restart: usize, most: usize) {
    let message = match failure.message.as_str() {
        "" => "a rank failed",
        message => message,
    };
    warning(&format!("{message}; restart {restart} of {most} goes on from the last checkpoint"));
}

/// The plan of a run on this machine that says nothing of how to split it, and why it is this one, in words; none where the run says it, or
/// where nothing fits, for that has a message of its own.
fn choice(
    arguments: &Arguments,
    imported: &[Imported],
    launching: &Launching,
    resume: &Resume,
) -> Result<Option<(PlanFile, String)>, Failure> {
    let config = load(arguments, imported, &arguments.settings_with(None))?;
    if config.says_how_to_split() || config.parallel.transport == Transport::Mpi {
        return Ok(None);
    }
    let Some(Choice { plan, reason }) = choose(&config, resume, launching.ranks)? else {
        return Ok(None);
    };
    let words = match reason {
        Reason::Checkpoint(path) => {
            let planned = config.with_settings(plan.settings()).map_err(Error::from)?;
            format!("plan\t{}, as {}", plan_in_words(&planned), path.display())
        }
        Reason::Search { chosen, rival, candidates, ms, doubt } => {
            in_words(&chosen, rival.as_deref(), doubt.as_deref(), &searched(candidates, ms))
        }
    };
    Ok(Some((plan, words)))
}

/// How many plans were compared, and how long that took.
fn searched(candidates: usize, ms: f64) -> String {
    format!("{}, compared in {}", human::plural(candidates, "plan"), human::milliseconds(ms))
}

/// Why a search has chosen this plan: lines of a label, a tabulator and a text.
fn in_words(chosen: &Evaluated, rival: Option<&Evaluated>, doubt: Option<&str>, searched: &str) -> String {
    let words = |found: &Evaluated| {
        let sequences = human::plural(found.config.micro_batch(), "sequence");
        format!("{}, micro-batches of {sequences}", plan_in_words(&found.config))
    };
    let step_ms = chosen.step.step_ms;
    let source = if doubt.is_some() { "guessed" } else { "predicted from measurements of this machine" };
    let mut lines = format!(
        "plan\t{}: {} a step, {source}\n\tfastest of {searched}",
        words(chosen),
        human::milliseconds(step_ms)
    );
    if let Some(rival) = rival {
        let off = 100.0 * (rival.step.step_ms / step_ms - 1.0);
        let than = if off < 0.0 { "faster, but less simple" } else { "slower" };
        lines += &format!("; next best, {:.1} % {than}: {}", off.abs(), words(rival));
    }
    if let Some(doubt) = doubt {
        lines += &format!("\n\t{doubt}");
    }
    lines
}

/// The run, with some keys set.
fn load(arguments: &Arguments, imported: &[Imported], settings: &[String]) -> Result<RunConfig, Error> {
    match (&arguments.planned.run, arguments.resumed()) {
        (Some(path), _) => RunConfig::load_with(Some(path), imported, settings),
        (None, Some(checkpoint)) => of_checkpoint(checkpoint, settings),
        (None, None) => {
            RunConfig::parse_with(DEMONSTRATION, "the built-in demonstration", imported, settings)?
                .with_found_model()
        }
    }
}

/// Refuses what `--resume` names where no checkpoint is, before anything else is said.
fn require_checkpoint(path: &Path) -> Result<(), Failure> {
    let Err(error) = Checkpoint::open(path) else { return Ok(()) };
    let is_nothing = !path.join("manifest.json").exists()
        && lockstep_checkpoint::list(path).is_ok_and(|checkpoints| checkpoints.is_empty());
    let failure = Failure::from(error);
    let message = match failure.code {
        _ if is_nothing || !path.is_dir() => format!(
            "--resume {}: no checkpoint is there; lockstep checkpoint list DIR lists those of a run, auto takes the newest one, \
             never begins anew",
            path.display()
        ),
        CORRUPT_INPUT => failure.message + "; --resume auto takes the newest checkpoint that is whole",
        _ => failure.message,
    };
    Err(Failure { message, ..failure })
}

/// The configuration of the run that wrote a checkpoint, with some keys set.
fn of_checkpoint(path: &Path, settings: &[String]) -> Result<RunConfig, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let Some(run) = checkpoint.manifest().config.get("run") else {
        return Err(Error::NoRunToResume { path: path.to_owned() });
    };
    Ok(RunConfig::stored(run, &path.display().to_string())?.with_settings(settings)?)
}

impl Arguments {
    /// The checkpoint that `--resume` names.
    fn resumed(&self) -> Option<&Path> {
        (!["auto", "never"].contains(&self.resume.as_str())).then(|| Path::new(&self.resume))
    }

    /// What is set, by a plan first and by the user after it.
    fn settings_with(&self, plan: Option<&PlanFile>) -> Vec<String> {
        let mut settings = self.planned.settings_with(plan);
        settings.extend(self.steps.map(|steps| format!("train.steps={steps}")));
        settings
    }
}

/// The values of `--deepspeed`, which are told once.
fn imported(
    arguments: &Arguments,
    launching: &Launching,
    started: Option<usize>,
) -> Result<Option<Import>, Failure> {
    let Some(path) = &arguments.deepspeed else { return Ok(None) };
    if arguments.planned.run.is_none() && arguments.resumed().is_some() {
        let message =
            "--deepspeed goes with a RUN.toml; the checkpoint that --resume names has its own configuration";
        return Err(Failure::configuration(message));
    }
    let ranks = match started.or(launching.ranks) {
        Some(ranks) => ranks,
        None => load(arguments, &[], &arguments.settings_with(None))?.ranks(),
    };
    let options = Options { ranks: Some(ranks), auto: AutoValues::OfTheRun };
    import::read(Format::DeepSpeed, path, options).map(Some)
}

/// The configuration of a run on `started` ranks: unless it says otherwise, they are as many replicas as they make. Before they
/// are started, `--nproc-per-node` says how many.
fn configuration(
    arguments: &Arguments,
    launching: &Launching,
    imported: &[Imported],
    plan: Option<&PlanFile>,
    started: Option<usize>,
) -> Result<RunConfig, Failure> {
    let mut settings = arguments.settings_with(plan);
    let config = load(arguments, imported, &settings).map_err(|error| blamed(plan, error))?;
    let Some(ranks) = started.or(launching.ranks) else { return Ok(config) };
    let found = config.ranks();
    // A checkpoint's own number of ranks gives way as well.
    let is_of_checkpoint = arguments.planned.run.is_none() && arguments.resumed().is_some();
    if config.origin(REPLICAS) == Origin::Default || is_of_checkpoint && found != ranks {
        settings.push(config.setting_for_ranks(ranks)?);
        return Ok(load(arguments, imported, &settings)?);
    }
    if found != ranks && started.is_none() && !arguments.nodes.are_several(launching) {
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
fn resumable(failure: Failure, checkpoints: &Path) -> Failure {
    let saved = lockstep_checkpoint::list(checkpoints).unwrap_or_default();
    let how = match saved.last() {
        Some(last) => format!("; the same command goes on from {}", last.path.display()),
        None => "; no checkpoint was saved, so that the same command begins anew".to_owned(),
    };
    match failure {
        Failure { message, code: PEER_LOST } if !message.is_empty() => {
            Failure { message: message + &how, code: PEER_LOST }
        }
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
        note!("interrupted at step {step} of {steps}; {how} from {checkpoint}");
        return;
    }
    if summary.steps_made == 0 {
        let step = summary.step;
        note!("all {step} steps were made before; --steps {} goes on, --resume never begins anew", 2 * step);
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
    let steps = human::plural(summary.steps_made as usize, "step");
    let seconds = human::seconds(summary.seconds);
    let speed = human::count(summary.tokens as f64 / summary.seconds);
    field("done", &format!("{steps} in {seconds}, {speed} tokens/s; {loss}{eval}{refused}"));
    if let Some(report) = &summary.report {
        field("report", &report.display().to_string());
    }
    // Commands to copy are not wrapped.
    note!("{}lockstep generate --model {checkpoint} --prompt ...", screen::field("next", ""));
    note!("{}lockstep checkpoint export {checkpoint} --hf DIR", screen::field("", ""));
}

/// Prints a sample of generated text to standard output.
fn sample(checkpoint: &Path, threads: usize) -> Result<(), Failure> {
    let model = LoadedModel::open(checkpoint, threads)?;
    if model.config().max_position_embeddings() <= SAMPLE_PROMPT.len() {
        return Ok(());
    }
    let sampling = Sampling { temperature: 0.8, top_k: 40, ..Sampling::default() };
    show_sample(&model, SAMPLE_PROMPT, SAMPLE_TOKENS, sampling)?;
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

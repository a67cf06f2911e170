//! `lockstep train`: trains as a rank, or launches the ranks of a run.

mod arguments;
mod attempts;
mod launcher;
mod request;

use std::path::Path;
use std::process::ExitCode;

use lockstep_config::{Resume, RunConfig, engine_options, human};
use lockstep_engine::Ranks;
use lockstep_infer::{LoadedModel, Sampling};
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::{is_launched, started_group};
use lockstep_observe::metrics::CountUnit;
use lockstep_observe::progress::{Detail, Progress};
use lockstep_observe::screen;
use lockstep_train::{Summary, level_of_checkpoint, ranks_of, train};

pub(crate) use self::arguments::Arguments;
use self::arguments::CHOSEN_VARIABLE;
use self::launcher::Launcher;
use self::request::Request;
use crate::exit::{Failure, INTERRUPTED};
use crate::generate::show_sample;
use crate::launching::{Launching, variable};
use crate::output::{field, note, say, warning};
use crate::{import, instructions, ranks};

/// Number of tokens of the sample at the end of the demonstration.
const SAMPLE_TOKENS: usize = 160;
const SAMPLE_PROMPT: &str = "pub fn ";
/// Multiple of a uniform guess's loss above which a run has diverged.
const DIVERGED: f64 = 1.2;

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    // A rank may be asked to stop at any time from its start.
    let interrupt = is_launched().then(Interrupt::on_signals).transpose()?;
    let place = lockstep_launch::place()?;
    let started = place.as_ref().and_then(|place| place.world_size);
    // A rank of ours has the launcher's flags but must not start anything.
    let launching = match is_launched() {
        true => Launching::default(),
        false => arguments.flags.settle(&variable)?,
    };
    if !is_launched()
        && !arguments.print_config
        && let Some(code) = arguments.hosts.run(launching.ranks, &arguments.nodes, started.is_some())?
    {
        return Ok(code);
    }
    let request = Request::new(arguments, &launching, started)?;
    let mut plan = arguments.planned.plan()?;
    if arguments.print_config {
        say!("{}", request.configuration(plan.as_ref())?.to_toml().trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let mut chosen = std::env::var(CHOSEN_VARIABLE).ok();
    if plan.is_none() && started.is_none() && !arguments.nodes.are_several(&launching) {
        (plan, chosen) = request.choice()?.unzip();
    }
    let config = request.configuration(plan.as_ref())?;
    let recorded = match is_launched() {
        true => instructions::handed(),
        false => level_of_checkpoint(&config, &request.resume),
    };
    instructions::choose_for(recorded);
    if !is_launched() {
        say_what_is_taken(&request, &config);
        let launcher = Launcher {
            arguments,
            launching: &launching,
            config: &config,
            plan: plan.as_ref(),
            chosen: chosen.as_deref(),
            recorded,
        };
        launcher.check(&request.resume, place.filter(|_| started.is_some()))?;
        if let Some(exit) = attempts::run(&launcher, started.is_some())? {
            return Ok(exit);
        }
    }
    let interrupt = interrupt.map_or_else(Interrupt::on_signals, Ok)?;
    train_as_rank(&request, &config, chosen.as_deref(), &interrupt)
}

/// Trains as one of the ranks, or as the only one.
fn train_as_rank(
    request: &Request<'_>,
    config: &RunConfig,
    chosen: Option<&str>,
    interrupt: &Interrupt,
) -> Result<ExitCode, Failure> {
    let join = ranks::join_options(config);
    let ranks = match started_group(join).map_err(|error| ranks::told_by(error, 0))? {
        Some(group) if group.size() > 1 || config.ranks() > 1 => ranks_of(group, config)?,
        _ => Ranks::alone(),
    };
    let threads = engine_options(config).threads;
    if ranks.is_first() {
        say_if_threads_differ(threads);
    }
    let show = |steps| {
        let detail = if request.arguments.verbose { Detail::Everything } else { Detail::Summary };
        let mut progress = Progress::on_stderr(steps).with_detail(detail);
        for line in chosen.iter().flat_map(|chosen| chosen.lines()) {
            let (label, text) = line.split_once('\t').unwrap_or(("plan", line));
            progress.detail(label, text);
        }
        progress
    };
    let summary = train(config, &request.resume, &ranks, interrupt, show)
        .inspect_err(|error| ranks::leave_records(&ranks, error, &config.metrics.dir))
        .map_err(|error| ranks::ended_by(error, ranks.rank(), |code| ranks.abort(code)))?;
    if ranks.is_first() {
        report(config, &request.resume, &summary);
    }
    if summary.interrupted {
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if request.is_demonstration() && ranks.is_first() {
        note!("\na sample:");
        sample(&summary.checkpoint, threads)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the values taken from a DeepSpeed file, the defaults taken for missing settings, and settings without effect.
fn say_what_is_taken(request: &Request<'_>, config: &RunConfig) {
    for line in request.import.iter().flat_map(|import| import::table(import, config)) {
        note!("{line}");
    }
    let open = if request.is_demonstration() { Vec::new() } else { config.taken_by_default() };
    let is_of_several = request.arguments.nodes.are_several(request.launching);
    let idle = if is_of_several { None } else { config.idle_zero_stage() };
    for sentence in open.into_iter().chain(idle) {
        note!("note: {sentence}");
    }
}

/// Warns that `OMP_NUM_THREADS` has no effect if it differs from `threads`. torchrun sets it to 1 by default.
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

/// Prints how the run ended, and possible next commands.
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
    let mut eval = summary.eval_loss.map_or(String::new(), |loss| format!(", eval loss {loss:.4}"));
    summary.eval_metrics.iter().for_each(|(name, mean)| eval += &format!(", eval {name} {mean:.4}"));
    let mut refused = String::new();
    if summary.skipped > 0 {
        refused = format!(", {} skipped", human::plural(summary.skipped as usize, "step"));
    }
    if summary.rollbacks > 0 {
        refused += &format!(", {}", human::plural(summary.rollbacks as usize, "rollback"));
    }
    let steps = human::plural(summary.steps_made as usize, "step");
    let seconds = human::seconds(summary.seconds);
    let (speed, unit) = (human::count(summary.amount as f64 / summary.seconds), summary.unit.word());
    field("done", &format!("{steps} in {seconds}, {speed} {unit}/s; {loss}{eval}{refused}"));
    warn_if_diverged(summary);
    if let Some(report) = &summary.report {
        field("report", &report.display().to_string());
    }
    // Commands to copy are not wrapped.
    let chat = if summary.has_chats { "--chat " } else { "" };
    let mut next = vec![format!("lockstep checkpoint export {checkpoint} --hf DIR")];
    if summary.unit == CountUnit::Tokens {
        next.insert(0, format!("lockstep generate --model {checkpoint} {chat}--prompt ..."));
    }
    for (label, command) in ["next"].into_iter().chain(std::iter::repeat("")).zip(next) {
        note!("{}{command}", screen::field(label, ""));
    }
}

/// Warns if the run ends worse than an untrained model.
fn warn_if_diverged(summary: &Summary) {
    if summary.skipped_last > 1 {
        warning(&format!(
            "the last {} steps were skipped and changed nothing; lower optimizer.lr, or lengthen schedule.warmup_steps",
            summary.skipped_last
        ));
    }
    let uniform = summary.uniform_loss;
    let losses = [("loss", summary.loss), ("eval loss", summary.eval_loss)];
    let worst = losses.into_iter().filter_map(|(name, loss)| Some((name, loss?)));
    if let Some((name, loss)) =
        worst.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, loss)| *loss > DIVERGED * uniform)
    {
        warning(&format!(
            "the {name} is {loss:.4}, and {uniform:.4} for a uniform guess: the run has diverged; lower optimizer.lr, or lengthen \
             schedule.warmup_steps"
        ));
    }
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

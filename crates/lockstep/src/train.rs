//! `lockstep train`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use lockstep_infer::{LoadedModel, Sampling};
use lockstep_train::interrupt::Interrupt;
use lockstep_train::progress::Progress;
use lockstep_train::{Resume, RunConfig, Summary, engine_options, human, train};

use crate::exit::{Failure, INTERRUPTED};
use crate::infer::{Length, continue_text, show};
use crate::output::say;

/// The built-in demonstration: what `lockstep train` does without a file.
const DEMONSTRATION: &str = include_str!("demonstration.toml");
/// Tokens of the sample that a demonstration ends with.
const SAMPLE_TOKENS: usize = 160;
const SAMPLE_PROMPT: &str = "pub fn ";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The run's configuration; see docs/configuration.md
    run: Option<PathBuf>,
    /// Set a value of the configuration, e.g. --set train.steps=200
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    settings: Vec<String>,
    /// Where to begin: the newest good checkpoint (auto), the start (never), or a checkpoint's directory
    #[arg(long, default_value = "auto", value_name = "auto|never|PATH")]
    resume: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let config = match &arguments.run {
        Some(path) => RunConfig::load(Some(path), &arguments.settings)?,
        None => RunConfig::parse(DEMONSTRATION, "the built-in demonstration", &arguments.settings)
            .map_err(lockstep_train::Error::from)?,
    };
    let resume = match arguments.resume.as_str() {
        "auto" => Resume::Auto,
        "never" => Resume::Never,
        path => Resume::From(path.into()),
    };
    let interrupt = Interrupt::on_signals()?;
    let summary = train(&config, &resume, &interrupt, Progress::on_stderr)?;
    report(&config, &resume, &summary);
    if summary.interrupted {
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if arguments.run.is_none() {
        eprintln!("\na sample:");
        sample(&summary.checkpoint, engine_options(&config).threads)?;
    }
    Ok(ExitCode::SUCCESS)
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

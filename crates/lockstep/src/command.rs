//! The command line: parse, call, print. Exit codes are an interface; see [`exit`].

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::exit::{self, Failure};
use crate::output::{self, note};
use crate::{
    bench, checkpoint, completions, data, doctor, error_file, fetch, generate, import, infer, instructions,
    limits, logging, models, plan, quantize, report, train, typed, verify,
};

/// Train and run large language models: one model, any plan, the same training run.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version = VERSION)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Format of the events that LOCKSTEP_LOG=debug shows on standard error
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "text|json",
        hide_possible_values = true
    )]
    log_format: logging::LogFormat,
}

/// Commit from which this program is built; empty if unknown.
const COMMIT: &str = env!("LOCKSTEP_BUILD_COMMIT");
/// Version as shown by `--version`: `0.1.0 (commit)`.
const VERSION: &str = env!("LOCKSTEP_BUILD_VERSION");

/// First steps, shown if the program is called without arguments.
const FIRST_STEPS: &str = "\
Lockstep trains and runs large language models. To begin with:

  lockstep train              train a small Llama on text found here, and see a
                              sample of what it writes; about a minute
  lockstep train run.toml     train a model of yours; docs/getting-started.md
                              says what stands in run.toml
  lockstep doctor             what this machine offers, and what it lacks
  lockstep plan --model llama3-8b --cluster dgx-h100
                              the best plan for machines that you name

  lockstep --help             all commands
  lockstep train --help       the flags of one of them";

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model; without a file, the built-in demonstration
    Train(Box<train::Arguments>),
    /// Search for the fastest plan, or predict the time and memory of a given one
    Plan(Box<plan::Arguments>),
    /// Compare a plan's numbers with those of one rank; without a file, for a tiny Llama on a built-in text
    Verify(verify::Arguments),
    /// List the model presets: parameters, shape, context, vocabulary
    Models(models::Arguments),
    /// Download models into the cache of Hugging Face, or update them
    Fetch(fetch::Arguments),
    /// Measure loss and perplexity of a model on text
    Eval(Box<infer::EvalArguments>),
    /// Continue prompts, or chat with a model
    Generate(Box<generate::Arguments>),
    /// Write a model with weights of 8 or 4 bits, as a directory that transformers loads
    Quantize(quantize::Arguments),
    /// List, check, export and import checkpoints
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Convert a configuration of another tool (DeepSpeed, Accelerate) to a RUN.toml, on standard output or in a file
    Import(import::Arguments),
    /// Print the JSON Schema of RUN.toml, by which an editor completes and checks it
    Schema,
    /// Tokenize text, and inspect data
    #[command(subcommand)]
    Data(data::Command),
    /// Time training steps, matrix products, collectives and pipelines; measure this machine for the planner
    #[command(subcommand)]
    Bench(bench::Command),
    /// Write the report of a run: one self-contained page
    Report(report::Arguments),
    /// Check this machine: processor, memory, limits, libraries, and a self-test of the kernels
    Doctor(doctor::Arguments),
    /// Print a script that completes commands in a shell
    Completions(completions::Arguments),
}

/// Parses the command line; for a name from another tool, the error names the equivalent.
fn parsed() -> Cli {
    typed::parse(std::env::args().collect()).unwrap_or_else(|(error, arguments)| {
        let Some(hint) = typed::hint(&error, &arguments) else { error.exit() };
        output::error(&hint);
        std::process::exit(i32::from(exit::CONFIGURATION));
    })
}

/// Runs the command line of this process and returns its exit code.
pub(crate) fn main() -> ExitCode {
    lockstep_observe::build::set_commit(COMMIT);
    let Cli { command, log_format } = parsed();
    let prepared =
        logging::start(log_format).and_then(|()| limits::prepare()).and_then(|()| instructions::limit());
    if let Err(Failure { message, code }) = prepared {
        output::error(&message);
        return ExitCode::from(code);
    }
    let Some(command) = command else {
        note!("{FIRST_STEPS}");
        return ExitCode::from(exit::CONFIGURATION);
    };
    // A run that resumes takes the level of its checkpoint.
    if !matches!(command, Command::Train(_)) {
        instructions::choose();
    }
    finish(match command {
        Command::Train(arguments) => train::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Models(arguments) => models::run(&arguments),
        Command::Fetch(arguments) => fetch::run(&arguments),
        Command::Eval(arguments) => infer::eval(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Quantize(arguments) => quantize::run(&arguments),
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Import(arguments) => import::run(&arguments),
        Command::Schema => {
            output::say!("{:#}", lockstep_config::configuration_schema());
            Ok(ExitCode::SUCCESS)
        }
        Command::Data(command) => data::run(&command),
        Command::Bench(command) => bench::run(&command),
        Command::Report(arguments) => report::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments, Cli::command()),
    })
}

/// Returns the exit code of a process, and reports its failure.
pub(crate) fn finish(result: Result<ExitCode, Failure>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(failure) => {
            error_file::write(&failure);
            let Failure { message, code } = failure;
            // A rank without a message of its own leaves the report to its launcher.
            if !message.is_empty() {
                output::error(&message);
            }
            ExitCode::from(code)
        }
    }
}

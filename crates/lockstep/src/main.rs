//! The command line of Lockstep: parse, call, print. Exit codes are an interface; see [`exit`].
#![forbid(unsafe_code)]

mod bench;
#[cfg(test)]
mod book;
mod checkpoint;
mod collectives;
mod completions;
mod data;
mod doctor;
mod exit;
mod infer;
#[cfg(test)]
mod manifests;
mod measured;
mod nodes;
mod output;
mod pipelines;
mod plan;
mod planned;
mod ranks;
mod report;
mod train;
mod verify;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use exit::Failure;

/// Train and run large language models: one model, any plan, the same training run.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model; without a file, the built-in demonstration
    Train(train::Arguments),
    /// Predict what a plan needs: the memory of every rank, and whether it fits
    Plan(plan::Arguments),
    /// Hold a plan's numbers against those of one rank; without a file, of a tiny Llama on a built-in text
    Verify(verify::Arguments),
    /// Loss and perplexity of a model on text
    Eval(infer::EvalArguments),
    /// Continue a prompt
    Generate(infer::GenerateArguments),
    /// List, check, export and import checkpoints
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Tokenize text, and see what data consists of
    #[command(subcommand)]
    Data(data::Command),
    /// Time training steps, matrix products, collectives and pipelines; measure this machine for the planner
    #[command(subcommand)]
    Bench(bench::Command),
    /// Make the report of a run: one page that needs nothing else
    Report(report::Arguments),
    /// Look at this machine: processor, memory, limits, libraries, and a test of the kernels
    Doctor(doctor::Arguments),
    /// Print a script that completes commands in a shell
    Completions(completions::Arguments),
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LOCKSTEP_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let result = match Cli::parse().command {
        Command::Train(arguments) => train::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Eval(arguments) => infer::eval(&arguments),
        Command::Generate(arguments) => infer::generate(&arguments),
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Data(command) => data::run(&command),
        Command::Bench(command) => bench::run(&command),
        Command::Report(arguments) => report::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments, Cli::command()),
    };
    match result {
        Ok(code) => code,
        Err(Failure { message, code }) => {
            // A rank that has nothing to say of its own leaves it to its launcher.
            if !message.is_empty() {
                eprintln!("error: {message}");
            }
            ExitCode::from(code)
        }
    }
}

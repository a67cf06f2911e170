//! `lockstep completions SHELL`: a completion script that the shell sources.

use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::{Shell, generate};

use crate::exit::Failure;
use crate::output::say;

#[derive(Debug, Args)]
#[command(after_help = "For example, in ~/.bashrc:\n  source <(lockstep completions bash)")]
pub(crate) struct Arguments {
    /// The shell to complete for
    shell: Shell,
}

pub(crate) fn run(arguments: &Arguments, mut command: Command) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    generate(arguments.shell, &mut command, "lockstep", &mut script);
    say!("{}", String::from_utf8_lossy(&script).trim_end());
    Ok(ExitCode::SUCCESS)
}

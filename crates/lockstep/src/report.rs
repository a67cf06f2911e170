//! `lockstep report`: writes the report of a run.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use lockstep_observe::report;

use crate::exit::Failure;
use crate::output::say;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of a run's records: its metrics.dir
    #[arg(value_name = "RUN_DIR", value_hint = ValueHint::DirPath)]
    dir: PathBuf,
    /// File to write [default: report.html in RUN_DIR]
    #[arg(short, long, value_name = "FILE.html", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let path = report::write(&arguments.dir, arguments.output.as_deref())?;
    say!("wrote {}", path.display());
    Ok(ExitCode::SUCCESS)
}

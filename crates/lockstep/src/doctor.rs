//! `lockstep doctor`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use lockstep_train::RunConfig;
use lockstep_train::doctor::{Peaks, Status, examine, worst};
use serde_json::json;

use crate::exit::{Failure, MISSING};
use crate::output::say;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where checkpoints would go [default: checkpoints]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    checkpoint_dir: Option<PathBuf>,
    /// Measure the peaks of arithmetic and memory as well
    #[arg(long)]
    bench: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let dir = arguments.checkpoint_dir.clone().unwrap_or_else(|| RunConfig::default().checkpoint.dir);
    let findings = examine(&dir, if arguments.bench { Peaks::Measured } else { Peaks::Skipped });
    let worst = worst(&findings);
    if arguments.json {
        say!("{}", json!({ "version": env!("CARGO_PKG_VERSION"), "status": worst, "findings": findings }));
    } else {
        let width = findings.iter().map(|finding| finding.name.chars().count()).max().unwrap_or(0);
        let mut section = "";
        for finding in &findings {
            let heading = if finding.section == section { "" } else { finding.section };
            section = finding.section;
            say!("{heading:10} {:width$}  {}", finding.name, finding.value);
            if let Some(advice) = &finding.advice {
                let status = if finding.status == Status::Missing { "missing" } else { "warning" };
                say!("{:10} {status}: {advice}", "");
            }
        }
    }
    Ok(if worst == Status::Missing { ExitCode::from(MISSING) } else { ExitCode::SUCCESS })
}

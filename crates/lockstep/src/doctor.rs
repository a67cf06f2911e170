//! `lockstep doctor`: checks this machine, or analyses flight records.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueHint};
use lockstep_config::RunConfig;
use lockstep_data::{Format, expand};
use lockstep_observe::doctor::{Peaks, Status, examine, worst};
use lockstep_observe::flight::{analyse, read_all};
use serde_json::json;

use crate::exit::{Failure, MISSING};
use crate::output::say;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory for checkpoints [default: checkpoints]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    checkpoint_dir: Option<PathBuf>,
    /// Measure peak compute and memory throughput as well
    #[arg(long)]
    bench: bool,
    /// Find the operation on which ranks differ, from the flight records that a failed run has left: files, globs, or directories
    /// with flight-*.json
    #[arg(long, value_name = "FILE", num_args = 1.., value_hint = ValueHint::AnyPath, conflicts_with_all = ["bench", "checkpoint_dir"])]
    trace: Vec<String>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    if !arguments.trace.is_empty() {
        return trace(&arguments.trace, arguments.json);
    }
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

fn trace(asked: &[String], as_json: bool) -> Result<ExitCode, Failure> {
    let pattern = |pattern: &String| match Path::new(pattern) {
        dir if dir.is_dir() => dir.join("flight-*.json").display().to_string(),
        _ => pattern.clone(),
    };
    let patterns: Vec<String> = asked.iter().map(pattern).collect();
    let are_there = |pattern: &String| expand(std::slice::from_ref(pattern), Format::JsonLines).is_ok();
    if !patterns.iter().any(are_there) {
        return Err(Failure::configuration(format!(
            "{} has no records of ranks (flight-*.json): runs of several ranks leave them when they end badly; \
             `lockstep report DIR` shows the steps of any run",
            asked.join(", ")
        )));
    }
    let files = expand(&patterns, Format::JsonLines)?;
    let analysis = analyse(&read_all(&files.into_iter().map(|file| file.path).collect::<Vec<_>>())?);
    if as_json {
        say!("{}", json!(analysis))
    } else {
        say!("{}", analysis.to_string().trim_end())
    }
    Ok(ExitCode::SUCCESS)
}

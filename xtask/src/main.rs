//! The one entry point for developers: `cargo xtask ci` runs what CI runs, step by step, and stops at the first failure.
#![forbid(unsafe_code)]

mod picture;

use std::env;
use std::fs;
use std::process::{Command, ExitCode};
use std::time::Instant;

/// The test command of the README, word for word.
const TEST: &str = "cargo test --workspace";

const HELP: &str = "\
cargo xtask ci      formatting, lints, documentation and the README's test command
cargo xtask docs    writes docs/configuration.md from the code
cargo xtask picture draws docs/train.svg from a run of the demonstration
";

fn main() -> ExitCode {
    let result = match env::args().nth(1).as_deref() {
        Some("ci") => ci(),
        Some("docs") => run(
            "cargo test --quiet -p lockstep-train --test configuration the_manual_is_current",
            &[("LOCKSTEP_WRITE_DOCS", "1")],
        ),
        Some("picture") => picture::draw(),
        _ => Err(HELP.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn ci() -> Result<(), String> {
    let readme =
        fs::read_to_string("README.md").map_err(|error| format!("cannot read README.md: {error}"))?;
    if !readme.contains(TEST) {
        return Err(format!("README.md does not name the test command, {TEST:?}"));
    }
    run("cargo fmt --all -- --check", &[])?;
    run("cargo clippy --workspace --all-targets -- -D warnings", &[])?;
    run("cargo doc --workspace --no-deps", &[("RUSTDOCFLAGS", "-D warnings")])?;
    run(TEST, &[])
}

/// Runs a command line whose words hold no spaces.
fn run(command: &str, environment: &[(&str, &str)]) -> Result<(), String> {
    println!("== {command}");
    let begin = Instant::now();
    let mut words = command.split_whitespace();
    let program = words.next().unwrap_or_default();
    let status = Command::new(program)
        .args(words)
        .envs(environment.iter().copied())
        .status()
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    if !status.success() {
        return Err(format!("failed: {command} ({status})"));
    }
    println!("== ok in {:.0} s", begin.elapsed().as_secs_f64());
    Ok(())
}

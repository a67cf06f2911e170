//! The one entry point for developers: `cargo xtask ci` runs what CI runs, step by step, and stops at the first failure.
#![forbid(unsafe_code)]

mod mpi;
mod picture;

use std::env;
use std::process::{Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fs, io};

/// The test command of the README, word for word.
const TEST: &str = "cargo test --workspace";

/// The test of the parity matrix: faults, compiled in, of which each must be noticed.
const MUTATIONS: &str =
    "cargo test --workspace --features lockstep-testkit/mutations --test mutations -- --nocapture";

/// A target without x86's vectors: the portable kernels must build alone.
const OTHER_TARGET: &str = "aarch64-unknown-linux-gnu";

/// No step of CI takes this long unless something hangs.
const LIMIT: Duration = Duration::from_secs(25 * 60);

const HELP: &str = "\
cargo xtask ci      formatting, lints, documentation and the README's test command
cargo xtask soak    what takes too long for the tests: ranks that die at 1,000 random moments, 2,000 random plans,
                    a search for plans against looking at all of them, the planner's 60 usual questions, every command
                    of the book as it stands
cargo xtask mutations  faults put into sums over ranks, each of which a test must notice
cargo xtask mpi     the feature mpi, built and run with the MPI that MPICC and MPIRUN name
cargo xtask docs    writes docs/configuration.md and tables of keys from the code
cargo xtask picture draws docs/train.svg from a run of the demonstration
";

fn main() -> ExitCode {
    let result = match env::args().nth(1).as_deref() {
        Some("ci") => ci(),
        Some("mpi") => mpi::check(),
        Some("mutations") => run(MUTATIONS, &[]),
        Some("docs") => run(
            "cargo test --quiet --workspace --test configuration --test manual is_current",
            &[("LOCKSTEP_WRITE_DOCS", "1")],
        ),
        Some("soak") => soak(),
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

fn soak() -> Result<(), String> {
    run(
        "cargo test --workspace --test processes a_rank_that_dies -- --nocapture",
        &[("LOCKSTEP_SEEDS", "1000")],
    )?;
    run("cargo test --workspace --test parity random_plans", &[("LOCKSTEP_PLANS", "2000")])?;
    run(
        "cargo test --workspace --test planner looking_at_everything -- --nocapture",
        &[("LOCKSTEP_GRID", "all")],
    )?;
    run(
        "cargo test --workspace --test planner usual_questions -- --nocapture",
        &[("LOCKSTEP_QUESTIONS", "all")],
    )?;
    run("cargo test --workspace --test command_line book", &[("LOCKSTEP_BOOK", "all")])
}

fn ci() -> Result<(), String> {
    let readme =
        fs::read_to_string("README.md").map_err(|error| format!("cannot read README.md: {error}"))?;
    if !readme.contains(TEST) {
        return Err(format!("README.md does not name the test command, {TEST:?}"));
    }
    run("cargo fmt --all -- --check", &[])?;
    run("cargo clippy --workspace --all-targets -- -D warnings", &[])?;
    if is_installed(OTHER_TARGET) {
        run(&format!("cargo clippy --target {OTHER_TARGET} -- -D warnings"), &[])?;
    } else {
        println!("== skipped: no standard library for {OTHER_TARGET} (rustup target add {OTHER_TARGET})");
    }
    run("cargo doc --workspace --no-deps", &[("RUSTDOCFLAGS", "-D warnings")])?;
    run(TEST, &[])?;
    run(MUTATIONS, &[])?;
    mpi::check_if_possible()
}

/// Whether rustup has the standard library of `target`.
fn is_installed(target: &str) -> bool {
    let listed = Command::new("rustup").args(["target", "list", "--installed"]).output();
    listed.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).lines().any(|line| line == target))
}

/// Runs a command line whose words hold no spaces.
fn run(command: &str, environment: &[(&str, &str)]) -> Result<(), String> {
    println!("== {command}");
    let begin = Instant::now();
    let mut words = command.split_whitespace();
    let program = words.next().unwrap_or_default();
    let failed = |error: io::Error| format!("cannot run {program}: {error}");
    let mut child =
        Command::new(program).args(words).envs(environment.iter().copied()).spawn().map_err(failed)?;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if begin.elapsed() > LIMIT {
            let _ = child.kill();
            return Err(format!("failed: {command} took more than {} minutes", LIMIT.as_secs() / 60));
        }
        sleep(Duration::from_millis(50));
    };
    if !status.success() {
        return Err(format!("failed: {command} ({status})"));
    }
    println!("== ok in {:.0} s", begin.elapsed().as_secs_f64());
    Ok(())
}

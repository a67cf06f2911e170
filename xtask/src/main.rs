//! The one entry point for developers: `cargo xtask ci` runs what CI runs, step by step, and stops at the first failure.
#![forbid(unsafe_code)]

mod aarch64;
mod circles;
mod floors;
mod golden;
mod mpi;
mod mutants;
mod picture;
mod soak;
mod step;
mod words;

use std::process::ExitCode;
use std::{env, fs};

use step::{Background, run};

/// Test command of the README, word for word.
const TEST: &str = "cargo test --workspace";

/// Test of the parity matrix: injected faults, each of which must be detected.
const MUTATIONS: &str = "cargo test --workspace --test mutations -- --nocapture";

/// Flag of `cargo xtask aarch64`: a missing tool is no error.
const IF_POSSIBLE: &str = "--if-possible";

const HELP: &str = "\
cargo xtask ci      formatting, lints, documentation and the README's test command
cargo xtask soak [PART...]  what takes hours: attacks on whole runs (signals, crowds, memory, network, restarts, disks), on
                    meetings and frames (strangers, frames), on checkpoints (power, pruning, exports), ranks that die at
                    1,000 random moments (deaths), 2,000 random plans (plans), a search for plans against looking at all of
                    them (search), the planner's 60 usual questions (questions), recorded plans (golden), every command of the book as it
                    stands (book), mutants of the code of which tests must notice 90 % (mutants)
cargo xtask golden [--write] [NAME...]  trains and predicts 59 plans and compares losses, gradient norms, weights, booked and
                    predicted bytes and predicted times with the recorded ones; --write records them anew
cargo xtask mutations  faults put into what ranks tell each other and record, each of which a test must notice
cargo xtask aarch64 [--if-possible]  tests of the kernels for AArch64, cross-compiled and run under QEMU; --if-possible installs
                    what is missing, and reports the tests as not run if it cannot
cargo xtask mpi     the feature mpi, built and run with the MPI that MPICC and MPIRUN name
cargo xtask docs    writes docs/configuration.md and tables of keys from the code
cargo xtask picture draws docs/train.svg from a run of the demonstration
cargo xtask circles names the circles of imports between files of a crate, and crates that use one on their own floor or above
cargo xtask words [SEED | --list [DIR]]  counts doc comments that open without a noun or verb, and prints 50 drawn at random, or all at
                    fault
";

fn main() -> ExitCode {
    let result = match env::args().nth(1).as_deref() {
        Some("ci") => ci(),
        Some("aarch64") if env::args().nth(2).as_deref() == Some(IF_POSSIBLE) => aarch64::check_if_possible(),
        Some("aarch64") => aarch64::check(),
        Some("mpi") => mpi::check(),
        Some("mutations") => run(MUTATIONS, &[]),
        Some("docs") => run(
            "cargo test --quiet --workspace --test configuration --test manual is_current",
            &[("LOCKSTEP_WRITE_DOCS", "1")],
        ),
        Some("golden") => golden::golden(&env::args().skip(2).collect::<Vec<_>>()),
        Some("soak") => soak::soak(&env::args().skip(2).collect::<Vec<_>>()),
        Some("picture") => picture::draw(),
        Some("circles") => imports(),
        Some("words") => words::words(&env::args().skip(2).collect::<Vec<_>>()),
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
    println!("== cargo xtask words");
    words::check()?;
    println!("== cargo xtask circles");
    imports()?;
    run("cargo clippy --workspace --all-targets -- -D warnings", &[])?;
    // The product alone, without the features that the testkit enables.
    run("cargo clippy -- -D warnings", &[])?;
    if aarch64::is_installed(aarch64::TARGET) {
        run(&format!("cargo clippy --target {} -- -D warnings", aarch64::TARGET), &[])?;
    }
    run("cargo doc --workspace --no-deps", &[("RUSTDOCFLAGS", "-D warnings")])?;
    // Every crate packs from its own files and versioned dependencies; building each again from its package would double the time.
    run("cargo publish --workspace --dry-run --no-verify --allow-dirty --quiet", &[])?;
    // Emulated kernels run in the time that the other tests spend waiting.
    let aarch64 = Background::start(&["aarch64", IF_POSSIBLE])?;
    // Builds and runs have a time limit each.
    run(&format!("{TEST} --no-run"), &[])?;
    run(TEST, &[])?;
    mpi::check_if_possible()?;
    aarch64.finish()
}

/// Checks the directions of imports: of files in a crate, and of crates.
fn imports() -> Result<(), String> {
    floors::check()?;
    circles::check()
}

//! Mutation testing: cargo-mutants changes the code in small ways, one at a time, and the tests of its crate must fail.
//!
//! There are some ten thousand such mutants, so a sample is drawn: every `n`th of each crate from the `k`th on,
//! `LOCKSTEP_SHARD=k/n`. Nine of ten must be detected. `mutants.txt` lists survivors that change nothing that a test could see,
//! each with the reason; they do not count.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::step::{LIMIT, run_within};

/// Offset and interval of the sample, unless `LOCKSTEP_SHARD` overrides it.
const SHARD: &str = "0/60";
/// Survivors that are equivalent to the code.
const ACCEPTED: &str = include_str!("../mutants.txt");
/// Percentage of mutants that must be detected.
const GOAL_PERCENT: usize = 90;
/// Limit on the build and on the tests of a mutant, in seconds.
const MUTANT_LIMIT_S: &str = "600";

/// Code whose tests are tested.
struct Code {
    package: &'static str,
    /// Files below the crate's `src`; empty for all.
    files: &'static [&'static str],
    /// A dependent crate whose tests cover this one as well.
    tested_by: Option<&'static str>,
    /// Arguments of `cargo test` that select tests; empty for all tests of the crate.
    tests: &'static [&'static str],
}

const CODE: [Code; 8] = [
    Code {
        package: "lockstep-plan",
        files: &[],
        tested_by: Some("lockstep-planner"),
        tests: &["--lib", "--test", "state_layout", "--test", "planner"],
    },
    Code {
        package: "lockstep-planner",
        files: &[],
        tested_by: None,
        tests: &["--lib", "--test", "all_reduces", "--test", "clusters", "--test", "planner"],
    },
    Code {
        package: "lockstep-observe",
        files: &["metrics/*.rs"],
        tested_by: Some("lockstep-train"),
        tests: &["--lib", "--test", "training"],
    },
    Code {
        package: "lockstep-checkpoint",
        files: &[],
        tested_by: Some("lockstep-train"),
        tests: &[
            "--lib",
            "--test",
            "faults",
            "--test",
            "hugging_face",
            "--test",
            "safetensors",
            "--test",
            "save_and_load",
            "--test",
            "training",
        ],
    },
    Code { package: "lockstep-data", files: &[], tested_by: None, tests: &[] },
    Code {
        package: "lockstep-train",
        files: &[
            "clipping.rs",
            "evaluation.rs",
            "guard.rs",
            "loss_scale.rs",
            "saving/*.rs",
            "start.rs",
            "state.rs",
            "trainer.rs",
        ],
        tested_by: None,
        tests: &["--lib", "--test", "training"],
    },
    Code {
        package: "lockstep-comm",
        files: &[
            "algorithm.rs",
            "blocks.rs",
            "number.rs",
            "record.rs",
            "tcp/frame.rs",
            "tcp/handshake.rs",
            "tcp/roster.rs",
            "tcp/stepwise.rs",
            "tcp/tree.rs",
        ],
        tested_by: None,
        tests: &[],
    },
    Code {
        package: "lockstep-launch",
        files: &["environment/*.rs", "hostfile.rs", "restarts.rs"],
        tested_by: None,
        tests: &["--lib"],
    },
];

/// Mutants by result.
#[derive(Default)]
struct Tally {
    noticed: usize,
    missed: Vec<String>,
}

/// Draws the sample and tests it.
pub(crate) fn sample() -> Result<(), String> {
    if !Command::new("cargo")
        .args(["mutants", "--version"])
        .output()
        .is_ok_and(|output| output.status.success())
    {
        run_within(LIMIT, "cargo install cargo-mutants --locked", &[])?;
    }
    let shard = env::var("LOCKSTEP_SHARD").unwrap_or_else(|_| SHARD.to_owned());
    let mut tally = Tally::default();
    for code in &CODE {
        try_out(code, &shard, &mut tally)?;
    }
    let is_accepted = |name: &String| ACCEPTED.lines().any(|line| line.split('\t').next() == Some(name));
    tally.missed.retain(|name| !is_accepted(name));
    let all = tally.noticed + tally.missed.len();
    println!("== {} of {all} mutants noticed; these were not:", tally.noticed);
    tally.missed.iter().for_each(|name| println!("  {name}"));
    if tally.noticed * 100 >= all * GOAL_PERCENT {
        return Ok(());
    }
    Err(format!("mutants: {} of {all} noticed, {GOAL_PERCENT} % are to be", tally.noticed))
}

/// Tests the mutants of one crate that are in the sample.
fn try_out(code: &Code, shard: &str, tally: &mut Tally) -> Result<(), String> {
    let Code { package, files, tested_by, tests } = code;
    let out = format!("target/mutants/{package}");
    let mut mutants = Command::new("cargo");
    mutants.args([
        "mutants",
        "--package",
        package,
        "--shard",
        shard,
        "--sharding",
        "round-robin",
        "--output",
        &out,
    ]);
    mutants.args(["--timeout", MUTANT_LIMIT_S, "--build-timeout", MUTANT_LIMIT_S, "--no-shuffle"]);
    for file in *files {
        mutants.args(["--file", &format!("crates/{package}/src/{file}")]);
    }
    if let Some(other) = tested_by {
        // The baseline would run only the tests of the first package, which lacks some of the named ones.
        mutants.args(["--test-package", package, "--test-package", other, "--baseline", "skip"]);
    }
    if !tests.is_empty() {
        mutants.arg("--").args(*tests);
    }
    println!("== {mutants:?}");
    let failed = |error: std::io::Error| format!("mutants of {package}: {error}");
    fs::create_dir_all(&out).map_err(failed)?;
    // Exit codes 2 (some missed) and 3 (some timed out) are counted below.
    let status = mutants.status().map_err(failed)?;
    if !matches!(status.code(), Some(0 | 2 | 3)) {
        return Err(format!("mutants of {package}: cargo mutants ended with {status}"));
    }
    let lines = |name: &str| -> Vec<String> {
        let text = fs::read_to_string(Path::new(&out).join("mutants.out").join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    };
    tally.noticed += lines("caught.txt").len() + lines("timeout.txt").len();
    tally.missed.extend(lines("missed.txt"));
    Ok(())
}

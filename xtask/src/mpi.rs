//! Tests of the feature `mpi`, built with the MPI of this machine and run by its `mpirun`.
//!
//! MPICC and MPIRUN select another MPI than the machine's default. If there is none, CI installs the distribution's if it may,
//! and otherwise reports what was skipped.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::step::run;

/// Exit code of a test part that ends in the error that it expects.
const AS_EXPECTED: i32 = 42;
/// Time limit on a part; only a hang exceeds it.
const LIMIT: Duration = Duration::from_secs(120);

/// Configuration of a run that takes no time.
const RUN: &str = "[model]\nmodel_type = \"llama\"\nhidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = 2\n\
    num_attention_heads = 4\nnum_key_value_heads = 2\nmax_position_embeddings = 64\nvocab_size = 256\n\
    [data]\ntrain = [\"text.txt\"]\ncache_dir = \"cache\"\ntokenizer = \"bytes\"\n\
    [train]\nsteps = 20\nglobal_batch = 8\nmicro_batch = 2\nseq_len = 32\nthreads = 1\neval_every = 0\n";

/// Relative tolerance between losses of several ranks and of one.
const TOLERANCE: f64 = 1e-4;

/// Parts of `tests/mpi.rs`: ranks, name, exit code, and a text that some rank must print.
const PARTS: [(usize, &str, i32, &str); 11] = [
    (1, "", 0, "all operations are right"),
    (2, "", 0, "all operations are right"),
    (3, "", 0, "all operations are right"),
    (4, "", 0, "all operations are right"),
    (4, "cut", 0, "all operations are right"),
    (4, "mismatch", AS_EXPECTED, "rank 0 tells: rank 1 called all_reduce(sum) of 9 f32"),
    (4, "tables", AS_EXPECTED, "rank 2 tells: rank 1 called all_to_all of 3 u8 to rank 2"),
    (4, "late", AS_EXPECTED, "rank 0 tells: rank 0 waited 300 ms for rank 2"),
    (4, "left", AS_EXPECTED, "rank 0 tells: rank 1 was lost: it left the run"),
    (4, "panic", AS_EXPECTED, "rank 0 tells: rank 1 was lost: it panicked"),
    (4, "moving", AS_EXPECTED, "rank 0 waited 200 ms for rank 1"),
];

/// Runs [`check`] after installing an MPI if there is none; reports it if that is not possible.
pub(crate) fn check_if_possible() -> Result<(), String> {
    if !can_run(&mpicc()) {
        println!("== installing OpenMPI");
        let apt = |arguments: &[&str]| {
            Command::new("apt-get").args(arguments).env("DEBIAN_FRONTEND", "noninteractive").status()
        };
        let _ = apt(&["update", "-q"]);
        let _ = apt(&["install", "-qy", "--no-install-recommends", "libopenmpi-dev", "openmpi-bin"]);
    }
    if can_run(&mpicc()) && can_run(&mpirun()) {
        return check();
    }
    println!(
        "== NOT TESTED: the feature mpi; there is no {} and {}, nor could they be installed",
        mpicc(),
        mpirun()
    );
    Ok(())
}

/// Lints the feature, runs the tests of collectives and faults, and trains.
pub(crate) fn check() -> Result<(), String> {
    run(
        "cargo clippy --workspace --all-targets --features lockstep/mpi,lockstep-mpi/mpi -- -D warnings",
        &[],
    )?;
    let [test, program] = build()?;
    for (ranks, part, code, words) in PARTS {
        let mut command = launch(ranks);
        command.arg(&test);
        command.args(Some(part).filter(|part| !part.is_empty()));
        expect(command, &format!("{ranks} ranks of {}: {part}", mpirun()), code, words)?;
    }
    train(&program)
}

/// Trains on one rank and on four that are joined by MPI: the losses must agree.
fn train(program: &Path) -> Result<(), String> {
    let dir = env::temp_dir().join(format!("lockstep-mpi-{}", std::process::id()));
    let failed = |error: std::io::Error| format!("{}: {error}", dir.display());
    std::fs::create_dir_all(&dir).map_err(failed)?;
    std::fs::write(dir.join("run.toml"), RUN).map_err(failed)?;
    std::fs::write(dir.join("text.txt"), "a rank of the mesh waits for the tape\n".repeat(400))
        .map_err(failed)?;
    let mut losses = Vec::new();
    for (ranks, transport) in [(1, "auto"), (4, "mpi")] {
        let mut command = if ranks == 1 { Command::new(program) } else { launch(ranks) };
        if ranks > 1 {
            command.arg(program);
        }
        command.args(["train", "run.toml", "--set", &format!("parallel.transport={transport}")]);
        command.args(["--set", &format!("metrics.dir={transport}")]);
        command.args(["--set", &format!("checkpoint.dir={transport}")]).current_dir(&dir);
        expect(command, &format!("20 steps on {ranks} ranks"), 0, "done       20 steps")?;
        let rows = std::fs::read_to_string(dir.join(transport).join("metrics.jsonl")).map_err(failed)?;
        let loss = |row: &str| row.split_once("\"loss\":")?.1.split(',').next()?.parse::<f64>().ok();
        losses.push(rows.lines().filter_map(loss).collect::<Vec<f64>>());
    }
    std::fs::remove_dir_all(&dir).map_err(failed)?;
    let is_close = |pair: (&f64, &f64)| (pair.0 - pair.1).abs() <= TOLERANCE * pair.0;
    if losses[0].len() == 20 && losses[1].len() == 20 && losses[0].iter().zip(&losses[1]).all(is_close) {
        return Ok(());
    }
    Err(format!("losses of one rank and of four differ by more than {TOLERANCE}: {losses:?}"))
}

fn mpicc() -> String {
    env::var("MPICC").unwrap_or_else(|_| "mpicc".to_owned())
}

fn mpirun() -> String {
    env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned())
}

fn can_run(program: &str) -> bool {
    version(program).is_some()
}

fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns an `mpirun` command for `ranks` ranks, which may exceed the number of cores.
fn launch(ranks: usize) -> Command {
    let mut command = Command::new(mpirun());
    if version(&mpirun()).is_some_and(|version| version.contains("Open MPI")) {
        command.args(["--oversubscribe", "--quiet"]);
        // CI runs as root, in a container of its own.
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    }
    command.args(["-n", &ranks.to_string()]);
    command
}

/// Arguments of cargo for the test and the program with the feature. With the whole workspace and a test, dependencies have the
/// features of `cargo test --workspace`, and only the crates with the feature are built again.
const BUILD: &str = "build --workspace --features lockstep/mpi,lockstep-mpi/mpi --test mpi --bin lockstep";

/// Builds the test and the program with the feature and returns their paths.
fn build() -> Result<[PathBuf; 2], String> {
    println!("== cargo {BUILD}");
    let output = Command::new("cargo")
        .args(BUILD.split_whitespace())
        .args(["--quiet", "--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run cargo: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let programs =
        || text.lines().filter_map(|line| line.split_once("\"executable\":\"")?.1.split('"').next());
    // The test has a hash at the end of its name.
    let is_test = |program: &&str| Path::new(program).parent().is_some_and(|folder| folder.ends_with("deps"));
    match (programs().find(is_test), programs().find(|program| !is_test(program))) {
        (Some(test), Some(program)) if output.status.success() => Ok([test.into(), program.into()]),
        _ => Err(format!("failed: cargo {BUILD}")),
    }
}

/// Runs a command to its end and checks that it exits with `code` and prints `words`.
fn expect(mut command: Command, what: &str, code: i32, words: &str) -> Result<(), String> {
    let begin = Instant::now();
    let log = env::temp_dir().join(format!("lockstep-mpi-{}.log", std::process::id()));
    let failed = |error: std::io::Error| format!("{what}: {error}");
    let file = std::fs::File::create(&log).map_err(failed)?;
    command.stdout(file.try_clone().map_err(failed)?).stderr(file).stdin(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    let status = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => break Some(status),
            None if begin.elapsed() > LIMIT => break None,
            None => sleep(Duration::from_millis(20)),
        }
    };
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let said = std::fs::read_to_string(&log).map_err(failed)?;
    let _ = std::fs::remove_file(&log);
    let found = status.and_then(|status| status.code());
    if found != Some(code) || !said.contains(words) {
        return Err(format!(
            "{what}: ended with {found:?} where {code} and {words:?} were expected:\n{said}"
        ));
    }
    println!("== ok in {:.1} s: {what}", begin.elapsed().as_secs_f64());
    Ok(())
}

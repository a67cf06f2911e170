//! System limits and ranks that do not run: one message and an exit code of the README, never a silent death.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::workshop::{Outcome, Workshop};

const PROGRAM: &str = env!("CARGO_BIN_EXE_lockstep");

/// Runs `train run.toml` in a shell that has set limits.
fn limited(workshop: &Workshop, limit: &str, arguments: &str) -> Outcome {
    let line = format!("{limit}; exec {PROGRAM} train run.toml {arguments}");
    workshop.start("sh", &["-c", &line]).finish()
}

#[test]
fn a_file_that_may_not_grow_is_an_error_and_no_signal() {
    let workshop = Workshop::new();
    for (ranks, dir) in [("1", "a"), ("2", "b")] {
        let set = format!("--set checkpoint.dir={dir} --set metrics.dir={dir}-runs --nproc-per-node {ranks}");
        // In blocks of 512 bytes: the weights take more.
        let outcome = limited(&workshop, "ulimit -f 16", &set);
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        assert!(outcome.stderr.contains("File too large"), "{outcome:?}");
        assert!(outcome.stderr.contains("raise ulimit -f"), "{outcome:?}");
    }
}

#[test]
fn an_address_space_that_is_too_small_is_an_error_and_no_signal() {
    let workshop = Workshop::new();
    let mut refused = 0;
    for kilobytes in (40..110).step_by(5).map(|megabytes| megabytes * 1000) {
        // Below some limit the dynamic loader itself has no memory.
        let run = |arguments: &str| {
            let line = format!("ulimit -v {kilobytes}; exec {PROGRAM} {arguments}");
            let mut command = Command::new("sh");
            command.args(["-c", &line]).current_dir(workshop.path(""));
            // The standard library has no memory left for a backtrace of a failed allocation.
            command.env_remove("RUST_BACKTRACE");
            command.env("XDG_CACHE_HOME", workshop.path("cache")).output().unwrap()
        };
        if !run("--version").status.success() {
            continue;
        }
        let dir = format!("--set checkpoint.dir=c{kilobytes} --set metrics.dir=m{kilobytes}");
        let output = run(&format!("train run.toml {dir}"));
        assert!(matches!(output.status.code(), Some(0 | 1)), "{kilobytes} kB: {output:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(1) {
            refused += 1;
            let says = [
                "memory allocation of",
                "out of memory",
                "Cannot allocate memory",
                "cannot start",
                "ulimit -v",
            ];
            assert!(says.iter().any(|says| text.contains(says)), "{kilobytes} kB: {text}");
        }
    }
    assert!(refused > 0, "no limit was too small");
    let outcome = limited(&workshop, "ulimit -v 500000", "--nproc-per-node 2");
    outcome.fails(1, &["Cannot allocate memory", "raise ulimit -v"]);
}

#[test]
fn threads_that_are_refused_are_an_error_and_no_panic() {
    let workshop = Workshop::new();
    // Root has no such limit, so another user runs out of tasks.
    let is_root = rustix::process::geteuid().is_root();
    let begin = if is_root { "setpriv --reuid=65534 --regid=65534 --clear-groups" } else { "env" };
    let all = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(workshop.path(""), all).unwrap();
    let limited = |tasks: usize, command: &str| {
        let line = format!("exec {begin} bash -c 'ulimit -u {tasks} && exec {command}'");
        Command::new("bash")
            .args(["-c", &line])
            .current_dir(workshop.path(""))
            .env("XDG_CACHE_HOME", workshop.path("cache"))
            .output()
    };
    if !limited(1000, &format!("{PROGRAM} --version")).is_ok_and(|output| output.status.success()) {
        #[expect(clippy::print_stderr, reason = "a part that this machine cannot run is said")]
        {
            eprintln!("no bash or setpriv here, or another user may not run {PROGRAM}");
        }
        return;
    }
    let mut refused = 0;
    for tasks in 1..=10 {
        let set = format!("--set train.threads=2 --set checkpoint.dir=c{tasks} --set metrics.dir=m{tasks}");
        let output = limited(tasks, &format!("{PROGRAM} train run.toml {set}")).unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{tasks} tasks: {output:?}");
        assert!(!text.contains("panicked at"), "{tasks} tasks: {text}");
        if output.status.code() == Some(1) {
            refused += 1;
            assert!(text.contains("error: ") && text.contains("raise ulimit -u"), "{tasks} tasks: {text}");
        }
    }
    assert!(refused > 0, "no limit on tasks was too small");
}

#[test]
fn ranks_that_are_all_stopped_are_told_and_go_on() {
    let workshop = Workshop::new();
    let run = [
        "train",
        "run.toml",
        "--nproc-per-node",
        "2",
        "--set",
        "train.steps=1000000",
        "--set",
        "elastic.heartbeat_ms=1000",
    ];
    let mut run = workshop.start(PROGRAM, &run);
    run.wait_until("a step", |run| run.stderr().contains("\nstep "));
    let launcher = run.child.id();
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let ranks: Vec<Pid> =
        children.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap()).collect();
    let begin = std::time::Instant::now();
    ranks.iter().for_each(|pid| kill_process(*pid, Signal::STOP).unwrap());
    run.wait_until("a warning", |run| run.stderr().contains("all of them are stopped; kill -CONT "));
    let told = begin.elapsed();
    ranks.iter().for_each(|pid| kill_process(*pid, Signal::CONT).unwrap());
    run.wait_until("the end of it", |run| run.stderr().contains("the ranks move again"));
    kill_process(Pid::from_raw(launcher.cast_signed()).unwrap(), Signal::TERM).unwrap();
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(75), "{outcome:?}");
    // The heartbeat's limit and a second.
    assert!(told.as_secs_f64() < 2.0, "told after {told:?}: {outcome:?}");
}

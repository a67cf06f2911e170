//! torchrun's flags and variables: destinations of output, variables of ranks, restarts, pairing.

use std::net::TcpListener;
use std::process::Command;

use serde_json::Value;

use crate::workshop::{Outcome, Workshop};

const PROGRAM: &str = env!("CARGO_BIN_EXE_lockstep");

fn train(workshop: &Workshop, arguments: &str, variables: &[(&str, &str)]) -> Outcome {
    let arguments: Vec<&str> =
        ["train", "run.toml"].into_iter().chain(arguments.split_whitespace()).collect();
    workshop.start_in(PROGRAM, &arguments, variables).finish()
}

/// Returns the content of a run's `TORCHELASTIC_ERROR_FILE`.
fn error_file(workshop: &Workshop) -> Value {
    let found: Value = serde_json::from_slice(&workshop.read("error.json")).unwrap();
    let keys: Vec<&String> = found["message"]["extraInfo"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["py_callstack", "timestamp"], "{found}");
    found
}

#[test]
fn output_goes_where_torchruns_flags_send_it() {
    let workshop = Workshop::new();
    let redirected =
        "--nproc_per_node=2 --redirects 3 --log_dir logs --resume never --no_python --monitor_interval 5";
    let outcome = train(&workshop, redirected, &[]).succeeds();
    assert!(outcome.stderr.starts_with("without effect here: --monitor-interval ("), "{outcome:?}");
    assert_eq!(outcome.stderr.matches('\n').count(), 1, "ranks print to files: {outcome:?}");
    let log = |name: &str| String::from_utf8(workshop.read(name)).unwrap();
    assert!(log("logs/rank-00000.err").contains("\nstep "), "{outcome:?}");
    assert!(workshop.path("logs/rank-00001.out").exists());
    // With variables, only rank 0's errors are written to a file and shown.
    let tee = [("PET_TEE", "0:2"), ("PET_NPROC_PER_NODE", "2"), ("PET_LOG_DIR", "tee")];
    let outcome = train(&workshop, "--resume never", &tee).succeeds();
    assert!(
        outcome.stderr.contains("\nstep ") && log("tee/rank-00000.err").contains("\nstep "),
        "{outcome:?}"
    );
    assert!(!workshop.path("tee/rank-00001.err").exists() && !workshop.path("tee/rank-00000.out").exists());
    let outcome =
        train(&workshop, "--nproc-per-node 2 --local-ranks-filter 1 --resume never", &[]).succeeds();
    assert_eq!(outcome.stderr, "", "rank 0 is not shown");
    // A failure is reported even if its rank's output is not shown.
    let broken = "--nproc-per-node 2 --redirects 3 --log-dir broken --set data.train=[\"nowhere.txt\"]";
    let outcome = train(&workshop, broken, &[("TORCHELASTIC_ERROR_FILE", "error.json")]);
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stderr.contains("what it said is in broken/rank-0000"), "{outcome:?}");
    let found = error_file(&workshop);
    assert_eq!(found["message"]["errorCode"], 2, "{found}");
    let text = found["message"]["message"].as_str().unwrap();
    assert!(text.starts_with("ConfigurationError: ") && text.contains("nowhere"), "{found}");
}

#[test]
fn ranks_are_told_what_torchelastic_tells_its_workers() {
    let workshop = Workshop::new();
    let run = "--nproc-per-node 2 --role trainer --max-restarts 3 --rdzv-id job7 --set train.steps=1000000";
    let arguments: Vec<&str> = ["train", "run.toml"].into_iter().chain(run.split_whitespace()).collect();
    let mut run = workshop.start_in(PROGRAM, &arguments, &[]);
    run.wait_until("a step", |run| run.stderr().contains("\nstep "));
    let launcher = run.child.id();
    let children = || {
        let text = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
        text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let variables = |pid: &str| {
        let bytes = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        text.split('\0').map(str::to_owned).collect::<Vec<_>>()
    };
    let first = children();
    let second_rank = variables(&first[1]);
    for expected in [
        "RANK=1",
        "ROLE_RANK=1",
        "ROLE_WORLD_SIZE=2",
        "ROLE_NAME=trainer",
        "TORCHELASTIC_RESTART_COUNT=0",
        "TORCHELASTIC_MAX_RESTARTS=3",
        "TORCHELASTIC_USE_AGENT_STORE=False",
    ] {
        assert!(second_rank.iter().any(|found| found == expected), "{expected}: {second_rank:?}");
    }
    // A killed rank is restarted together with all others, and the run continues.
    let victim = rustix::process::Pid::from_raw(first[1].parse().unwrap()).unwrap();
    rustix::process::kill_process(victim, rustix::process::Signal::KILL).unwrap();
    run.wait_until("a restart", |run| run.stderr().contains("restart 1 of 3"));
    run.wait_until("a step after it", |run| {
        run.stderr().split_once("restart 1 of 3").is_some_and(|(_, after)| after.contains("\nstep "))
    });
    let again = children();
    assert!(again.len() == 2 && again != first, "{again:?}");
    assert!(variables(&again[0]).iter().any(|found| found == "TORCHELASTIC_RESTART_COUNT=1"));
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(launcher.cast_signed()).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(75), "{outcome:?}");
}

#[test]
fn a_pairing_code_joins_two_machines_and_another_one_does_not() {
    let workshop = Workshop::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let node = |rank: usize, code: &str| {
        let text = format!("--nnodes 2 --node-rank {rank} --rdzv-endpoint 127.0.0.1:{port}");
        let arguments: Vec<&str> = ["train", "run.toml"].into_iter().chain(text.split_whitespace()).collect();
        workshop.start_in(PROGRAM, &arguments, &[("LOCKSTEP_PAIRING_CODE", code)])
    };
    let first = node(0, "K7QX2-M4VTD-9RZPA-3WHNC");
    node(1, "K7QX2-M4VTD-9RZPA-3WHNB").finish().refuses(2, &["another secret", "--pairing-code"]);
    node(1, "k7qx2m4vtd9rzpa3whnc").finish().succeeds();
    first.finish().succeeds();
}

/// Two machines: network namespaces joined by a pair of interfaces.
struct Machines([String; 2]);

impl Machines {
    /// Creates the machines; `None` if this user may not.
    fn new() -> Option<Self> {
        let names = [0, 1].map(|number| format!("lockstep-{}-{number}", std::process::id()));
        let ip = |arguments: &str| {
            Command::new("ip")
                .args(arguments.split_whitespace())
                .output()
                .is_ok_and(|output| output.status.success())
        };
        let [first, second] = &names;
        if !ip(&format!("netns add {first}")) {
            return None;
        }
        let machines = Self(names.clone());
        let steps = [
            format!("netns add {second}"),
            format!("-n {first} link add near type veth peer name far netns {second}"),
            format!("-n {first} addr add 10.83.0.1/24 dev near"),
            format!("-n {second} addr add 10.83.0.2/24 dev far"),
            format!("-n {first} link set near up"),
            format!("-n {second} link set far up"),
            format!("-n {first} link set lo up"),
            format!("-n {second} link set lo up"),
        ];
        steps.iter().all(|step| ip(step)).then_some(machines)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

#[test]
fn torchruns_own_line_starts_a_run_on_two_machines_by_a_pairing_code() {
    let Some(machines) = Machines::new() else {
        // The test above joins two launchers by a pairing code on loopback.
        #[expect(clippy::print_stderr, reason = "a part that this machine cannot run is said")]
        {
            eprintln!("no network namespaces here");
        }
        return;
    };
    let workshop = Workshop::new();
    let start = |machine: usize, more: &[&str]| {
        let rank = format!("--node_rank={machine}");
        let inside = ["netns", "exec", &machines.0[machine], PROGRAM, "train", "run.toml"];
        let line = ["--nproc_per_node=4", "--nnodes=2", &rank, "--rdzv_id=12345", "--rdzv_backend=c10d"];
        let rest = [
            "--rdzv_endpoint=10.83.0.1:29500",
            "--set",
            "train.global_batch=8",
            "--set",
            "train.micro_batch=1",
        ];
        workshop.start("ip", &[&inside[..], &line, &rest, more].concat())
    };
    let mut first = start(0, &[]);
    first.wait_until("a pairing code", |run| run.stderr().contains("--pairing-code "));
    let said = first.stderr();
    let code = said.split_once("pairing code ").unwrap().1.split_whitespace().next().unwrap();
    start(1, &[]).finish().refuses(2, &["no secret", "--pairing-code", "--secret-file"]);
    start(1, &["--pairing-code", code]).finish().succeeds();
    let outcome = first.finish().succeeds();
    assert!(outcome.stderr.contains("8 ranks × 1 micro-batch of 1"), "{outcome:?}");
}

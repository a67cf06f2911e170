//! A run over several machines, all of which are this one: with our launcher on each, and with other launchers' variables.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use rustix::process::{Pid, Signal, kill_process};

use crate::workshop::{Outcome, Started, Workshop};

const PROGRAM: &str = env!("CARGO_BIN_EXE_lockstep");
const MANY: [&str; 4] = ["--set", "train.steps=1000000", "--set", "checkpoint.every=1000000"];

/// Returns an unused port.
pub(crate) fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts `train run.toml` on one of two nodes.
fn node(workshop: &Workshop, port: u16, arguments: &[&str]) -> Started {
    let endpoint = format!("127.0.0.1:{port}");
    let all = ["train", "run.toml", "--nnodes", "2", "--rdzv-endpoint", &endpoint];
    workshop.start(PROGRAM, &[&all[..], arguments].concat())
}

/// Returns the final weights of a run.
fn weights(workshop: &Workshop, checkpoints: &str) -> Vec<u8> {
    workshop.read(&format!("{checkpoints}/step-00000004/rank-00000.safetensors"))
}

/// Starts one process per rank, as `srun` or `mpirun` do.
fn each_rank(
    workshop: &Workshop,
    ranks: usize,
    arguments: &[&str],
    variable: impl Fn(usize) -> String,
) -> Vec<Outcome> {
    let start = |rank| {
        let text = variable(rank);
        let variables: Vec<(&str, &str)> =
            text.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
        workshop.start_in(PROGRAM, &[&["train", "run.toml"], arguments].concat(), &variables)
    };
    let started: Vec<Started> = (0..ranks).map(start).collect();
    started.into_iter().map(Started::finish).collect()
}

#[test]
fn by_any_way_and_any_launcher_the_bits_are_those_of_one_machine() {
    let workshop = Workshop::new();
    let saved = |dir: &str| {
        [
            "--set".to_owned(),
            format!("checkpoint.dir={dir}"),
            "--set".to_owned(),
            format!("metrics.dir={dir}-records"),
        ]
    };
    let run = |dir: &str, arguments: &[&str]| {
        let saved = saved(dir);
        let saved: Vec<&str> = saved.iter().map(String::as_str).collect();
        workshop.run(&[&["train", "run.toml"], arguments, &saved[..]].concat()).succeeds()
    };
    run("shared", &["--nproc-per-node", "2"]);
    run("tcp", &["--nproc-per-node", "2", "--set", "parallel.transport=tcp"]);
    run(
        "ring",
        &["--nproc-per-node", "2", "--set", "parallel.transport=tcp", "--set", "parallel.all_reduce=ring"],
    );
    let port = port();
    let settings = saved("nodes");
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let second = node(&workshop, port, &[&["--node-rank", "1"], &settings[..]].concat());
    let first = node(&workshop, port, &[&["--node-rank", "0"], &settings[..]].concat());
    let (first, second) = (first.finish().succeeds(), second.finish().succeeds());
    assert!(first.stderr.contains("2 ranks × 1 micro-batch of 2"), "{first:?}");
    assert_eq!(second.stderr, "", "the first rank speaks for all");
    let settings = saved("mpirun");
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let named = std::process::id();
    let of_mpirun = |rank| {
        format!(
            "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} \
             OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=test-{named}"
        )
    };
    each_rank(&workshop, 2, &settings, of_mpirun).into_iter().for_each(|outcome| drop(outcome.succeeds()));
    // As torchrun's agent does: it listens at MASTER_PORT itself, and names this machine by an arbitrary name.
    let agent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port();
    let settings = saved("torchrun");
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let of_torchrun = |rank| {
        format!(
            "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 MASTER_ADDR=host.invalid \
             MASTER_PORT={port} TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=none \
             TORCHELASTIC_RESTART_COUNT=0 OMP_NUM_THREADS=7"
        )
    };
    let outcomes = each_rank(&workshop, 2, &settings, of_torchrun);
    let [first, second] = outcomes.try_into().unwrap();
    let (first, second) = (first.succeeds(), second.succeeds());
    assert!(first.stderr.contains("OMP_NUM_THREADS=7 is not read: 1 thread a rank"), "{first:?}");
    assert_eq!(second.stderr, "", "the first rank speaks for all");
    drop(agent);
    let settings = saved("by-hand");
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let by_hand = |rank| format!("RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}");
    each_rank(&workshop, 2, &settings, by_hand).into_iter().for_each(|outcome| drop(outcome.succeeds()));
    for dir in ["tcp", "ring", "nodes", "mpirun", "torchrun", "by-hand"] {
        assert!(weights(&workshop, dir) == weights(&workshop, "shared"), "{dir}: other weights");
    }
}

#[test]
fn a_rank_that_is_killed_on_another_machine_ends_the_run_on_all_and_is_named() {
    let workshop = Workshop::new();
    let port = port();
    // Without node ranks: numbered in order of arrival.
    let runs = [0, 1].map(|_| node(&workshop, port, &MANY));
    let mut runs = runs.map(Some);
    let speaks = |run: &Option<Started>| run.as_ref().is_some_and(|run| run.stderr().contains("\nstep "));
    let begin = std::time::Instant::now();
    while !runs.iter().any(speaks) {
        assert!(begin.elapsed().as_secs() < 30, "no step");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let silent = usize::from(speaks(&runs[0]));
    let launcher = runs[silent].as_ref().unwrap().child.id();
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let rank = Pid::from_raw(children.split_whitespace().next().unwrap().parse().unwrap()).unwrap();
    kill_process(rank, Signal::KILL).unwrap();
    for run in runs.iter_mut().map(|run| run.take().unwrap()) {
        let outcome = run.finish();
        assert_eq!(outcome.code, Some(5), "{outcome:?}");
        // Only the rank's own machine sees how it ended; its launcher tells the other one.
        let expected = "error: rank 1 was lost: it was killed by signal 9 (SIGKILL)";
        assert!(outcome.stderr.contains(expected), "{outcome:?}");
        assert_eq!(outcome.stderr.matches("error:").count(), 1, "{outcome:?}");
    }
    // Each machine has written the flight record of its rank.
    let found = workshop.run(&["doctor", "--trace", "runs", "--json"]).json();
    assert_eq!(found["culprits"], serde_json::json!([1]), "{found}");
    assert_eq!(found["known"], serde_json::json!([0, 1]), "{found}");
}

#[test]
fn ranks_of_another_launcher_tell_of_a_lost_one_and_leave_their_records_themselves() {
    let workshop = Workshop::new();
    let port = port().to_string();
    let start = |rank: &str| {
        let variables = [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
        ];
        workshop.start_in(PROGRAM, &[&["train", "run.toml"], &MANY[..]].concat(), &variables)
    };
    let (mut first, mut second) = (start("0"), start("1"));
    first.wait_until("a step", |run| run.stderr().contains("\nstep "));
    kill_process(Pid::from_raw(second.child.id() as i32).unwrap(), Signal::KILL).unwrap();
    second.child.wait().unwrap();
    let outcome = first.finish();
    assert_eq!(outcome.code, Some(5), "{outcome:?}");
    assert!(outcome.stderr.contains("error: rank 1 was lost"), "{outcome:?}");
    assert!(outcome.stderr.contains("lockstep doctor --trace runs/flight-00000.json"), "{outcome:?}");
    let found = workshop.run(&["doctor", "--trace", "runs", "--json"]).json();
    assert_eq!(
        (&found["culprits"], &found["known"]),
        (&serde_json::json!([1]), &serde_json::json!([0])),
        "{found}"
    );
}

#[test]
fn what_keeps_machines_from_meeting_is_told() {
    let workshop = Workshop::new();
    let refused = |arguments: &[&str], parts: &[&str]| {
        workshop.run(&[&["train", "run.toml"], arguments].concat()).refuses(2, parts);
    };
    refused(&["--nnodes", "2"], &["--rdzv-endpoint"]);
    refused(
        &["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "127.0.0.1"],
        &["node 2", "below the number of nodes, 2"],
    );
    refused(
        &["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "0.0.0.0:29399"],
        &["0.0.0.0 can be reached from other machines", "LOCKSTEP_SECRET_FILE"],
    );
    workshop.write("secret", "0123456789abcdef0123456789abcdef");
    let secret = workshop.path("secret");
    let mode = |mode| std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    refused(
        &["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "0.0.0.0:29399", "--secret-file", "secret"],
        &["others may read it", "chmod 600"],
    );
    mode(0o600);
    workshop.write("other", "0123456789abcdef0123456789abcdeF");
    std::fs::set_permissions(workshop.path("other"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let port = port();
    let mut first = node(&workshop, port, &["--node-rank", "0", "--secret-file", "secret"]);
    node(&workshop, port, &["--node-rank", "1", "--secret-file", "other"])
        .finish()
        .refuses(2, &["another secret"]);
    node(&workshop, port, &["--node-rank", "1", "--secret-file", "secret", "--rdzv-id", "x"])
        .finish()
        .refuses(2, &["another run"]);
    // None of the rejected ones has kept the right machine out.
    let second = node(&workshop, port, &["--node-rank", "1", "--secret-file", "secret"]);
    first.wait_until("a step", |run| run.stderr().contains("\nstep "));
    first.finish().succeeds();
    second.finish().succeeds();
}

#[test]
fn ranks_with_other_settings_or_variables_that_contradict_are_told() {
    let workshop = Workshop::new();
    let port = port();
    let of_torchrun = |rank: usize| {
        format!(
            "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
        )
    };
    let arguments = ["train", "run.toml", "--set", "optimizer.lr=1e-3"];
    let odd_text = of_torchrun(1);
    let odd: Vec<(&str, &str)> =
        odd_text.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
    let odd = workshop.start_in(PROGRAM, &arguments, &odd);
    let text = of_torchrun(0);
    let first: Vec<(&str, &str)> =
        text.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
    let first = workshop.start_in(PROGRAM, &["train", "run.toml"], &first);
    for run in [odd, first] {
        run.finish().refuses(2, &["rank 1 was started with other settings than rank 0"]);
    }
    let half = [("RANK", "0"), ("LOCAL_RANK", "0")];
    workshop.start_in(PROGRAM, &["train", "run.toml"], &half).finish().refuses(2, &["WORLD_SIZE is not"]);
    let nowhere = [("RANK", "0"), ("WORLD_SIZE", "2")];
    workshop.start_in(PROGRAM, &["train", "run.toml"], &nowhere).finish().refuses(2, &["set MASTER_ADDR"]);
    let both = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    workshop
        .start_in(PROGRAM, &["train", "run.toml"], &both)
        .finish()
        .refuses(2, &["torchrun says rank 0 of 2", "OpenMPI says rank 1"]);
}

#[test]
fn a_wait_for_machines_that_takes_long_is_told_while_it_lasts() {
    let workshop = Workshop::new();
    let alone = ["train", "run.toml", "--nnodes", "2", "--node-rank", "0", "--rdzv-conf", "join_timeout=6"];
    let endpoint =
        format!("127.0.0.1:{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port());
    let outcome = workshop.run(&[&alone[..], &["--rdzv-endpoint", &endpoint]].concat());
    assert!(
        outcome.stderr.starts_with(&format!("waiting for 2 machines at {endpoint}, 6 s at most\n")),
        "{outcome:?}"
    );
    outcome.fails(2, &["did not come within 6 s"]);
}

//! Events of a run with `LOCKSTEP_LOG`, as text and as JSON, and its metrics for Prometheus.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::Value;

use crate::workshop::Workshop;

const LOCKSTEP: &str = env!("CARGO_BIN_EXE_lockstep");
const DEBUG: (&str, &str) = ("LOCKSTEP_LOG", "debug");

#[test]
fn a_run_tells_of_its_data_its_checkpoints_and_its_ranks() {
    let workshop = Workshop::new();
    let arguments = ["train", "run.toml", "--nproc-per-node", "2", "--set", "parallel.transport=tcp"];
    let told = workshop.start_in(LOCKSTEP, &arguments, &[DEBUG]).finish().succeeds();
    for part in [
        "starting ranks",
        "started a rank",
        "joining the other ranks",
        "the rendezvous of the ranks",
        "connected to the neighbours among the other ranks",
        "data files",
        "tokenizing into the cache",
        "no checkpoint to go on from",
        "the engine has its weights and buffers",
        "committed a checkpoint",
        "a rank has ended",
    ] {
        assert!(told.stderr.contains(part), "{part}: {told:?}");
    }
    let again = ["train", "run.toml", "--steps", "6", "--log-format", "json"];
    let told = workshop.start_in(LOCKSTEP, &again, &[DEBUG]).finish().succeeds();
    let events: Vec<Value> = told
        .stderr
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let find = |message: &str| events.iter().find(|event| event["fields"]["message"] == message);
    let resumed = find("going on from a checkpoint").unwrap_or_else(|| panic!("{told:?}"));
    assert_eq!(
        (&resumed["fields"]["path"], &resumed["level"]),
        (&"checkpoints/step-00000004".into(), &"INFO".into())
    );
    assert!(find("tokens are in the cache").is_some(), "{told:?}");
    // No events are printed without it.
    let silent = workshop.run(&["train", "run.toml", "--steps", "8"]).succeeds();
    assert!(!silent.stderr.contains("INFO") && !silent.stderr.contains("DEBUG"), "{silent:?}");
}

#[test]
fn prometheus_finds_the_last_step_over_http_and_in_a_file() {
    let workshop = Workshop::new();
    let sets = [
        "train.steps=2000",
        "metrics.prometheus=127.0.0.1:0",
        "metrics.prometheus_file=run.prom",
        "checkpoint.every=0",
    ];
    let sets = sets.iter().flat_map(|setting| ["--set", setting]);
    let arguments: Vec<&str> = ["train", "run.toml"].into_iter().chain(sets).collect();
    let mut run = workshop.start(LOCKSTEP, &arguments);
    run.wait_until("a step", |run| run.stderr().contains("step   10/2000"));
    let stderr = run.stderr();
    let (_, rest) = stderr.split_once("metrics for Prometheus at http://").unwrap();
    let address = rest.split('/').next().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let value = |text: &str, name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("no {name} in {text}"))
    };
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(
        value(&answer, "lockstep_step") >= 10.0 && value(&answer, "lockstep_mfu_ratio") > 0.0,
        "{answer}"
    );
    run.child.kill().unwrap();
    run.child.wait().unwrap();
    let file = String::from_utf8(workshop.read("run.prom")).unwrap();
    assert!(value(&file, "lockstep_step") >= 1.0, "{file}");
}

//! A run on several ranks of this machine: the numbers of one rank, one reporter, and an error that names the culprit.

use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::workshop::{Started, Workshop};

const MANY: [&str; 4] = ["--set", "train.steps=1000000", "--set", "checkpoint.every=1000000"];

fn start(workshop: &Workshop, ranks: &str) -> Started {
    let arguments = [&["train", "run.toml", "--nproc-per-node", ranks], &MANY[..]].concat();
    let mut run = workshop.start(env!("CARGO_BIN_EXE_lockstep"), &arguments);
    run.wait_until("a step", |run| run.stderr().contains("\nstep "));
    run
}

/// Returns the processes that `run` has started, oldest first.
fn ranks_of(run: &Started) -> Vec<Pid> {
    let children = format!("/proc/{pid}/task/{pid}/children", pid = run.child.id());
    let children = std::fs::read_to_string(children).unwrap();
    children.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap()).collect()
}

fn losses(workshop: &Workshop, name: &str) -> Vec<f64> {
    let text = String::from_utf8(workshop.read(name)).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.filter_map(|row| row["loss"].as_f64()).collect()
}

#[test]
fn two_ranks_train_as_one_and_speak_once() {
    let workshop = Workshop::new();
    workshop.train(&["checkpoint.dir=alone", "metrics.dir=alone"]).succeeds();
    let traced = ["--set", "metrics.trace_steps=[2, 3]"];
    let both =
        workshop.run(&[&["train", "run.toml", "--nproc-per-node", "2"], &traced[..]].concat()).succeeds();
    assert_eq!(both.stderr.matches("saved checkpoints/step-00000004").count(), 1, "{both:?}");
    assert!(both.stderr.contains("2 ranks × 1 micro-batch of 2"), "{both:?}");
    let pairs =
        losses(&workshop, "alone/metrics.jsonl").into_iter().zip(losses(&workshop, "runs/metrics.jsonl"));
    let mut steps = 0;
    for (alone, both) in pairs {
        assert!((alone - both).abs() <= 1e-5 * alone, "{both}, on one rank {alone}");
        steps += 1;
    }
    assert_eq!(steps, 4);
    // One trace file, with a process for each rank.
    let trace: Value = serde_json::from_slice(&workshop.read("runs/trace-00000002-00000003.json")).unwrap();
    for rank in [0, 1] {
        let events = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["pid"] == rank);
        let buckets = events.clone().filter(|event| event["name"] == "all_reduce, bucket 0");
        let bytes: Vec<u64> = buckets.map(|event| event["args"]["bytes"].as_u64().unwrap()).collect();
        assert!(bytes.len() == 2 && bytes[0] > 0, "rank {rank}: {bytes:?}");
        assert_eq!(events.filter(|event| event["cat"] == "step").count(), 2, "rank {rank}");
    }
    let report = String::from_utf8(workshop.read("runs/report.html")).unwrap();
    assert!(report.contains("\"comm_exposed\":{") && report.contains("\"memory_by_rank\":[{"), "{report}");
    // The number of ranks follows from the plan alone.
    let planned = workshop.train(&["train.steps=6", "parallel.data_parallel_replicate=2"]).succeeds();
    assert!(planned.stderr.contains("resuming from checkpoints/step-00000004"), "{planned:?}");
}

#[test]
fn a_zero_stage_alone_shards_over_the_ranks_that_are_started() {
    let workshop = Workshop::new();
    let run = ["train", "run.toml", "--nproc-per-node", "2", "--set", "train.steps=1"];
    let both = workshop.run(&[&run[..], &["--set", "parallel.zero_stage=2"]].concat()).succeeds();
    assert!(!both.stderr.contains("note:"), "{both:?}");
    let record: Value = serde_json::from_slice(&workshop.read("runs/run.json")).unwrap();
    let settings = record["settings"].as_array().unwrap();
    let value = |key: &str| settings.iter().find(|setting| setting["key"] == key).unwrap()["value"].clone();
    assert_eq!([value("parallel.data_parallel_shard"), value("parallel.zero_stage")], [2, 2]);
    let alone = workshop.run(&["plan", "run.toml", "--set", "parallel.zero_stage=2"]).succeeds();
    assert!(alone.stderr.contains("shards nothing on one rank"), "{alone:?}");
}

#[test]
fn a_killed_rank_ends_the_run_at_once_and_is_named() {
    let workshop = Workshop::new();
    for rank in [0, 1] {
        let run = start(&workshop, "2");
        let pid = ranks_of(&run)[rank];
        let begin = Instant::now();
        kill_process(pid, Signal::KILL).unwrap();
        let outcome = run.finish();
        assert_eq!(outcome.code, Some(5), "{outcome:?}");
        let expected = format!("error: rank {rank} was lost: it was killed by signal 9");
        assert!(outcome.stderr.contains(&expected), "{outcome:?}");
        assert_eq!(outcome.stderr.matches("error:").count(), 1, "{outcome:?}");
        assert!(begin.elapsed().as_secs() < 5, "it took {:?}", begin.elapsed());
        let command =
            outcome.stderr.lines().find(|line| line.starts_with("lockstep doctor --trace runs/flight-"));
        let file = command.unwrap().split(' ').nth(3).unwrap();
        for trace in [file, "runs", "runs/flight-*.json"] {
            let found = workshop.run(&["doctor", "--trace", trace, "--json"]).json();
            assert_eq!(found["culprits"], serde_json::json!([rank]), "{found}");
        }
        let told = workshop.run(&["doctor", "--trace", file]).succeeds().stdout;
        assert!(told.contains(&format!("the run ended: rank {rank} was lost")), "{told}");
        assert!(told.contains(" (crates/lockstep-"), "the line of the call: {told}");
        assert!(told.contains("\n  rank    median ms"), "{told}");
    }
    workshop.write("broken.json", "{\"format\": \"lockstep flight recorder\", \"version\": 1, \"ranks\"");
    workshop.run(&["doctor", "--trace", "broken.json"]).refuses(4, &["broken.json", "EOF"]);
    workshop.run(&["doctor", "--trace", "none.json"]).refuses(2, &["none.json"]);
}

#[test]
fn a_signal_to_the_launcher_or_to_one_rank_saves_and_ends_all_with_75() {
    let workshop = Workshop::new();
    for to_rank in [None, Some(1)] {
        let run = start(&workshop, "2");
        let launcher = Pid::from_raw(run.child.id() as i32).unwrap();
        kill_process(to_rank.map_or(launcher, |rank| ranks_of(&run)[rank]), Signal::TERM).unwrap();
        let outcome = run.finish();
        assert_eq!(outcome.code, Some(75), "{outcome:?}");
        assert_eq!(outcome.stderr.matches("the same command resumes from").count(), 1, "{outcome:?}");
    }
}

#[test]
fn ranks_that_do_not_fit_are_refused_before_any_starts() {
    let workshop = Workshop::new();
    let refused = |arguments: &[&str], parts: &[&str]| {
        workshop.run(&[&["train", "run.toml"], arguments].concat()).refuses(2, parts);
    };
    let replicas = |number: &str| format!("parallel.data_parallel_replicate={number}");
    refused(&["--set", &replicas("3")], &["3 ranks cannot share train.global_batch = 4", "3 or 6"]);
    refused(&["--set", &replicas("4")], &["2 does not divide train.global_batch = 4 / 4 ranks"]);
    // More ranks than any plan can use.
    refused(&["--nproc-per-node", "7"], &["7 ranks cannot share train.global_batch = 4"]);
    refused(&["--nproc-per-node", "0"], &["0", "a number from 1, auto"]);
    refused(
        &["--nproc-per-node", "4", "--set", "parallel.data_parallel_replicate=2"],
        &["leave one of them out"],
    );
    refused(&["--nproc-per-node", "2", "--set", "data.train=['none.txt']"], &["none.txt"]);
    let set = |settings: &[&str], parts: &[&str]| {
        let sets: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        refused(&sets, parts);
    };
    set(
        &["parallel.tensor_parallel=3", "parallel.sequence_parallel=true"],
        &[
            "the configuration has 3 problems",
            "tensor 3 does not divide the 2 attention heads; nearest: 2",
            "tensor 3 does not divide the 64 columns of the feed-forward layers; nearest: 2",
            "seq_len 16 is not a multiple of context x tensor = 3; nearest: 15 or 18",
        ],
    );
    set(
        &["parallel.tensor_parallel=8", "parallel.tensor_layout=2d", "parallel.context_parallel=2"],
        &[
            "the configuration has 2 problems",
            "tensor 8 is no square of 2 or more, which two dimensions need; no number would do",
            "two dimensions do not go together with context parallelism; nearest: tensor_layout 1d",
        ],
    );
    set(
        &["parallel.tensor_parallel=9", "parallel.tensor_layout=2d"],
        &[
            "tensor's side 3 does not divide the 2 attention heads; no number would do",
            "tensor's side 3 does not divide the 1 key/value heads",
            "train.micro_batch",
            "micro_batch 2 is not a multiple of tensor's side = 3; nearest: 3",
            "seq_len 16 is not a multiple of tensor's side = 3; nearest: 15 or 18",
        ],
    );
    set(&["parallel.tensor_layout=2d"], &["has no effect with parallel.tensor_parallel = 1"]);
    set(
        &["parallel.tensor_parallel=4", "parallel.tensor_layout=2d", "parallel.sequence_parallel=true"],
        &["has no effect with parallel.tensor_layout = \"2d\", which splits by tokens in any case"],
    );
    set(&["parallel.tensor_parallel=2", "optimizer.kind=muon"], &["needs whole matrices"]);
    let slices = "parallel.partition_activations=true";
    set(&[slices, "parallel.recompute=full"], &["has no effect with parallel.tensor_parallel = 1"]);
    set(
        &[slices, "parallel.tensor_parallel=2", "parallel.recompute=selective"],
        &["parallel.partition_activations", "parallel.recompute = \"selective\" has none"],
    );
    set(&["parallel.sequence_parallel=true"], &["has no effect with parallel.tensor_parallel = 1"]);
    set(&["parallel.tensor_parallel=2", "model.preset=llama-15n"], &["did you mean `llama-15m`"]);
    refused(&["--nproc-per-node", "2", "--log-dir", "run.toml"], &["cannot write run.toml"]);
}

#[test]
fn what_ranks_print_is_kept_where_a_failure_says() {
    let workshop = Workshop::new();
    let arguments = ["train", "run.toml", "--nproc-per-node", "2", "--log-dir", "logs"];
    let mut run = workshop.start(env!("CARGO_BIN_EXE_lockstep"), &[&arguments[..], &MANY[..]].concat());
    run.wait_until("a step", |run| run.stderr().contains("\nstep "));
    kill_process(ranks_of(&run)[1], Signal::KILL).unwrap();
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(5), "{outcome:?}");
    assert!(outcome.stderr.contains("what it said is in logs/rank-00001.err"), "{outcome:?}");
    let kept = String::from_utf8(workshop.read("logs/rank-00000.err")).unwrap();
    assert!(outcome.stderr.starts_with(&kept), "rank 0 is shown as well: {kept}, {outcome:?}");
    // A single rank is launched in the same way, and its failure has no other reporter.
    let alone = ["train", "run.toml", "--log-dir", "logs", "--set", "data.train=['none.txt']"];
    workshop.run(&alone).refuses(2, &["none.txt"]);
    let kept = String::from_utf8(workshop.read("logs/rank-00000.err")).unwrap();
    assert!(kept.ends_with("\n") && kept.contains("none.txt"), "{kept}");
}

#[test]
fn steps_of_several_ranks_are_timed_together() {
    let workshop = Workshop::new();
    let bench = |more: &[&str]| {
        let small = ["--batch", "1", "--seq-len", "8", "--steps", "1", "--threads", "1", "--json"];
        workshop.run(&[&["bench", "step", "--model", "llama-15m"], &small[..], more].concat())
    };
    let alone = bench(&["--accumulation", "2"]).json();
    let both = bench(&["--nproc-per-node", "2"]).json();
    let loss = |found: &Value| found["loss"][0].as_f64().unwrap();
    assert!((loss(&alone) - loss(&both)).abs() < 1e-4, "{alone} {both}");
    assert_eq!((&alone["ranks"], &alone["comm"]["bytes"], &both["ranks"]), (&1.into(), &0.into(), &2.into()));
    assert!(both["comm"]["bytes"].as_u64() > Some(1 << 20), "{both}");
    let bytes = |found: &Value| found["peak_rss_bytes"].as_u64().unwrap();
    // Two copies of everything, except that shared gradients exist once.
    assert!((bytes(&alone) * 3 / 2..bytes(&alone) * 5 / 2).contains(&bytes(&both)), "{alone} {both}");
    let context = bench(&["--accumulation", "2", "--set", "parallel.context_parallel=2"]).json();
    assert!((loss(&alone) - loss(&context)).abs() < 1e-4, "{alone} {context}");
    assert_eq!(context["ranks"], 2, "{context}");
    bench(&["--set", "parallel.context_parallel=3"])
        .refuses(2, &["seq_len 8 is not a multiple of 2 x context = 6"]);
    bench(&["--set", "model.max_position_embeddings=4"]).refuses(2, &["--seq-len 8: allowed is 1 to 4"]);
    bench(&["--accumulation", "0"]).refuses(2, &["--accumulation 0: allowed is 1 or more"]);
}

/// Returns a plan file: `{ "version": 1, "micro_batch": 1, ... }`.
fn plan(rest: &str) -> String {
    format!("{{ \"version\": 1, \"micro_batch\": 1, {rest} }}")
}

#[test]
fn a_plan_file_says_how_a_run_is_split() {
    let workshop = Workshop::new();
    workshop.write(
        "plan.json",
        plan(
            r#""mesh": { "pipeline": 2, "replicate": 2 }, "stages": [1, 3],
               "schedule": { "rows": ["F0,F1,B0,B1", "F0,F1,B0,B1"] }"#,
        ),
    );
    workshop.run(&["train", "run.toml", "--plan", "plan.json"]).succeeds();
    let manifest: serde_json::Value =
        serde_json::from_slice(&workshop.read("checkpoints/step-00000004/manifest.json")).unwrap();
    let saved = &manifest["plan"];
    assert_eq!((&saved["mesh"]["pipeline"], &saved["stages"]), (&2.into(), &serde_json::json!([1, 3])));
    // A plan from a checkpoint can be reused, for its model only.
    workshop.write("saved.json", saved.to_string());
    workshop.run(&["train", "run.toml", "--plan", "saved.json", "--set", "train.steps=5"]).succeeds();
    workshop
        .run(&["train", "run.toml", "--plan", "saved.json", "--set", "model.intermediate_size=128"])
        .refuses(2, &["saved.json cannot be used", "the plan is for the model"]);
}

#[test]
fn a_plan_file_that_does_not_fit_is_refused_before_any_rank_starts() {
    let workshop = Workshop::new();
    let run = |rest: &str, more: &[&str]| {
        workshop.write("plan.json", plan(rest));
        workshop.run(&[&["train", "run.toml", "--plan", "plan.json"], more].concat())
    };
    run(r#""mesh": { "tensor": 4 }, "stages": [3]"#, &[]).refuses(
        2,
        &["tensor 4 does not divide the 2 attention heads", "the stages have 3 units and the model 4"],
    );
    run(r#""mesh": { "pipeline": 2 }, "stages": [2, 2]"#, &["--set", "parallel.pipeline_stages=[1, 3]"])
        .refuses(2, &["pipeline_stages is [2,2] in the plan, and --set says [1,3]"]);
    run(r#""mesh": { "pipeline": 2 }, "stages": [2, 2]"#, &["--nproc-per-node", "3"])
        .refuses(2, &["--nproc-per-node is 3", "for 2 ranks"]);
    let forgets = r#""mesh": { "pipeline": 2 }, "stages": [2, 2],
        "schedule": { "rows": ["F0,F1,F2,F3,B0,B1,B2,B3", "B0,F0,F1,B1,F2,B2,F3"] }"#;
    run(forgets, &[]).refuses(2, &["plan.json cannot be used"]);
    workshop.run(&["train", "run.toml", "--plan", "none.json"]).refuses(2, &["none.json", "No such file"]);
}

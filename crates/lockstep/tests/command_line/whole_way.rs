//! A user's way from text to text: train, stop, resume, inspect checkpoints, export to transformers and import again, evaluate,
//! generate.

use std::collections::BTreeSet;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::workshop::Workshop;

fn rows(workshop: &Workshop, name: &str) -> Vec<Value> {
    let text = String::from_utf8(workshop.read(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns step, loss and gradient norm, which must not depend on interruptions.
fn numbers(workshop: &Workshop, name: &str) -> Vec<(u64, f64, f64)> {
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap();
    let losses = rows(workshop, name).into_iter().filter(|row| row.get("loss").is_some());
    losses
        .map(|row| (row["step"].as_u64().unwrap(), number(&row, "loss"), number(&row, "grad_norm")))
        .collect()
}

#[test]
fn a_run_in_two_parts_gives_the_numbers_of_one_and_a_third_start_makes_no_step() {
    let workshop = Workshop::new();
    let first = workshop.train(&[]).succeeds();
    assert_eq!(first.stdout, "", "train with a file prints to standard error only");
    let second = workshop.train(&["train.steps=8"]).succeeds();
    assert!(second.stderr.contains("resuming from checkpoints/step-00000004 (step 4)"), "{second:?}");
    let third = workshop.train(&["train.steps=8"]).succeeds();
    assert!(third.stderr.contains("all 8 steps were made before"), "{third:?}");
    workshop.train(&["train.steps=8", "checkpoint.dir=other", "metrics.dir=other"]).succeeds();
    let whole = numbers(&workshop, "other/metrics.jsonl");
    assert_eq!(whole.len(), 8);
    assert_eq!(numbers(&workshop, "runs/metrics.jsonl"), whole);
    let weights = |dir: &str| workshop.read(&format!("{dir}/step-00000008/rank-00000.safetensors"));
    assert!(weights("checkpoints") == weights("other"), "the weights of the two runs differ");
}

#[test]
fn an_interrupted_run_ends_with_75_and_the_same_command_completes_it() {
    let workshop = Workshop::new();
    for signal in [Signal::INT, Signal::TERM] {
        let many = ["train", "run.toml", "--set", "train.steps=1000000", "--set", "checkpoint.every=0"];
        let mut run = workshop.start(env!("CARGO_BIN_EXE_lockstep"), &many);
        run.wait_until("a step", |run| run.stderr().contains("\nstep "));
        let pid = Pid::from_raw(run.child.id() as i32).unwrap();
        kill_process(pid, signal).unwrap();
        let outcome = run.finish();
        assert_eq!(outcome.code, Some(75), "{outcome:?}");
        let (_, message) =
            outcome.stderr.split_once("interrupted at step ").expect("it says where it stopped");
        assert!(message.contains("the same command resumes from checkpoints/step-"), "{outcome:?}");
        let step: u64 = message.split(' ').next().unwrap().parse().unwrap();
        workshop.train(&[&format!("train.steps={}", step + 2)]).succeeds();
        let steps: Vec<u64> = numbers(&workshop, "runs/metrics.jsonl").iter().map(|row| row.0).collect();
        assert_eq!(steps, (1..=step + 2).collect::<Vec<_>>(), "every step once");
    }
}

#[test]
fn a_run_killed_at_any_time_goes_on_from_a_whole_checkpoint_to_the_same_weights() {
    let workshop = Workshop::new();
    let settings = |dir: &str| {
        ["train.steps=40", "checkpoint.every=1", "checkpoint.keep=2"]
            .map(str::to_owned)
            .into_iter()
            .chain([format!("checkpoint.dir={dir}"), format!("metrics.dir={dir}")])
            .collect::<Vec<_>>()
    };
    let arguments = |dir: &str| -> Vec<String> {
        let sets = settings(dir).into_iter().flat_map(|setting| ["--set".to_owned(), setting]);
        ["train", "run.toml"].map(str::to_owned).into_iter().chain(sets).collect()
    };
    let start = |dir: &str| {
        let arguments = arguments(dir);
        workshop
            .start(env!("CARGO_BIN_EXE_lockstep"), &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    start("whole").finish().succeeds();
    for kill in 0..8 {
        let mut run = start("killed");
        run.wait_until("a save", |run| run.stderr().contains("saved ") || run.stderr().contains("all 40"));
        // A different moment of the following saves, each of which takes a few milliseconds.
        std::thread::sleep(std::time::Duration::from_micros(1700 * kill));
        run.child.kill().unwrap();
        run.child.wait().unwrap();
        let listed = workshop.run(&["checkpoint", "list", "killed", "--json"]).json();
        let paths = listed.as_array().unwrap().iter().map(|row| row["path"].as_str().unwrap());
        for path in paths {
            workshop.run(&["checkpoint", "verify", path]).succeeds();
        }
    }
    start("killed").finish().succeeds();
    let weights = |dir: &str| workshop.read(&format!("{dir}/step-00000040/rank-00000.safetensors"));
    assert!(weights("killed") == weights("whole"), "the weights of the two runs differ");
    assert_eq!(numbers(&workshop, "killed/metrics.jsonl"), numbers(&workshop, "whole/metrics.jsonl"));
}

#[test]
fn checkpoints_are_listed_shown_verified_and_carried_to_transformers_and_back() {
    let workshop = Workshop::trained();
    let last = "checkpoints/step-00000004";
    let list = workshop.run(&["checkpoint", "list", "checkpoints", "--json"]).json();
    let steps: Vec<u64> = list.as_array().unwrap().iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 4], "{list}");
    assert_eq!(list[1]["path"], last);
    let listed = workshop.run(&["checkpoint", "list", "checkpoints"]).succeeds();
    assert_eq!(listed.stdout.lines().count(), 2, "{listed:?}");

    let shown = workshop.run(&["checkpoint", "show", last, "--json"]).json();
    assert_eq!((shown["step"].as_u64(), shown["samples_consumed"].as_u64()), (Some(4), Some(16)));
    let shown = workshop.run(&["checkpoint", "show", last]).succeeds().stdout;
    assert!(shown.contains("step              4\n") && shown.contains("model             llama"), "{shown}");
    let verified = workshop.run(&["checkpoint", "verify", last]).succeeds();
    assert_eq!(verified.stdout, format!("{last}: every byte is as it was written\n"));

    let config: Value = serde_json::from_slice(&workshop.read("hf/config.json")).unwrap();
    assert_eq!((config["model_type"].as_str(), config["hidden_size"].as_u64()), (Some("llama"), Some(32)));
    let imported = workshop.run(&["checkpoint", "import", "hf", "--out", "imported"]).succeeds();
    assert_eq!(imported.stdout, "wrote imported/step-00000000\n");
    workshop.run(&["checkpoint", "verify", "imported/step-00000000"]).succeeds();
    workshop.run(&["checkpoint", "export", "imported/step-00000000", "--hf", "again"]).succeeds();
    for file in ["model.safetensors", "config.json"] {
        let same = workshop.read(&format!("hf/{file}")) == workshop.read(&format!("again/{file}"));
        assert!(same, "{file} changed on the way through a checkpoint");
    }
    workshop.run(&["checkpoint", "export", last, "--hf", "half", "--dtype", "bf16"]).succeeds();
    assert!(
        workshop.read("half/model.safetensors").len() < workshop.read("hf/model.safetensors").len() * 6 / 10
    );
    workshop.run(&["generate", "--model", "half", "--prompt", "All", "--max-new-tokens", "2"]).succeeds();
    let from_hf =
        ["--set", "model.path=hf", "--set", "model.from_pretrained=true", "--set", "checkpoint.dir=tuned"];
    workshop.write(
        "tune.toml",
        "[data]\ntrain = [\"text.txt\"]\n[train]\nsteps = 1\nglobal_batch = 2\nseq_len = 16\n",
    );
    workshop.run(&[&["train", "tune.toml"][..], &from_hf].concat()).succeeds();
}

#[test]
fn evaluation_and_generation_print_one_json_document_that_does_not_depend_on_the_form_of_the_model() {
    let workshop = Workshop::trained();
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for model in ["hf", "checkpoints/step-00000004"] {
        let eval = workshop.run(&["eval", "--model", model, "--data", "text.txt", "--json"]).json();
        assert_eq!(eval["tokens"].as_u64(), Some(40 * 51 - 1), "every token but the first is predicted");
        let (loss, perplexity) = (eval["loss"].as_f64().unwrap(), eval["perplexity"].as_f64().unwrap());
        assert!((1.0..6.0).contains(&loss) && (loss.exp() / perplexity - 1.0).abs() < 1e-9, "{eval}");
        let generate = ["generate", "--model", model, "--prompt", "All ranks", "--max-new-tokens", "8"];
        let sampled =
            workshop.run(&[&generate[..], &["--seed", "3", "--top-k", "5", "--json"]].concat()).json();
        assert_eq!(sampled["prompt"], "All ranks");
        assert_eq!(sampled["prompt_tokens"].as_u64(), Some(9));
        assert_eq!(sampled["tokens"].as_array().unwrap().len(), 8);
        let greedy = workshop.run(&[&generate[..], &["--temperature", "0"]].concat()).succeeds();
        assert!(greedy.stdout.starts_with("All ranks") && greedy.stderr.is_empty(), "{greedy:?}");
        seen.insert(format!("{eval} {sampled} {}", greedy.stdout));
    }
    assert_eq!(seen.len(), 1, "{seen:?}");
}

#[test]
fn a_model_runs_in_the_type_of_its_files_or_in_another() {
    let workshop = Workshop::trained();
    let export = ["checkpoint", "export", "checkpoints/step-00000004", "--hf", "narrow", "--dtype", "bf16"];
    workshop.run(&export).succeeds();
    let bench = ["bench", "generate", "--model", "narrow", "--prompt-tokens", "5", "--new-tokens", "3"];
    for (dtype, expected, is_in_place) in [("auto", "bf16", true), ("f32", "f32", false)] {
        let found = workshop.run(&[&bench[..], &["--dtype", dtype, "--json"]].concat()).json();
        assert_eq!(found["dtype"], expected, "{found}");
        assert_eq!(found["weights_in_place_bytes"].as_u64().unwrap() > 0, is_in_place, "{found}");
        assert!(found["decode_tokens_per_s"].as_f64().unwrap() > 0.0, "{found}");
    }
    let eval = ["eval", "--model", "narrow", "--data", "text.txt", "--json"];
    let [narrow, wide] = ["bf16", "f32"].map(|dtype| {
        workshop.run(&[&eval[..], &["--dtype", dtype]].concat()).json()["loss"].as_f64().unwrap()
    });
    assert!(narrow != wide && (narrow / wide - 1.0).abs() < 0.01, "loss {narrow} in bf16, {wide} in f32");
}

#[test]
fn a_bench_prints_one_json_document() {
    let workshop = Workshop::new();
    let arguments =
        ["--model", "baby-gpt", "--batch", "1", "--seq-len", "8", "--steps", "2", "--threads", "1"];
    let bench = workshop.run(&[&["bench", "step"][..], &arguments, &["--json"]].concat()).json();
    assert!(bench["tokens_per_s"].as_f64().unwrap() > 0.0, "{bench}");
    assert_eq!(bench["loss"].as_array().unwrap().len(), 2, "{bench}");
}

#[test]
fn help_and_version_are_no_errors_and_go_to_standard_output() {
    let workshop = Workshop::new();
    for arguments in
        [&["--help"][..], &["--version"], &["train", "--help"], &["checkpoint", "export", "--help"]]
    {
        let outcome = workshop.run(arguments).succeeds();
        assert!(outcome.stdout.len() > 10 && outcome.stderr.is_empty(), "{outcome:?}");
    }
}

#[test]
fn a_bench_of_collectives_prints_a_row_for_each_size_without_a_wrong_element() {
    let workshop = Workshop::new();
    let sizes = ["--nproc-per-node", "3", "--sizes", "3000,300kB", "--seconds", "0.01", "--json"];
    for op in ["all_reduce", "all_to_all"] {
        let rows = workshop.run(&[&["bench", "collectives", "--op", op], &sizes[..]].concat()).json();
        let bytes: Vec<u64> =
            rows.as_array().unwrap().iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
        assert_eq!(bytes, [3000, 300_000], "{rows}");
        for row in rows.as_array().unwrap() {
            assert_eq!((row["op"].as_str(), row["wrong"].as_u64()), (Some(op), Some(0)), "{row}");
            let bytes = row["algbw_GBps"].as_f64().unwrap() * 1e3 * row["median_us"].as_f64().unwrap();
            assert!((bytes / row["bytes"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{row}");
        }
    }
}

//! Typical mistakes of new users: each ends with a documented exit code and one message that names the remedy, and leaves no
//! files.

use std::net::TcpListener;

use crate::workshop::Workshop;

/// Returns the names in the directory, without the test's own files and the user's cache.
fn names(workshop: &Workshop) -> Vec<String> {
    let entries = std::fs::read_dir(workshop.path("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with(".std") && name != "cache").collect();
    names.sort();
    names
}

#[test]
fn a_mistake_is_told_with_its_way_out_and_leaves_nothing() {
    let workshop = Workshop::new();
    std::fs::create_dir(workshop.path("empty")).unwrap();
    workshop.write("damaged/manifest.json", "{");
    workshop.write("ds.json", "{}");
    workshop.write("garbage/metrics.jsonl", "garbage\n");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("metrics.prometheus={}", taken.local_addr().unwrap());
    let before = names(&workshop);
    // Arguments after `train run.toml`, the exit code, and parts of the message.
    let of_runs: [(&str, i32, &[&str]); 24] = [
        ("--set data.train=[]", 2, &["data.train", "names nothing"]),
        ("train.steps=5", 2, &["`--set train.steps=5`"]),
        ("--resume run.toml", 2, &["no checkpoint", "`lockstep train run.toml`"]),
        ("--set optimizer.lr 1e-3", 2, &["`--set optimizer.lr=1e-3`"]),
        ("--set model.name_or_path=gpt2", 2, &["model.name_or_path", "model.preset = \"NAME\""]),
        ("--set model.n_layers=3", 2, &["model.n_layers", "model.num_hidden_layers"]),
        ("--set parallel.sharding_strategy=FULL_SHARD", 2, &["parallel.zero_stage: 3 for FULL_SHARD"]),
        ("--resume nowhere", 2, &["--resume nowhere", "no checkpoint is there", "checkpoint list", "never"]),
        ("--resume empty", 2, &["--resume empty", "no checkpoint is there", "auto"]),
        ("--resume text.txt", 2, &["--resume text.txt", "no checkpoint is there"]),
        ("--resume damaged", 4, &["damaged/manifest.json is damaged", "--resume auto"]),
        ("--steps 0", 2, &["train.steps=0", ">= 1"]),
        ("--steps many", 2, &["--steps", "many"]),
        ("--set =4", 2, &["--set section.key=VALUE"]),
        ("--set train.steps==4", 2, &["train.steps", "an integer"]),
        ("--set train.stepz=4", 2, &["train.steps"]),
        ("--set schedule.scale_lr=cubic", 2, &["none", "linear", "sqrt"]),
        ("--set schedule.scale_lr_batch=8", 2, &["has no effect", "schedule.scale_lr"]),
        ("--set metrics.prometheus=somewhere", 2, &["metrics.prometheus", "somewhere", "HOST:PORT"]),
        ("--plan nowhere.json", 2, &["nowhere.json"]),
        ("--log-format yaml", 2, &["yaml", "text", "json"]),
        ("--nproc-per-node 0", 2, &["a number from 1"]),
        ("--print-config --set train.steps=0", 2, &["train.steps"]),
        ("--set checkpoint.dir=text.txt/here", 2, &["cannot create text.txt/here"]),
    ];
    for (arguments, code, parts) in of_runs {
        let arguments: Vec<&str> = ["train", "run.toml"].into_iter().chain(arguments.split(' ')).collect();
        workshop.run(&arguments).refuses(code, parts);
    }
    workshop.run(&["train", "--resume", "empty"]).refuses(2, &["no checkpoint is there"]);
    let others: [(&str, i32, &[&str]); 14] = [
        ("train text.txt", 2, &["a run is described in TOML", "`lockstep train --set data.train=text.txt`"]),
        ("train ds.json", 2, &["`lockstep import deepspeed ds.json > run.toml`"]),
        ("train run.toml --num_gpus 2", 2, &["--hostfile", "--nproc-per-node N"]),
        ("generate --model nowhere --prompt a", 2, &["nowhere is no directory, no checkpoint"]),
        ("train empty", 2, &["empty: it is a directory", "the file that describes the run"]),
        ("doctor --trace empty", 2, &["empty has no records of ranks", "`lockstep report DIR`"]),
        ("run.toml", 2, &["`lockstep train run.toml`"]),
        ("generate empty", 2, &["`lockstep generate --model empty --prompt TEXT`"]),
        ("report nowhere", 2, &["no metrics.jsonl in nowhere", "metrics.dir"]),
        ("report empty", 2, &["no metrics.jsonl in empty", "metrics.dir"]),
        ("report garbage", 4, &["garbage/metrics.jsonl", "1 damaged"]),
        ("doctor --trace nowhere", 2, &["nowhere has no records of ranks"]),
        ("train nowhere.toml", 2, &["nowhere.toml"]),
        ("checkpoint verify nowhere", 2, &["nowhere"]),
    ];
    for (arguments, code, parts) in others {
        workshop.run(&arguments.split(' ').collect::<Vec<_>>()).refuses(code, parts);
    }
    assert_eq!(names(&workshop), before, "a mistake leaves nothing");
    // Detected when the run is about to begin, before anything is saved.
    workshop.train(&[&taken]).fails(2, &["cannot listen on metrics.prometheus", "free port"]);
    assert!(!workshop.path("runs").exists(), "nothing is written");
}

#[test]
fn a_filter_of_events_that_is_none_is_refused() {
    let workshop = Workshop::new();
    for (filter, part) in [("debgu", "\"debgu\""), ("lockstep_comm=loud", "\"loud\""), ("a=b=c", "\"c\"")] {
        let program = env!("CARGO_BIN_EXE_lockstep");
        let outcome =
            workshop.start_in(program, &["train", "run.toml"], &[("LOCKSTEP_LOG", filter)]).finish();
        outcome.refuses(2, &["LOCKSTEP_LOG", part, "allowed: error, warn, info, debug, trace"]);
    }
    assert!(!workshop.path("runs").exists() && !workshop.path("checkpoints").exists());
}

#[test]
fn a_level_of_instructions_that_is_none_is_refused() {
    let workshop = Workshop::new();
    let program = env!("CARGO_BIN_EXE_lockstep");
    let outcome =
        workshop.start_in(program, &["train", "run.toml"], &[("LOCKSTEP_CPU_LEVEL", "sse2")]).finish();
    outcome.refuses(2, &["LOCKSTEP_CPU_LEVEL=sse2", "portable, avx2, avx512, avx512_bf16, amx_bf16"]);
    let limited = workshop.start_in(program, &["doctor"], &[("LOCKSTEP_CPU_LEVEL", "portable")]).finish();
    let told = limited.succeeds().stdout;
    assert!(told.contains("instructions") && told.contains("portable"), "{told}");
}

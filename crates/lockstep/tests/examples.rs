//! The examples as their users run them, in a small size: each ends well, and under every plan with the numbers of one rank.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time limit on any run of an example; each takes a few seconds.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Returns the program of an example, which cargo builds beside the tests.
fn example(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let path = own.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is missing: run cargo build -p lockstep --examples first", path.display());
    path
}

/// Runs an example in a directory and returns its standard output.
fn run(dir: &Path, name: &str, arguments: &[&str]) -> String {
    let begin = Instant::now();
    let mut command = Command::new(example(name));
    // Examples are programs of their users, who have no variables of a launcher.
    let output = command.args(arguments).current_dir(dir).env("RUST_BACKTRACE", "0").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {arguments:?}: {}\n{errors}", output.status);
    assert!(begin.elapsed() < TIME_LIMIT, "{name} {arguments:?} took {:?}", begin.elapsed());
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the CNN for a few steps under a plan and returns the loss and the gradient norm of each.
fn numbers(arguments: &[&str]) -> Vec<[f64; 2]> {
    let dir = tempfile::tempdir().unwrap();
    let small = ["--steps", "6", "--set", "train.eval_every=0", "--set", "train.micro_batch=8"];
    run(dir.path(), "cifar10_ddp", &[&small, arguments].concat());
    let rows = std::fs::read_to_string(dir.path().join("runs/cifar10/metrics.jsonl")).unwrap();
    let rows = rows.lines().map(|row| serde_json::from_str::<Value>(row).unwrap());
    rows.map(|row| ["loss", "grad_norm"].map(|key| row[key].as_f64().unwrap())).collect()
}

#[test]
fn a_cnn_has_the_numbers_of_one_rank_under_every_plan_that_applies_to_it() {
    let alone = numbers(&[]);
    assert_eq!(alone.len(), 6);
    let plans: [&[&str]; 9] = [
        &["--nproc_per_node=2", "--auto"],
        &["--nproc_per_node=2"],
        &["--nproc_per_node=2", "--set", "parallel.zero_stage=1"],
        &["--nproc_per_node=2", "--set", "parallel.zero_stage=2"],
        &["--nproc_per_node=2", "--set", "parallel.zero_stage=3"],
        &["--nproc_per_node=3", "--set", "parallel.pipeline_parallel=3"],
        &["--nproc_per_node=4", "--set", "parallel.pipeline_parallel=2", "--set", "parallel.zero_stage=1"],
        &["--set", "parallel.recompute=full"],
        &["--set", "parallel.offload.optimizer=disk"],
    ];
    for plan in plans {
        let found = numbers(plan);
        assert_eq!(found.len(), alone.len(), "{plan:?}");
        for (step, (found, expected)) in found.iter().zip(&alone).enumerate() {
            for (name, found, expected) in
                [("loss", found[0], expected[0]), ("gradient norm", found[1], expected[1])]
            {
                let difference = (found / expected - 1.0).abs();
                assert!(difference < 1e-4, "{plan:?}, step {step}: {name} {found}, on one rank {expected}");
            }
        }
    }
}

#[test]
fn a_resnet_trains_alike_on_one_rank_and_on_two() {
    // With all images in one micro-batch of each rank the batch norms differ, so each of both ranks' shares is one of its own.
    let small = ["--model", "resnet18", "--steps", "2", "--set", "train.global_batch=8"];
    let losses = |plan: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path(), "cifar10_ddp", &[&small, plan, &["--set", "train.micro_batch=4"]].concat());
        let rows = std::fs::read_to_string(dir.path().join("runs/cifar10/metrics.jsonl")).unwrap();
        let rows = rows.lines().map(|row| serde_json::from_str::<Value>(row).unwrap());
        rows.filter_map(|row| row["loss"].as_f64()).collect::<Vec<f64>>()
    };
    let (alone, both) = (losses(&[]), losses(&["--nproc_per_node=2"]));
    assert!(alone.len() == 2 && both.len() == 2, "{alone:?}, {both:?}");
    assert!(
        alone.iter().zip(&both).all(|(a, b)| (a / b - 1.0).abs() < 1e-3),
        "{alone:?}, on two ranks {both:?}"
    );
}

#[test]
fn the_cnn_learns() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(dir.path(), "cifar10_ddp", &["--steps", "60"]);
    let eval: f64 = output.split_whitespace().nth(4).unwrap().parse().unwrap();
    assert!(eval < 1.6, "ten classes are guessed with a loss of 2.30: {output}");
}

#[test]
fn a_loop_of_ones_own_prints_the_same_on_one_rank_and_on_two() {
    let dir = tempfile::tempdir().unwrap();
    let alone = run(dir.path(), "own_loop", &[]);
    assert!(alone.lines().count() == 10, "{alone}");
    let loss = |output: &str| -> f64 {
        let last = output.lines().last().unwrap();
        last.split_once("loss ").unwrap().1.split(',').next().unwrap().parse().unwrap()
    };
    let other = tempfile::tempdir().unwrap();
    let both = run(other.path(), "own_loop", &["--nproc_per_node=2"]);
    assert!((loss(&both) - loss(&alone)).abs() < 2e-4 && loss(&alone) < 0.01, "{alone}\n{both}");

    // One rank's checkpoint of the middle, gone on with by two ranks.
    let checkpoints = |dir: &Path| dir.join("checkpoints/own_loop");
    let mut saved: Vec<PathBuf> =
        std::fs::read_dir(checkpoints(dir.path())).unwrap().map(|entry| entry.unwrap().path()).collect();
    saved.sort();
    let saved: Vec<PathBuf> = saved.into_iter().filter(|path| path.join("manifest.json").exists()).collect();
    assert_eq!(saved.len(), 10, "{saved:?}");
    saved[5..].iter().for_each(|path| std::fs::remove_dir_all(path).unwrap());
    let resumed = run(dir.path(), "own_loop", &["--nproc_per_node=2"]);
    let lines = |output: &str| output.lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines(&resumed).len(), 5, "{resumed}");
    assert!((loss(&resumed) - loss(&alone)).abs() < 2e-4, "{alone}\n{resumed}");
    let nothing_left = run(dir.path(), "own_loop", &[]);
    assert!(nothing_left.is_empty(), "{nothing_left}");
}

#[test]
fn an_operation_of_ones_own_trains_under_sharding() {
    for plan in [&[][..], &["--nproc_per_node=2", "--set", "parallel.zero_stage=3"]] {
        let dir = tempfile::tempdir().unwrap();
        let output = run(dir.path(), "custom_op", plan);
        let loss: f64 = output.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(loss < 0.2, "{plan:?}: {output}");
    }
}

#[test]
fn a_decoder_of_ones_own_learns_alike_under_tensor_and_pipeline_parallelism() {
    let dir = tempfile::tempdir().unwrap();
    let losses = |arguments: &[&str]| -> Vec<f64> {
        let output = run(dir.path(), "custom_model", arguments);
        output.lines().map(|line| line.split_once("loss ").unwrap().1.parse().unwrap()).collect()
    };
    let alone = losses(&[]);
    assert!(alone.len() == 6 && alone[5] < 0.2, "{alone:?}");
    for split in ["tensor", "pipeline"] {
        let found = losses(&["--nproc_per_node=2", "--split", split]);
        // Rounding differs under tensor parallelism, and grows while the model learns.
        let (first, last) = (found[0], found[5]);
        assert!((first - alone[0]).abs() < 5e-3 && last < 0.2, "{split}: {found:?}, on one rank {alone:?}");
    }
}

#[test]
fn a_plan_file_is_executed_and_its_prediction_of_memory_holds() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(dir.path(), "from_plan", &["--nproc_per_node=2"]);
    let memory: Vec<Vec<f64>> = output
        .lines()
        .filter(|line| line.contains(" MB predicted"))
        .map(|line| line.split(' ').filter_map(|word| word.parse().ok()).collect())
        .collect();
    assert_eq!(memory.len(), 2, "{output}");
    for numbers in memory {
        let [predicted, peak] = numbers[..] else { panic!("{output}") };
        assert!((peak / predicted - 1.0).abs() < 0.02, "{peak} MB, {predicted} predicted");
    }
    let again = run(dir.path(), "from_plan", &["--nproc_per_node=2", "--plan", "plan.json"]);
    let losses = |output: &str| -> Vec<String> {
        output.lines().filter(|line| line.starts_with("step")).map(str::to_owned).collect()
    };
    assert_eq!(losses(&again), losses(&output));
}

#[test]
fn fsdp_halves_the_model_state_of_ddp_on_two_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let small = ["--nproc_per_node=2", "--hidden", "64", "--seq_len", "16", "--json"];
    let table: Vec<Value> = serde_json::from_str(&run(dir.path(), "fsdp_memory", &small)).unwrap();
    let of = |row: usize, category: &str| table[row][category].as_f64().unwrap();
    assert_eq!(table.len(), 4, "{table:?}");
    for (row, sharded) in
        [[false, false, true], [false, true, true], [true, true, true]].into_iter().enumerate()
    {
        for (category, is_sharded) in ["parameters", "gradients", "optimizer"].into_iter().zip(sharded) {
            let ratio = of(row + 1, category) / of(0, category);
            let expected = if is_sharded { 0.5 } else { 1.0 };
            assert!(
                (ratio / expected - 1.0).abs() < 0.03,
                "{}: {ratio} of DDP's {category}",
                table[row + 1]["layout"]
            );
        }
    }
    let of_ddp: f64 = ["parameters", "gradients", "optimizer"].iter().map(|category| of(0, category)).sum();
    assert!(of(0, "all") > of_ddp && of(3, "all") < of(0, "all"), "{table:?}");
}

#[test]
fn a_pretrained_encoder_becomes_a_classifier() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/bert");
    let dir = tempfile::tempdir().unwrap();
    let of = |ranks: &str| run(dir.path(), "finetune_bert", &[ranks, "--model", fixture.to_str().unwrap()]);
    let numbers = |output: &str| -> Vec<f64> {
        let last = output.lines().last().unwrap().replace(',', "");
        last.split(' ').filter_map(|word| word.parse().ok()).collect()
    };
    let (alone, both) = (of("--nproc_per_node=1"), of("--nproc_per_node=2"));
    assert!(numbers(&alone)[1] >= 0.9, "{alone}");
    assert!((numbers(&both)[0] - numbers(&alone)[0]).abs() < 1e-2, "{alone}\n{both}");
}

#[test]
fn a_checkpoint_of_the_command_generates_text() {
    let dir = tempfile::tempdir().unwrap();
    let trained = Command::new(env!("CARGO_BIN_EXE_lockstep"))
        .args([
            "train",
            "--set",
            "train.steps=2",
            "--set",
            "model.preset=\"llama-15m\"",
            "--set",
            "model.num_hidden_layers=1",
        ])
        .args(["--set", "model.hidden_size=48", "--set", "train.global_batch=2", "--set", "train.seq_len=16"])
        .args(["--set", "checkpoint.dir=saved"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    let arguments = ["--model", "saved/step-00000002", "--prompt", "fn "];
    let output = run(dir.path(), "big_model_inference", &arguments);
    assert!(output.starts_with("fn "), "{output}");
    let limited = [&arguments[..], &["--max-memory", "cpu=2GiB"]].concat();
    assert_eq!(run(dir.path(), "big_model_inference", &limited), output);
}

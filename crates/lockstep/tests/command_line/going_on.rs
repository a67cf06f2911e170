//! Runs that continue: with more steps than before, from a checkpoint alone, and from a printed configuration.

use serde_json::Value;

use crate::workshop::Workshop;

const FOLLOWING: [&str; 2] = ["schedule.kind=cosine", "optimizer.lr=1e-3"];

#[test]
fn more_steps_let_a_run_go_on_whose_schedule_follows_them() {
    let workshop = Workshop::new();
    let train = |more: &[&str]| {
        let settings = FOLLOWING.iter().flat_map(|setting| ["--set", setting]);
        workshop.run(
            &["train", "run.toml"]
                .into_iter()
                .chain(settings)
                .chain(more.iter().copied())
                .collect::<Vec<_>>(),
        )
    };
    train(&[]).succeeds();
    let done = train(&[]).succeeds();
    assert!(done.stderr.contains("all 4 steps were made before; --steps 8 goes on"), "{done:?}");
    let more = train(&["--steps", "8"]).succeeds();
    let words = more.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("the schedule now follows 8 steps, and not 4: the learning rate of step 5 is"),
        "{more:?}"
    );
    assert!(workshop.path("checkpoints/step-00000008").is_dir(), "{more:?}");
    // A schedule with an explicit new length is a different schedule.
    let pinned = ["--steps", "12", "--set", "schedule.decay_steps=3"];
    train(&pinned)
        .refuses(2, &["schedule.decay_steps was 7, is 3", "--resume checkpoints/step-00000008 to go on"]);
}

#[test]
fn a_checkpoint_alone_says_what_run_it_is_of() {
    let workshop = Workshop::new();
    workshop.train(&FOLLOWING).succeeds();
    let weights = |workshop: &Workshop| workshop.read("checkpoints/step-00000004/rank-00000.safetensors");
    let expected = weights(&workshop);
    std::fs::remove_file(workshop.path("run.toml")).unwrap();
    let resumed = workshop.run(&["train", "--resume", "checkpoints/step-00000002"]).succeeds();
    assert!(
        resumed.stderr.contains("26.8k parameters") && resumed.stderr.contains("step 4/4"),
        "{resumed:?}"
    );
    assert_eq!(resumed.stdout, "", "a sample is the demonstration's: {resumed:?}");
    assert!(weights(&workshop) == expected, "the same run ends with the same weights");
    // The run may be given more steps and other ranks.
    let resume = ["train", "--resume", "checkpoints/step-00000004", "--steps", "6", "--nproc-per-node", "2"];
    let more = workshop.run(&resume).succeeds();
    assert!(
        more.stderr.contains("2 ranks") && workshop.path("checkpoints/step-00000006").is_dir(),
        "{more:?}"
    );
}

#[test]
fn a_directory_of_checkpoints_stands_for_its_newest_whole_one() {
    let workshop = Workshop::trained();
    let more = ["train", "--resume", "checkpoints", "--steps", "6"];
    let resumed = workshop.run(&more).succeeds();
    assert!(resumed.stderr.contains("resuming from checkpoints/step-00000004 (step 4)"), "{resumed:?}");
    let generated =
        workshop.run(&["generate", "--model", "checkpoints", "--prompt", "a", "--max-new-tokens", "2"]);
    assert!(generated.succeeds().stdout.starts_with('a'));
    let weights = "checkpoints/step-00000006/rank-00000.safetensors";
    let bytes = workshop.read(weights);
    workshop.write(weights, &bytes[..bytes.len() / 2]);
    // An older checkpoint is never used silently.
    let damaged =
        workshop.run(&["generate", "--model", "checkpoints", "--prompt", "a", "--max-new-tokens", "2"]);
    damaged.refuses(4, &["step-00000006", "bytes, but"]);
    let verified = workshop.run(&["checkpoint", "verify", "checkpoints"]);
    assert_eq!(verified.stdout.matches("every byte is as it was written").count(), 2, "{verified:?}");
    assert!(verified.code == Some(4) && verified.stderr.contains("step-00000006"), "{verified:?}");
    workshop.run(&["train", "empty-run.toml"]).refuses(2, &["empty-run.toml"]);
    workshop.run(&["train", "checkpoints"]).refuses(2, &["`lockstep train --resume checkpoints`"]);
}

#[test]
fn a_resume_with_nothing_to_do_moves_nothing() {
    let workshop = Workshop::trained();
    let done = workshop.run(&["train", "--resume", "checkpoints/step-00000002", "--steps", "2"]).succeeds();
    assert!(done.stderr.contains("all 2 steps were made before"), "{done:?}");
    assert!(workshop.path("checkpoints/step-00000004").exists(), "{done:?}");
}

#[test]
fn another_model_is_not_told_to_resume_from_a_checkpoint_that_it_cannot_take() {
    let workshop = Workshop::trained();
    let other = workshop.train(&["model.num_hidden_layers=3"]);
    assert!(!other.stderr.contains("--resume checkpoints"), "{other:?}");
    other.fails(2, &["num_hidden_layers was 2, is 3", "--resume never", "another model"]);
    workshop.train(&["optimizer.lr=0.5"]).fails(2, &["--resume checkpoints/step-00000004 to go on"]);
    let of_ranks = ["train", "run.toml", "--nproc-per-node", "2", "--set", "optimizer.lr=0.5"];
    workshop.run(&of_ranks).fails(2, &["optimizer.lr was 0.0003, is 0.5"]);
}

#[test]
fn a_run_that_comes_to_nothing_says_so_and_leaves_its_report() {
    let workshop = Workshop::new();
    let skipping = workshop.train(&["optimizer.lr=1000", "train.max_grad_norm=0"]).succeeds();
    assert!(skipping.stderr.contains("the last 3 steps were skipped"), "{skipping:?}");
    let diverged =
        workshop.run(&["train", "run.toml", "--resume", "never", "--set", "optimizer.lr=3"]).succeeds();
    assert!(diverged.stderr.contains("for a uniform guess: the run has diverged"), "{diverged:?}");
    let hopeless = workshop.run(&[
        "train",
        "run.toml",
        "--resume",
        "never",
        "--steps",
        "30",
        "--set",
        "optimizer.lr=1000000",
    ]);
    for part in ["in step", " of 30: ", "runs/report.html"] {
        assert!(hopeless.stderr.contains(part), "{part}: {hopeless:?}");
    }
    assert!(workshop.path("runs/report.html").is_file());
    hopeless.fails(1, &["10 steps in a row were skipped", "is NaN", "lower optimizer.lr"]);
}

#[test]
fn what_a_file_leaves_open_is_said() {
    let workshop = Workshop::new();
    workshop.write(
        "bare.toml",
        "[train]\nsteps = 1\nglobal_batch = 2\nseq_len = 16\nthreads = 1\neval_every = 0\n",
    );
    let trained = workshop.run(&["train", "bare.toml"]).succeeds();
    for part in ["note: no model is named, so llama-15m is trained", "note: no data are named"] {
        assert!(trained.stderr.contains(part), "{part}: {trained:?}");
    }
}

#[test]
fn a_configuration_that_is_printed_is_one_that_can_be_read() {
    let workshop = Workshop::new();
    let print = |run: &str, set: &str| {
        workshop.run(&["train", run, "--print-config", "--steps", "7", "--set", set]).succeeds().stdout
    };
    let first = print("run.toml", "data.text_field='a \"b\"'");
    for line in
        ["steps = 7  # --set train.steps=7", "# seed = 1337  # default", "kind = \"constant\"  # run.toml:"]
    {
        assert!(first.lines().any(|found| found.starts_with(line)), "{line}: {first}");
    }
    workshop.write("printed.toml", &first);
    let values = |text: &str| {
        text.lines().map(|line| line.split("  #").next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(values(&print("printed.toml", "data.text_field='a \"b\"'")), values(&first));
    assert!(!workshop.path("checkpoints").exists() && !workshop.path("runs").exists(), "nothing is trained");
}

#[test]
fn the_record_of_a_run_names_program_host_and_data() {
    let workshop = Workshop::new();
    workshop.train(&[]).succeeds();
    let run: Value = serde_json::from_slice(&workshop.read("runs/run.json")).unwrap();
    assert_eq!(run["lockstep"], env!("CARGO_PKG_VERSION"), "{run}");
    assert!(run["commit"].is_null() || run["commit"].as_str().is_some_and(|hash| hash.len() >= 40), "{run}");
    let host = rustix::system::uname();
    assert_eq!(run["host"], host.nodename().to_string_lossy().as_ref(), "{run}");
    assert_eq!(run["data"]["sources"][0]["digest"], run["data"]["digest"], "{run}");
    assert!(run["data"]["digest"].as_str().is_some_and(|digest| digest.len() == 64), "{run}");
}

//! Checkpoints that are damaged, missing or of another run: the newest intact one is used, and without one the run does not
//! begin.

use std::fs;

use crate::workshop::Workshop;

const OLD: &str = "checkpoints/step-00000002";
const NEW: &str = "checkpoints/step-00000004";

fn file(checkpoint: &str, name: &str) -> String {
    format!("{checkpoint}/{name}")
}

/// Damages a checkpoint in the way that `kind` names.
fn damage(workshop: &Workshop, checkpoint: &str, kind: &str) {
    let (manifest, tensors) = (file(checkpoint, "manifest.json"), file(checkpoint, "rank-00000.safetensors"));
    match kind {
        "flipped weights" => workshop.flip_a_bit(&tensors),
        "flipped manifest" => workshop.flip_a_bit(&manifest),
        "cut manifest" => {
            let bytes = workshop.read(&manifest);
            workshop.write(&manifest, &bytes[..bytes.len() / 2]);
        }
        "empty manifest" => workshop.write(&manifest, ""),
        "cut weights" => {
            let bytes = workshop.read(&tensors);
            workshop.write(&tensors, &bytes[..bytes.len() / 2]);
        }
        "no weights" => fs::remove_file(workshop.path(&tensors)).unwrap(),
        other => panic!("no such damage: {other}"),
    }
}

const DAMAGES: [(&str, &str); 6] = [
    ("flipped weights", "rank-00000.safetensors is damaged in tensor `model."),
    ("flipped manifest", "manifest.json is damaged: its bytes do not match"),
    ("cut manifest", "manifest.json is damaged: it does not end with its hash"),
    ("empty manifest", "manifest.json is damaged: it is too short"),
    ("cut weights", "rank-00000.safetensors has"),
    ("no weights", "rank-00000.safetensors is missing, but checkpoints/step-"),
];

#[test]
fn a_damaged_checkpoint_is_named_and_passed_over_for_the_previous_good_one() {
    let workshop = Workshop::trained();
    for (kind, says) in DAMAGES {
        damage(&workshop, NEW, kind);
        workshop.run(&["checkpoint", "verify", NEW]).refuses(4, &[NEW, says]);
        workshop.run(&["train", "run.toml", "--resume", NEW]).refuses(4, &[NEW, says]);
        let outcome = workshop.train(&[]).succeeds();
        for part in
            ["passed over a damaged checkpoint", says, "resuming from checkpoints/step-00000002 (step 2)"]
        {
            assert!(outcome.stderr.contains(part), "{kind}: {part:?} in {outcome:?}");
        }
        // The run has replaced it by an intact one.
        workshop.run(&["checkpoint", "verify", NEW]).succeeds();
    }
}

#[test]
fn a_run_of_which_every_checkpoint_is_damaged_does_not_begin_anew_by_itself() {
    let workshop = Workshop::trained();
    damage(&workshop, OLD, "cut weights");
    damage(&workshop, NEW, "cut manifest");
    workshop.train(&[]).refuses(4, &["no checkpoint in checkpoints is whole", OLD, NEW, "--resume never"]);
    workshop
        .run(&["generate", "--model", NEW, "--prompt", "a"])
        .refuses(4, &[NEW, "manifest.json is damaged"]);
    workshop.run(&["generate", "--model", OLD, "--prompt", "a"]).refuses(4, &[OLD, "bytes, but"]);
    workshop.run(&["checkpoint", "export", OLD, "--hf", "out"]).refuses(4, &[OLD, "bytes, but"]);
    assert!(!workshop.path("out").exists(), "an export that fails leaves nothing");
    workshop.run(&["train", "run.toml", "--resume", "never"]).succeeds();
}

#[test]
fn a_checkpoint_that_is_none_is_refused_with_code_2_by_every_command() {
    let workshop = Workshop::trained();
    fs::create_dir(workshop.path("nothing")).unwrap();
    for path in ["nowhere", "nothing", "text.txt"] {
        workshop.run(&["checkpoint", "verify", path]).refuses(2, &[path, "manifest.json"]);
        workshop.run(&["train", "run.toml", "--resume", path]).refuses(2, &[path, "checkpoint"]);
    }
    for path in ["nowhere", "nothing", "text.txt", "checkpoints"] {
        workshop.run(&["checkpoint", "show", path]).refuses(2, &[path, "manifest.json"]);
        workshop.run(&["checkpoint", "export", path, "--hf", "out"]).refuses(2, &[path, "manifest.json"]);
        workshop.run(&["checkpoint", "import", path, "--out", "out"]).refuses(2, &[path, "config.json"]);
    }
    for path in ["nowhere", "text.txt"] {
        workshop.run(&["checkpoint", "list", path]).refuses(2, &[path, "is not a directory"]);
    }
    let empty = workshop.run(&["checkpoint", "list", "nothing"]).succeeds();
    assert!(empty.stdout.is_empty() && empty.stderr.contains("no checkpoints in nothing"), "{empty:?}");
    workshop
        .run(&["checkpoint", "export", NEW, "--hf", "hf"])
        .refuses(2, &["hf is not empty", "another directory"]);
    assert!(!workshop.path("out").exists(), "what fails leaves nothing");
}

#[test]
fn a_checkpoint_of_another_run_is_refused_with_what_differs() {
    let workshop = Workshop::trained();
    workshop.train(&["train.lr=1e-2", "train.steps=8"]).refuses(
        2,
        &[NEW, "other settings", "optimizer.lr was 0.0003, is 0.01", "--resume never", "checkpoint.dir"],
    );
    workshop
        .train(&["schedule.warmup_steps=3"])
        .refuses(2, &["schedule.warmup_steps was 1, is 3", &format!("--resume {NEW} to go on")]);
    workshop.train(&["model.intermediate_size=96"]).refuses(2, &["model.intermediate_size was 64, is 96"]);
    workshop.run(&["checkpoint", "import", "hf", "--out", "imported"]).succeeds();
    let resume = ["train", "run.toml", "--resume", "imported/step-00000000"];
    workshop.run(&resume).refuses(2, &["imported/step-00000000", "weights only", "model.from_pretrained"]);
}

#[test]
fn what_shows_or_exports_one_checkpoint_of_several_asks_which() {
    let workshop = Workshop::trained();
    for command in
        [&["checkpoint", "show", "checkpoints"][..], &["checkpoint", "export", "checkpoints", "--hf", "out"]]
    {
        workshop.run(command).fails(2, &["did you mean", "checkpoints/step-00000004"]);
    }
}

#[test]
fn damaged_checkpoints_do_not_count_towards_those_that_are_kept() {
    let workshop = Workshop::new();
    workshop.train(&["checkpoint.every=1", "checkpoint.keep=4"]).succeeds();
    for step in [2, 3, 4] {
        workshop.flip_a_bit(&format!("checkpoints/step-0000000{step}/rank-00000.safetensors"));
    }
    let more = ["train.steps=3", "checkpoint.every=1", "checkpoint.keep=3"];
    let resumed = workshop.train(&more).succeeds();
    assert!(
        resumed.stderr.contains("the damaged checkpoint is now checkpoints/damaged/step-00000004"),
        "{resumed:?}"
    );
    let verified = workshop.run(&["checkpoint", "verify", "checkpoints"]).succeeds();
    assert_eq!(verified.stdout.lines().count(), 3, "the one of before and two new ones: {verified:?}");
    assert!(workshop.path("checkpoints/step-00000001").exists());
}

#[test]
fn a_run_that_fails_evicts_no_good_checkpoint() {
    let workshop = Workshop::new();
    // At this learning rate the model learns the text in a few steps.
    let good = ["train.steps=60", "checkpoint.every=10", "optimizer.lr=1e-2"];
    workshop.train(&good).succeeds();
    let resume = ["train", "run.toml", "--resume", "checkpoints"];
    let absurd = ["--set", "train.steps=100", "--set", "checkpoint.every=2", "--set", "optimizer.lr=1000"];
    let failing = workshop.run(&[&resume[..], &absurd].concat());
    assert!(failing.stderr.contains("checkpoints of now replace none of before"), "{failing:?}");
    for step in [50, 60] {
        let path = format!("checkpoints/step-000000{step}");
        assert!(workshop.path(&path).exists(), "{path}: {failing:?}");
    }
}

#[test]
fn the_best_checkpoint_stays_if_that_is_wanted() {
    let workshop = Workshop::new();
    let settings = [
        "train.steps=30",
        "train.eval_every=5",
        "checkpoint.every=5",
        "checkpoint.keep=2",
        "checkpoint.keep_best=true",
        "optimizer.lr=3e-2",
    ];
    workshop.train(&settings).succeeds();
    let rows = String::from_utf8(workshop.read("runs/metrics.jsonl")).unwrap();
    let rows = rows.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let evaluated = rows.filter_map(|row| Some((row["step"].as_u64()?, row["eval_loss"].as_f64()?)));
    let (best, _) = evaluated.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert!(workshop.path(&format!("checkpoints/step-{best:08}")).exists(), "step {best}");
    workshop
        .train(&["checkpoint.keep_best=true", "train.eval_every=0"])
        .refuses(2, &["checkpoint.keep_best", "train.eval_every = 0"]);
}

#[test]
fn an_export_beside_a_run_that_prunes_is_whole_or_says_which_checkpoint_to_take() {
    let workshop = Workshop::new();
    let settings = ["train.steps=1000000", "checkpoint.every=1", "checkpoint.keep=1", "train.log_every=1000"];
    let sets = settings.iter().flat_map(|setting| ["--set", setting]);
    let program = env!("CARGO_BIN_EXE_lockstep");
    let mut run = workshop.start(program, &["train", "run.toml"].into_iter().chain(sets).collect::<Vec<_>>());
    run.wait_until("checkpoints", |run| run.stderr().matches("saved ").count() > 2);
    let tries = std::env::var("LOCKSTEP_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(20);
    for number in 0..tries {
        let listed = workshop.run(&["checkpoint", "list", "checkpoints"]).succeeds().stdout;
        let Some(path) = listed.lines().next().and_then(|line| line.split_whitespace().nth(1)) else {
            continue;
        };
        let hf = format!("hf-{number}");
        let outcome = workshop.run(&["checkpoint", "export", path, "--hf", &hf]);
        match outcome.code {
            Some(0) => {
                let config = workshop.read(&format!("{hf}/config.json"));
                assert!(
                    !config.is_empty() && workshop.path(&hf).join("model.safetensors").is_file(),
                    "{outcome:?}"
                );
            }
            Some(1) => {
                outcome.fails(1, &["was removed or moved while it was read", "take checkpoints/step-"])
            }
            _ => outcome.fails(2, &["there is no checkpoint ", "the newest there is checkpoints/step-"]),
        }
        assert!(workshop.path(&format!(".lockstep-export-{hf}")).symlink_metadata().is_err(), "try {number}");
    }
    run.child.kill().unwrap();
    run.child.wait().unwrap();
}

//! Directories that cannot be written and full disks. No checkpoint is lost, and a run that could not save fails before its first
//! step.

use std::io::Write;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::workshop::{Outcome, Workshop};

const LOCKSTEP: &str = env!("CARGO_BIN_EXE_lockstep");

#[test]
fn a_directory_that_cannot_be_made_is_named_before_the_first_step() {
    let workshop = Workshop::new();
    workshop.train(&["checkpoint.dir=text.txt/here"]).refuses(2, &["cannot create text.txt/here"]);
    workshop.train(&["checkpoint.dir=text.txt"]).refuses(2, &["cannot create text.txt", "File exists"]);
    workshop.train(&["metrics.dir=text.txt/here"]).fails(1, &["cannot create", "text.txt/here"]);
    workshop.train(&["data.cache_dir=text.txt/here"]).refuses(2, &["cannot create text.txt/here"]);
    assert!(!workshop.path("checkpoints/step-00000002").exists(), "no step was made");
}

/// Runs a shell script in which `disk` is a small file system of its own, mounted with `options`, and `$1` is the program.
/// Returns `None`, with a message, if the system does not allow mounts.
pub(crate) fn with_disk(workshop: &Workshop, options: &str, script: &str) -> Option<Outcome> {
    std::fs::create_dir(workshop.path("disk")).unwrap();
    let mount = format!("mount -t tmpfs -o {options} tmpfs disk");
    let probe = format!("cd '{}' && {mount}", workshop.path("").display());
    let probed = Command::new("unshare").args(["-rm", "sh", "-c", &probe]).output();
    if !probed.as_ref().is_ok_and(|output| output.status.success()) {
        // Written directly, because the test harness hides `eprintln` of tests that pass.
        let message = format!("SKIPPED: no small file system can be mounted here: {probed:?}\n");
        std::io::stderr().write_all(message.as_bytes()).unwrap();
        return None;
    }
    let script = format!("{mount} && {script}");
    Some(workshop.start("unshare", &["-rm", "sh", "-c", &script, "sh", LOCKSTEP]).finish())
}

#[test]
fn a_full_disk_stops_no_step_and_spoils_no_checkpoint() {
    let workshop = Workshop::new();
    // Room for two checkpoints of this model and not for three. The shell prints the values to compare.
    let script = r#"{ $1 train run.toml --set checkpoint.dir=disk --set checkpoint.every=1 --set checkpoint.keep=0
        echo "code $?"; for saved in disk/step-*; do $1 checkpoint verify $saved; done; ls -A disk
        $1 train run.toml --set checkpoint.dir=disk --set train.steps=2; echo "code $?"; }"#;
    let Some(outcome) = with_disk(&workshop, "size=900k", script) else { return };
    let verified = |step| format!("disk/step-0000000{step}: every byte is as it was written\n");
    let expected =
        format!("code 1\n{}{}.run.lock\nstep-00000001\nstep-00000002\ncode 0\n", verified(1), verified(2));
    assert_eq!(outcome.stdout, expected, "{outcome:?}");
    let full = "no space left for disk/";
    for part in
        [&format!("not saved: {full}")[..], "step 4/4", &format!("error: {full}"), "earlier checkpoints"]
    {
        assert!(outcome.stderr.contains(part), "{part:?} in {outcome:?}");
    }
}

#[test]
fn a_full_disk_under_the_cache_or_an_export_leaves_nothing_half_written() {
    let workshop = Workshop::trained();
    let script = r#"{ $1 checkpoint export checkpoints/step-00000004 --hf disk/hf; echo "code $?"
        $1 checkpoint import hf --out disk/imported; echo "code $?"
        head -c 400000 /dev/zero | tr '\0' a > long.txt
        $1 train run.toml --set data.cache_dir=disk/cache --set 'data.train=["long.txt"]' --resume never; echo "code $?"
        find disk -type f -size +0; }"#;
    let Some(outcome) = with_disk(&workshop, "size=64k", script) else { return };
    assert_eq!(outcome.stdout, "code 1\ncode 1\ncode 1\n", "{outcome:?}");
    let messages: Vec<&str> = outcome.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(messages.len(), 3, "{outcome:?}");
    for (message, parts) in messages.iter().zip([
        ["no space left", "disk/"],
        ["no space left", "disk/imported"],
        ["disk is full", "disk/cache"],
    ]) {
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} in {message}");
    }
}

#[test]
fn metrics_that_find_no_room_are_told_now_and_then_and_not_at_each_step() {
    let workshop = Workshop::new();
    let script = r#"{ $1 train run.toml --set train.steps=60 --set checkpoint.every=0 --set metrics.dir=disk/runs; echo "code $?"; }"#;
    let Some(outcome) = with_disk(&workshop, "size=20k", script) else { return };
    assert_eq!(outcome.stdout, "code 0\n", "{outcome:?}");
    let told = outcome.stderr.lines().filter(|line| line.contains("metrics.jsonl: ")).count();
    assert!((2..=8).contains(&told), "{told} messages: {outcome:?}");
}

#[test]
fn a_read_only_directory_is_named_before_the_first_step() {
    let workshop = Workshop::trained();
    let script = r#"{ $1 train run.toml --resume never --set checkpoint.dir=disk; echo "code $?"
        $1 train run.toml --set checkpoint.dir=disk/below; echo "code $?"
        $1 train run.toml --set train.steps=8 --set metrics.dir=disk/runs; echo "code $?"
        $1 train run.toml --resume never --set data.cache_dir=disk/cache; echo "code $?"
        $1 checkpoint export checkpoints/step-00000004 --hf disk/hf; echo "code $?"
        $1 checkpoint import hf --out disk/imported; echo "code $?"; }"#;
    let Some(outcome) = with_disk(&workshop, "ro", script) else { return };
    assert_eq!(outcome.stdout, "code 1\n".repeat(6), "{outcome:?}");
    let messages: Vec<&str> = outcome.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(messages.len(), 6, "{outcome:?}");
    for (message, path) in
        messages.iter().zip(["disk", "disk/below", "disk/runs", "disk/cache", "disk/", "disk/imported"])
    {
        assert!(message.contains(path) && message.contains("Read-only"), "{path} in {message}");
    }
    assert!(!outcome.stderr.contains("step 1/"), "no step was made: {outcome:?}");
}

#[test]
fn a_tokenization_that_fills_the_disk_goes_on_when_there_is_room() {
    let workshop = Workshop::new();
    let script = r#"{ head -c 400000 /dev/zero | tr '\0' a > long.txt
        $1 data tokenize long.txt -o disk/out; echo "code $?"; ls disk
        mount -o remount,size=2m disk; $1 data tokenize long.txt -o disk/out > /dev/null; echo "code $?"; ls disk; }"#;
    let Some(outcome) = with_disk(&workshop, "size=256k", script) else { return };
    assert_eq!(outcome.stdout, "code 1\nout.partial\ncode 0\nout.bin\nout.idx\n", "{outcome:?}");
    assert!(outcome.stderr.contains("error: the disk is full below disk/out.partial"), "{outcome:?}");
}

#[test]
fn a_run_whose_state_is_on_disk_is_killed_and_goes_on_to_the_same_weights() {
    let on_disk = [
        "train.precision=bf16",
        "train.steps=400",
        "train.log_every=1",
        "checkpoint.every=30",
        "parallel.offload={ optimizer = \"disk\", gradients = \"disk\", activations = \"disk\" }",
    ];
    let undisturbed = Workshop::new();
    undisturbed.train(&on_disk).succeeds();
    let expected = undisturbed.read("checkpoints/step-00000400/rank-00000.safetensors");
    let killed = Workshop::new();
    let sets: Vec<&str> = on_disk.iter().flat_map(|setting| ["--set", setting]).collect();
    for step in [50, 140, 310] {
        let arguments: Vec<&str> = ["train", "run.toml"].into_iter().chain(sets.iter().copied()).collect();
        let mut run = killed.start(LOCKSTEP, &arguments);
        run.wait_until("the step", |run| run.stderr().contains(&format!(" {step}/400")));
        run.child.kill().unwrap();
        run.child.wait().unwrap();
        // The files are deleted while open, so only their space remains in use.
        let names = std::fs::read_dir(killed.path("checkpoints")).unwrap();
        let left: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(left.iter().all(|name| !name.contains("offload")), "{left:?}");
    }
    let last = killed.train(&on_disk).succeeds();
    assert!(last.stderr.contains("resuming from"), "{last:?}");
    assert!(killed.read("checkpoints/step-00000400/rank-00000.safetensors") == expected);
}

#[test]
fn what_only_measures_or_verifies_a_state_on_disk_leaves_nothing_behind() {
    let workshop = Workshop::new();
    let names = || {
        let entries = std::fs::read_dir(workshop.path(".")).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        // The output of commands is kept in files of the workshop.
        names.retain(|name| !name.starts_with(".std"));
        names.sort();
        names
    };
    let before = names();
    let on_disk = ["--set", "parallel.offload.optimizer=disk"];
    let step = ["bench", "step", "--model", "llama-15m", "--batch", "1", "--seq-len", "16", "--steps", "1"];
    for command in [&step[..], &["verify", "--steps", "1"]] {
        for directory in [&[][..], &["--set", "parallel.offload.dir=a/b"]] {
            workshop.run(&[command, &on_disk, directory].concat()).succeeds();
            assert_eq!(names(), before, "{command:?} {directory:?}");
        }
    }
}

#[test]
fn a_disk_in_memory_is_no_place_for_what_memory_lacks() {
    let workshop = Workshop::new();
    if let Some(outcome) = with_disk(
        &workshop,
        "size=900k",
        "$1 train run.toml --set parallel.offload.optimizer=disk --set parallel.offload.dir=disk; echo \"code $?\"",
    ) {
        assert_eq!(outcome.stdout, "code 2\n", "{outcome:?}");
        assert!(outcome.stderr.contains("disk lies in memory"), "{outcome:?}");
    }
    let on_disk = "parallel.offload.activations=disk";
    workshop
        .train(&[on_disk, "parallel.offload.fraction=0.5"])
        .refuses(2, &["activations are offloaded altogether"]);
    workshop.train(&[on_disk, "parallel.offload.dir=text.txt"]).fails(1, &["text.txt"]);
    workshop
        .train(&["parallel.offload.gradients=disk"])
        .refuses(2, &["need the optimizer's state there too", "parallel.offload.optimizer"]);
    workshop
        .train(&["parallel.offload.optimizer=disk", "optimizer.kind=muon"])
        .refuses(2, &["\"muon\" needs whole matrices"]);
    workshop.train(&["parallel.offload.fraction=0.5"]).refuses(2, &["nothing that is offloaded"]);
}

#[test]
fn a_leftover_that_cannot_be_removed_stops_no_save() {
    let workshop = Workshop::new();
    // A mount point cannot be removed, even by root.
    let script = r#"{ mkdir -p disk/.tmp-step-00000002/held disk/.trash-step-00000001/held
        for name in tmp-step-00000002 trash-step-00000001; do mount -t tmpfs tmpfs disk/.$name/held; done
        $1 train run.toml --set checkpoint.dir=disk --set checkpoint.every=1 --set checkpoint.keep=2; echo "code $?"
        for saved in disk/step-*; do $1 checkpoint verify $saved; done; }"#;
    let Some(outcome) = with_disk(&workshop, "size=8m", script) else { return };
    let verified = |step| format!("disk/step-0000000{step}: every byte is as it was written\n");
    // The first checkpoint cannot be deleted either, because its place in the trash is taken.
    assert_eq!(
        outcome.stdout,
        format!("code 0\n{}{}{}", verified(1), verified(3), verified(4)),
        "{outcome:?}"
    );
    for part in [
        "what an earlier save left stays: cannot delete disk/.tmp-step-00000002",
        "an old checkpoint is not removed",
    ] {
        assert_eq!(outcome.stderr.matches(part).count(), 1, "{part:?} once in {outcome:?}");
    }
}

#[test]
fn rows_of_a_deleted_file_come_back_and_two_runs_keep_apart() {
    let workshop = Workshop::new();
    let settings = ["train", "run.toml", "--set", "train.steps=100000", "--set", "checkpoint.every=0"];
    let mut run = workshop.start(LOCKSTEP, &settings);
    run.wait_until("a first step", |run| run.stderr().contains("\nstep "));
    workshop
        .run(&["train", "run.toml", "--set", "checkpoint.dir=other"])
        .fails(2, &["another run writes its metrics to runs", "metrics.dir"]);
    // The run may recreate the file before its directory is gone.
    run.wait_until("no directory", |_| std::fs::remove_dir_all(workshop.path("runs")).is_ok());
    run.wait_until("a message", |run| run.stderr().contains("runs/metrics.jsonl was deleted"));
    let pid = Pid::from_raw(run.child.id() as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(75), "{outcome:?}");
    let rows = String::from_utf8(workshop.read("runs/metrics.jsonl")).unwrap();
    for (index, row) in rows.lines().enumerate() {
        assert!(row.starts_with(&format!("{{\"step\":{},", index + 1)), "row {index}: {row}");
    }
    assert!(rows.lines().count() > 4, "{rows}");
}

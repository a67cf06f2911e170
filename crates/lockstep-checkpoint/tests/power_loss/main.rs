//! Tests of power loss at any moment. A process saves, replaces, prunes and sweeps under `strace`. Its calls are
//! replayed on a model of a disk that loses unsynced data (`disk`). After every call, each kind of loss must leave the
//! newest committed checkpoint undamaged.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

#[path = "../common/mod.rs"]
mod common;
mod disk;
mod record;

use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;

use common::State;
use disk::{Disk, Forgets};
use lockstep_checkpoint::{
    Checkpoint, CheckpointQuality, CommitObserver, CommitPoint, latest_good_of, list, make_room, prune, save,
    save_observed, set_aside, set_damaged_aside,
};

const CHILD_DIR: &str = "LOCKSTEP_TEST_POWER_LOSS";
/// Prefix of names of nonexistent files: the process reports progress by looking one up.
const MARK: &str = "mark-";

/// Observer that makes a save fail at a point.
struct FailsAt(CommitPoint);

impl CommitObserver for FailsAt {
    fn reached(&self, point: CommitPoint) -> std::io::Result<()> {
        if point == self.0 { Err(std::io::Error::other("injected")) } else { Ok(()) }
    }
}

/// Runs every operation of a run on its checkpoint directories. Passes promises to `mark`: `DIR=STEP` means that the
/// newest checkpoint of DIR is STEP or newer; 0 promises nothing.
fn run_of_saves(root: &Path, mark: impl Fn(&str, u64)) {
    let (dir, fallback) = (root.join("dir"), root.join("fallback"));
    let save_in = |name: &str, step: u64| {
        let state = State::at(step);
        save(&root.join(name), &state.request(), &state.slices()).unwrap();
        mark(name, step);
    };
    let keep = |count| NonZeroUsize::new(count).unwrap();
    let standing = |_: &_| CheckpointQuality::default();
    for step in 1..=3 {
        save_in("dir", step);
        prune(&dir, keep(2), &[step], standing).unwrap();
    }
    // Replaces a checkpoint of the same step.
    save_in("dir", 3);
    // A save fails, and its state is saved to the fallback directory.
    let state = State::at(4);
    save_observed(&dir, &state.request(), &state.slices(), &FailsAt(CommitPoint::ManifestWritten))
        .unwrap_err();
    save_in("fallback", 4);
    make_room(&dir, keep(1), standing).unwrap();
    // Leftovers of a killed save and a killed deletion, for the next save to sweep.
    for name in [".tmp-step-00000005", ".trash-step-00000001"] {
        std::fs::create_dir(dir.join(name)).unwrap();
        std::fs::write(dir.join(name).join("rank-00000.safetensors"), "left").unwrap();
    }
    save_in("dir", 5);
    prune(&dir, keep(2), &[5], standing).unwrap();
    // One process dies while it prunes, another right after it replaced a checkpoint. Their leftovers are swept and
    // were never synced.
    std::fs::rename(dir.join("step-00000003"), dir.join(".trash-step-00000003")).unwrap();
    let state = State::at(5);
    save_observed(&dir, &state.request(), &state.slices(), &FailsAt(CommitPoint::Renamed)).unwrap_err();
    save_in("dir", 6);
    save_in("fallback", 6);
    // Damaged checkpoints are set aside, and a run starts below the existing steps.
    mark("fallback", 4);
    set_damaged_aside(&fallback, &[fallback.join("step-00000006")]).unwrap();
    mark("dir", 0);
    set_aside(&dir, 5).unwrap();
    save_in("dir", 7);
}

#[test]
fn child_that_saves() {
    let Some(root) = std::env::var_os(CHILD_DIR) else { return };
    let root = Path::new(&root);
    run_of_saves(root, |name, step| drop(root.join(format!("{MARK}{name}={step}")).symlink_metadata()));
}

/// Returns the seeds of the random losses; `LOCKSTEP_SEEDS` gives their number.
fn seeds() -> u64 {
    std::env::var("LOCKSTEP_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(4)
}

#[test]
fn the_newest_committed_checkpoint_is_whole_after_a_power_loss_at_any_call() {
    let work = tempfile::tempdir().unwrap();
    let root = work.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let Some(calls) =
        record::calls_of(&root, &["--exact", "child_that_saves", "--test-threads=1"], CHILD_DIR)
    else {
        let message = "SKIPPED: strace is not there, or may not trace: no power loss was replayed\n";
        std::io::stderr().write_all(message.as_bytes()).unwrap();
        return;
    };
    let mut disk = Disk::new(&root);
    let mut promised: BTreeMap<String, u64> = BTreeMap::new();
    let (mut states, mut looked_at) = (std::collections::HashSet::new(), 0);
    let crashed = work.path().join("crashed");
    for (index, call) in calls.iter().enumerate() {
        if let Some((name, step)) = call.path().and_then(|path| path.split_once(MARK)?.1.split_once('=')) {
            promised.insert(name.to_owned(), step.parse().unwrap());
            continue;
        }
        if !disk.apply(call) {
            continue;
        }
        for forgets in Forgets::all(seeds()) {
            let tree = disk.after_loss(forgets);
            looked_at += 1;
            if !states.insert((tree.clone(), promised.clone())) {
                continue;
            }
            tree.write(&crashed);
            let when = format!("after call {index} ({call}), {forgets:?} lost");
            assert_whole(&crashed, &promised, &when);
            std::fs::remove_dir_all(&crashed).unwrap();
        }
    }
    assert!(disk.syncs() > 20 && states.len() > 150, "{} syncs, {} states", disk.syncs(), states.len());
    // The recording must reproduce the real disk; otherwise a call was missed.
    assert_eq!(disk.as_seen(), disk::Tree::read(&root), "the replayed disk and the real one");
    println!("{} calls, {looked_at} losses, {} different disks", calls.len(), states.len());
}

/// Asserts that the newest checkpoint of each directory is at least as new as the last one whose commit was reported (`promised`),
/// and that no listed checkpoint is damaged.
fn assert_whole(root: &Path, promised: &BTreeMap<String, u64>, when: &str) {
    let dirs = [root.join("dir"), root.join("fallback")];
    for dir in &dirs {
        for listed in list(dir).unwrap() {
            let checkpoint = Checkpoint::open(&listed.path).and_then(|found| found.verify().map(|()| found));
            let checkpoint = checkpoint.unwrap_or_else(|error| panic!("{when}: {error}"));
            State::at(listed.step).assert_equals(&checkpoint);
        }
        let name = dir.file_name().unwrap().to_str().unwrap();
        let newest = list(dir).unwrap().last().map_or(0, |listed| listed.step);
        let least = promised.get(name).copied().unwrap_or(0);
        assert!(newest >= least, "{when}: the newest of {name} is {newest}, and {least} was committed");
    }
    let all: Vec<&Path> = dirs.iter().map(std::path::PathBuf::as_path).collect();
    let found = latest_good_of(&all).unwrap();
    assert!(found.skipped.is_empty(), "{when}: {:?}", found.skipped);
    // A new save must succeed as well.
    for dir in dirs {
        let state = State::at(9);
        save(&dir, &state.request(), &state.slices()).unwrap_or_else(|error| panic!("{when}: {error}"));
        let hidden: Vec<_> = std::fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with('.'))
            .collect();
        assert!(hidden.is_empty(), "{when}: {hidden:?} left");
    }
}

#[test]
fn strace_that_is_there_can_be_asked_for_its_version() {
    // Without strace the replay is skipped; with strace it must not be skipped by accident.
    let Ok(output) = Command::new("strace").arg("-V").output() else { return };
    assert!(output.status.success(), "{output:?}");
}

//! File systems that stop answering during a save, or are full: the run reports it, goes on, uses its fallback, and ends in time.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::bad_disks::with_disk;
use crate::workshop::{Outcome, Started, Workshop};

const LOCKSTEP: &str = env!("CARGO_BIN_EXE_lockstep");

/// A small ext4 file system mounted at `disk` of a workshop. It is thawed and unmounted when dropped.
struct Volume(std::path::PathBuf);

impl Volume {
    /// Mounts the file system; `None`, with a message, if the system does not allow it.
    fn mount(workshop: &Workshop) -> Option<Self> {
        let path = workshop.path("disk");
        std::fs::create_dir(&path).unwrap();
        let script = "truncate -s 64M image && mkfs.ext4 -q -F image && mount -o loop image disk";
        let made = Command::new("sh").args(["-c", script]).current_dir(workshop.path("")).output();
        if made.as_ref().is_ok_and(|output| output.status.success()) {
            return Some(Self(path));
        }
        // Written directly, because the test harness hides `eprintln` of tests that pass.
        let message = format!(
            "SKIPPED: no file system can be mounted and frozen here (needs root, mkfs.ext4 and loop devices): {made:?}\n"
        );
        std::io::stderr().write_all(message.as_bytes()).unwrap();
        None
    }

    fn freeze(&self) {
        assert!(self.run("fsfreeze", &["-f"]), "frozen");
    }

    fn thaw(&self) {
        assert!(self.run("fsfreeze", &["-u"]), "thawed");
    }

    fn run(&self, program: &str, arguments: &[&str]) -> bool {
        Command::new(program)
            .args(arguments)
            .arg(&self.0)
            .output()
            .is_ok_and(|output| output.status.success())
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // It may be thawed already.
        self.run("fsfreeze", &["-u"]);
        self.run("umount", &["-l"]);
    }
}

/// Starts a run that saves into `disk` repeatedly until it is stopped.
fn endless(workshop: &Workshop, settings: &[&str]) -> Started {
    let common = [
        "train.steps=1000000",
        "train.log_every=1000",
        "checkpoint.every=100",
        "checkpoint.dir=disk",
        "metrics.jsonl=false",
        "metrics.tensorboard=false",
    ];
    let sets = common.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    workshop.start(LOCKSTEP, &["train", "run.toml"].into_iter().chain(sets).collect::<Vec<_>>())
}

fn terminate(run: &Started) {
    kill_process(Pid::from_raw(run.child.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
}

/// Stops a run on a frozen volume: it prints `last` and ends within `limit`. Threads stuck in a system call on the volume remain
/// and end when it is thawed.
fn ends_by_sigterm(mut run: Started, volume: &Volume, last: &str, limit: Duration) -> Outcome {
    let asked = Instant::now();
    terminate(&run);
    run.wait_until("its last words", |run| run.stderr().contains(last));
    assert!(asked.elapsed() < limit, "ended after {:?}: {}", asked.elapsed(), run.stderr());
    volume.thaw();
    let outcome = run.finish();
    assert!(
        asked.elapsed() < limit + Duration::from_secs(2),
        "ended after {:?}: {outcome:?}",
        asked.elapsed()
    );
    outcome
}

/// Returns the last step that a run has shown.
fn last_step(run: &Started) -> u64 {
    let text = run.stderr();
    let steps =
        text.lines().filter_map(|line| line.strip_prefix("step ")?.split('/').next()?.trim().parse().ok());
    steps.max().unwrap_or(0)
}

fn assert_resumes_from(workshop: &Workshop, settings: &[&str], dir: &str) {
    let sets = settings.iter().flat_map(|setting| ["--set", setting]);
    let resumed: Outcome = workshop.run(
        &["train", "run.toml", "--set", "train.steps=1", "--set", "checkpoint.dir=disk"]
            .into_iter()
            .chain(sets)
            .collect::<Vec<_>>(),
    );
    let expected = format!("resuming from {dir}/step-");
    assert!(resumed.stderr.contains(&expected), "{expected:?} in {resumed:?}");
}

/// Freezes the disk of a run while it saves, and checks its messages and that it saves into `other`.
fn goes_to_the_fallback(settings: &[&str]) {
    let workshop = Workshop::new();
    let Some(volume) = Volume::mount(&workshop) else { return };
    let common = ["checkpoint.fallback=other", "checkpoint.stall_s=7", "checkpoint.grace_s=20"];
    let settings: Vec<&str> = common.iter().chain(settings).copied().collect();
    let mut run = endless(&workshop, &settings);
    run.wait_until("a checkpoint", |run| run.stderr().contains("saved disk/step-"));
    volume.freeze();
    let (frozen, step) = (Instant::now(), last_step(&run));
    run.wait_until("a message on the stall", |run| run.stderr().contains("has made no progress for 5 s"));
    assert!(frozen.elapsed() < Duration::from_millis(6500), "told after {:?}", frozen.elapsed());
    run.wait_until("a save elsewhere", |run| run.stderr().contains("saved other/step-"));
    assert!(frozen.elapsed() < Duration::from_secs(12), "saved elsewhere after {:?}", frozen.elapsed());
    assert!(last_step(&run) >= step, "{}", run.stderr());
    let outcome = ends_by_sigterm(run, &volume, "interrupted at step ", Duration::from_secs(15));
    assert_eq!(outcome.code, Some(75), "{outcome:?}");
    for part in ["is not saved in disk: ", "; trying other"] {
        assert!(outcome.stderr.contains(part), "{part:?} in {outcome:?}");
    }
    for dir in ["disk", "other"] {
        workshop.run(&["checkpoint", "verify", dir]).succeeds();
    }
    assert_resumes_from(&workshop, &settings, "other");
}

#[test]
fn a_frozen_file_system_is_told_and_the_run_saves_in_its_fallback() {
    goes_to_the_fallback(&[]);
}

#[test]
fn a_frozen_file_system_under_saves_in_the_foreground_is_given_up_as_well() {
    goes_to_the_fallback(&["checkpoint.async=false"]);
}

#[test]
fn ranks_that_share_a_model_leave_a_frozen_file_system_together() {
    goes_to_the_fallback(&["parallel.data_parallel_shard=2", "parallel.zero_stage=3"]);
}

#[test]
fn sigterm_is_kept_on_a_frozen_file_system_without_a_fallback() {
    let workshop = Workshop::new();
    let Some(volume) = Volume::mount(&workshop) else { return };
    let mut run = endless(&workshop, &["checkpoint.grace_s=8"]);
    run.wait_until("a checkpoint", |run| run.stderr().contains("saved disk/step-"));
    volume.freeze();
    let outcome = ends_by_sigterm(run, &volume, "error: ", Duration::from_secs(8));
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    for part in [" is not saved:\n  disk: ", "has made no progress for 5 s", "set checkpoint.fallback"] {
        assert!(outcome.stderr.contains(part), "{part:?} in {outcome:?}");
    }
    workshop.run(&["checkpoint", "verify", "disk"]).succeeds();
    assert_resumes_from(&workshop, &[], "disk");
}

#[test]
fn a_run_that_begins_on_a_frozen_file_system_says_so_and_gives_up() {
    let workshop = Workshop::new();
    let Some(volume) = Volume::mount(&workshop) else { return };
    volume.freeze();
    let mut run = endless(&workshop, &["checkpoint.stall_s=7"]);
    run.wait_until("its last words", |run| run.stderr().contains("error: "));
    volume.thaw();
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    for part in
        ["opening disk has made no progress for 5 s", "error: opening disk has made no progress for 7 s"]
    {
        assert!(outcome.stderr.contains(part), "{part:?} in {outcome:?}");
    }
}

#[test]
fn a_file_system_that_thaws_is_used_again_and_has_no_leftovers() {
    let workshop = Workshop::new();
    let Some(volume) = Volume::mount(&workshop) else { return };
    let mut run = endless(&workshop, &["checkpoint.fallback=other", "checkpoint.stall_s=2"]);
    run.wait_until("a checkpoint", |run| run.stderr().contains("saved disk/step-"));
    volume.freeze();
    run.wait_until("a save elsewhere", |run| run.stderr().contains("saved other/step-"));
    volume.thaw();
    let saves = |run: &Started| run.stderr().matches("saved disk/step-").count();
    let before = saves(&run);
    run.wait_until("saves as before", |run| saves(run) > before + 2);
    terminate(&run);
    assert_eq!(run.finish().code, Some(75));
    for dir in ["disk", "other"] {
        workshop.run(&["checkpoint", "verify", dir]).succeeds();
        let hidden = names(&workshop.path(dir)).into_iter().filter(|name| name.starts_with(".tmp"));
        assert_eq!(hidden.count(), 0, "{:?}", names(&workshop.path(dir)));
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_full_directory_is_pruned_before_a_save_and_never_of_its_last_good_checkpoint() {
    let workshop = Workshop::new();
    // Room for two checkpoints of this model and not for three.
    let script = r#"{ $1 train run.toml --set checkpoint.dir=disk --set checkpoint.every=1 --set checkpoint.keep=2
        echo "code $?"; for saved in disk/step-*; do $1 checkpoint verify $saved; done; }"#;
    let Some(outcome) = with_disk(&workshop, "size=900k", script) else { return };
    let verified = |step| format!("disk/step-0000000{step}: every byte is as it was written\n");
    assert_eq!(outcome.stdout, format!("code 0\n{}{}", verified(3), verified(4)), "{outcome:?}");
    assert!(outcome.stderr.contains("removed disk/step-00000001 to make room for step 3"), "{outcome:?}");
}

#[test]
fn what_finds_no_room_goes_to_the_fallback_and_the_newest_of_both_is_resumed() {
    let workshop = Workshop::new();
    let script = r#"{ run="$1 train run.toml --set checkpoint.dir=disk --set checkpoint.fallback=other --set checkpoint.every=1 --set checkpoint.keep=0"
        $run; echo "code $?"; ls disk other; $run --steps 5; echo "code $?"; ls other; }"#;
    let Some(outcome) = with_disk(&workshop, "size=900k", script) else { return };
    let first = "code 0\ndisk:\nstep-00000001\nstep-00000002\n\nother:\nstep-00000003\nstep-00000004\n";
    let second = "code 0\nstep-00000003\nstep-00000004\nstep-00000005\n";
    assert_eq!(outcome.stdout, format!("{first}{second}"), "{outcome:?}");
    for part in [
        "step 3 is not saved in disk: no space left for disk/",
        "; trying other",
        "resuming from other/step-00000004",
    ] {
        assert!(outcome.stderr.contains(part), "{part:?} in {outcome:?}");
    }
}

#[test]
fn a_last_save_that_fails_everywhere_says_where_and_why() {
    let workshop = Workshop::new();
    let script = r#"{ mkdir disk/a disk/b; head -c 400000 /dev/zero > disk/filler
        $1 train run.toml --set checkpoint.dir=disk/a --set checkpoint.fallback=disk/b --set checkpoint.every=0; echo "code $?"; ls disk/a disk/b; }"#;
    let Some(outcome) = with_disk(&workshop, "size=500k", script) else { return };
    assert_eq!(outcome.stdout, "code 1\ndisk/a:\n\ndisk/b:\n", "{outcome:?}");
    for part in ["error: step 4 is not saved:\n  disk/a: no space left", "\n  disk/b: no space left"] {
        assert!(outcome.stderr.contains(part), "{part:?} in {outcome:?}");
    }
}

#[test]
fn two_directories_that_are_one_are_refused_and_a_fallback_is_locked_too() {
    let workshop = Workshop::new();
    workshop
        .train(&["checkpoint.fallback=checkpoints"])
        .refuses(2, &["checkpoint.fallback", "is checkpoint.dir", "another directory"]);
    let mut run = workshop.start(
        LOCKSTEP,
        &["train", "run.toml", "--set", "train.steps=1000000", "--set", "checkpoint.fallback=other"],
    );
    run.wait_until("a step", |run| run.stderr().contains("step "));
    workshop
        .train(&["checkpoint.dir=mine", "checkpoint.fallback=other", "metrics.dir=mine"])
        .fails(1, &["another process is at work in other"]);
    run.child.kill().unwrap();
    run.child.wait().unwrap();
}

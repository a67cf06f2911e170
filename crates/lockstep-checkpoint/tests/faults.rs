//! Tests of faults: after any failure of a save or damage to its files, the last good checkpoint is found and the next
//! save succeeds.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod common;

use std::{
    env, fs, io,
    os::unix::process::ExitStatusExt,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use common::State;
use lockstep_checkpoint::{
    Checkpoint, CheckpointError, CommitObserver, CommitPoint, DType, Region, SaveRequest, TensorKind,
    TensorSlice, latest_good, list, save, save_observed,
};
use proptest::prelude::*;

/// Fault injected at the chosen point of a save.
enum Fault {
    Error,
    Panic,
    Abort,
}

struct FaultAt(CommitPoint, Fault);

impl CommitObserver for FaultAt {
    fn reached(&self, point: CommitPoint) -> io::Result<()> {
        match self.1 {
            _ if point != self.0 => Ok(()),
            Fault::Error => Err(io::Error::other("injected")),
            Fault::Panic => panic!("injected at {point:?}"),
            Fault::Abort => std::process::abort(),
        }
    }
}

fn save_step(dir: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    let state = State::at(step);
    save(dir, &state.request(), &state.slices())
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Asserts that the newest good checkpoint is `step`, that it is undamaged, and that none was skipped.
fn assert_latest(dir: &Path, step: u64, when: &str) {
    let found = latest_good(dir).unwrap();
    assert!(found.skipped.is_empty(), "{when}: {:?}", found.skipped);
    let checkpoint = found.checkpoint.unwrap_or_else(|| panic!("{when}: no checkpoint"));
    assert_eq!(checkpoint.manifest().step, step, "{when}");
    State::at(step).assert_equals(&checkpoint);
}

fn is_committed(point: CommitPoint) -> bool {
    matches!(point, CommitPoint::Renamed | CommitPoint::ParentSynced)
}

#[test]
fn an_error_or_a_panic_at_any_point_removes_what_was_written() {
    for point in CommitPoint::ALL {
        for fault in [Fault::Error, Fault::Panic] {
            let dir = tempfile::tempdir().unwrap();
            save_step(dir.path(), 1).unwrap();
            let state = State::at(2);
            let observer = FaultAt(point, fault);
            let outcome = panic::catch_unwind(AssertUnwindSafe(|| {
                save_observed(dir.path(), &state.request(), &state.slices(), &observer)
            }));
            match outcome {
                Ok(Err(CheckpointError::Stopped { point: stopped, .. })) => assert_eq!(stopped, point),
                Ok(other) => panic!("{point:?}: {other:?}"),
                Err(_) => {}
            }
            let last = if is_committed(point) { 2 } else { 1 };
            assert_latest(dir.path(), last, &format!("after {point:?}"));
            assert_eq!(names_in(dir.path()).len() as u64, last, "{point:?} left {:?}", names_in(dir.path()));
            save_step(dir.path(), 3).unwrap();
            assert_latest(dir.path(), 3, &format!("saved after {point:?}"));
        }
    }
}

#[test]
fn an_error_at_any_point_of_a_replacement_leaves_the_old_or_the_new() {
    for point in CommitPoint::ALL {
        let dir = tempfile::tempdir().unwrap();
        save_step(dir.path(), 1).unwrap();
        let new = State::at(2);
        let request = SaveRequest { step: 1, ..new.request() };
        save_observed(dir.path(), &request, &new.slices(), &FaultAt(point, Fault::Error)).unwrap_err();
        let checkpoint = latest_good(dir.path()).unwrap().checkpoint.unwrap();
        let expected = if is_committed(point) { 2 * 64 } else { 64 };
        assert_eq!(checkpoint.manifest().samples_consumed, expected, "{point:?}");
        save_step(dir.path(), 3).unwrap();
        assert_eq!(names_in(dir.path()), ["step-00000001", "step-00000003"], "{point:?}");
    }
}

/// Starts this test binary again to run only the test `child`, which reads its directory and orders from the
/// environment.
fn start_child(child: &str, dir: &Path, orders: &str) -> std::process::Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", child, "--nocapture", "--test-threads=1"])
        .env("LOCKSTEP_TEST_DIR", dir)
        .env("LOCKSTEP_TEST_ORDERS", orders)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Returns a child's directory and orders from the environment. Returns `None` in an ordinary test run.
fn orders() -> Option<(PathBuf, String)> {
    Some((env::var_os("LOCKSTEP_TEST_DIR")?.into(), env::var("LOCKSTEP_TEST_ORDERS").ok()?))
}

#[test]
fn child_that_aborts() {
    let Some((dir, point)) = orders() else { return };
    let point = CommitPoint::ALL.into_iter().find(|candidate| format!("{candidate:?}") == point).unwrap();
    let state = State::at(2);
    let observer = FaultAt(point, Fault::Abort);
    save_observed(&dir, &state.request(), &state.slices(), &observer).unwrap();
}

#[test]
fn a_process_killed_at_any_point_leaves_the_last_good_checkpoint_and_a_free_lock() {
    const SIGABRT: i32 = 6;
    for point in CommitPoint::ALL {
        let dir = tempfile::tempdir().unwrap();
        save_step(dir.path(), 1).unwrap();
        let status = start_child("child_that_aborts", dir.path(), &format!("{point:?}")).wait().unwrap();
        assert_eq!(status.signal(), Some(SIGABRT), "the child must die at {point:?}: {status}");
        assert_latest(dir.path(), if is_committed(point) { 2 } else { 1 }, &format!("killed at {point:?}"));
        save_step(dir.path(), 3).unwrap();
        assert_latest(dir.path(), 3, &format!("saved after a kill at {point:?}"));
        let hidden: Vec<_> = names_in(dir.path()).into_iter().filter(|name| name.starts_with('.')).collect();
        assert!(hidden.is_empty(), "{point:?} left {hidden:?}");
    }
}

#[test]
fn child_that_saves_on_and_on() {
    let Some((dir, first)) = orders() else { return };
    for step in first.parse::<u64>().unwrap().. {
        save_step(&dir, step).unwrap();
        let keep = std::num::NonZeroUsize::new(2).unwrap();
        lockstep_checkpoint::prune(&dir, keep, &[], |_| lockstep_checkpoint::CheckpointQuality::default())
            .unwrap();
    }
}

#[test]
fn a_process_killed_at_random_times_never_leaves_a_broken_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    save_step(dir.path(), 1).unwrap();
    for round in 0..20u64 {
        let before = newest_step(dir.path());
        let mut child = start_child("child_that_saves_on_and_on", dir.path(), &(before + 1).to_string());
        let started = Instant::now();
        while newest_step(dir.path()) == before {
            assert!(started.elapsed() < Duration::from_secs(60), "round {round}: the child saves nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Times spread over the phases of a save, which takes a few milliseconds.
        std::thread::sleep(Duration::from_micros(round * 7_919 % 10_000));
        child.kill().unwrap();
        child.wait().unwrap();
        let found = latest_good(dir.path()).unwrap();
        assert!(found.skipped.is_empty(), "round {round}: {:?}", found.skipped);
        let checkpoint = found.checkpoint.unwrap();
        State::at(checkpoint.manifest().step).assert_equals(&checkpoint);
    }
    save_step(dir.path(), 1_000_000).unwrap();
    assert_latest(dir.path(), 1_000_000, "after the kills");
}

fn newest_step(dir: &Path) -> u64 {
    list(dir).unwrap().last().map_or(0, |listed| listed.step)
}

fn flip(path: &Path, bit: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[bit / 8] ^= 1 << (bit % 8);
    fs::write(path, bytes).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_flipped_bit_is_found_and_named_and_the_previous_checkpoint_used(
        file in prop::sample::select(vec!["manifest.json", "rank-00000.safetensors"]),
        place in any::<prop::sample::Index>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        save_step(dir.path(), 1).unwrap();
        let newest = save_step(dir.path(), 2).unwrap();
        let damaged = newest.join(file);
        let good = fs::read(&damaged).unwrap();
        let bit = place.index(good.len() * 8);
        let slices = Checkpoint::open(&newest).unwrap().manifest().tensors.clone();
        flip(&damaged, bit);

        let found = latest_good(dir.path()).unwrap();
        let checkpoint = found.checkpoint.unwrap();
        prop_assert_eq!(checkpoint.manifest().step, 1);
        State::at(1).assert_equals(&checkpoint);
        prop_assert_eq!(found.skipped.len(), 1);
        let reason = &found.skipped[0].reason;
        prop_assert!(reason.is_corrupt(), "{}", reason);
        prop_assert!(reason.to_string().contains(file), "{}", reason);

        // The error names the tensor that holds the byte. Reading it without verification fails in the same way.
        if file == "rank-00000.safetensors" {
            let holder = slices.iter().find(|tensor| {
                let bytes = tensor.shape.iter().product::<usize>() as u64 * 4;
                (tensor.slices[0].offset..tensor.slices[0].offset + bytes).contains(&(bit as u64 / 8))
            });
            let named = holder.map_or("its header", |tensor| tensor.name.as_str());
            prop_assert!(reason.to_string().contains(named), "{} should name {}", reason, named);
            if let Some(tensor) = holder {
                let unverified = Checkpoint::open(&newest).unwrap();
                let read = unverified.read(&tensor.name, &tensor.kind, 0, &mut [0.0]);
                prop_assert!(matches!(read, Err(CheckpointError::Corrupt { .. })), "{:?}", read);
            }
        }
    }
}

#[test]
fn every_bit_of_a_manifest_matters() {
    let dir = tempfile::tempdir().unwrap();
    let values = [1.0f32];
    let tensor = TensorSlice {
        name: "w",
        kind: TensorKind::Parameter,
        dtype: DType::F32,
        global_shape: &[1],
        region: Region::Whole,
        bytes: bytemuck::cast_slice::<f32, u8>(&values).into(),
    };
    let path = save(dir.path(), &SaveRequest::default(), &[tensor]).unwrap();
    let manifest = fs::read(path.join("manifest.json")).unwrap();
    lockstep_checkpoint::Manifest::parse(&manifest, &path).unwrap();
    for bit in 0..manifest.len() * 8 {
        let mut damaged = manifest.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let outcome = lockstep_checkpoint::Manifest::parse(&damaged, &path);
        assert!(matches!(outcome, Err(CheckpointError::ManifestDamaged { .. })), "bit {bit}: {outcome:?}");
    }
    for length in 0..manifest.len() {
        let outcome = lockstep_checkpoint::Manifest::parse(&manifest[..length], &path);
        assert!(
            matches!(outcome, Err(CheckpointError::ManifestDamaged { .. })),
            "{length} bytes: {outcome:?}"
        );
    }
}

#[test]
fn a_lost_shortened_or_exchanged_file_is_named_and_the_previous_checkpoint_used() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 6] = [
        ("rank-00000.safetensors", |dir| fs::remove_file(dir.join("rank-00000.safetensors")).unwrap()),
        ("manifest.json", |dir| fs::remove_file(dir.join("manifest.json")).unwrap()),
        ("rank-00000.safetensors", |dir| {
            let file = fs::OpenOptions::new().write(true).open(dir.join("rank-00000.safetensors")).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        }),
        ("rank-00000.safetensors", |dir| {
            fs::remove_file(dir.join("rank-00000.safetensors")).unwrap();
            let other = dir.parent().unwrap().join("step-00000001/rank-00000.safetensors");
            fs::copy(other, dir.join("rank-00000.safetensors")).unwrap();
        }),
        ("rank-00000.safetensors", |dir| {
            fs::remove_file(dir.join("rank-00000.safetensors")).unwrap();
            std::os::unix::fs::symlink("/dev/zero", dir.join("rank-00000.safetensors")).unwrap();
        }),
        ("manifest.json", |dir| {
            fs::remove_file(dir.join("manifest.json")).unwrap();
            fs::create_dir(dir.join("manifest.json")).unwrap();
        }),
    ];
    for (named, damage) in damages {
        let dir = tempfile::tempdir().unwrap();
        save_step(dir.path(), 1).unwrap();
        damage(&save_step(dir.path(), 2).unwrap());
        let found = latest_good(dir.path()).unwrap();
        assert_eq!(found.checkpoint.unwrap().manifest().step, 1);
        let reason = found.skipped[0].reason.to_string();
        assert!(reason.contains(named) && reason.contains("step-00000002"), "{reason}");
    }
}

/// Small tmpfs that is unmounted when dropped. If mounting is not permitted, `None` and a message.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(options: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(dir.path())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            println!("SKIPPED: mounting a tmpfs needs root and the right to mount");
            return None;
        }
        Some(Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(self.path()).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            println!("{} is still mounted", self.path().display());
        }
    }
}

#[test]
fn a_full_disk_is_an_error_that_costs_nothing_already_saved() {
    let Some(disk) = SmallDisk::mount("size=1m") else { return };
    let dir = disk.path().join("checkpoints");
    save_step(&dir, 1).unwrap();
    let large = vec![1.0f32; 1 << 18];
    let tensor = TensorSlice {
        name: "w",
        kind: TensorKind::Parameter,
        dtype: DType::F32,
        global_shape: &[1 << 18],
        region: Region::Whole,
        bytes: bytemuck::cast_slice::<f32, u8>(&large).into(),
    };
    let request = SaveRequest { step: 2, ..SaveRequest::default() };
    let error = save(&dir, &request, &[tensor]).unwrap_err();
    assert!(matches!(error, CheckpointError::DiskFull { .. }), "{error:?}");
    assert!(error.to_string().contains("rank-00000.safetensors"), "{error}");
    assert_eq!(names_in(&dir), ["step-00000001"]);
    assert_latest(&dir, 1, "on a full disk");
    save_step(&dir, 3).unwrap();

    // Fill the remaining space, so that not even the manifest or the directory fits.
    let mut step = 4;
    let error = loop {
        match save_step(&dir, step) {
            Ok(_) => step += 1,
            Err(error) => break error,
        }
        assert!(step < 1000, "a disk of 1 MiB never fills");
    };
    assert!(matches!(error, CheckpointError::DiskFull { .. }), "{error:?}");
    assert_latest(&dir, step - 1, "when nothing more fits");
    assert!(!names_in(&dir).iter().any(|name| name.starts_with('.')), "{:?}", names_in(&dir));
}

#[test]
fn a_read_only_directory_is_an_error_that_names_it_and_still_loads() {
    let Some(disk) = SmallDisk::mount("size=1m") else { return };
    let dir = disk.path().join("checkpoints");
    save_step(&dir, 1).unwrap();
    let read_only =
        Command::new("mount").args(["-o", "remount,ro"]).arg(disk.path()).status().unwrap().success();
    assert!(read_only, "a tmpfs that was just mounted can be made read-only");
    let error = save_step(&dir, 2).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(".tmp-step-00000002") && message.contains("Read-only"), "{message}");
    assert!(!error.is_corrupt());
    assert_latest(&dir, 1, "on a read-only disk");
    let elsewhere = save_step(&disk.path().join("new"), 2).unwrap_err().to_string();
    assert!(elsewhere.contains("new"), "{elsewhere}");
}

//! A directory of checkpoints: names, lookup of the newest undamaged one, and deletion of old ones.
//!
//! Only `step-NNNNNNNN` is a checkpoint. Hidden names are unfinished saves and deletions. The holder of the directory's
//! lock may remove them, because no other process is writing.

use std::{
    fs, io,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use crate::{
    error::CheckpointError,
    files::{DirectoryLock, sync_directory},
    load::Checkpoint,
    manifest::{MANIFEST_FILE, Manifest},
};

/// Name prefix of a checkpoint that is being written, or that has just been replaced.
pub(crate) const STAGING: &str = ".tmp-";
/// Name prefix of a checkpoint that was moved aside for its replacement.
pub(crate) const SET_ASIDE: &str = ".old-";
/// Name prefix of a checkpoint that is being deleted.
const TRASH: &str = ".trash-";

/// Directory with the name of a checkpoint; its contents have not been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedCheckpoint {
    /// Step in the directory's name.
    pub step: u64,
    /// Path of the directory.
    pub path: PathBuf,
}

/// Checkpoint that cannot be used.
#[derive(Debug)]
pub struct SkippedCheckpoint {
    /// Path of the checkpoint.
    pub path: PathBuf,
    /// Reason, with the damaged file and, if known, the tensor.
    pub reason: CheckpointError,
}

/// Result of [`latest_good`].
#[derive(Debug)]
pub struct Latest {
    /// Newest undamaged checkpoint, fully verified; `None` if there is none.
    pub checkpoint: Option<Checkpoint>,
    /// Newer checkpoints that are damaged, newest first.
    pub skipped: Vec<SkippedCheckpoint>,
}

/// Lists the checkpoints in `dir`, oldest first; empty if there is no such directory.
pub fn list(dir: &Path) -> Result<Vec<ListedCheckpoint>, CheckpointError> {
    let mut found: Vec<_> = names_in(dir)?
        .into_iter()
        .filter_map(|name| Some(ListedCheckpoint { step: step_of(&name)?, path: dir.join(name) }))
        .collect();
    found.sort_by_key(|listed| listed.step);
    Ok(found)
}

/// Returns the checkpoint that `path` names: `path` itself, or the newest undamaged one in a directory of checkpoints.
///
/// # Errors
/// If every checkpoint in the directory is damaged; the error is that of the newest.
pub fn find(path: &Path) -> Result<PathBuf, CheckpointError> {
    if !path.is_dir() || path.join(MANIFEST_FILE).exists() || list(path)?.is_empty() {
        return Ok(path.to_owned());
    }
    let Latest { checkpoint, skipped } = latest_good(path)?;
    match (checkpoint, skipped.into_iter().next()) {
        (Some(checkpoint), _) => Ok(checkpoint.path().to_owned()),
        (None, Some(newest)) => Err(newest.reason),
        (None, None) => Ok(path.to_owned()),
    }
}

/// Verifies the checkpoints in `dir`, newest first, and returns the first undamaged one and the errors of the newer
/// ones.
pub fn latest_good(dir: &Path) -> Result<Latest, CheckpointError> {
    latest_good_of(&[dir])
}

/// Searches several directories as [`latest_good`] does. Of two checkpoints with the same step, the one in the earlier
/// directory is used.
///
/// # Errors
/// If an existing directory cannot be listed.
pub fn latest_good_of(dirs: &[&Path]) -> Result<Latest, CheckpointError> {
    let mut all = Vec::new();
    for dir in dirs {
        all.extend(list(dir)?);
    }
    // The sort is stable, so the order of directories remains.
    all.sort_by_key(|listed| std::cmp::Reverse(listed.step));
    let mut skipped = Vec::new();
    for listed in all {
        match open_listed(&listed).and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint)) {
            Ok(checkpoint) => return Ok(Latest { checkpoint: Some(checkpoint), skipped }),
            Err(reason) => skipped.push(SkippedCheckpoint { path: listed.path, reason }),
        }
    }
    Ok(Latest { checkpoint: None, skipped })
}

/// Properties of a checkpoint that decide whether [`prune`] keeps it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CheckpointQuality {
    /// True if the run was failing when the checkpoint was saved. It does not count as good and is kept only while it
    /// is the newest.
    pub is_doubtful: bool,
    /// Measured loss, if any; the checkpoint with the lowest loss is kept.
    pub loss: Option<f64>,
}

/// Outcome of [`prune`].
#[derive(Debug, Default)]
pub struct Pruned {
    /// Paths of deleted checkpoints.
    pub deleted: Vec<PathBuf>,
    /// Errors of checkpoints that could not be deleted.
    pub failed: Vec<CheckpointError>,
}

/// Deletes the checkpoints older than the newest `keep` good ones, and doubtful ones other than the newest. Keeps the
/// steps in `protect` and the checkpoint with the lowest loss. Skips checkpoints that cannot be deleted.
///
/// A checkpoint is good if its manifest is valid, every file has its full size, and `standing` does not call it
/// doubtful. The files are not hashed again. Broken checkpoints do not count, so with fewer than `keep` good ones no
/// good one is deleted.
pub fn prune(
    dir: &Path,
    keep: NonZeroUsize,
    protect: &[u64],
    standing: impl Fn(&Manifest) -> CheckpointQuality,
) -> Result<Pruned, CheckpointError> {
    let _lock = DirectoryLock::take(dir)?;
    let judged: Vec<(ListedCheckpoint, Option<CheckpointQuality>)> = list(dir)?
        .into_iter()
        .rev()
        .map(|listed| {
            let whole = open_listed(&listed).and_then(|found| found.check_sizes().map(|()| found));
            let standing = whole.ok().map(|checkpoint| standing(checkpoint.manifest()));
            (listed, standing)
        })
        .collect();
    let losses = judged.iter().filter_map(|(listed, standing)| Some((listed.step, standing.as_ref()?.loss?)));
    let best = losses.filter(|(_, loss)| loss.is_finite()).min_by(|a, b| a.1.total_cmp(&b.1));
    let (mut good, mut pruned, mut trash) = (0, Pruned::default(), Vec::new());
    for (index, (listed, standing)) in judged.into_iter().enumerate() {
        let is_doubtful = standing.is_some_and(|standing| standing.is_doubtful);
        let is_beyond = good >= keep.get() || is_doubtful && index > 0;
        if !is_beyond {
            good += usize::from(standing.is_some() && !is_doubtful);
        } else if !protect.contains(&listed.step) && best.is_none_or(|(step, _)| step != listed.step) {
            match throw_away(dir, &listed) {
                Ok(thrown) => trash.push((listed.path, thrown)),
                Err(error) => pruned.failed.push(error),
            }
        }
    }
    if !trash.is_empty() {
        // Otherwise a power loss could restore the name of a checkpoint whose files are gone.
        sync_directory(dir)?;
    }
    for (path, thrown) in trash {
        match fs::remove_dir_all(&thrown).map_err(CheckpointError::io("delete", &thrown)) {
            Ok(()) => pruned.deleted.push(path),
            Err(error) => pruned.failed.push(error),
        }
    }
    Ok(pruned)
}

/// Deletes checkpoints as [`prune`] does, to make room for a new one. Deletes nothing unless at least one remaining
/// checkpoint has been verified completely.
///
/// If the directory is locked or cannot be listed.
pub fn make_room(
    dir: &Path,
    keep: NonZeroUsize,
    standing: impl Fn(&Manifest) -> CheckpointQuality,
) -> Result<Pruned, CheckpointError> {
    let is_whole = |listed: &ListedCheckpoint| {
        let checkpoint = open_listed(listed).ok()?;
        (!standing(checkpoint.manifest()).is_doubtful && checkpoint.verify().is_ok()).then_some(listed.step)
    };
    let Some(whole) = list(dir)?.iter().rev().find_map(is_whole) else { return Ok(Pruned::default()) };
    prune(dir, keep, &[whole], standing)
}

/// Renames a checkpoint to a hidden name before its deletion, so that an interrupted deletion leaves no partial
/// checkpoint.
fn throw_away(dir: &Path, listed: &ListedCheckpoint) -> Result<PathBuf, CheckpointError> {
    let trash = dir.join(format!("{TRASH}{}", step_name(listed.step)));
    fs::rename(&listed.path, &trash).map_err(CheckpointError::io("delete", &listed.path))?;
    tracing::debug!(path = %listed.path.display(), "deletes an old checkpoint");
    Ok(trash)
}

/// Moves damaged checkpoints of `dir` into its subdirectory `damaged`, where they are ignored, and returns their new
/// paths. Replaces an earlier one with the same step there.
///
/// If the directory is locked or a checkpoint cannot be moved; those before it have been moved.
pub fn set_damaged_aside(dir: &Path, damaged: &[PathBuf]) -> Result<Vec<PathBuf>, CheckpointError> {
    let _lock = DirectoryLock::take(dir)?;
    let aside = dir.join("damaged");
    let mut moved = Vec::new();
    for path in damaged {
        fs::create_dir_all(&aside).map_err(CheckpointError::io("create", &aside))?;
        let target = aside.join(path.file_name().unwrap_or_default());
        if target.exists() {
            fs::remove_dir_all(&target).map_err(CheckpointError::io("delete", &target))?;
        }
        fs::rename(path, &target).map_err(CheckpointError::io("move aside", path))?;
        moved.push(target);
    }
    if !moved.is_empty() {
        sync_directory(&aside)?;
        sync_directory(dir)?;
    }
    Ok(moved)
}

/// Moves every checkpoint from step `from` on into a new subdirectory `earlier-N` of `dir` and returns its path.
/// Returns `None` if there are no such checkpoints.
pub fn set_aside(dir: &Path, from: u64) -> Result<Option<PathBuf>, CheckpointError> {
    let _lock = DirectoryLock::take(dir)?;
    let moved: Vec<_> = list(dir)?.into_iter().filter(|listed| listed.step >= from).collect();
    if moved.is_empty() {
        return Ok(None);
    }
    let names = (1..).map(|number| dir.join(format!("earlier-{number}")));
    let aside = names.into_iter().find(|path| !path.exists()).unwrap_or_else(|| dir.join("earlier"));
    fs::create_dir(&aside).map_err(CheckpointError::io("create", &aside))?;
    for listed in moved {
        let target = aside.join(step_name(listed.step));
        fs::rename(&listed.path, &target).map_err(CheckpointError::io("move aside", &listed.path))?;
    }
    sync_directory(&aside)?;
    sync_directory(dir)?;
    tracing::debug!(path = %aside.display(), from_step = from, "moved checkpoints of an earlier run aside");
    Ok(Some(aside))
}

/// Removes the leftovers of interrupted saves and deletions, and returns the errors of those that remain. The caller
/// must hold the lock.
pub(crate) fn sweep(dir: &Path) -> Result<Vec<CheckpointError>, CheckpointError> {
    let mut left = Vec::new();
    let names = names_in(dir)?;
    let is_ours =
        |name: &str, prefix: &str| name.strip_prefix(prefix).is_some_and(|rest| staged_step(rest).is_some());
    if names.iter().any(|name| [STAGING, TRASH, SET_ASIDE].iter().any(|prefix| is_ours(name, prefix))) {
        // Names given by a process that died may not be durable. Without this sync, a power loss after the deletion
        // could restore the name of a checkpoint.
        sync_directory(dir)?;
    }
    for name in names {
        let path = dir.join(&name);
        let is_ours = |prefix: &str| is_ours(&name, prefix);
        let swept = if is_ours(STAGING) || is_ours(TRASH) {
            fs::remove_dir_all(&path).map_err(CheckpointError::io("delete", &path))
        } else if is_ours(SET_ASIDE) {
            let original = dir.join(&name[SET_ASIDE.len()..]);
            match original.exists() {
                true => fs::remove_dir_all(&path).map_err(CheckpointError::io("delete", &path)),
                false => fs::rename(&path, &original).map_err(CheckpointError::io("restore", &original)),
            }
        } else {
            Ok(())
        };
        left.extend(swept.err());
    }
    Ok(left)
}

/// Returns the newest existing staging directory for `step` in `dir`, and a free path for a new one. The new path
/// differs if a leftover cannot be deleted.
pub(crate) fn staging_of(dir: &Path, step: u64) -> Result<(Option<PathBuf>, PathBuf), CheckpointError> {
    let attempts = names_in(dir)?;
    let attempts = attempts.iter().filter_map(|name| staged_step(name.strip_prefix(STAGING)?));
    let last = attempts.filter(|(found, _)| *found == step).map(|(_, attempt)| attempt).max();
    let path = |attempt: u32| match attempt {
        0 => dir.join(format!("{STAGING}{}", step_name(step))),
        attempt => dir.join(format!("{STAGING}{}.{attempt}", step_name(step))),
    };
    Ok((last.map(path), path(last.map_or(0, |attempt| attempt.saturating_add(1)))))
}

/// Parses the rest of a hidden name into the step and the number of the attempt.
fn staged_step(name: &str) -> Option<(u64, u32)> {
    match name.split_once('.') {
        None => Some((step_of(name)?, 0)),
        Some((step, attempt)) => Some((step_of(step)?, attempt.parse().ok()?)),
    }
}

/// Returns the directory name of the checkpoint of a step.
pub(crate) fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Returns the step in a directory name; `None` if it is not the name of a checkpoint.
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// Returns true if `path` ends with the name of a checkpoint.
pub(crate) fn is_named_like_a_checkpoint(path: &Path) -> bool {
    path.file_name().and_then(|name| step_of(name.to_str()?)).is_some()
}

fn open_listed(listed: &ListedCheckpoint) -> Result<Checkpoint, CheckpointError> {
    let checkpoint = Checkpoint::open(&listed.path)?;
    let step = checkpoint.manifest().step;
    if step == listed.step {
        return Ok(checkpoint);
    }
    Err(CheckpointError::Manifest {
        path: listed.path.join(MANIFEST_FILE),
        reason: format!("it is the manifest of step {step}"),
    })
}

fn names_in(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(CheckpointError::io("list", dir)(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        // Names that are not UTF-8 cannot be checkpoints.
        names.extend(entry.map_err(CheckpointError::io("list", dir))?.file_name().into_string().ok());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_canonical_name_of_a_step_is_a_checkpoint() {
        for step in [0, 7, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(step_of(&step_name(step)), Some(step));
        }
        for name in
            ["step-1", "step-+0000001", ".tmp-step-00000001", "step-00000001.bak", "step-0000000a", "x"]
        {
            assert_eq!(step_of(name), None, "{name}");
        }
    }

    /// The shortest limit on names among file systems in use is eCryptfs's: 143 bytes.
    #[test]
    fn names_are_short_and_differ_by_more_than_case() {
        let dir = tempfile::tempdir().unwrap();
        let mut names = vec!["damaged".to_owned(), format!("earlier-{}", u64::MAX), MANIFEST_FILE.to_owned()];
        for step in [0, 7, 99_999_999, u64::MAX] {
            names.push(step_name(step));
            names.extend([TRASH, SET_ASIDE].map(|prefix| format!("{prefix}{}", step_name(step))));
            for _ in 0..3 {
                let (_, path) = staging_of(dir.path(), step).unwrap();
                fs::create_dir(&path).unwrap();
                names.push(path.file_name().unwrap().to_str().unwrap().to_owned());
            }
        }
        let longest = names.iter().max_by_key(|name| name.len()).unwrap();
        assert!(longest.len() <= 48, "{longest} has {} bytes", longest.len());
        let mut folded: Vec<String> = names.iter().map(|name| name.to_lowercase()).collect();
        folded.sort();
        folded.dedup();
        assert_eq!(folded.len(), names.len(), "{names:?}");
        // Upper case is another name, even on a file system that ignores case.
        assert_eq!(step_of("STEP-00000007"), None);
    }

    #[test]
    fn a_sweep_removes_leftovers_restores_what_stepped_aside_and_touches_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            ".tmp-step-00000005",
            ".tmp-step-00000006.2",
            ".trash-step-00000001",
            ".old-step-00000002",
            ".old-step-00000003",
            "step-00000003",
            ".tmp-mine",
            "notes",
        ] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert!(sweep(dir.path()).unwrap().is_empty());
        let mut left = names_in(dir.path()).unwrap();
        left.sort();
        assert_eq!(left, [".tmp-mine", "notes", "step-00000002", "step-00000003"]);
    }

    #[test]
    fn a_save_beside_a_leftover_of_its_step_has_a_name_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (first, second) = (path(".tmp-step-00000005"), path(".tmp-step-00000005.1"));
        assert_eq!(staging_of(dir.path(), 5).unwrap(), (None, first.clone()));
        fs::create_dir(&first).unwrap();
        assert_eq!(staging_of(dir.path(), 5).unwrap(), (Some(first), second.clone()));
        fs::create_dir(&second).unwrap();
        assert_eq!(staging_of(dir.path(), 5).unwrap(), (Some(second), path(".tmp-step-00000005.2")));
        assert_eq!(staging_of(dir.path(), 6).unwrap().0, None);
    }
}

//! Lookup of the newest undamaged checkpoint in a directory, and deletion of old ones.
//!
//! Whoever deletes or moves checkpoints holds the directory's lock, so that no other process is writing.

use std::{
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use crate::{
    error::CheckpointError,
    files::{DirectoryLock, sync_directory},
    listing::{ListedCheckpoint, TRASH, list, step_name},
    load::Checkpoint,
    manifest::{MANIFEST_FILE, Manifest},
};

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

/// Returns the newest checkpoint of several directories whose manifest is valid. Its other files may be damaged: they are not
/// read. A directory that cannot be listed counts as empty.
pub fn newest_of(dirs: &[&Path]) -> Option<Checkpoint> {
    let mut all: Vec<_> = dirs.iter().filter_map(|dir| list(dir).ok()).flatten().collect();
    // The sort is stable, so the order of directories remains.
    all.sort_by_key(|listed| std::cmp::Reverse(listed.step));
    all.iter().find_map(|listed| open_listed(listed).ok())
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
/// # Errors
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
/// # Errors
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

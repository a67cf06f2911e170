//! Names in a directory of checkpoints: finished checkpoints, unfinished saves and deletions.
//!
//! Only `step-NNNNNNNN` is a checkpoint. Hidden names are unfinished saves and deletions. The holder of the directory's
//! lock may remove them, because no other process is writing.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    error::CheckpointError,
    files::{parent_of, sync_directory},
};

/// Name prefix of a checkpoint that is being written, or that has just been replaced.
const STAGING: &str = ".tmp-";
/// Name prefix of a checkpoint that was moved aside for its replacement.
pub(crate) const SET_ASIDE: &str = ".old-";
/// Name prefix of a checkpoint that is being deleted.
pub(crate) const TRASH: &str = ".trash-";

/// Directory with the name of a checkpoint; its contents have not been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedCheckpoint {
    /// Step in the directory's name.
    pub step: u64,
    /// Path of the directory.
    pub path: PathBuf,
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

/// Returns the path of the checkpoint of a step in the checkpoints' directory `dir`.
pub fn step_directory(dir: &Path, step: u64) -> PathBuf {
    dir.join(step_name(step))
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
fn is_named_like_a_checkpoint(path: &Path) -> bool {
    path.file_name().and_then(|name| step_of(name.to_str()?)).is_some()
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

impl CheckpointError {
    /// Replaces the error of a missing file by one that suggests a checkpoint below or beside `dir`.
    pub(crate) fn or_near_checkpoints(self, dir: &Path) -> Self {
        let is_missing = matches!(&self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound);
        if !is_missing {
            return self;
        }
        let newest = |dir: &Path| Some(list(dir).ok()?.pop()?.path);
        let path = dir.to_owned();
        if let Some(newest) = newest(dir) {
            return Self::ParentDirectory { path, newest };
        }
        match newest(&parent_of(dir)).filter(|_| is_named_like_a_checkpoint(dir) && !dir.exists()) {
            Some(newest) => Self::NoSuchCheckpoint { path, newest },
            None => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::MANIFEST_FILE;

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

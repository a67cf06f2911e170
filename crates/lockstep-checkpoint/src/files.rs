//! File-system operations that durability depends on. Their errors name the path.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Component, Path, PathBuf},
};

use rustix::fs::{
    Access, CWD, FallocateFlags, FlockOperation, RenameFlags, access, fallocate, flock, renameat_with,
};
use rustix::io::Errno;

use crate::{
    disk::{OneSecondTimeout, run_on_disk},
    error::CheckpointError,
};

/// Name of the file that a [`RunLock`] locks.
const RUN_LOCK_FILE: &str = ".run.lock";

/// Exclusive lock on a directory of checkpoints for one save or prune. The operating system releases it when the
/// process ends, so a lock is never stale.
#[derive(Debug)]
pub(crate) struct DirectoryLock(File);

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Closing the descriptor is not enough: a process that is being started holds a copy of it for a moment.
        // Unlocking fails only if there was no lock.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl DirectoryLock {
    /// Takes the lock without waiting. Fails with [`Busy`](CheckpointError::Busy) if it is held. On file systems
    /// without locks this always succeeds, and callers must ensure that only one process saves at a time.
    pub(crate) fn take(dir: &Path) -> Result<Self, CheckpointError> {
        Self::lock(File::open(dir).map_err(CheckpointError::io("open", dir))?, dir)
    }

    fn lock(handle: File, dir: &Path) -> Result<Self, CheckpointError> {
        match flock(&handle, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) | Err(Errno::NOTSUP | Errno::NOSYS | Errno::NOLCK | Errno::BADF | Errno::INVAL) => {
                Ok(Self(handle))
            }
            Err(Errno::WOULDBLOCK) => Err(CheckpointError::Busy { dir: dir.to_path_buf() }),
            Err(errno) => Err(CheckpointError::io("lock", dir)(errno.into())),
        }
    }
}

/// Exclusive lock on a directory of checkpoints for a whole run. The operating system releases it when the process
/// ends.
#[derive(Debug)]
pub struct RunLock {
    dir: PathBuf,
    /// Held lock; `None` once it is released.
    lock: Option<DirectoryLock>,
}

/// Releases the lock, but does not wait for a file system that does not answer.
impl Drop for RunLock {
    fn drop(&mut self) {
        let Some(lock) = self.lock.take() else { return };
        drop(run_on_disk(&OneSecondTimeout, "unlocking", &self.dir, move || {
            drop(lock);
            Ok(())
        }));
    }
}

impl RunLock {
    /// Takes the lock without waiting.
    ///
    /// # Errors
    /// If another run holds the lock, or the lock file in `dir` cannot be opened.
    pub fn take(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(RUN_LOCK_FILE);
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        DirectoryLock::lock(file.map_err(CheckpointError::io("open", &path))?, dir)
            .map(|lock| Self { dir: dir.to_owned(), lock: Some(lock) })
    }
}

/// Creates `dir` and missing parent directories durably.
pub(crate) fn create_directories(dir: &Path) -> Result<(), CheckpointError> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir).map_err(CheckpointError::io("create", dir))?;
    sync_directory(&parent_of(dir))
}

/// Creates `dir` if it is missing, and checks that it is writable. A run calls this before its first step, when no work
/// can be lost.
///
/// # Errors
/// If `dir` cannot be created or is not writable, or the disk is full.
pub fn prepare_directory(dir: &Path) -> Result<(), CheckpointError> {
    create_directories(dir)?;
    access(dir, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|errno| CheckpointError::io("write into", dir)(errno.into()))
}

/// Creates a file, which must not exist, and reserves `bytes` for it. A full disk is detected before any data is
/// written.
pub(crate) fn create_file(path: &Path, bytes: u64) -> Result<File, CheckpointError> {
    let file = File::create_new(path).map_err(CheckpointError::io("create", path))?;
    if bytes == 0 {
        return Ok(file);
    }
    match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(file),
        Err(errno) => Err(CheckpointError::io("reserve space for", path)(errno.into())),
    }
}

/// Opens a file for reading if it is a regular file. Pipes are rejected because opening them could block, symbolic
/// links because they could lead out of the checkpoint.
pub(crate) fn open_regular(path: &Path) -> Result<File, CheckpointError> {
    let metadata = fs::symlink_metadata(path).map_err(CheckpointError::io("open", path))?;
    if !metadata.is_file() {
        return Err(CheckpointError::NotAFile { path: path.to_path_buf() });
    }
    File::open(path).map_err(CheckpointError::io("open", path))
}

/// Reads a small file completely. Returns `None` if it is longer than `limit_bytes`, so that a huge file takes no
/// memory.
pub(crate) fn read_limited(
    file: File,
    path: &Path,
    limit_bytes: u64,
) -> Result<Option<Vec<u8>>, CheckpointError> {
    let mut content = Vec::new();
    file.take(limit_bytes + 1).read_to_end(&mut content).map_err(CheckpointError::io("read", path))?;
    Ok((content.len() as u64 <= limit_bytes).then_some(content))
}

/// Makes the entries of a directory (created, renamed and removed files) durable.
pub(crate) fn sync_directory(dir: &Path) -> Result<(), CheckpointError> {
    let handle = File::open(dir).map_err(CheckpointError::io("open", dir))?;
    match handle.sync_all() {
        // Some network file systems do not support syncing a directory, and do not need it.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        result => result.map_err(CheckpointError::io("sync", dir)),
    }
}

/// Swaps two paths atomically. Returns `false` if the file system does not support it.
pub(crate) fn exchange(a: &Path, b: &Path) -> Result<bool, CheckpointError> {
    match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => Ok(false),
        Err(errno) => Err(CheckpointError::io("rename to", b)(errno.into())),
    }
}

/// Returns the directory that contains `path`.
pub(crate) fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// Returns true if `name` is a single normal component, which cannot leave the directory that it is joined to.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
        && !name.contains(['\0', '\\'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_alone_lies_in_the_working_directory() {
        for (path, parent) in [("checkpoints", "."), ("a/b", "a"), ("/a", "/"), ("/", "."), ("a/b/", "a")] {
            assert_eq!(parent_of(Path::new(path)), Path::new(parent), "{path}");
        }
    }

    #[test]
    fn only_single_normal_components_are_plain_names() {
        for name in ["model.safetensors", "rank-00000.safetensors", "..x", ".hidden"] {
            assert!(is_plain_name(name), "{name:?} is plain");
        }
        for name in ["", ".", "..", "/etc/passwd", "a/b", "../a", "a/", "./a", "a\0b", "a\\b", "/"] {
            assert!(!is_plain_name(name), "{name:?} is not plain");
        }
    }

    #[test]
    fn a_second_holder_is_told_that_the_directory_is_busy() {
        let dir = tempfile::tempdir().unwrap();
        let first = DirectoryLock::take(dir.path()).unwrap();
        let second = DirectoryLock::take(dir.path());
        assert!(matches!(second, Err(CheckpointError::Busy { .. })), "{second:?}");
        drop(first);
        DirectoryLock::take(dir.path()).unwrap();
    }
}

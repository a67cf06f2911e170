//! Locks of blobs, shared with `huggingface_hub`: `flock` on a file in `.locks`.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::HubError;

/// Time between two attempts to take a lock.
const INTERVAL: Duration = Duration::from_millis(50);
/// Wait after which the user is told about it.
const TOLD_AFTER: Duration = Duration::from_secs(2);

/// An exclusive lock. The operating system releases it when the process ends, so a lock is never stale.
#[derive(Debug)]
pub(crate) struct Lock {
    /// `None` on a file system without locks.
    _file: Option<File>,
}

impl Lock {
    /// Takes a lock, and waits while another process or thread has it; `None` if `stop` is set meanwhile.
    ///
    /// # Errors
    /// If the file cannot be created or locked.
    pub(crate) fn take(
        path: &Path,
        stop: &AtomicBool,
        note: &dyn Fn(&str),
    ) -> Result<Option<Self>, HubError> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(HubError::io("create", directory))?;
        }
        let start = Instant::now();
        let mut is_told = false;
        while !stop.load(Ordering::Relaxed) {
            let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
            let file = file.map_err(HubError::io("create", path))?;
            match file.try_lock() {
                // The last owner may have removed the file, and another process may have locked its successor.
                Ok(()) if is_current(&file, path) => return Ok(Some(Self { _file: Some(file) })),
                Ok(()) => continue,
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    return Ok(Some(Self { _file: None }));
                }
                Err(TryLockError::Error(error)) => return Err(HubError::io("lock", path)(error)),
            }
            if !is_told && start.elapsed() > TOLD_AFTER {
                note(&format!("another process downloads the same file (it holds {})", path.display()));
                is_told = true;
            }
            thread::sleep(INTERVAL);
        }
        Ok(None)
    }
}

/// Returns true if `path` still names the open file.
fn is_current(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

//! The files of a queue: an unnamed scratch file, whose space is reserved at creation, and a stored file that is only read.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use lockstep_plan::DISK_ALIGNMENT_BYTES;
use rustix::{
    fs::{self, Access, FallocateFlags, Mode, OFlags},
    io::Errno,
};

use super::{
    error::{DiskError, RESERVE_BYTES},
    open_file::{OpenFile, Place},
};

/// Magic number of tmpfs (`man 2 statfs`).
const TMPFS_MAGIC: i128 = 0x0102_1994;

/// A file that exists and is only read. Its last block may be shorter than the alignment of transfers.
#[derive(Debug, Clone)]
pub struct StoredFile {
    pub(super) open: Arc<OpenFile>,
    passes_cache: bool,
}

impl StoredFile {
    /// Opens a file; its reads bypass the page cache if the file system allows it.
    ///
    /// # Errors
    /// If the file cannot be opened ([`DiskError::Open`]).
    pub fn open(path: &Path) -> Result<Self, DiskError> {
        let failed = |source: io::Error| DiskError::Open { path: path.to_owned(), source };
        let open = |more| fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | more, Mode::empty());
        let (file, passes_cache) = match open(OFlags::DIRECT) {
            Err(Errno::INVAL) => (open(OFlags::empty()).map_err(|errno| failed(errno.into()))?, false),
            opened => (opened.map_err(|errno| failed(errno.into()))?, true),
        };
        let file = File::from(file);
        let end_bytes = file.metadata().map_err(failed)?.len();
        let place = Place::Stored(path.to_owned());
        Ok(Self { open: Arc::new(OpenFile { file, place, end_bytes }), passes_cache })
    }

    /// Size of the file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.open.end_bytes
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.open.place.path()
    }

    /// Returns true if reads bypass the page cache (`O_DIRECT`).
    pub fn passes_cache(&self) -> bool {
        self.passes_cache
    }
}

/// An unnamed file. Its space is reserved from the start and returned to the system when the process ends. It reads
/// as zeros where nothing was written.
#[derive(Debug)]
pub struct ScratchFile {
    pub(super) open: Arc<OpenFile>,
    passes_cache: bool,
}

impl ScratchFile {
    /// Creates a file of `bytes`, rounded up, in `directory`, and creates that if it is missing.
    ///
    /// # Errors
    /// If there is not enough free space ([`DiskError::Full`]), or the file cannot be created
    /// ([`DiskError::Create`]).
    pub fn create(directory: &Path, bytes: u64) -> Result<Self, DiskError> {
        let failed = |source: io::Error| DiskError::Create { directory: directory.to_owned(), source };
        std::fs::create_dir_all(directory).map_err(failed)?;
        let len_bytes = bytes.max(1).next_multiple_of(DISK_ALIGNMENT_BYTES as u64);
        check_room(directory, len_bytes)?;
        let (file, passes_cache) = open_unnamed(directory).map_err(failed)?;
        match fs::fallocate(&file, FallocateFlags::empty(), 0, len_bytes) {
            Ok(()) => {}
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => return Err(full(directory, len_bytes)),
            // This file system cannot reserve space: a full disk shows only when a write fails.
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                file.set_len(len_bytes).map_err(failed)?;
            }
            Err(errno) => return Err(failed(errno.into())),
        }
        let place = Place::Scratch(directory.to_owned());
        Ok(Self { open: Arc::new(OpenFile { file, place, end_bytes: len_bytes }), passes_cache })
    }

    /// Size of the file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.open.end_bytes
    }

    /// Directory of the file.
    pub fn directory(&self) -> &Path {
        self.open.place.path()
    }

    /// Returns true if transfers bypass the page cache (`O_DIRECT`).
    pub fn passes_cache(&self) -> bool {
        self.passes_cache
    }

    /// Returns true if a directory lies in memory (tmpfs), so that offloading to it saves nothing.
    pub fn is_in_memory(directory: &Path) -> bool {
        fs::statfs(directory).is_ok_and(|found| i128::from(found.f_type) == TMPFS_MAGIC)
    }

    /// Returns a directory for a scratch file that exists already: the nearest writable one at or above `directory`,
    /// else the system's temporary directory.
    pub fn existing_directory(directory: &Path) -> PathBuf {
        let whole = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
        let is_writable = |path: &&Path| fs::access(*path, Access::WRITE_OK | Access::EXEC_OK).is_ok();
        let existing = whole.ancestors().find(|path| path.is_dir()).filter(is_writable);
        existing.map_or_else(std::env::temp_dir, Path::to_owned)
    }

    /// Returns the free bytes of the file system of `directory`, or of the nearest directory above it that exists.
    ///
    /// # Errors
    /// If the file system cannot be queried.
    pub fn available_bytes(directory: &Path) -> io::Result<u64> {
        let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
        let found = fs::statvfs(existing)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }
}

fn check_room(directory: &Path, needed_bytes: u64) -> Result<(), DiskError> {
    match ScratchFile::available_bytes(directory) {
        Ok(available) if available < needed_bytes.saturating_add(RESERVE_BYTES) => {
            Err(full(directory, needed_bytes))
        }
        _ => Ok(()),
    }
}

fn full(directory: &Path, needed_bytes: u64) -> DiskError {
    let available_bytes = ScratchFile::available_bytes(directory).unwrap_or(0);
    DiskError::Full { directory: directory.to_owned(), needed_bytes, available_bytes }
}

/// Opens an unnamed file. Returns true with it if the file bypasses the page cache.
fn open_unnamed(directory: &Path) -> io::Result<(File, bool)> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let unnamed = |more| fs::open(directory, flags | OFlags::TMPFILE | more, mode);
    match unnamed(OFlags::DIRECT) {
        Ok(file) => return Ok((file.into(), true)),
        Err(Errno::ACCESS | Errno::ROFS | Errno::NOSPC | Errno::PERM) => {}
        Err(Errno::INVAL) => {
            if let Ok(file) = unnamed(OFlags::empty()) {
                return Ok((file.into(), false));
            }
        }
        Err(_) => {}
    }
    // The file system has no unnamed files: create a named one and unlink it at once.
    let name = directory.join(format!(".lockstep-offload-{}-{:p}", std::process::id(), &flags));
    let create = |more| fs::open(&name, flags | OFlags::CREATE | OFlags::EXCL | more, mode);
    let (file, passes_cache) = match create(OFlags::DIRECT) {
        Ok(file) => (file, true),
        Err(Errno::INVAL) => {
            // Some file systems create the file and then refuse the flag.
            let _ = fs::unlink(&name);
            (create(OFlags::empty())?, false)
        }
        Err(errno) => return Err(errno.into()),
    };
    fs::unlink(&name)?;
    Ok((file.into(), passes_cache))
}

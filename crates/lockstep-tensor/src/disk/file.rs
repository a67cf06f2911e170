//! A file without a name, whose space is reserved.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{self, Access, FallocateFlags, Mode, OFlags},
    io::Errno,
};

use super::{DISK_ALIGNMENT_BYTES, DiskError};

/// What other writers of the file system should find left.
const RESERVE_BYTES: u64 = 64 << 20;
/// The number by which tmpfs tells what it is (`man 2 statfs`).
const TMPFS_MAGIC: i128 = 0x0102_1994;

/// A file without a name: its space is its own from the start and the system's again when the process ends. It reads as zeros
/// where nothing was written.
#[derive(Debug)]
pub struct ScratchFile {
    file: File,
    directory: PathBuf,
    len_bytes: u64,
    passes_cache: bool,
}

impl ScratchFile {
    /// A file of `bytes`, rounded up, in `directory`, which is made if it is missing.
    ///
    /// # Errors
    /// [`DiskError::Full`] if there is no room for it, else [`DiskError::Create`].
    pub fn create(directory: &Path, bytes: u64) -> Result<Self, DiskError> {
        let failed = |source: io::Error| DiskError::Create { directory: directory.to_owned(), source };
        std::fs::create_dir_all(directory).map_err(failed)?;
        let len_bytes = bytes.max(1).next_multiple_of(DISK_ALIGNMENT_BYTES as u64);
        check_room(directory, len_bytes)?;
        let (file, passes_cache) = open_unnamed(directory).map_err(failed)?;
        match fs::fallocate(&file, FallocateFlags::empty(), 0, len_bytes) {
            Ok(()) => {}
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => return Err(full(directory, len_bytes)),
            // A file system that cannot reserve: a full disk is found by the write that fills it.
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                file.set_len(len_bytes).map_err(failed)?;
            }
            Err(errno) => return Err(failed(errno.into())),
        }
        Ok(Self { file, directory: directory.to_owned(), len_bytes, passes_cache })
    }

    /// Its size.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether its bytes go to the disk without a copy in the system's memory (`O_DIRECT`).
    pub fn passes_cache(&self) -> bool {
        self.passes_cache
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Whether a directory lies in memory, so that nothing is saved by a file in it.
    pub fn is_in_memory(directory: &Path) -> bool {
        fs::statfs(directory).is_ok_and(|found| i128::from(found.f_type) == TMPFS_MAGIC)
    }

    /// Where a file for `directory` can be without anything being made first: the nearest directory at or above it that is there and
    /// can be written to, or else the system's own for what is temporary.
    pub fn existing_directory(directory: &Path) -> PathBuf {
        let whole = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
        let is_writable = |path: &&Path| fs::access(*path, Access::WRITE_OK | Access::EXEC_OK).is_ok();
        let existing = whole.ancestors().find(|path| path.is_dir()).filter(is_writable);
        existing.map_or_else(std::env::temp_dir, Path::to_owned)
    }

    /// Bytes that files in `directory`, or the nearest directory above it that exists, can still take.
    ///
    /// # Errors
    /// The file system cannot be asked.
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

/// Opens a file without a name, past the page cache if the file system allows that.
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
    // A file system without unnamed files: one that loses its name at once.
    let name = directory.join(format!(".lockstep-offload-{}-{:p}", std::process::id(), &flags));
    let create = |more| fs::open(&name, flags | OFlags::CREATE | OFlags::EXCL | more, mode);
    let (file, passes_cache) = match create(OFlags::DIRECT) {
        Ok(file) => (file, true),
        Err(Errno::INVAL) => {
            // Some file systems make the file and then refuse the flag.
            let _ = fs::unlink(&name);
            (create(OFlags::empty())?, false)
        }
        Err(errno) => return Err(errno.into()),
    };
    fs::unlink(&name)?;
    Ok((file.into(), passes_cache))
}

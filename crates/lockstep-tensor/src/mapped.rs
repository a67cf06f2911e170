//! Memory-mapped read-only files: token corpora and checkpoints are read through the page cache, without a copy.

use std::{fs::File, io, ops::Deref, path::Path};

/// A file mapped read-only for as long as this value lives.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps the whole file at `path`.
    ///
    /// If another process truncates the file while it is mapped, this process dies with SIGBUS. So map only files
    /// that are renamed into place and never rewritten.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is private and read-only, and the files that Lockstep maps (token caches,
        // checkpoints) are committed by rename and never written again.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self { map })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

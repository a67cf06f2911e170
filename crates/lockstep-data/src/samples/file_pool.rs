//! Files that many threads read at offsets, with a bounded number of them open.
//!
//! Shards may number thousands, and a process may have a thousand descriptors. Reads name their offset, so threads
//! share a descriptor without a lock.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use crate::error::{DataError, Result};

/// Maximum number of files that are kept open.
const MOST_OPEN: usize = 128;

/// List of files; the most recently read ones are open.
#[derive(Debug)]
pub(crate) struct FilePool {
    paths: Vec<PathBuf>,
    /// Open files with their index in `paths`, the most recently used last.
    open: Mutex<VecDeque<(usize, Arc<File>)>>,
}

impl FilePool {
    pub(crate) fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, open: Mutex::new(VecDeque::with_capacity(MOST_OPEN)) }
    }

    pub(crate) fn path(&self, file: usize) -> &Path {
        &self.paths[file]
    }

    /// Appends `bytes` bytes from `offset` of a file to `out`.
    ///
    /// # Errors
    /// If the file cannot be opened or read, or ends before.
    pub(crate) fn read(&self, file: usize, offset: u64, bytes: usize, out: &mut Vec<u8>) -> Result<()> {
        let start = out.len();
        out.resize(start + bytes, 0);
        self.read_exact(file, offset, &mut out[start..])
    }

    /// Fills `out` from `offset` of a file.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn read_exact(&self, file: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let read = self.handle(file)?.read_exact_at(out, offset);
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => DataError::BadRecord {
                path: self.paths[file].clone(),
                record: format!("a record of {} bytes", out.len()),
                offset_bytes: offset,
                problem: "the file ends before; it was cut off after it was opened".to_owned(),
            },
            _ => DataError::io("read", &self.paths[file])(error),
        })
    }

    fn handle(&self, file: usize) -> Result<Arc<File>> {
        if let Some(handle) = self.opened(file) {
            return Ok(handle);
        }
        let path = &self.paths[file];
        let handle = Arc::new(File::open(path).map_err(DataError::io("open", path))?);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.len() == MOST_OPEN {
            open.pop_front();
        }
        open.push_back((file, Arc::clone(&handle)));
        Ok(handle)
    }

    fn opened(&self, file: usize) -> Option<Arc<File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let at = open.iter().rposition(|(index, _)| *index == file)?;
        let entry = open.remove(at)?;
        let handle = Arc::clone(&entry.1);
        open.push_back(entry);
        Some(handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_files_than_may_be_open_are_all_read() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..MOST_OPEN + 20)
            .map(|i| {
                let path = dir.path().join(i.to_string());
                std::fs::write(&path, format!("-{i}")).unwrap();
                path
            })
            .collect();
        let pool = FilePool::new(paths);
        for i in (0..MOST_OPEN + 20).chain([0, 5]) {
            let mut out = vec![b'>'];
            pool.read(i, 1, i.to_string().len(), &mut out).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), format!(">{i}"));
            assert!(pool.open.lock().unwrap().len() <= MOST_OPEN);
        }
        let error = pool.read(3, 1, 5, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("byte 1") && error.contains("the file ends before"), "{error}");
    }
}

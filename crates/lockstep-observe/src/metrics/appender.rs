//! Appends whole records to a file, whatever the disk does.
//!
//! A record that cannot be written (a full disk) waits in memory, and whatever part of it reached the file is
//! taken back, so that a reader never sees half of one. A file that somebody deletes is made anew with all that it held.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Error;

/// Records wait up to this size in memory when the disk takes none; about a hundred thousand steps.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Room for what usually waits, one record.
const USUAL_BYTES: usize = 4096;

/// What an appender needs of a file.
pub trait Sink {
    /// Writes all bytes at the end.
    ///
    /// # Errors
    /// What the system says; part of the bytes may have been written.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Makes the file `length` bytes long.
    ///
    /// # Errors
    /// What the system says.
    fn truncate(&mut self, length: u64) -> io::Result<()>;

    /// Makes a file that somebody has deleted anew at `path`, with its first `length` bytes; returns true if that was needed.
    ///
    /// # Errors
    /// If the new file cannot be made; the old one is kept.
    fn restore(&mut self, path: &Path, length: u64) -> io::Result<bool>;
}

impl Sink for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }

    fn restore(&mut self, path: &Path, length: u64) -> io::Result<bool> {
        if self.metadata()?.nlink() > 0 {
            return Ok(false);
        }
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        let mut anew = File::options().create_new(true).read(true).append(true).open(path)?;
        // The content of a deleted file lasts as long as it is open. What is appended does not depend on the place where it is read.
        self.rewind()?;
        io::copy(&mut Read::take(&mut *self, length), &mut anew)?;
        // As the old one was; that it can be is no condition of writing it.
        let _ = anew.try_lock();
        *self = anew;
        Ok(true)
    }
}

/// Appends records to one file.
#[derive(Debug)]
pub(super) struct Appender<S> {
    sink: S,
    path: PathBuf,
    /// Length of the whole records in the file.
    whole_bytes: u64,
    /// Whether part of a record may stand behind them.
    torn: bool,
    waiting: Vec<u8>,
    waiting_records: usize,
    /// Records given up because too many waited already.
    lost_records: usize,
}

impl<S: Sink> Appender<S> {
    /// An appender to a sink that holds `whole_bytes` bytes of records; `path` is what errors call it.
    pub(super) fn new(sink: S, path: PathBuf, whole_bytes: u64) -> Self {
        Self {
            sink,
            path,
            whole_bytes,
            torn: false,
            waiting: Vec::with_capacity(USUAL_BYTES),
            waiting_records: 0,
            lost_records: 0,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    #[cfg(test)]
    pub(super) fn sink(&mut self) -> &mut S {
        &mut self.sink
    }

    /// Appends the record that `write` makes, after those that still wait.
    ///
    /// # Errors
    /// [`Error::RowsWait`] if it cannot be written: the run can go on, and the record goes out with the next one that can be.
    /// [`Error::MetricsDeleted`] if it was written, to a file that had to be made anew.
    pub(super) fn append(&mut self, write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> Result<(), Error> {
        let length = self.waiting.len();
        if let Err(error) = write(&mut self.waiting) {
            self.waiting.truncate(length);
            return Err(Error::Metrics { path: self.path.clone(), action: "write a row of", source: error });
        }
        if self.waiting.len() > MAX_WAITING_BYTES && length > 0 {
            self.waiting.truncate(length);
            self.lost_records += 1;
        } else {
            self.waiting_records += 1;
        }
        self.flush()
    }

    /// The sink, with everything written that waits.
    ///
    /// # Errors
    /// As [`Appender::append`].
    pub(super) fn flushed(&mut self) -> Result<&S, Error> {
        self.flush()?;
        Ok(&self.sink)
    }

    /// Records that are not in the file, as they will stand in it, and how many others were given up.
    pub(super) fn waiting(&self) -> (&[u8], usize) {
        (&self.waiting, self.lost_records)
    }

    fn flush(&mut self) -> Result<(), Error> {
        if self.torn {
            self.take_back().map_err(|source| self.failed(source))?;
        }
        if self.waiting.is_empty() {
            return Ok(());
        }
        let restored =
            self.sink.restore(&self.path, self.whole_bytes).map_err(|source| self.failed(source))?;
        if let Err(source) = self.sink.append(&self.waiting) {
            self.torn = true;
            // If this fails as well, the next flush tries again before it writes.
            let _ = self.take_back();
            return Err(self.failed(source));
        }
        self.whole_bytes += self.waiting.len() as u64;
        self.waiting.clear();
        self.waiting_records = 0;
        if restored { Err(Error::MetricsDeleted { path: self.path.clone() }) } else { Ok(()) }
    }

    fn take_back(&mut self) -> io::Result<()> {
        self.sink.truncate(self.whole_bytes)?;
        self.torn = false;
        Ok(())
    }

    fn failed(&self, source: io::Error) -> Error {
        let (waiting_rows, lost_rows) = (self.waiting_records, self.lost_records);
        Error::RowsWait { path: self.path.clone(), source, waiting_rows, lost_rows }
    }
}

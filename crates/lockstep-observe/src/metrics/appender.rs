//! Appends whole records to a file, even if the disk fills up or the file is deleted.
//!
//! A record that cannot be written waits in memory, and the part of it that reached the file is truncated away: a reader never
//! sees half a record. If somebody deletes the file, it is recreated with its content.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Error;

/// Limit on the records that wait in memory while the disk accepts none; about a hundred thousand steps.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Initial capacity of the waiting records: one typical record.
const USUAL_BYTES: usize = 4096;

/// Operations on a file that an appender needs.
pub trait Sink {
    /// Writes all bytes at the end.
    ///
    /// # Errors
    /// If the system reports one; part of the bytes may have been written.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Sets the length of the file to `length` bytes.
    ///
    /// # Errors
    /// If the system reports one.
    fn truncate(&mut self, length: u64) -> io::Result<()>;

    /// Recreates a file that somebody has deleted at `path`, with its first `length` bytes; returns true if that was necessary.
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
        // The content of a deleted file lasts while the file is open. Appending does not depend on the read position.
        self.rewind()?;
        io::copy(&mut Read::take(&mut *self, length), &mut anew)?;
        // Locked as the old file was. A failure to lock does not prevent writing.
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
    /// Length of the whole records in the file, in bytes.
    whole_bytes: u64,
    /// True if part of a record may follow the whole ones.
    torn: bool,
    waiting: Vec<u8>,
    waiting_records: usize,
    /// Records dropped because the limit on waiting ones was reached.
    lost_records: usize,
}

impl<S: Sink> Appender<S> {
    /// Returns an appender to a sink that holds `whole_bytes` bytes of records; errors name `path`.
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

    /// Appends the record that `write` produces, after the waiting ones.
    ///
    /// # Errors
    /// [`Error::RowsWait`] if the record cannot be written: the run can go on, and the record is written with the next one that
    /// succeeds. [`Error::MetricsDeleted`] if it was written to a file that had to be recreated.
    pub(super) fn append(&mut self, write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> Result<(), Error> {
        let length = self.waiting.len();
        if let Err(error) = write(&mut self.waiting) {
            self.waiting.truncate(length);
            return Err(Error::io("write a row of", &self.path)(error));
        }
        if self.waiting.len() > MAX_WAITING_BYTES && length > 0 {
            self.waiting.truncate(length);
            self.lost_records += 1;
        } else {
            self.waiting_records += 1;
        }
        self.flush()
    }

    /// Returns the sink after writing all waiting records.
    ///
    /// # Errors
    /// As [`Appender::append`].
    pub(super) fn flushed(&mut self) -> Result<&S, Error> {
        self.flush()?;
        Ok(&self.sink)
    }

    /// Returns the bytes of the waiting records and the number of dropped ones.
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
            // If this fails as well, the next flush truncates before it writes.
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

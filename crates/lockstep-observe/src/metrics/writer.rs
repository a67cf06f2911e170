//! Writer of `metrics.jsonl`, which keeps the file a sequence of whole lines in the order of steps.
//!
//! A run that resumes after step N first cuts off the rows of later steps. The file of a resumed run therefore has the same steps
//! as that of an uninterrupted one.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::appender::{Appender, Sink};
use super::row::Row;
use crate::Error;
use crate::lock::retry_lock;

/// Name of the file in `metrics.dir`.
pub const FILE_NAME: &str = "metrics.jsonl";

/// Starting point of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Step 1. An existing file is moved aside.
    Fresh,
    /// The step after that of a checkpoint (0: before the first step).
    After {
        /// Last completed step.
        step: u64,
    },
}

impl Start {
    /// Number of completed steps.
    pub const fn done(self) -> u64 {
        match self {
            Self::Fresh => 0,
            Self::After { step } => step,
        }
    }
}

/// State of the directory when the writer was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resumption {
    /// New path of an earlier run's file, if a fresh run moved one aside.
    pub moved_to: Option<PathBuf>,
    /// Bytes that a resumed run has cut off, whole rows and torn ones.
    pub cut_bytes: u64,
    /// Line numbers, from 1, of lines that are not rows. They are left unchanged.
    pub damaged_lines: Vec<usize>,
}

/// Writer of rows to `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsWriter<S = File> {
    lines: Appender<S>,
}

impl MetricsWriter<File> {
    /// Opens the file in `dir`, which is created if necessary. The file is locked against other runs until the writer is dropped.
    ///
    /// # Errors
    /// [`Error::MetricsInUse`] if another run writes there; [`Error::Metrics`], with the path and the failed action, otherwise.
    pub fn open(dir: &Path, start: Start) -> Result<(Self, Resumption), Error> {
        let path = dir.join(FILE_NAME);
        fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        let mut found = Resumption::default();
        // The lock on the earlier file is held until the file has been moved aside.
        let earlier = lock_earlier(&path)?;
        if start == Start::Fresh {
            found.moved_to = move_aside(&path).map_err(Error::io("move aside", &path))?;
        }
        let sink = File::options()
            .create(true)
            .read(true)
            .append(true)
            .open(&path)
            .map_err(Error::io("open", &path))?;
        drop(earlier);
        lock(&sink, &path)?;
        let mut whole_bytes = 0;
        if let Start::After { step } = start {
            let length = sink.metadata().map_err(Error::io("read", &path))?.len();
            whole_bytes =
                rows_up_to(step, &sink, &mut found.damaged_lines).map_err(Error::io("read", &path))?;
            found.cut_bytes = length - whole_bytes;
            sink.set_len(whole_bytes).map_err(Error::io("truncate", &path))?;
        }
        Ok((Self::over(sink, path, whole_bytes), found))
    }

    /// Writes the waiting rows and returns a handle that can sync the file. Called before a checkpoint is saved, it guarantees
    /// that the file has every step of the checkpoint.
    ///
    /// # Errors
    /// [`Error::RowsWait`] if waiting rows cannot be written; [`Error::Metrics`] if the handle cannot be duplicated.
    pub fn file(&mut self) -> Result<MetricsFile, Error> {
        let path = self.path().to_owned();
        let file = self.lines.flushed()?.try_clone().map_err(Error::io("open", &path))?;
        Ok(MetricsFile { file, path })
    }
}

/// Handle to the metrics file that may be synced from another thread.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
    path: PathBuf,
}

impl MetricsFile {
    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until everything written so far is on disk.
    ///
    /// # Errors
    /// If the system reports one.
    pub fn sync(&self) -> Result<(), Error> {
        self.file.sync_data().map_err(Error::io("sync", &self.path))
    }
}

impl<S: Sink> MetricsWriter<S> {
    /// Returns a writer over a sink that holds `whole_bytes` bytes of rows; errors name `path`.
    pub fn over(sink: S, path: PathBuf, whole_bytes: u64) -> Self {
        Self { lines: Appender::new(sink, path, whole_bytes) }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.lines.path()
    }

    /// Returns the bytes of the waiting rows and the number of dropped ones.
    pub fn waiting(&self) -> (&[u8], usize) {
        self.lines.waiting()
    }

    /// Appends a row, after the waiting ones.
    ///
    /// # Errors
    /// [`Error::RowsWait`] if the row cannot be written: the run can go on, and the row is written with the next one that
    /// succeeds. [`Error::MetricsDeleted`] if it was written to a file that had to be recreated.
    pub fn append(&mut self, row: &impl Row) -> Result<(), Error> {
        self.lines.append(|out| {
            serde_json::to_writer(&mut *out, row)?;
            out.push(b'\n');
            Ok(())
        })
    }
}

/// Opens and locks the file of an earlier run at `path`; `None` if there is none.
fn lock_earlier(path: &Path) -> Result<Option<File>, Error> {
    let Ok(file) = File::open(path) else { return Ok(None) };
    lock(&file, path)?;
    Ok(Some(file))
}

/// Locks `file` against other runs until it is closed. File systems without locks are accepted.
fn lock(file: &File, path: &Path) -> Result<(), Error> {
    let is_busy = |error: &TryLockError| matches!(error, TryLockError::WouldBlock);
    match retry_lock(|| file.try_lock(), is_busy) {
        Err(TryLockError::WouldBlock) => {
            Err(Error::MetricsInUse { dir: path.parent().unwrap_or(path).to_owned() })
        }
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// Renames a file that is not empty to the first of `metrics-1.jsonl`, `metrics-2.jsonl`, ... that is free.
fn move_aside(path: &Path) -> io::Result<Option<PathBuf>> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.len() > 0 => {}
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    for number in 1_u64.. {
        let free = path.with_file_name(format!("metrics-{number}.jsonl"));
        if !free.try_exists()? {
            fs::rename(path, &free)?;
            return Ok(Some(free));
        }
    }
    Ok(None)
}

/// Returns the length of the rows up to and including `step`: the bytes before the first whole row of a later step, or before an
/// unfinished last line.
fn rows_up_to(step: u64, file: &File, damaged_lines: &mut Vec<usize>) -> io::Result<u64> {
    #[derive(Deserialize)]
    struct StepOnly {
        step: u64,
    }

    let mut reader = BufReader::new(file);
    let (mut length, mut line) = (0, Vec::new());
    for number in 1.. {
        line.clear();
        let bytes = reader.read_until(b'\n', &mut line)?;
        if bytes == 0 || line.last() != Some(&b'\n') {
            break;
        }
        match serde_json::from_slice::<StepOnly>(&line) {
            Ok(row) if row.step > step => break,
            Ok(_) => {}
            Err(_) => damaged_lines.push(number),
        }
        length += bytes as u64;
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::metrics::EvalMetrics;
    use crate::metrics::example;

    fn eval(step: u64) -> EvalMetrics {
        EvalMetrics { step, loss: 2.5, counted: 10, ms: 1.0, ..EvalMetrics::default() }
    }

    fn write_steps(writer: &mut MetricsWriter<impl Sink>, steps: std::ops::RangeInclusive<u64>) {
        for step in steps {
            writer.append(&example(step)).unwrap();
            if step % 4 == 0 {
                writer.append(&eval(step)).unwrap();
            }
        }
    }

    #[test]
    fn a_resumed_run_leaves_the_file_of_an_uninterrupted_one() {
        let dir = tempfile::tempdir().unwrap();
        let whole = dir.path().join("whole");
        write_steps(&mut MetricsWriter::open(&whole, Start::Fresh).unwrap().0, 1..=20);

        let resumed = dir.path().join("resumed");
        write_steps(&mut MetricsWriter::open(&resumed, Start::Fresh).unwrap().0, 1..=13);
        // Simulates a kill in the middle of a line.
        File::options()
            .append(true)
            .open(resumed.join(FILE_NAME))
            .unwrap()
            .write_all(b"{\"step\":14,")
            .unwrap();
        let (mut writer, found) = MetricsWriter::open(&resumed, Start::After { step: 8 }).unwrap();
        assert!(
            found.cut_bytes > 11 && found.damaged_lines.is_empty() && found.moved_to.is_none(),
            "{found:?}"
        );
        write_steps(&mut writer, 9..=20);

        let read = |dir: &Path| fs::read_to_string(dir.join(FILE_NAME)).unwrap();
        assert_eq!(read(&resumed), read(&whole));
    }

    #[test]
    fn resuming_without_a_file_or_after_its_end_keeps_what_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let (mut writer, found) = MetricsWriter::open(dir.path(), Start::After { step: 5 }).unwrap();
        assert_eq!(found, Resumption::default());
        write_steps(&mut writer, 6..=7);
        let before = fs::read(writer.path()).unwrap();
        drop(writer);
        let (writer, found) = MetricsWriter::open(dir.path(), Start::After { step: 7 }).unwrap();
        assert_eq!((found, fs::read(writer.path()).unwrap()), (Resumption::default(), before));
    }

    #[test]
    fn damaged_lines_are_reported_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        fs::write(&path, b"{\"step\":1}\n\xff\xfe garbage\n{\"step\":-2}\n{\"step\":2}\n{\"step\":3}\n")
            .unwrap();
        let (_, found) = MetricsWriter::open(dir.path(), Start::After { step: 2 }).unwrap();
        assert_eq!((found.damaged_lines, found.cut_bytes), (vec![2, 3], 11));
        assert!(fs::read(&path).unwrap().ends_with(b"{\"step\":2}\n"));
    }

    #[test]
    fn a_fresh_run_keeps_the_file_of_an_earlier_one() {
        let dir = tempfile::tempdir().unwrap();
        for run in 0..3 {
            let (mut writer, found) = MetricsWriter::open(dir.path(), Start::Fresh).unwrap();
            let moved = (run > 0).then(|| dir.path().join(format!("metrics-{run}.jsonl")));
            assert_eq!(found.moved_to, moved);
            write_steps(&mut writer, 1..=1);
        }
    }

    /// A disk of limited size that writes part of the data before it fails, as real ones do.
    #[derive(Default)]
    struct SmallDisk {
        content: Vec<u8>,
        capacity: usize,
        truncate_fails: bool,
    }

    impl Sink for SmallDisk {
        fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
            let room = self.capacity.saturating_sub(self.content.len()).min(bytes.len());
            self.content.extend_from_slice(&bytes[..room]);
            if room < bytes.len() { Err(ErrorKind::StorageFull.into()) } else { Ok(()) }
        }

        fn truncate(&mut self, length: u64) -> io::Result<()> {
            if self.truncate_fails {
                return Err(io::Error::other("injected"));
            }
            self.content.truncate(length as usize);
            Ok(())
        }

        fn restore(&mut self, _: &Path, _: u64) -> io::Result<bool> {
            Ok(false)
        }
    }

    #[test]
    fn rows_wait_while_the_disk_is_full_and_no_half_line_stays() {
        let row = serde_json::to_string(&example(1)).unwrap().len() + 1;
        let disk = SmallDisk { capacity: 2 * row + row / 2, ..SmallDisk::default() };
        let mut writer = MetricsWriter::over(disk, "m.jsonl".into(), 0);
        write_steps(&mut writer, 1..=2);
        for waiting in 1..=3 {
            let error = writer.append(&example(2 + waiting)).unwrap_err();
            let Error::RowsWait { path, waiting_rows, lost_rows: 0, .. } = error else { panic!("{error}") };
            assert_eq!((path, waiting_rows as u64), ("m.jsonl".into(), waiting));
            assert_eq!(writer.lines.sink().content.len(), 2 * row);
        }
        // The torn part cannot be truncated away either; it must not end up before the next row.
        writer.lines.sink().truncate_fails = true;
        writer.append(&example(6)).unwrap_err();
        writer.lines.sink().capacity = usize::MAX;
        assert!(matches!(writer.append(&example(7)), Err(Error::RowsWait { waiting_rows: 5, .. })));
        writer.lines.sink().truncate_fails = false;
        writer.append(&example(8)).unwrap();
        let steps: Vec<u64> = String::from_utf8(std::mem::take(&mut writer.lines.sink().content))
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, (1..=8).collect::<Vec<_>>());
    }

    #[test]
    fn a_file_that_is_deleted_comes_back_with_all_rows() {
        let dir = tempfile::tempdir().unwrap();
        let runs = dir.path().join("runs");
        let (mut writer, _) = MetricsWriter::open(&runs, Start::Fresh).unwrap();
        write_steps(&mut writer, 1..=3);
        fs::remove_dir_all(&runs).unwrap();
        assert!(
            matches!(writer.append(&example(4)), Err(Error::MetricsDeleted { path }) if path == writer.path())
        );
        write_steps(&mut writer, 5..=5);
        let rows = fs::read_to_string(runs.join(FILE_NAME)).unwrap();
        let steps: Vec<&str> = rows.lines().map(|row| &row[..row.find(',').unwrap()]).collect();
        assert_eq!(steps, [1, 2, 3, 4, 5].map(|step| format!("{{\"step\":{step}")), "{rows}");
    }

    #[test]
    fn two_runs_do_not_write_to_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let (mut writer, _) = MetricsWriter::open(dir.path(), Start::Fresh).unwrap();
        write_steps(&mut writer, 1..=1);
        for start in [Start::Fresh, Start::After { step: 0 }] {
            let refused = MetricsWriter::open(dir.path(), start);
            assert!(matches!(refused, Err(Error::MetricsInUse { .. })), "{start:?}: {refused:?}");
        }
        write_steps(&mut writer, 2..=2);
        assert_eq!(fs::read_to_string(writer.path()).unwrap().lines().count(), 2);
        drop(writer);
        MetricsWriter::open(dir.path(), Start::After { step: 2 }).unwrap();
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = MetricsWriter::open(&file, Start::Fresh).unwrap_err();
        assert!(error.to_string().contains(&file.display().to_string()), "{error}");
    }
}

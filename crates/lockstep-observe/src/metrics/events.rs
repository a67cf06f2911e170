//! TensorBoard event files with the scalars of `metrics.jsonl`, one file for each process.
//!
//! Every number of a row becomes a scalar. Tags are grouped as TensorBoard shows them: `train/loss`, `eval/loss`, `perf/mfu`,
//! `memory/peak`, `comm/exposed_ms`; the numbers of a table are grouped under its name. A process that resumes declares the first
//! step of its file, so TensorBoard drops the later steps of earlier processes. A run that starts from step 1 again moves the old
//! files to a subdirectory, which TensorBoard shows as a separate run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::appender::Appender;
use super::event_format::{Event, push_event, push_scalar};
use super::row::Row;
use super::writer::Start;
use crate::Error;

/// File name prefix by which TensorBoard recognizes event files.
const FILE_PREFIX: &str = "events.out.tfevents.";

/// Initial capacity for a row in either form.
const ROW_BYTES: usize = 4096;

/// Writer of this process's event file. The file is created with the first row, so a process without steps leaves none.
#[derive(Debug)]
pub struct EventWriter {
    dir: PathBuf,
    first_step: u64,
    file: Option<Appender<File>>,
    row: Vec<u8>,
    scalars: Scalars,
}

impl EventWriter {
    /// Returns a writer for the files in `dir`.
    ///
    /// # Errors
    /// If the files of an earlier run cannot be moved aside.
    pub fn open(dir: &Path, start: Start) -> Result<Self, Error> {
        let first_step = match start {
            Start::Fresh => {
                move_aside(dir).map_err(Error::io("move the event files of an earlier run in", dir))?;
                1
            }
            Start::After { step } => step + 1,
        };
        Ok(Self {
            dir: dir.to_owned(),
            first_step,
            file: None,
            row: Vec::with_capacity(ROW_BYTES),
            scalars: Scalars { summary: Vec::with_capacity(ROW_BYTES), ..Scalars::default() },
        })
    }

    /// Appends the numbers of a row.
    ///
    /// # Errors
    /// [`Error::RowsWait`], [`Error::MetricsDeleted`] or [`Error::Metrics`]; the run can go on, as with `metrics.jsonl`.
    pub fn append(&mut self, row: &impl Row) -> Result<(), Error> {
        let failed = Error::io("write an event file in", &self.dir);
        self.row.clear();
        self.scalars.summary.clear();
        serde_json::to_writer(&mut self.row, row).map_err(|error| failed(error.into()))?;
        // Parsing the JSON row guarantees that both files hold the same numbers.
        let mut reader = serde_json::Deserializer::from_slice(&self.row);
        self.scalars.deserialize(&mut reader).map_err(|error| failed(error.into()))?;
        let file = match &mut self.file {
            Some(file) => file,
            empty => empty.insert(create(&self.dir, self.first_step)?),
        };
        let event = Event::Scalars { step: row.step(), values: &self.scalars.summary };
        file.append(|out| {
            push_event(out, wall_time(), event);
            Ok(())
        })
    }
}

/// Creates the file and writes its header.
fn create(dir: &Path, first_step: u64) -> Result<Appender<File>, Error> {
    let now = wall_time();
    let host = rustix::system::uname();
    let host: String = host
        .nodename()
        .to_string_lossy()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' })
        .collect();
    let id = std::process::id();
    // TensorBoard reads files in the order of their names.
    let (seconds, micros) = (now as u64, (now.fract() * 1e6) as u32);
    let path = dir.join(format!("{FILE_PREFIX}{seconds:010}.{micros:06}.{host}.{id}"));
    fs::create_dir_all(dir).map_err(Error::io("create", &path))?;
    let file = File::options().create_new(true).read(true).append(true).open(&path);
    let file = file.map_err(Error::io("create", &path))?;
    let mut file = Appender::new(file, path, 0);
    file.append(|out| {
        push_event(out, now, Event::FileVersion);
        push_event(out, now, Event::SessionStart { step: first_step });
        Ok(())
    })?;
    Ok(file)
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Moves all event files in `dir` to the first of `earlier-1`, `earlier-2`, ... that is free.
fn move_aside(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let names: Vec<_> = entries
        .map(|entry| entry.map(|entry| entry.file_name()))
        .filter(|name| name.as_ref().map_or(true, |name| name.to_string_lossy().starts_with(FILE_PREFIX)))
        .collect::<io::Result<_>>()?;
    if names.is_empty() {
        return Ok(());
    }
    let aside = free_directory(dir)?;
    names.iter().try_for_each(|name| fs::rename(dir.join(name), aside.join(name)))
}

fn free_directory(dir: &Path) -> io::Result<PathBuf> {
    let mut number = 1_u64;
    loop {
        let free = dir.join(format!("earlier-{number}"));
        match fs::create_dir(&free) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            result => return result.map(|()| free),
        }
    }
}

/// Collects the numbers of a row, while it is parsed, in the body of a Summary.
#[derive(Debug, Default)]
struct Scalars {
    summary: Vec<u8>,
    /// Path to the current value, such as `memory/peak`.
    tag: String,
}

impl Scalars {
    fn push(&mut self, value: f64) {
        // The step is a field of the event, not a scalar.
        if self.tag != STEP {
            push_scalar(&mut self.summary, &self.tag, value as f32);
        }
    }
}

/// Key of a row's step, which does not become a tag.
const STEP: &str = "step";

/// Returns the group of a top-level key and its name within the group; tables are groups themselves.
fn grouped(key: &str) -> (&'static str, &str) {
    match key {
        STEP | "memory" | "memory_predicted" | "comm" | "disk" => ("", key),
        "step_ms"
        | "tokens_per_s"
        | "samples_per_s"
        | "flops_per_s"
        | "mfu"
        | "data_wait_ms"
        | "checkpoint_stall_ms" => ("perf/", key),
        _ => key.strip_prefix("eval_").map_or(("train/", key), |name| ("eval/", name)),
    }
}

impl<'de> DeserializeSeed<'de> for &mut Scalars {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Scalars {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a row of metrics")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let length = self.tag.len();
        while let Some(key) = map.next_key::<&str>()? {
            let (group, name) = if length > 0 { ("/", key) } else { grouped(key) };
            self.tag.push_str(group);
            self.tag.push_str(name);
            map.next_value_seed(&mut *self)?;
            self.tag.truncate(length);
        }
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.push(value);
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.push(value as f64);
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.push(value as f64);
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.push(f64::from(u8::from(value)));
        Ok(())
    }

    /// A null: the value is unknown or not finite.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::example;

    fn files(dir: &Path) -> Vec<PathBuf> {
        let mut files: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file())
            .collect();
        files.sort();
        files
    }

    /// Returns the messages of a file whose records are all whole.
    fn messages(path: &Path) -> Vec<Vec<u8>> {
        let bytes = fs::read(path).unwrap();
        let (mut rest, mut messages) = (bytes.as_slice(), Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            messages.push(rest[12..12 + length].to_vec());
            rest = &rest[16 + length..];
        }
        messages
    }

    fn contains(message: &[u8], part: &[u8]) -> bool {
        message.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn every_number_of_a_row_is_a_scalar() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::open(dir.path(), Start::Fresh).unwrap();
        assert!(files(dir.path()).is_empty(), "no step, no file");
        writer.append(&example(7)).unwrap();
        let messages = messages(&files(dir.path())[0]);
        assert_eq!(messages.len(), 3, "version, start and one row");
        assert!(contains(&messages[0], b"brain.Event:2"));
        let row = serde_json::to_value(example(7)).unwrap();
        for (tag, value) in [
            ("train/loss", row["loss"].as_f64()),
            ("train/skipped", Some(0.0)),
            ("perf/step_ms", row["step_ms"].as_f64()),
            ("memory/peak", row["memory"]["peak"].as_f64()),
            ("comm/busy_ms", Some(0.0)),
        ] {
            let mut scalar = Vec::new();
            push_scalar(&mut scalar, tag, value.unwrap() as f32);
            assert!(contains(&messages[2], &scalar), "{tag} is {value:?}");
        }
        for tag in ["perf/mfu", "step", "train/step"] {
            let tag = [&[0x0a, tag.len() as u8], tag.as_bytes()].concat();
            assert!(!contains(&messages[2], &tag), "{tag:?} is unknown or the event's own");
        }
    }

    #[test]
    fn tags_are_grouped() {
        let table = [
            ("loss", "train/loss"),
            ("lr", "train/lr"),
            ("eval_loss", "eval/loss"),
            ("mfu", "perf/mfu"),
            ("memory", "memory"),
            ("comm", "comm"),
            ("step", "step"),
        ];
        for (key, tag) in table {
            let (group, name) = grouped(key);
            assert_eq!(format!("{group}{name}"), tag);
        }
    }

    #[test]
    fn a_resumed_run_says_from_which_step_on_its_file_counts() {
        let dir = tempfile::tempdir().unwrap();
        for start in [Start::Fresh, Start::After { step: 299 }] {
            EventWriter::open(dir.path(), start).unwrap().append(&example(1)).unwrap();
        }
        let files = files(dir.path());
        assert_eq!(files.len(), 2, "a file for each process");
        // step = 300, status = START
        assert!(messages(&files[1])[1].ends_with(&[0x10, 0xac, 0x02, 0x3a, 2, 0x08, 1]));
    }

    #[test]
    fn a_run_begun_anew_moves_the_files_of_the_earlier_one_aside() {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..3 {
            EventWriter::open(dir.path(), Start::Fresh).unwrap().append(&example(1)).unwrap();
        }
        for place in ["earlier-1", "earlier-2", "."] {
            assert_eq!(files(&dir.path().join(place)).len(), 1, "{place}");
        }
    }
}

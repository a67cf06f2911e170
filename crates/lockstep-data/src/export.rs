//! Tokenizes text into a Megatron indexed data set, in steps that survive a kill.
//!
//! The work directory `PREFIX.partial` holds the ids, the document lengths and a journal. Each journal line records how
//! far both files reach. A later run truncates both files to the last complete journal line and resumes reading there,
//! so the result has the same bytes as an uninterrupted run. Two renames finish the work; that of the index is the
//! last.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    ops::Range,
    path::{Path, PathBuf},
    time::{Duration, Instant, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use crate::{
    encoder::{Encoder, Ending, Position, TokenSink, end_document},
    error::{DataError, Result},
    id_type::IdType,
    indexed::{id_type_for, write_index},
    json_line::TextOptions,
    progress::Progress,
    sources::SourceFile,
    tokenizer::Tokenizer,
};

/// Options for tokenizing text into an indexed data set.
#[derive(Clone, Copy)]
pub struct ExportOptions<'a> {
    /// Path of the `.bin` and the `.idx` without the extension.
    pub prefix: &'a Path,
    /// Field names for reading documents.
    pub text: TextOptions<'a>,
    /// Token at the end of each document.
    pub ending: Ending,
    /// Observer of the progress.
    pub progress: &'a dyn Progress,
    /// Function that is polled for a stop request; stopped work can be resumed.
    pub should_stop: &'a dyn Fn() -> bool,
}

/// Indexed data set that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// Path of the file with the ids.
    pub bin: PathBuf,
    /// Path of the index with the document boundaries.
    pub index: PathBuf,
    /// Type in which ids are stored.
    pub id_type: IdType,
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Total length of the text files, in bytes.
    pub source_bytes: u64,
    /// Number of tokens that an earlier, interrupted run had written.
    pub resumed_tokens: u64,
}

/// Tokenizes `files` in order into `prefix.bin` and `prefix.idx`, with one sequence per document. Resumes an
/// interrupted run with the same files, tokenizer and options.
///
/// # Errors
/// As [`tokenize_files`](crate::tokenize_files). Also if the result exists already, `prefix.partial` holds work on
/// other inputs, `options.should_stop` returns true, or a document has a prompt, for which the format has no place.
pub fn tokenize_to_indexed(
    files: &[SourceFile],
    tokenizer: &Tokenizer,
    options: &ExportOptions<'_>,
) -> Result<Exported> {
    if let Some(file) = files.iter().find(|file| !file.is_text()) {
        return Err(DataError::NotText { path: file.path.clone() });
    }
    let names = Names::of(options.prefix);
    let sizes = sizes_of(files)?;
    let key = key_of(files, &sizes, tokenizer, options);
    let (sink, position) =
        IndexedSink::open(&names, &key, id_type_for(tokenizer.vocab_size() as u64), options.should_stop)?;
    let resumed_tokens = sink.reached.tokens;
    let source_bytes = sizes.iter().map(|(bytes, _)| bytes).sum();
    options.progress.begin("tokenizing", source_bytes);
    options.progress.advance(sizes[..position.file].iter().map(|(bytes, _)| bytes).sum());
    let made = write_documents(files, tokenizer, options, sink, position);
    options.progress.finish();
    let (documents, tokens, id_type) = made?.commit(&names)?;
    Ok(Exported {
        bin: names.bin,
        index: names.index,
        id_type,
        documents,
        tokens,
        source_bytes,
        resumed_tokens,
    })
}

fn write_documents<'a>(
    files: &[SourceFile],
    tokenizer: &Tokenizer,
    options: &ExportOptions<'a>,
    sink: IndexedSink<'a>,
    position: Position,
) -> Result<IndexedSink<'a>> {
    let mut encoder = Encoder::new(sink, tokenizer, options.text, options.ending, options.progress, position);
    for (index, file) in files.iter().enumerate().skip(position.file) {
        let start = if index == position.file { position.offset } else { 0 };
        encoder.read(index, file, start)?;
    }
    encoder.finish(files)?;
    let mut position = encoder.position();
    if options.ending == Ending::EndOfText {
        end_document(&mut encoder.sink, tokenizer, &mut position)?;
    }
    Ok(encoder.sink)
}

/// Returns the length and the modification time of each file, in bytes and nanoseconds.
fn sizes_of(files: &[SourceFile]) -> Result<Vec<(u64, u128)>> {
    let size = |file: &SourceFile| {
        let metadata = fs::metadata(&file.path).map_err(DataError::io("open", &file.path))?;
        let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Ok((metadata.len(), changed.unwrap_or_default().as_nanos()))
    };
    files.iter().map(size).collect()
}

/// Returns a hash of all inputs that determine the result. Files count by name, length and modification time.
fn key_of(
    files: &[SourceFile],
    sizes: &[(u64, u128)],
    tokenizer: &Tokenizer,
    options: &ExportOptions<'_>,
) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"lockstep data tokenize 1").update(tokenizer.content_hash().as_bytes());
    let text = format!("{:?} {:?}", options.text, options.ending);
    hasher.update(blake3::hash(text.as_bytes()).as_bytes());
    for (file, (bytes, changed)) in files.iter().zip(sizes) {
        hasher.update(blake3::hash(file.path.as_os_str().as_encoded_bytes()).as_bytes());
        hasher.update(file.format.name().as_bytes());
        hasher.update(&bytes.to_le_bytes()).update(&changed.to_le_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Paths of the data set and of its work directory.
struct Names {
    bin: PathBuf,
    index: PathBuf,
    work: PathBuf,
}

impl Names {
    fn of(prefix: &Path) -> Self {
        let with = |extension: &str| {
            let mut name = prefix.as_os_str().to_owned();
            name.push(extension);
            PathBuf::from(name)
        };
        Self { bin: with(".bin"), index: with(".idx"), work: with(".partial") }
    }

    fn partial_bin(&self) -> PathBuf {
        self.work.join("tokens.bin")
    }

    fn partial_index(&self) -> PathBuf {
        self.work.join("tokens.idx")
    }

    fn lengths(&self) -> PathBuf {
        self.work.join("lengths.u32")
    }

    fn journal(&self) -> PathBuf {
        self.work.join("journal.jsonl")
    }
}

/// First line of a journal: the hash of the inputs.
#[derive(Serialize, Deserialize)]
struct Heading {
    key: String,
}

/// Any later line of a journal: the state of the work at that point.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Reached {
    position: Position,
    /// Tokens in the `.bin`.
    tokens: u64,
    /// Documents that have begun.
    documents: u64,
    /// First token of the last document.
    document_start: u64,
}

impl Reached {
    /// Returns the number of documents whose length is known.
    fn ended(&self) -> u64 {
        self.documents.saturating_sub(1)
    }
}

/// Minimum time between two journal lines.
const JOURNAL_EVERY: Duration = Duration::from_secs(1);

struct IndexedSink<'a> {
    bin: File,
    lengths: File,
    /// Journal file, locked until the work ends.
    journal: File,
    work: PathBuf,
    id_type: IdType,
    reached: Reached,
    new_ids: Vec<u8>,
    new_lengths: Vec<u8>,
    written: Instant,
    should_stop: &'a dyn Fn() -> bool,
}

impl<'a> IndexedSink<'a> {
    /// Starts the work, or resumes it if the work directory exists.
    fn open(
        names: &Names,
        key: &str,
        id_type: IdType,
        should_stop: &'a dyn Fn() -> bool,
    ) -> Result<(Self, Position)> {
        let work = &names.work;
        let is_new = !names.journal().exists();
        let stranger = if names.bin.exists() && (is_new || names.partial_bin().exists()) {
            Some(&names.bin)
        } else {
            Some(&names.index).filter(|index| is_new && index.exists())
        };
        if let Some(path) = stranger {
            return Err(DataError::OutputExists { path: path.clone() });
        }
        fs::create_dir_all(work).map_err(DataError::io("create", work))?;
        let open = |path: &Path| {
            let file = File::options().read(true).append(true).create(true).open(path);
            file.map_err(DataError::io("write", path))
        };
        let journal = open(&names.journal())?;
        if journal.try_lock().is_err() {
            return Err(DataError::WorkInUse { path: work.clone() });
        }
        if names.bin.exists() && !names.partial_bin().exists() {
            // An earlier run was killed between the two renames.
            fs::rename(&names.bin, names.partial_bin()).map_err(DataError::io("rename", &names.bin))?;
        }
        let (bin, lengths) = (open(&names.partial_bin())?, open(&names.lengths())?);
        let mut sink = Self {
            bin,
            lengths,
            journal,
            work: work.clone(),
            id_type,
            reached: Reached::default(),
            new_ids: Vec::new(),
            new_lengths: Vec::new(),
            written: Instant::now(),
            should_stop,
        };
        sink.take_up(&names.journal(), key)?;
        let position = sink.reached.position;
        Ok((sink, position))
    }

    /// Reads the journal and truncates both files to the state in its last complete line.
    fn take_up(&mut self, path: &Path, key: &str) -> Result<()> {
        let mut text = fs::read(path).map_err(DataError::io("read", path))?;
        text.truncate(text.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1));
        self.journal.set_len(text.len() as u64).map_err(|e| self.write_error(e))?;
        let mut lines = text.split_inclusive(|&byte| byte == b'\n');
        let other = || DataError::OtherWork { path: self.work.clone() };
        let heading = lines.next().map(serde_json::from_slice::<Heading>);
        for line in lines {
            self.reached = serde_json::from_slice(line).map_err(|_| other())?;
        }
        if !heading.is_some_and(|heading| heading.is_ok_and(|heading| heading.key == key)) {
            // Other work without any tokens may be overwritten.
            if self.reached.tokens > 0 {
                return Err(other());
            }
            self.reached = Reached::default();
            self.journal.set_len(0).map_err(|e| self.write_error(e))?;
            self.append_to_journal(&Heading { key: key.to_owned() })?;
        }
        let (ids, lengths) = (self.reached.tokens * self.id_type.bytes() as u64, self.reached.ended() * 4);
        for (file, bytes) in [(&self.bin, ids), (&self.lengths, lengths)] {
            let there = file.metadata().map_err(DataError::io("read", &self.work))?.len();
            if there < bytes {
                return Err(DataError::OtherWork { path: self.work.clone() });
            }
            file.set_len(bytes).map_err(DataError::io("write", &self.work))?;
        }
        Ok(())
    }

    fn append_to_journal(&mut self, line: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(line).map_err(|e| self.write_error(e.into()))?;
        text.push(b'\n');
        let written = self.journal.write_all(&text).and_then(|()| self.journal.sync_data());
        written.map_err(|e| self.write_error(e))
    }

    /// Writes and syncs the tokens so far, then records that in the journal.
    fn write_out(&mut self) -> Result<()> {
        let written = self
            .bin
            .write_all(&self.new_ids)
            .and_then(|()| self.lengths.write_all(&self.new_lengths))
            .and_then(|()| self.bin.sync_data())
            .and_then(|()| self.lengths.sync_data());
        written.map_err(|e| self.write_error(e))?;
        self.new_ids.clear();
        self.new_lengths.clear();
        let reached = self.reached;
        self.append_to_journal(&reached)?;
        self.written = Instant::now();
        Ok(())
    }

    fn end_last_document(&mut self) -> Result<()> {
        if self.reached.documents > 0 {
            let tokens = self.reached.tokens - self.reached.document_start;
            // Megatron stores lengths as signed numbers.
            let length = i32::try_from(tokens).map_err(|_| {
                let allowed = format!("at most {} in an indexed data set", i32::MAX);
                DataError::out_of_range("the number of tokens in a document", tokens, allowed)
            })?;
            self.new_lengths.extend(length.to_le_bytes());
        }
        Ok(())
    }

    /// Writes the index and renames both files to their final names. Returns the number of documents, the number of
    /// tokens and the id type.
    fn commit(mut self, names: &Names) -> Result<(u64, u64, IdType)> {
        self.end_last_document()?;
        // The journal does not record the length of the last document, which counts as unfinished until the renames.
        let lengths = fs::read(names.lengths()).map_err(DataError::io("read", &names.lengths()))?;
        let lengths: Vec<u32> = lengths
            .as_chunks()
            .0
            .iter()
            .chain(self.new_lengths.as_chunks().0)
            .map(|&n| u32::from_le_bytes(n))
            .collect();
        let written = self
            .bin
            .write_all(&self.new_ids)
            .and_then(|()| self.bin.sync_all())
            .and_then(|()| {
                let mut index = BufWriter::new(File::create(names.partial_index())?);
                write_index(&mut index, self.id_type, &lengths)?;
                index.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
            })
            .and_then(|()| fs::rename(names.partial_bin(), &names.bin))
            .and_then(|()| fs::rename(names.partial_index(), &names.index));
        written.map_err(|e| self.write_error(e))?;
        fs::remove_dir_all(&names.work).map_err(DataError::io("remove", &names.work))?;
        Ok((self.reached.documents, self.reached.tokens, self.id_type))
    }

    fn write_error(&self, source: io::Error) -> DataError {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                DataError::NoSpaceToGoOn { path: self.work.clone() }
            }
            _ => DataError::Io { action: "write in", path: self.work.clone(), source },
        }
    }
}

impl TokenSink for IndexedSink<'_> {
    fn id_type(&self) -> IdType {
        self.id_type
    }

    fn tokens(&self) -> u64 {
        self.reached.tokens
    }

    fn begin_document(&mut self) -> Result<()> {
        self.end_last_document()?;
        self.reached.documents += 1;
        self.reached.document_start = self.reached.tokens;
        Ok(())
    }

    fn write(&mut self, ids: &[u8], contexts: &[Range<u64>]) -> Result<()> {
        if !contexts.is_empty() {
            return Err(DataError::NoPlaceForPrompts { document: self.reached.documents });
        }
        self.new_ids.extend(ids);
        self.reached.tokens += (ids.len() / self.id_type.bytes()) as u64;
        Ok(())
    }

    fn reached(&mut self, position: Position) -> Result<()> {
        self.reached.position = position;
        let stop = (self.should_stop)();
        if stop || self.written.elapsed() >= JOURNAL_EVERY || self.new_ids.len() > LARGEST_STEP_BYTES {
            self.write_out()?;
        }
        if stop {
            return Err(DataError::Interrupted { path: self.work.clone(), tokens: self.reached.tokens });
        }
        Ok(())
    }
}

/// Size of the ids in memory, in bytes, above which they are written out.
const LARGEST_STEP_BYTES: usize = 16 << 20;

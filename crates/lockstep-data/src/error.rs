//! Everything that can be wrong with data, each with the place where it was found and what is allowed.
//!
//! [`DataError::kind`] sorts the variants for the command line: a mistake in the configuration, an input
//! that is corrupt, or a machine that failed.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{id_type::IdType, json_records::RecordPlace, supervision::Supervision};

/// The result of every fallible function in this crate.
pub type Result<T, E = DataError> = std::result::Result<T, E>;

/// What is wrong with a data source, a tokenizer, a token file or a request for samples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused something.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb: "read", "create".
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file system filled up while a token file was written. The partial file is gone.
    #[error(
        "the disk is full: {} could not be written ({written_bytes} bytes were; the partial file is \
         removed). Free some space or choose another cache directory",
        path.display()
    )]
    DiskFull {
        /// The token file that was to be made.
        path: PathBuf,
        /// How many bytes of it had been written.
        written_bytes: u64,
    },
    /// A pattern names no file.
    #[error(
        "no file matches \"{pattern}\" (searched from {}); give a file, a directory, or a glob such as \
         \"data/**/*.txt\"",
        searched.display()
    )]
    NoMatch {
        /// The pattern as it was given.
        pattern: String,
        /// The directory from which it was searched.
        searched: PathBuf,
    },
    /// A glob that cannot be parsed.
    #[error("\"{pattern}\" is not a valid glob: {problem}")]
    BadPattern {
        /// The pattern as it was given.
        pattern: String,
        /// What the parser says.
        problem: String,
    },
    /// A file whose format cannot be told from its extension.
    #[error(
        "{}: files of type .{extension} are not read as they are; text (any UTF-8 file), JSON lines (.jsonl, .ndjson), Parquet, \
         Megatron's .bin with its .idx, and raw tokens (.bin) are. If this is one of those under another name, \
         set data.format to \"text\", \"jsonl\", \"parquet\", \"indexed\" or \"tokens\"",
        path.display()
    )]
    UnsupportedFormat {
        /// The file.
        path: PathBuf,
        /// Its extension, without the dot.
        extension: String,
    },
    /// A format name that is not known.
    #[error("\"{name}\" is not a data format; allowed: {}", allowed.join(", "))]
    UnknownFormat {
        /// The name that was given.
        name: String,
        /// The names that are known.
        allowed: &'static [&'static str],
    },
    /// A name of a type of ids that is not known.
    #[error("\"{name}\" is not a type in which raw token files are read; allowed: u16, u32")]
    UnknownIdType {
        /// The name that was given.
        name: String,
    },
    /// A Parquet file that cannot be read.
    #[error("{} is not a Parquet file with text: {problem}", path.display())]
    BadParquet {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A result that would be overwritten.
    #[error("{} is there already; give another name, or remove it", path.display())]
    OutputExists {
        /// The file.
        path: PathBuf,
    },
    /// Another process is at the same work.
    #[error("another process is writing in {}; wait for its end, or give another name", path.display())]
    WorkInUse {
        /// The directory of the work.
        path: PathBuf,
    },
    /// Unfinished work that is not this one.
    #[error(
        "{} holds unfinished work on other files, or with another tokenizer or other options; finish that, or remove \
         the directory to begin anew",
        path.display()
    )]
    OtherWork {
        /// The directory of the work.
        path: PathBuf,
    },
    /// The file system filled up. What is done is kept.
    #[error("the disk is full below {}; free some space, and the same command goes on where it was", path.display())]
    NoSpaceToGoOn {
        /// The directory of the work.
        path: PathBuf,
    },
    /// Work that was stopped from outside, and kept.
    #[error("interrupted after {tokens} tokens, which are in {}; the same command goes on from there", path.display())]
    Interrupted {
        /// The directory of the work.
        path: PathBuf,
        /// How many tokens there are.
        tokens: u64,
    },
    /// Prompts on their way into a format that has no place for them.
    #[error(
        "document {document} has a prompt, which is not to be predicted, and an indexed data set cannot say so; train on \
         the file itself (data.train), or set data.text_field to a field with the whole text"
    )]
    NoPlaceForPrompts {
        /// Which document, from 1.
        document: u64,
    },
    /// Files of tokens where only text will do.
    #[error("{} holds tokens already", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
    },
    /// Text without anything to turn it into tokens.
    #[error(
        "{} is text, and no tokenizer is named for it: set data.tokenizer to \"bytes\" or the path of a tokenizer.json",
        path.display()
    )]
    NoTokenizer {
        /// The first file of text.
        path: PathBuf,
    },
    /// A byte that is not UTF-8.
    #[error(
        "{} is not UTF-8 text: the byte at offset {offset_bytes} is invalid; convert the file, or leave it out, by a glob \
         such as \"*.txt\" in the place of a directory",
        path.display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Where the first invalid byte stands, from the start of the file.
        offset_bytes: u64,
    },
    /// A record of a JSON file that holds no document.
    #[error("{} {place}: {problem}", path.display())]
    JsonRecord {
        /// The file.
        path: PathBuf,
        /// Which line, or which element of an array.
        place: RecordPlace,
        /// What is wrong with it.
        problem: String,
    },
    /// The files are there, but hold no text.
    #[error("there is no text in {}", describe_files(first, *files))]
    NoText {
        /// The first of the files.
        first: PathBuf,
        /// How many files there are.
        files: usize,
    },
    /// A file that changed while it was read.
    #[error("{} changed while it was being tokenized; try again when nothing writes to it", path.display())]
    SourceChanged {
        /// The file.
        path: PathBuf,
    },
    /// A tokenizer that cannot be loaded.
    #[error("{} is not a usable tokenizer.json: {problem}", path.display())]
    BadTokenizer {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        problem: String,
    },
    /// A tokenizer with ids that the model has no embedding for.
    #[error(
        "the tokenizer {tokenizer} has ids up to {largest_id}, but the model's vocabulary has \
         {vocab_size} entries (ids up to {}); raise vocab_size to at least {} or use the model's own \
         tokenizer",
        vocab_size.saturating_sub(1),
        u64::from(*largest_id) + 1
    )]
    TokenizerTooLarge {
        /// What the tokenizer is called.
        tokenizer: String,
        /// Its largest id.
        largest_id: u32,
        /// The model's vocabulary, padding not counted.
        vocab_size: usize,
    },
    /// A tokenizer that fails on a text.
    #[error("the tokenizer {tokenizer} failed: {problem}")]
    TokenizerFailed {
        /// What the tokenizer is called.
        tokenizer: String,
        /// What it says.
        problem: String,
    },
    /// A token file that cannot be trusted.
    #[error("{} is not a valid token file: {problem}; delete it and it is made again", path.display())]
    BadTokenFile {
        /// The file.
        path: PathBuf,
        /// The rule it breaks.
        problem: TokenFileProblem,
    },
    /// A raw token file whose length cannot be right.
    #[error(
        "{} has {bytes} bytes, which is not a whole number of ids of type {id_type}; data.token_type names another",
        path.display()
    )]
    BadRawFile {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The type it was to be read as.
        id_type: IdType,
    },
    /// An index of a Megatron data set that cannot be trusted.
    #[error("{} is not a valid index of a Megatron data set: {problem}", path.display())]
    BadIndex {
        /// The index.
        path: PathBuf,
        /// The rule it breaks.
        problem: IndexProblem,
    },
    /// An id beyond the vocabulary.
    #[error(
        "{}: token {index} is {value} (read as {id_type}), but the vocabulary has {vocab_size} entries: 0 to {}; the \
         tokens were made for another model, or are of another type",
        path.display(),
        vocab_size.saturating_sub(1)
    )]
    TokenOutOfRange {
        /// The file.
        path: PathBuf,
        /// Which token, from 0.
        index: u64,
        /// Its value.
        value: i64,
        /// The vocabulary.
        vocab_size: u64,
        /// How ids were read.
        id_type: IdType,
    },
    /// Too little text for one training window.
    #[error(
        "{what} holds {tokens} tokens, but one window of seq_len {seq_len} needs {needed_tokens} (seq_len + \
         1); give more text or a smaller seq_len"
    )]
    TooFewTokens {
        /// The training set, the validation set or the like.
        what: String,
        /// How many tokens there are.
        tokens: u64,
        /// How many are needed.
        needed_tokens: u64,
        /// The window's length.
        seq_len: usize,
    },
    /// A chat that its template refuses.
    #[error("the chat does not suit the template of {tokenizer}: {problem}")]
    BadChat {
        /// The tokenizer.
        tokenizer: String,
        /// What the template says.
        problem: String,
    },
    /// Prompts without an answer that fits.
    #[error("{what} has no answer to learn from within seq_len {seq_len}: {}", why_no_answers(supervision))]
    NoAnswers {
        /// The training set, the validation set or the like.
        what: String,
        /// The window's length.
        seq_len: usize,
        /// What was left out.
        supervision: Supervision,
    },
    /// A number outside its range.
    #[error("{name} is {value}; allowed: {allowed}")]
    OutOfRange {
        /// What the number is called in the configuration.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is allowed, in words.
        allowed: String,
    },
    /// A batch that cannot be dealt out evenly.
    #[error(
        "global_batch {global_batch} is not a multiple of micro_batch {micro_batch} × {replicas} data-parallel \
         replicas = {}",
        micro_batch.saturating_mul(*replicas)
    )]
    UnevenBatch {
        /// Sequences in the global batch.
        global_batch: u64,
        /// Sequences in one micro-batch.
        micro_batch: u64,
        /// Replicas that share the global batch.
        replicas: u64,
    },
    /// Several sources of one blend have problems of their own.
    #[error("{} sources cannot be used:\n{}", .0.len(), .0.iter().map(|problem| format!("  {problem}")).collect::<Vec<_>>().join("\n"))]
    Several(Vec<DataError>),
    /// The thread that fills micro-batches is gone without an error of its own.
    #[error("the data thread ended unexpectedly; this is a defect of Lockstep")]
    PrefetcherLost,
}

/// The rule that a token file breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenFileProblem {
    /// Shorter than a header.
    #[error("it has {bytes} bytes, fewer than its header of {header_bytes}")]
    ShorterThanHeader {
        /// Its length.
        bytes: u64,
        /// The length of a header.
        header_bytes: u64,
    },
    /// Not a token file at all.
    #[error("it does not start with the magic bytes of a token file")]
    Magic,
    /// Written by another version.
    #[error("its format version is {found}; this program reads version {supported}")]
    Version {
        /// The version in the file.
        found: u32,
        /// The version that is read.
        supported: u32,
    },
    /// A changed byte in the header.
    #[error("the checksum of its header does not match")]
    HeaderChecksum,
    /// A header with a sound checksum and an impossible value: not written by this program.
    #[error("its header says {field} = {value}, which is impossible")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Truncated, or longer than it should be.
    #[error("it has {bytes} bytes where its header asks for {expected_bytes}")]
    Length {
        /// Its length.
        bytes: u64,
        /// The length that follows from the header.
        expected_bytes: u64,
    },
    /// A changed byte in the tokens.
    #[error("the checksum of its tokens does not match")]
    PayloadChecksum,
    /// A valid file of another corpus under this name.
    #[error("it belongs to another corpus, tokenizer or set of options than its name says")]
    OtherContent,
    /// Numbers that should ascend and stay within the file.
    #[error("its {what} do not lie in order within its tokens")]
    Order {
        /// What the numbers are of.
        what: &'static str,
    },
}

/// The rule that an index of a Megatron data set breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexProblem {
    /// Shorter than a header.
    #[error("it has {bytes} bytes, fewer than its header of 34")]
    ShorterThanHeader {
        /// Its length.
        bytes: u64,
    },
    /// Not an index at all.
    #[error("it does not start with MMIDIDX")]
    Magic,
    /// Another version.
    #[error("its version is {found}; version 1 is read")]
    Version {
        /// The version in the file.
        found: u64,
    },
    /// A code that stands for no type of ids.
    #[error("its type code is {code}; allowed: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16")]
    IdType {
        /// The code in the file.
        code: u8,
    },
    /// A length that does not follow from the counts.
    #[error(
        "it has {bytes} bytes, which does not fit its {sequences} sequences and {borders} document borders"
    )]
    Length {
        /// Its length.
        bytes: u64,
        /// Sequences, as the header says.
        sequences: u64,
        /// Borders, as the header says.
        borders: u64,
    },
    /// A sequence of less than no tokens.
    #[error("sequence {sequence} has {length} tokens")]
    SequenceLength {
        /// Which sequence.
        sequence: usize,
        /// Its length.
        length: i32,
    },
    /// A sequence that does not begin where the one before it ends.
    #[error("sequence {sequence} begins at byte {offset}; by the lengths before it that is byte {expected}")]
    Offset {
        /// Which sequence.
        sequence: usize,
        /// Where it begins, as the file says.
        offset: i64,
        /// Where it begins by the lengths.
        expected: u64,
    },
    /// More or fewer tokens than there are.
    #[error("its sequences ask for {expected} bytes or more of tokens; the .bin has {bin_bytes}")]
    TokenBytes {
        /// By the index.
        expected: u64,
        /// The length of the `.bin`.
        bin_bytes: u64,
    },
    /// A border that goes back or beyond.
    #[error(
        "document border {index} is at sequence {border}; allowed: from 0 in ascending order to {sequences}"
    )]
    Border {
        /// Which border.
        index: usize,
        /// The sequence it names.
        border: i64,
        /// How many sequences there are.
        sequences: usize,
    },
    /// Sequences that belong to no document.
    #[error("its last document ends at sequence {border} of {sequences}")]
    LastBorder {
        /// The last border; 0 where there is none.
        border: u64,
        /// How many sequences there are.
        sequences: usize,
    },
}

/// What a [`DataError`] means for whoever started the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// A path, pattern, number or combination that has to be corrected.
    Configuration,
    /// An input that is damaged or not what it claims to be.
    CorruptInput,
    /// The machine failed: input and output, disk space.
    Failed,
    /// Somebody asked for a stop; the same command goes on.
    Interrupted,
}

impl DataError {
    /// Which kind this is; the command line derives its exit code from it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoMatch { .. }
            | Self::BadPattern { .. }
            | Self::UnsupportedFormat { .. }
            | Self::UnknownFormat { .. }
            | Self::UnknownIdType { .. }
            | Self::NotText { .. }
            | Self::OutputExists { .. }
            | Self::WorkInUse { .. }
            | Self::OtherWork { .. }
            | Self::NoPlaceForPrompts { .. }
            | Self::NoTokenizer { .. }
            | Self::NoText { .. }
            | Self::TokenizerTooLarge { .. }
            | Self::TooFewTokens { .. }
            | Self::NoAnswers { .. }
            | Self::BadChat { .. }
            | Self::OutOfRange { .. }
            | Self::UnevenBatch { .. } => ErrorKind::Configuration,
            Self::NotUtf8 { .. }
            | Self::JsonRecord { .. }
            | Self::BadTokenizer { .. }
            | Self::BadParquet { .. }
            | Self::BadTokenFile { .. }
            | Self::BadRawFile { .. }
            | Self::BadIndex { .. }
            | Self::TokenOutOfRange { .. } => ErrorKind::CorruptInput,
            Self::Io { source, .. }
                if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                ErrorKind::Configuration
            }
            Self::Interrupted { .. } => ErrorKind::Interrupted,
            Self::Several(problems) => problems.first().map_or(ErrorKind::Failed, Self::kind),
            Self::Io { .. }
            | Self::DiskFull { .. }
            | Self::NoSpaceToGoOn { .. }
            | Self::SourceChanged { .. }
            | Self::TokenizerFailed { .. }
            | Self::PrefetcherLost => ErrorKind::Failed,
        }
    }

    /// All results, or every error there is.
    ///
    /// # Errors
    /// The only error, or [`DataError::Several`].
    pub fn all_of<T>(results: impl IntoIterator<Item = Result<T>>) -> Result<Vec<T>> {
        let (mut values, mut problems) = (Vec::new(), Vec::new());
        for result in results {
            match result {
                Ok(value) => values.push(value),
                Err(problem) => problems.push(problem),
            }
        }
        match problems.pop() {
            None => Ok(values),
            Some(only) if problems.is_empty() => Err(only),
            Some(last) => {
                problems.push(last);
                Err(Self::Several(problems))
            }
        }
    }

    /// Attaches a path to an operating-system error: `map_err(DataError::io("read", path))`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

/// Why no window has a label, and what would give it one.
fn why_no_answers(supervision: &Supervision) -> String {
    let Supervision { answer_beyond, without_answer, masked_windows, seq_len_for_one_more, .. } =
        *supervision;
    if masked_windows > 0 {
        return format!("none of its {masked_windows} windows holds a token to predict; raise train.seq_len");
    }
    let mut why = Vec::new();
    if answer_beyond > 0 {
        why.push(format!(
            "{answer_beyond} have prompts that fill it (train.seq_len = {seq_len_for_one_more} holds the first answer of one)"
        ));
    }
    if without_answer > 0 {
        why.push(format!("{without_answer} have no answer: no assistant's message, or an empty completion"));
    }
    format!("of its {} samples {}", supervision.samples, why.join(" and "))
}

fn describe_files(first: &Path, files: usize) -> String {
    match files {
        0 => "an empty list of files".to_owned(),
        1 => first.display().to_string(),
        _ => format!("{} and {} more", first.display(), files - 1),
    }
}

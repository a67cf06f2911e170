//! Everything that can be wrong with data, each with the place where it was found and what is allowed.
//!
//! [`DataError::kind`] sorts the variants for the command line: a mistake in the configuration, an input
//! that is corrupt, or a machine that failed.

use std::{
    io,
    path::{Path, PathBuf},
};

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
        "{}: files of type .{extension} are not read as they are; text (any UTF-8 file) and JSON lines \
         (.jsonl, .ndjson) are. If this is one of those under another name, set the format to \"text\" or \
         \"jsonl\"",
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
    /// A byte that is not UTF-8.
    #[error("{} is not UTF-8 text: the byte at offset {offset_bytes} is invalid", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Where the first invalid byte stands, from the start of the file.
        offset_bytes: u64,
    },
    /// A line of a JSON lines file that holds no document.
    #[error("{} line {line}: {problem}", path.display())]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
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
    /// An id beyond the vocabulary.
    #[error("token {index} has id {id}, beyond its vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// Which token.
        index: u64,
        /// Its id.
        id: u32,
        /// The vocabulary.
        vocab_size: u64,
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
}

impl DataError {
    /// Which of the three kinds this is; the command line derives its exit code from it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoMatch { .. }
            | Self::BadPattern { .. }
            | Self::UnsupportedFormat { .. }
            | Self::UnknownFormat { .. }
            | Self::NoText { .. }
            | Self::TokenizerTooLarge { .. }
            | Self::TooFewTokens { .. }
            | Self::OutOfRange { .. }
            | Self::UnevenBatch { .. } => ErrorKind::Configuration,
            Self::NotUtf8 { .. }
            | Self::JsonLine { .. }
            | Self::BadTokenizer { .. }
            | Self::BadTokenFile { .. } => ErrorKind::CorruptInput,
            Self::Io { source, .. }
                if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                ErrorKind::Configuration
            }
            Self::Io { .. }
            | Self::DiskFull { .. }
            | Self::SourceChanged { .. }
            | Self::TokenizerFailed { .. }
            | Self::PrefetcherLost => ErrorKind::Failed,
        }
    }

    /// Attaches a path to an operating-system error: `map_err(DataError::io("read", path))`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

fn describe_files(first: &Path, files: usize) -> String {
    match files {
        0 => "an empty list of files".to_owned(),
        1 => first.display().to_string(),
        _ => format!("{} and {} more", first.display(), files - 1),
    }
}

//! Errors of the data crate, each with the location of the problem and the allowed values.
//!
//! [`DataError::kind`] classifies the variants for the command line: a configuration mistake, a corrupt input, or a
//! machine failure.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use crate::{id_type::IdType, supervision::Supervision};

/// The result of every fallible function in this crate.
pub type Result<T, E = DataError> = std::result::Result<T, E>;

/// Error in a data source, a tokenizer, a token file or a request for samples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// An operating-system call failed.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// Attempted action as a verb: "read", "create".
        action: &'static str,
        /// File or directory of the call.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file system was full while a token file was written. The partial file has been removed.
    #[error(
        "the disk is full: {path} could not be written ({written_bytes} bytes were; the partial file is \
         removed). Free some space or choose another cache directory"
    )]
    DiskFull {
        /// Token file that was being written.
        path: PathBuf,
        /// Bytes of the file that had been written.
        written_bytes: u64,
    },
    /// A pattern matches no file.
    #[error(
        "no file matches \"{pattern}\" (searched from {searched}); give a file, a directory, or a glob such as \
         \"data/**/*.txt\""
    )]
    NoMatch {
        /// Pattern as given.
        pattern: String,
        /// Directory in which the search started.
        searched: PathBuf,
    },
    /// A glob cannot be parsed.
    #[error("\"{pattern}\" is not a valid glob: {problem}")]
    BadPattern {
        /// Pattern as given.
        pattern: String,
        /// Message of the glob parser.
        problem: String,
    },
    /// The format of a file cannot be derived from its extension.
    #[error(
        "{path}: files of type .{extension} are not read as they are; text (any UTF-8 file), JSON lines (.jsonl, .ndjson), Parquet, \
         Megatron's .bin with its .idx, and raw tokens (.bin) are. If this is one of those under another name, \
         set data.format to \"text\", \"jsonl\", \"parquet\", \"indexed\" or \"tokens\""
    )]
    UnsupportedFormat {
        /// File with the unsupported extension.
        path: PathBuf,
        /// Extension without the dot.
        extension: String,
    },
    /// A format name is unknown.
    #[error("\"{name}\" is not a data format; allowed: {}", allowed.join(", "))]
    UnknownFormat {
        /// Name as given.
        name: String,
        /// Known format names.
        allowed: &'static [&'static str],
    },
    /// The name of an id type is unknown.
    #[error("\"{name}\" is not a type in which raw token files are read; allowed: u16, u32")]
    UnknownIdType {
        /// Name as given.
        name: String,
    },
    /// A Parquet file cannot be read.
    #[error("{path} is not a Parquet file with text: {problem}")]
    BadParquet {
        /// Parquet file that cannot be read.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// An output file exists already and would be overwritten.
    #[error("{path} is there already; give another name, or remove it")]
    OutputExists {
        /// Existing output file.
        path: PathBuf,
    },
    /// Another process is writing the same output.
    #[error("another process is writing in {path}; wait for its end, or give another name")]
    WorkInUse {
        /// Work directory of the unfinished output.
        path: PathBuf,
    },
    /// A work directory holds unfinished work on other inputs or with other options.
    #[error(
        "{path} holds unfinished work on other files, or with another tokenizer or other options; finish that, or remove \
         the directory to begin anew"
    )]
    OtherWork {
        /// Work directory of the unfinished output.
        path: PathBuf,
    },
    /// The file system was full while a data set was written. The finished part is kept.
    #[error("the disk is full below {path}; free some space, and the same command goes on where it was")]
    NoSpaceToGoOn {
        /// Work directory of the unfinished output.
        path: PathBuf,
    },
    /// Tokenization was stopped on request. The finished part is kept.
    #[error("interrupted after {tokens} tokens, which are in {path}; the same command goes on from there")]
    Interrupted {
        /// Work directory of the unfinished output.
        path: PathBuf,
        /// Number of tokens in the finished part.
        tokens: u64,
    },
    /// A document has a prompt, but the output format cannot store masked labels.
    #[error(
        "document {document} has a prompt, which is not to be predicted, and an indexed data set cannot say so; train on \
         the file itself (data.train), or set data.text_field to a field with the whole text"
    )]
    NoPlaceForPrompts {
        /// Number of the document, from 1.
        document: u64,
    },
    /// A file of tokens was given where text is required.
    #[error("{path} holds tokens already")]
    NotText {
        /// Token file that was given.
        path: PathBuf,
    },
    /// A text file was given without a tokenizer.
    #[error(
        "{path} is text, and no tokenizer is named for it: set data.tokenizer to \"bytes\" or the path of a tokenizer.json"
    )]
    NoTokenizer {
        /// First text file.
        path: PathBuf,
    },
    /// A file is not valid UTF-8.
    #[error(
        "{path} is not UTF-8 text: the byte at offset {offset_bytes} is invalid; convert the file, or leave it out, by a glob \
         such as \"*.txt\" in the place of a directory"
    )]
    NotUtf8 {
        /// File with the invalid byte.
        path: PathBuf,
        /// Offset of the first invalid byte from the start of the file.
        offset_bytes: u64,
    },
    /// A record of a JSON file holds no document.
    #[error("{path} {place}: {problem}")]
    JsonRecord {
        /// File that holds the record.
        path: PathBuf,
        /// Line number, or number of the array element.
        place: RecordPlace,
        /// Description of the problem.
        problem: String,
    },
    /// The files exist but hold no text.
    #[error("there is no text in {}", describe_files(first, *files))]
    NoText {
        /// First of the files.
        first: PathBuf,
        /// Number of files.
        files: usize,
    },
    /// A file changed while it was being tokenized.
    #[error("{path} changed while it was being tokenized; try again when nothing writes to it")]
    SourceChanged {
        /// File that changed.
        path: PathBuf,
    },
    /// A tokenizer cannot be loaded.
    #[error("{path} is not a usable tokenizer.json: {problem}")]
    BadTokenizer {
        /// `tokenizer.json`, configuration or template that cannot be used.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A tokenizer has ids that the model has no embedding for.
    #[error(
        "the tokenizer {tokenizer} has ids up to {largest_id}, but the model's vocabulary has \
         {vocab_size} entries (ids up to {}); raise vocab_size to at least {} or use the model's own \
         tokenizer",
        vocab_size.saturating_sub(1),
        u64::from(*largest_id) + 1
    )]
    TokenizerTooLarge {
        /// Name of the tokenizer: the path of its file.
        tokenizer: String,
        /// Largest id of the tokenizer.
        largest_id: u32,
        /// Vocabulary size of the model, without padding.
        vocab_size: usize,
    },
    /// A tokenizer fails on a text.
    #[error("the tokenizer {tokenizer} failed: {problem}")]
    TokenizerFailed {
        /// Name of the tokenizer: the path of its file.
        tokenizer: String,
        /// Description of the problem.
        problem: String,
    },
    /// A file of the token cache is invalid.
    #[error("{path} is not a valid token file: {problem}; delete it and it is written again")]
    BadTokenFile {
        /// Token file that is invalid.
        path: PathBuf,
        /// Rule of the format that the file breaks.
        problem: TokenFileProblem,
    },
    /// The length of a raw token file is not a multiple of the id size, or is zero.
    #[error(
        "{path} has {bytes} bytes, which is not a whole number of ids of type {id_type}; data.token_type names another"
    )]
    BadRawFile {
        /// Raw token file.
        path: PathBuf,
        /// Length of the file in bytes.
        bytes: u64,
        /// Id type for which the length was checked.
        id_type: IdType,
    },
    /// The index of a Megatron data set is invalid.
    #[error("{path} is not a valid index of a Megatron data set: {problem}")]
    BadIndex {
        /// Index file that is invalid.
        path: PathBuf,
        /// Rule of the format that the index breaks.
        problem: IndexProblem,
    },
    /// A token id is beyond the vocabulary.
    #[error(
        "{path}: token {index} is {value} (read as {id_type}), but the vocabulary has {vocab_size} entries: 0 to {}; the \
         tokens were made for another model, or are of another type",
        vocab_size.saturating_sub(1)
    )]
    TokenOutOfRange {
        /// Token file that holds the id.
        path: PathBuf,
        /// Index of the token in the file, from 0.
        index: u64,
        /// Value of the token id.
        value: i64,
        /// Vocabulary size that ids are checked against.
        vocab_size: u64,
        /// Id type as which the file was read.
        id_type: IdType,
    },
    /// The data set has too few tokens for one window.
    #[error(
        "{what} holds {tokens} tokens, but one window of seq_len {seq_len} needs {needed_tokens} (seq_len + \
         1); give more text or a smaller seq_len"
    )]
    TooFewTokens {
        /// Name of the data set, such as "the training set".
        what: String,
        /// Number of tokens in the data set.
        tokens: u64,
        /// Number of tokens that one window needs.
        needed_tokens: u64,
        /// Number of inputs per window.
        seq_len: usize,
    },
    /// The chat template rejects a chat.
    #[error("the chat does not suit the template of {tokenizer}: {problem}")]
    BadChat {
        /// Name of the tokenizer with the template.
        tokenizer: String,
        /// Error message of the template.
        problem: String,
    },
    /// No window has a label: the answers are missing or do not fit into a window.
    #[error("{what} has no answer to learn from within seq_len {seq_len}: {}", why_no_answers(supervision))]
    NoAnswers {
        /// Name of the data set, such as "the training set".
        what: String,
        /// Number of inputs per window.
        seq_len: usize,
        /// Counts of the dropped samples and windows.
        supervision: Supervision,
    },
    /// A number is out of its range.
    #[error("{name} is {value}; allowed: {allowed}")]
    OutOfRange {
        /// Name of the number, as in the configuration.
        name: &'static str,
        /// Value as given.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// The global batch cannot be split evenly over replicas and micro-batches.
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
        /// Number of data-parallel replicas.
        replicas: u64,
    },
    /// A record of a file of samples is damaged.
    #[error("{path}, {record} at byte {offset_bytes}: {problem}")]
    BadRecord {
        /// File that holds the record.
        path: PathBuf,
        /// Name of the record: its number from 0, the name of a member, or "the header".
        record: String,
        /// Offset of the damage from the start of the file; of the uncompressed contents if the file is compressed.
        offset_bytes: u64,
        /// Description of the problem, with the allowed values.
        problem: String,
    },
    /// A sample of a data set is unusable.
    #[error("sample {index} of the data set: {problem}")]
    BadSample {
        /// Index of the sample in its data set.
        index: u64,
        /// Description of the problem.
        problem: String,
    },
    /// A sample of a batch failed.
    #[error("sample {sample} (epoch {epoch}, index {index}): {source}")]
    AtSample {
        /// Global sample number.
        sample: u64,
        /// Epoch of the sample, from 0.
        epoch: u64,
        /// Index of the sample in its data set.
        index: u64,
        /// Error of the data set, of a transform, or of the stacking.
        source: Box<DataError>,
    },
    /// Arrays in memory are not a data set.
    #[error("the arrays are not a data set: {problem}")]
    BadArrays {
        /// Description of the problem.
        problem: String,
    },
    /// A data set has no samples, or lacks a file or tensor that was asked for.
    #[error("{path}: {problem}")]
    NoSamples {
        /// File or directory of the data set.
        path: PathBuf,
        /// Description of what is missing, and of what is allowed.
        problem: String,
    },
    /// A transform does not suit the tensor that it is applied to.
    #[error("transform {transform} of \"{tensor}\": {problem}")]
    BadTransform {
        /// Name of the transform.
        transform: String,
        /// Name of the tensor.
        tensor: String,
        /// Description of the problem, with the allowed shapes, dtypes or values.
        problem: String,
    },
    /// Several sources of a blend are unusable; holds one error for each.
    #[error("{} sources cannot be used:\n{}", .0.len(), .0.iter().map(|problem| format!("  {problem}")).collect::<Vec<_>>().join("\n"))]
    Several(Vec<DataError>),
    /// The prefetch thread ended without reporting an error.
    #[error("the data thread ended unexpectedly; this is a defect of Lockstep")]
    PrefetcherLost,
    /// A thread of a loader panicked, in a data set or a transform.
    #[error("a data thread panicked while it filled a batch; its message is above")]
    LoaderPanicked,
}

/// Rule of the token file format that a file breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TokenFileProblem(pub(crate) String);

/// Rule of Megatron's index format that an index breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct IndexProblem(pub(crate) String);

/// Position of a record in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordPlace {
    /// Line number, from 1.
    Line(u64),
    /// Number of the element in the file's array, from 1.
    Element(u64),
}

impl fmt::Display for RecordPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Element(number) => write!(f, "element {number}"),
        }
    }
}

/// Class of a [`DataError`], from which the command line derives its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// A path, pattern, number or combination of options must be corrected.
    Configuration,
    /// An input is damaged or not in the format that it claims.
    CorruptInput,
    /// The machine failed: I/O or disk space.
    Failed,
    /// A stop was requested; the same command resumes the work.
    Interrupted,
}

impl DataError {
    /// Returns the class of the error; the command line derives its exit code from it.
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
            | Self::UnevenBatch { .. }
            | Self::BadArrays { .. }
            | Self::NoSamples { .. }
            | Self::BadTransform { .. } => ErrorKind::Configuration,
            Self::NotUtf8 { .. }
            | Self::JsonRecord { .. }
            | Self::BadTokenizer { .. }
            | Self::BadParquet { .. }
            | Self::BadTokenFile { .. }
            | Self::BadRawFile { .. }
            | Self::BadIndex { .. }
            | Self::TokenOutOfRange { .. }
            | Self::BadRecord { .. }
            | Self::BadSample { .. } => ErrorKind::CorruptInput,
            Self::AtSample { source, .. } => source.kind(),
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
            | Self::LoaderPanicked
            | Self::PrefetcherLost => ErrorKind::Failed,
        }
    }

    /// Collects all values, or all errors.
    ///
    /// # Errors
    /// If any result is an error: a single error as it is, several as [`DataError::Several`].
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

    /// Returns the error of a number that is out of its range.
    pub(crate) fn out_of_range(name: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::OutOfRange { name, value: value.to_string(), allowed: allowed.into() }
    }

    /// Returns a function that attaches a path to an operating-system error: `map_err(DataError::io("read", path))`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

/// Returns the reasons why no window has a label, with the setting that would change it.
fn why_no_answers(supervision: &Supervision) -> String {
    let Supervision { answer_out_of_window, without_answer, masked_windows, seq_len_for_one_more, .. } =
        *supervision;
    if masked_windows > 0 {
        return format!("none of its {masked_windows} windows holds a token to predict; raise train.seq_len");
    }
    let mut why = Vec::new();
    if answer_out_of_window > 0 {
        why.push(format!(
            "{answer_out_of_window} have prompts that fill it (train.seq_len = {seq_len_for_one_more} holds the first answer of one)"
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

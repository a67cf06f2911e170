//! From files on a disk to micro-batches of token ids, as a pure function of the global sample number.
//!
//! Data goes one way through this crate:
//!
//! ```text
//! patterns -> expand -> SourceFile -> Tokens -> Dataset -> Prefetcher -> MicroBatch
//! ```
//!
//! - [`expand`] turns files, directories and globs into a sorted list of [`SourceFile`]s.
//! - [`Tokens`] is what they hold, as one sequence of ids: files of tokens are mapped into memory, raw ones and
//!   Megatron's indexed ones alike; text is tokenized once ([`tokenize_files`]) into a file named by the hash of
//!   everything that decides its content, so a second run finds it. With the ids it knows where documents begin, and
//!   which tokens (prompts) are read and never predicted.
//! - [`Dataset`] cuts a range of them into windows, [`Packing`] says what becomes of documents there, and
//!   [`SampleOrder`] which window sample number `n` is. A blend of several draws from each as its weight says.
//! - [`tokenize_to_indexed`] makes a data set for Megatron, and for any number of runs, out of text.
//! - [`SampleCursor`] says which sample numbers a replica reads at which step, by arithmetic alone. The
//!   number of samples consumed is the whole state: there is nothing else to save or to share.
//! - [`Prefetcher`] fills [`MicroBatch`]es ahead of the consumer on a thread of its own.
#![forbid(unsafe_code)]

mod batch;
mod blend;
mod chat;
mod contents;
mod dataset;
mod decode;
mod demo;
mod documents;
mod error;
mod export;
mod growth;
mod id_type;
mod indexed;
mod json_line;
mod json_records;
mod order;
mod packing;
mod parquet_file;
mod prefetch;
mod progress;
mod quiet;
mod sources;
mod supervision;
#[cfg(test)]
mod testing;
mod token_cache;
mod token_file;
mod tokenize;
mod tokenizer;
mod tokens;

pub use batch::{IGNORE_LABEL, MicroBatch};
pub use chat::ChatTemplate;
pub use contents::{Contents, FileContents};
pub use dataset::{Dataset, Place, Tail, WindowOptions, split_validation};
pub use decode::TextStream;
pub use demo::demo_sources;
pub use error::{DataError, ErrorKind, IndexProblem, Result, TokenFileProblem};
pub use export::{ExportOptions, Exported, tokenize_to_indexed};
pub use id_type::IdType;
pub use indexed::IndexHeader;
pub use json_line::{Columns, Document, Part, PartRole, RecordShape, TextOptions, parse_json_line};
pub use json_records::RecordPlace;
pub use order::{SampleCursor, SampleOrder};
pub use packing::Packing;
pub use parquet_file::read_text_column;
pub use prefetch::Prefetcher;
pub use progress::{Bar, Progress, Silent};
pub use sources::{Format, SourceFile, expand};
pub use supervision::Supervision;
pub use token_cache::TokenFileHeader;
pub use token_file::TokenFile;
pub use tokenize::{Ending, TokenizeOptions, Tokenized, tokenize_files};
pub use tokenizer::{HfTokenizer, Tokenizer};
pub use tokens::{FindDocuments, OpenOptions, Tokens};

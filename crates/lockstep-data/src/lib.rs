//! Turns files on disk into micro-batches of token ids, as a pure function of the global sample number.
//!
//! Data flows in one direction through this crate:
//!
//! ```text
//! patterns -> expand -> SourceFile -> Tokens -> Dataset -> Prefetcher -> MicroBatch
//! ```
//!
//! - [`expand`] turns files, directories and globs into a sorted list of [`SourceFile`]s.
//! - [`Tokens`] is the content of those files as one sequence of ids. Raw token files and Megatron's indexed data sets
//!   are memory-mapped. Text is tokenized once ([`tokenize_files`]) into a cache file whose name is the hash of
//!   everything that decides its content, so that a second run finds it. Besides the ids it holds the document
//!   boundaries and the ranges (such as prompts) whose labels are masked.
//! - [`Dataset`] cuts a range of tokens into windows. [`Packing`] decides how documents are packed into windows, and
//!   [`SampleOrder`] which window is sample number `n`. A blend draws from several sources in proportion to their
//!   weights.
//! - [`tokenize_to_indexed`] tokenizes text into a Megatron indexed data set, which any number of runs can read.
//! - [`SampleCursor`] computes which sample numbers a data-parallel replica reads at each step. The number of samples
//!   consumed is the whole state of the loader: nothing else is saved or communicated.
//! - [`Prefetcher`] fills [`MicroBatch`]es ahead of the consumer on its own thread.
//!
//! [`samples`] does the same for data other than text: images, records, arrays.
#![forbid(unsafe_code)]

mod batch;
mod batch_source;
mod blend;
mod chat;
mod contents;
mod dataset;
mod decode;
mod demo;
mod documents;
mod encoder;
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
pub mod samples;
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
pub use batch_source::BatchSource;
pub use chat::{ChatTemplate, PartRole, TextPart};
pub use contents::{Contents, FileContents};
pub use dataset::{Dataset, SampleOrigin, split_validation};
pub use decode::TextStream;
pub use demo::demo_sources;
pub use encoder::Ending;
pub use error::{DataError, ErrorKind, IndexProblem, RecordPlace, Result, TokenFileProblem};
pub use export::{ExportOptions, Exported, tokenize_to_indexed};
pub use id_type::IdType;
pub use indexed::IndexHeader;
pub use json_line::{Columns, Document, RecordShape, TextOptions, parse_json_line};
pub use order::{SampleCursor, SampleOrder};
pub use packing::{Packing, Tail, WindowOptions};
pub use parquet_file::read_text_column;
pub use prefetch::Prefetcher;
pub use progress::{Bar, Progress, Silent};
pub use sources::{Format, SourceFile, expand};
pub use supervision::Supervision;
pub use token_cache::TokenFileHeader;
pub use token_file::TokenFile;
pub use tokenize::{TokenizeOptions, Tokenized, tokenize_files};
pub use tokenizer::{HfTokenizer, Tokenizer};
pub use tokens::{FindDocuments, OpenOptions, Tokens};

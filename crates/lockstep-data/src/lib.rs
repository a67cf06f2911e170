//! From files on a disk to micro-batches of token ids, as a pure function of the global sample number.
//!
//! Text goes one way through this crate:
//!
//! ```text
//! patterns -> expand -> SourceFile -> tokenize_files -> TokenFile -> Dataset -> Prefetcher -> MicroBatch
//! ```
//!
//! - [`expand`] turns files, directories and globs into a sorted list of [`SourceFile`]s.
//! - [`tokenize_files`] runs a [`Tokenizer`] over them once and leaves a [`TokenFile`]: a memory-mapped
//!   file named by the hash of everything that decides its content, so a second run finds it.
//! - [`Dataset`] cuts a range of it into windows; [`SampleOrder`] says which window sample number `n` is.
//! - [`SampleCursor`] says which sample numbers a replica reads at which step, by arithmetic alone. The
//!   number of samples consumed is the whole state: there is nothing else to save or to share.
//! - [`Prefetcher`] fills [`MicroBatch`]es ahead of the consumer on a thread of its own.
#![forbid(unsafe_code)]

mod batch;
mod dataset;
mod decode;
mod demo;
mod documents;
mod error;
mod order;
mod prefetch;
mod progress;
mod quiet;
mod sources;
#[cfg(test)]
mod testing;
mod token_file;
mod tokenize;
mod tokenizer;

pub use batch::{IGNORE_LABEL, MicroBatch};
pub use dataset::{Dataset, Tail, WindowOptions, split_validation};
pub use decode::TextStream;
pub use demo::demo_sources;
pub use documents::parse_json_line;
pub use error::{DataError, ErrorKind, Result, TokenFileProblem};
pub use order::{SampleCursor, SampleOrder};
pub use prefetch::Prefetcher;
pub use progress::{Bar, Progress, Silent};
pub use sources::{Format, SourceFile, expand};
pub use token_file::{TokenFile, TokenFileHeader, TokenWidth};
pub use tokenize::{TokenizeOptions, Tokenized, tokenize_files};
pub use tokenizer::{HfTokenizer, Tokenizer};

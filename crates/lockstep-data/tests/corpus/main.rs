//! Tests of the path from text files to micro-batches, and of every failure on it, through the public interface.
//!
//! One test binary, so that the helpers are shared and linked once.
#![expect(clippy::unwrap_used, reason = "a test that cannot set up its inputs has failed")]

mod batches;
mod broken_inputs;
mod exporting;
mod packing;
mod parquet;
mod sources;
mod tokenizing;
mod workshop;

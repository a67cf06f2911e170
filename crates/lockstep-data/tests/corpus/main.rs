//! The way of text from files to micro-batches, and everything that can go wrong on it, through the public
//! interface. One program, so that the helpers are shared and linked once.
#![expect(clippy::unwrap_used, reason = "a test that cannot set up its inputs has failed")]

mod batches;
mod broken_inputs;
mod exporting;
mod packing;
mod parquet;
mod sources;
mod tokenizing;
mod workshop;

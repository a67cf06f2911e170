//! Tests of data sets beyond text, from files to batches, and of every failure on the way, through the public interface.
//!
//! One test binary, so that the helpers are shared and linked once.
#![expect(clippy::unwrap_used, reason = "a test that cannot set up its inputs has failed")]

mod broken_files;
mod files;
mod images;
mod loading;
mod shards;
mod synthetic;
mod workshop;

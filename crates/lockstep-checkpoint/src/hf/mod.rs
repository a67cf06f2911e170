//! Hugging Face model directories, in and out.
//!
//! A directory holds `model.safetensors`, or shards and the `model.safetensors.index.json` that says
//! which tensor is where. [`HfCheckpoint`] reads either as one set of names; [`HfExport`] writes what
//! `transformers` loads. Pickled weights are never opened.

mod export;
mod read;

pub use export::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, FillValues, HfExport};
pub use read::HfCheckpoint;

/// The file that holds all weights of a small model.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The file that says which shard holds which weight.
const INDEX_FILE: &str = "model.safetensors.index.json";

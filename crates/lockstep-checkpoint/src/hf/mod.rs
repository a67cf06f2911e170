//! Reading and writing of Hugging Face model directories.
//!
//! A directory holds `model.safetensors`, or shards and a `model.safetensors.index.json` that maps tensors to shards.
//! [`HfCheckpoint`] reads either as one set of names. [`HfExport`] writes a directory that `transformers` loads.
//! Pickled weights are never opened.

mod export;
mod read;

pub use export::{
    DEFAULT_SHARD_BYTES, EncodedBytes, ExportData, ExportTensor, FillValues, HfExport, check_vacant,
};
pub use read::HfCheckpoint;

/// Name of the file with all weights of an unsharded model.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the index that maps each weight to its shard.
const INDEX_FILE: &str = "model.safetensors.index.json";

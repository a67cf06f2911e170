//! Checkpoints of a run: written so that no crash can damage them, read so that no damaged byte is used.
//!
//! The format consists of host bytes and depends on no device, optimizer or model. Only [`ModelDirectory`] knows the
//! names of a model's parameters in Hugging Face's format. Four ideas carry the crate:
//!
//! - **One logical tensor.** A checkpoint describes global tensors by name. How they were sharded over ranks only
//!   decides where the bytes are stored. [`Checkpoint::read`] reads any range of elements of any tensor, so resuming
//!   under another plan needs no conversion.
//! - **The rename commits.** [`save`] writes into a hidden directory, syncs it, and renames it to its final name.
//!   Before the rename there is no new checkpoint; after it there is a complete one.
//! - **Every byte is hashed.** The manifest holds a BLAKE3 hash of each file, of each tensor and of itself. Reads check
//!   the hashes; [`latest_good`] falls back to the newest undamaged checkpoint.
//! - **Plain safetensors.** [`safetensors`] reads the rank files and Hugging Face directories, and trusts no header.
//!
//! ```
//! use lockstep_checkpoint::{DType, Region, SaveRequest, TensorKind, TensorSlice, latest_good, save};
//!
//! let dir = tempfile::tempdir()?;
//! let weight = [1.0f32, 2.0, 3.0, 4.0];
//! let tensor = TensorSlice {
//!     name: "lm_head.weight",
//!     kind: TensorKind::Parameter,
//!     dtype: DType::F32,
//!     global_shape: &[2, 2],
//!     region: Region::Whole,
//!     bytes: bytemuck::cast_slice::<f32, u8>(&weight).into(),
//! };
//! save(dir.path(), &SaveRequest { step: 100, ..SaveRequest::default() }, &[tensor])?;
//!
//! let found = latest_good(dir.path())?;
//! let checkpoint = found.checkpoint.expect("just saved");
//! let mut second_row = [0.0f32; 2];
//! checkpoint.read("lm_head.weight", &TensorKind::Parameter, 2, &mut second_row)?;
//! assert_eq!(second_row, [3.0, 4.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("safetensors is little-endian and Lockstep copies its bytes as they are");

mod absent;
mod background;
mod base;
mod block_parameter;
mod channel_scales;
mod convert;
mod coverage;
mod digest;
mod directory;
mod disk;
mod error;
mod files;
mod gguf_export;
mod listing;
mod load;
mod manifest;
mod model_export;
mod observer;
mod offloaded_weights;
mod packed_parameter;
mod peft;
mod pretrained;
mod quantization_summary;
mod quantize;
mod quantized;
mod quantized_form;
mod region;
mod save;
mod shard;
mod shard_file;
mod stored_parameter;
mod tensor_files;
mod trained;
mod weight_quantization;

pub mod gguf;
pub mod hf;
pub mod safetensors;

pub use background::{PendingSave, SaveThread};
pub use base::BaseModel;
pub use block_parameter::BlockParameter;
pub use channel_scales::ChannelScales;
pub use digest::Digest;
pub use directory::{
    CheckpointQuality, Latest, Pruned, SkippedCheckpoint, find, latest_good, latest_good_of, make_room,
    newest_of, prune, set_aside, set_damaged_aside,
};
pub use disk::run_on_disk;
pub use error::{CheckpointError, CoverageError};
pub use files::{RunLock, prepare_directory};
pub use gguf_export::GgufExportNotes;
pub use listing::{ListedCheckpoint, list, step_directory};
pub use load::Checkpoint;
pub use lockstep_plan::DType;
pub use manifest::{FORMAT_VERSION, FileEntry, MANIFEST_FILE, Manifest, SliceEntry, TensorEntry, TensorKind};
pub use observer::{Abandoned, CommitObserver, CommitPoint, Wait};
pub use offloaded_weights::{OffloadedWeight, OffloadedWeights};
pub use packed_parameter::PackedParameter;
pub use peft::{PeftAdapter, parse_adapter_config};
pub use pretrained::{ModelDirectory, checkpoint_model};
pub use quantization_summary::QuantizationSummary;
pub use quantize::{QuantizedMatrices, QuantizedModel};
pub use quantized::{Quantization, QuantizationError, parse_quantization};
pub use quantized_form::QuantizedForm;
pub use region::Region;
pub use save::{SaveRequest, Staging, save, save_observed};
pub use shard::{ByteSource, ShardReport, SliceBytes, TensorSlice, write_shard, write_shard_observed};
pub use stored_parameter::{RowOrder, StoredParameter};
pub use weight_quantization::{
    WeightQuantization, WeightType, encode_blocks, is_quantizable, round_to_blocks,
};

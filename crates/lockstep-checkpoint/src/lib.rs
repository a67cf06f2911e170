//! Checkpoints: what a run leaves on disk, written so that no crash can spoil it and read so that no
//! damaged byte gets in.
//!
//! The format works on host bytes and knows no device, no optimizer and no model; only [`ModelDirectory`]
//! knows how a model's parameters are called elsewhere. Four ideas carry the crate:
//!
//! - **One logical tensor.** A checkpoint describes whole tensors by name; which rank held which part
//!   is only *where the bytes lie*. [`Checkpoint::read`] takes any range of elements of any tensor, so
//!   resuming under another plan is the ordinary path and not a conversion.
//! - **The rename commits.** [`save`] writes into a hidden directory, syncs it, and renames it into
//!   place. Before the rename there is no new checkpoint; after it there is a whole one.
//! - **Every byte is hashed.** The manifest holds a BLAKE3 of each file and each tensor and one of
//!   itself. Reading checks; [`latest_good`] falls back to the newest checkpoint that is whole.
//! - **Plain safetensors.** The rank files and Hugging Face directories are read by [`safetensors`],
//!   which trusts no header.
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

mod background;
mod base;
mod convert;
mod coverage;
mod digest;
mod directory;
mod disk;
mod error;
mod files;
mod load;
mod manifest;
mod peft;
mod pretrained;
mod region;
mod save;
mod shard;
mod shard_file;

pub mod hf;
pub mod safetensors;

pub use background::{PendingSave, SaveThread};
pub use base::BaseModel;
pub use digest::Digest;
pub use directory::{
    Latest, ListedCheckpoint, Pruned, SkippedCheckpoint, Standing, find, latest_good, latest_good_of, list,
    make_room, prune, set_aside, set_damaged_aside,
};
pub use disk::{Abandoned, Wait, run_on_disk};
pub use error::{CheckpointError, CoverageError};
pub use files::{RunLock, prepare_directory};
pub use load::Checkpoint;
pub use lockstep_plan::DType;
pub use manifest::{FORMAT_VERSION, FileEntry, MANIFEST_FILE, Manifest, SliceEntry, TensorEntry, TensorKind};
pub use peft::{PeftAdapter, parse_adapter_config};
pub use pretrained::{ModelDirectory, checkpoint_model};
pub use region::Region;
pub use save::{CommitObserver, CommitPoint, SaveRequest, Staging, save, save_observed};
pub use shard::{ByteSource, ShardReport, SliceBytes, TensorSlice, write_shard, write_shard_observed};

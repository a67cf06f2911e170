//! The model that a fine-tuning run started from, as its checkpoints name it under `config.base`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Checkpoint, CheckpointError, Digest, MANIFEST_FILE};

/// The base of a checkpoint that holds a part of a model only: where the rest lies, and what it must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// The model's directory.
    pub path: PathBuf,
    /// What [`ModelDirectory::for_each_parameter_hashed`](crate::ModelDirectory::for_each_parameter_hashed) gives
    /// for it.
    pub digest: Digest,
}

impl BaseModel {
    /// The base of a checkpoint; none for one that holds a whole model.
    ///
    /// # Errors
    /// [`CheckpointError::Manifest`] if `config.base` is not what it should be.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>, CheckpointError> {
        match checkpoint.manifest().config.get("base") {
            None | Some(Value::Null) => Ok(None),
            Some(base) => Self::deserialize(base).map(Some).map_err(|error| CheckpointError::Manifest {
                path: checkpoint.path().join(MANIFEST_FILE),
                reason: format!("config.base: {error}"),
            }),
        }
    }
}

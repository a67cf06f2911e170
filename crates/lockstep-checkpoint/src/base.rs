//! Base model of a fine-tuning run, recorded in its checkpoints under `config.base`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Checkpoint, CheckpointError, Digest, MANIFEST_FILE};

/// Base model of a checkpoint that holds only the trained part: its location and its expected contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// Directory of the model.
    pub path: PathBuf,
    /// Digest of the parameters, from
    /// [`ModelDirectory::for_each_parameter_hashed`](crate::ModelDirectory::for_each_parameter_hashed).
    pub digest: Digest,
}

impl BaseModel {
    /// Returns the base model of a checkpoint; `None` if the checkpoint holds a whole model.
    ///
    /// # Errors
    /// If `config.base` in the manifest is malformed.
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

//! Reads a model directory through the page cache. Opening it reads only headers; tensors are read on access.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io,
    path::{Path, PathBuf},
};

use lockstep_plan::BlockFormat;
use serde::Deserialize;

use super::{INDEX_FILE, SINGLE_FILE};
use crate::{
    RowOrder, StoredParameter,
    convert::is_float,
    error::CheckpointError,
    files::{is_plain_name, read_limited},
    gguf::StoredElements,
    safetensors::{SafetensorsFile, TensorRef, deserialize_unique_strings},
};

/// Maximum size of an index, in bytes; the largest public models need about a tenth.
const MAX_INDEX_BYTES: u64 = 100 << 20;

/// Weights of a Hugging Face model directory.
#[derive(Debug)]
pub struct HfCheckpoint {
    dir: PathBuf,
    shards: Vec<SafetensorsFile>,
    /// Shard index of each tensor, by name.
    by_name: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    #[serde(deserialize_with = "deserialize_unique_strings")]
    weight_map: BTreeMap<String, String>,
}

impl HfCheckpoint {
    /// Opens `dir`, which holds `model.safetensors` (preferred, as in `transformers`) or an index.
    ///
    /// Checks the header of every shard, and that each shard holds the tensors that the index assigns to it. Tensors
    /// that the index does not name are not part of the model.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let single = dir.join(SINGLE_FILE);
        if single.exists() {
            let file = SafetensorsFile::open(&single)?;
            let by_name = file.names().map(|name| (name.to_owned(), 0)).collect();
            return Ok(Self { dir: dir.to_path_buf(), shards: vec![file], by_name });
        }
        Self::open_sharded(dir)
    }

    fn open_sharded(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(INDEX_FILE);
        let invalid = |reason: String| CheckpointError::Index { path: path.clone(), reason };
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CheckpointError::NoWeights { dir: dir.to_path_buf() });
            }
            result => result.map_err(CheckpointError::io("open", &path))?,
        };
        let bytes = read_limited(file, &path, MAX_INDEX_BYTES)?
            .ok_or_else(|| invalid(format!("it is longer than {MAX_INDEX_BYTES} bytes")))?;
        let index: Index = serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;

        let mut shards: Vec<SafetensorsFile> = Vec::new();
        let mut opened: HashMap<String, usize> = HashMap::new();
        let mut by_name = BTreeMap::new();
        for (tensor, shard) in index.weight_map {
            let number = match opened.get(&shard) {
                Some(&number) => number,
                None => {
                    if !is_plain_name(&shard) {
                        return Err(CheckpointError::UnsafeName { path, name: shard });
                    }
                    let file = SafetensorsFile::open(&dir.join(&shard));
                    shards.push(file.map_err(|error| error.named_in(path.clone()))?);
                    opened.insert(shard.clone(), shards.len() - 1);
                    shards.len() - 1
                }
            };
            if shards[number].header().tensor(&tensor).is_none() {
                return Err(CheckpointError::MissingWeight { path, tensor, shard });
            }
            by_name.insert(tensor, number);
        }
        Ok(Self { dir: dir.to_path_buf(), shards, by_name })
    }

    /// Returns all tensor names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Returns true if there is a tensor with that name.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Returns the tensor with that name: stored type, shape and bytes.
    pub fn tensor(&self, name: &str) -> Result<TensorRef<'_>, CheckpointError> {
        self.shard_of(name)?.tensor(name)
    }

    /// Returns the location of a float tensor; `None` if there is none of that name.
    pub(crate) fn stored(&self, name: &str) -> Option<StoredParameter<'_>> {
        let dtype = self.tensor(name).ok()?.known_dtype().filter(|&dtype| is_float(dtype))?;
        self.stored_as(name, StoredElements::Dense(dtype))
    }

    /// Returns the location of a tensor whose bytes are `elements` elements in blocks; `None` if there is none of that name and size.
    pub(crate) fn stored_blocks(
        &self,
        name: &str,
        format: BlockFormat,
        elements: usize,
    ) -> Option<StoredParameter<'_>> {
        let stored = self.stored_as(name, StoredElements::Blocks(format))?;
        let is_whole = format.bytes(elements) == Some(self.tensor(name).ok()?.bytes.len());
        is_whole.then_some(StoredParameter { elements, ..stored })
    }

    fn stored_as(&self, name: &str, stored: StoredElements) -> Option<StoredParameter<'_>> {
        let shard = &self.shards[*self.by_name.get(name)?];
        let info = shard.header().tensor(name)?;
        Some(StoredParameter {
            name: &info.name,
            file: shard.path(),
            offset: info.offset,
            stored,
            order: RowOrder::Same,
            elements: info.shape.iter().product(),
            first_element: 0,
        })
    }

    /// Fills `out` with all values of a tensor as `f32`. `out` must have as many elements as the tensor.
    pub fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), CheckpointError> {
        let elements = self.tensor(name)?.elements();
        if out.len() != elements {
            let tensor = name.to_owned();
            return Err(CheckpointError::Range { tensor, start: 0, count: out.len(), elements });
        }
        self.read_f32_at(name, 0, out)
    }

    /// Fills `out` with the elements `start..start + out.len()` of a tensor of `f32`, `bf16` or `f16`.
    pub fn read_f32_at(&self, name: &str, start: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        self.shard_of(name)?.read_f32_at(name, start, out)
    }

    fn shard_of(&self, name: &str) -> Result<&SafetensorsFile, CheckpointError> {
        self.by_name
            .get(name)
            .map(|&number| &self.shards[number])
            .ok_or_else(|| CheckpointError::NoSuchTensor { path: self.dir.clone(), tensor: name.to_owned() })
    }
}

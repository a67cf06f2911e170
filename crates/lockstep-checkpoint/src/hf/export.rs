//! Writes a model directory that `transformers` loads, with only one piece of a tensor in memory.
//!
//! Tensors fill the shards greedily in the given order; shards are named as in `transformers`. The directory appears
//! under its final name only when it is complete.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use lockstep_plan::DType;
use serde_json::json;

use super::INDEX_FILE;
use crate::{
    convert,
    digest::Digest,
    error::{CheckpointError, CoverageError},
    files::{DirectoryLock, create_directories, create_file, is_plain_name, parent_of, sync_directory},
    safetensors::{SafetensorsWriter, TensorSpec, stored_dtype},
};

/// Maximum size of a weight file in bytes. Larger models are split into shards of at most this size.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// Elements converted at a time.
const CONVERTED_ELEMENTS: usize = 1 << 20;

/// Function that fills a buffer with a tensor's elements from the given index on.
pub type FillValues<'a> = dyn Fn(usize, &mut [f32]) -> Result<(), CheckpointError> + 'a;

/// Function that returns all bytes of a tensor.
pub type EncodedBytes<'a> = dyn Fn() -> Result<Vec<u8>, CheckpointError> + 'a;

/// Source of an exported tensor's elements.
pub enum ExportData<'a> {
    /// Elements in memory.
    Bytes {
        /// Type of the elements.
        dtype: DType,
        /// Elements, little-endian, row-major.
        bytes: &'a [u8],
    },
    /// Bytes from a function, which writes them in any stored type, for example a packed tensor.
    Encoded {
        /// Type of the elements.
        dtype: ::safetensors::Dtype,
        /// Function that returns all bytes.
        bytes: Box<EncodedBytes<'a>>,
    },
    /// Elements from a function, for example a checkpoint that is read during the export, or a transposed view.
    Values(Box<FillValues<'a>>),
}

/// Tensor to export.
pub struct ExportTensor<'a> {
    /// Hugging Face name of the tensor.
    pub name: String,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
    /// Elements of the tensor.
    pub data: ExportData<'a>,
}

/// Description of a model directory to write.
pub struct HfExport<'a> {
    /// Weights; their order decides the assignment to shards.
    pub tensors: Vec<ExportTensor<'a>>,
    /// Type in which float tensors are stored. `None` keeps the type of each tensor (`f32` for [`ExportData::Values`]).
    /// Integer tensors always keep their type.
    pub dtype: Option<DType>,
    /// File name of the weights if they are not sharded.
    pub file: &'static str,
    /// Texts to write beside the weights, by file name, such as `config.json`.
    pub texts: BTreeMap<String, String>,
    /// Files to copy beside the weights, by their new name, such as those of the tokenizer.
    pub copies: BTreeMap<String, PathBuf>,
    /// Maximum size of a shard; see [`DEFAULT_SHARD_BYTES`]. A tensor above it gets a shard of its own.
    pub shard_bytes: u64,
}

impl HfExport<'_> {
    /// Writes the directory `out`, which must be empty or not exist.
    pub fn write(&self, out: &Path) -> Result<(), CheckpointError> {
        let Some(name) = out.file_name() else {
            return Err(CheckpointError::io("create", out)(io::ErrorKind::InvalidInput.into()));
        };
        if let Some(dtype) = self.dtype.filter(|&dtype| !convert::is_float(dtype)) {
            return Err(CheckpointError::UnsupportedDtype {
                path: out.to_path_buf(),
                tensor: "*".to_owned(),
                dtype: dtype.to_string(),
            });
        }
        let parent = parent_of(out);
        create_directories(&parent)?;
        let _lock = DirectoryLock::take(&parent)?;
        check_vacant(out)?;
        let staging = parent.join(staging_name(&name.to_string_lossy()));
        remove_if_there(&staging)?;
        let written = self.write_into(&staging).and_then(|()| {
            fs::rename(&staging, out).map_err(CheckpointError::io("rename to", out))?;
            sync_directory(&parent)
        });
        if written.is_err() {
            // The first error is the one to report.
            drop(fs::remove_dir_all(&staging));
        }
        written
    }

    /// Returns the bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().filter_map(|tensor| self.spec(tensor).bytes()).sum()
    }

    fn write_into(&self, dir: &Path) -> Result<(), CheckpointError> {
        fs::create_dir(dir).map_err(CheckpointError::io("create", dir))?;
        for (name, text) in &self.texts {
            write_file(dir, name, text.as_bytes())?;
        }
        for (name, source) in &self.copies {
            let content = fs::read(source).map_err(CheckpointError::io("read", source))?;
            write_file(dir, name, &content)?;
        }
        let specs: Vec<TensorSpec> = self.tensors.iter().map(|tensor| self.spec(tensor)).collect();
        let shards = self.split(&specs)?;
        if let [_] | [] = shards[..] {
            let all: Vec<usize> = (0..specs.len()).collect();
            self.write_weights(&dir.join(self.file), &specs, &all)?;
        } else {
            self.write_shards(dir, &specs, &shards)?;
        }
        sync_directory(dir)
    }

    fn write_shards(
        &self,
        dir: &Path,
        specs: &[TensorSpec],
        shards: &[Vec<usize>],
    ) -> Result<(), CheckpointError> {
        let mut weight_map = BTreeMap::new();
        for (index, members) in shards.iter().enumerate() {
            let file = format!("model-{:05}-of-{:05}.safetensors", index + 1, shards.len());
            self.write_weights(&dir.join(&file), specs, members)?;
            weight_map.extend(members.iter().map(|&member| (specs[member].name.clone(), file.clone())));
        }
        let total_size: u64 = specs.iter().filter_map(TensorSpec::bytes).sum();
        let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        write_file(dir, INDEX_FILE, format!("{index:#}\n").as_bytes())
    }

    /// Returns the shards as indices into the tensors.
    fn split(&self, specs: &[TensorSpec]) -> Result<Vec<Vec<usize>>, CheckpointError> {
        let mut shards = Vec::new();
        let mut current = Vec::new();
        let mut current_bytes = 0u64;
        for (index, spec) in specs.iter().enumerate() {
            let bytes = spec.bytes().ok_or_else(|| CheckpointError::Coverage {
                tensor: spec.name.clone(),
                kind: "shape".to_owned(),
                source: CoverageError::too_large(&spec.shape),
            })?;
            if bytes > self.shard_bytes {
                shards.push(vec![index]);
                continue;
            }
            if current_bytes + bytes > self.shard_bytes {
                shards.push(std::mem::take(&mut current));
                current_bytes = 0;
            }
            current.push(index);
            current_bytes += bytes;
        }
        if !current.is_empty() {
            shards.push(current);
        }
        Ok(shards)
    }

    fn write_weights(
        &self,
        path: &Path,
        specs: &[TensorSpec],
        members: &[usize],
    ) -> Result<(), CheckpointError> {
        let member_specs = members.iter().map(|&member| specs[member].clone()).collect();
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let by_name: BTreeMap<&str, usize> =
            members.iter().map(|&member| (specs[member].name.as_str(), member)).collect();
        let file = create_file(path, 0)?;
        let mut writer = SafetensorsWriter::new(BufWriter::new(file), path, member_specs, &metadata)?;
        while let Some(name) = writer.next_tensor().map(|spec| spec.name.clone()) {
            self.stream(&self.tensors[by_name[name.as_str()]], &mut writer)?;
        }
        let file = writer.finish()?.into_inner().map_err(|error| error.into_error());
        file.and_then(|file: File| file.sync_all()).map_err(CheckpointError::io("write", path))
    }

    /// Writes one tensor in its stored type.
    fn stream<W: Write>(
        &self,
        tensor: &ExportTensor<'_>,
        writer: &mut SafetensorsWriter<W>,
    ) -> Result<(), CheckpointError> {
        let elements: usize = tensor.shape.iter().product();
        if let ExportData::Encoded { bytes, .. } = &tensor.data {
            return writer.write(&tensor.name, &bytes()?);
        }
        let stored = self.stored(tensor);
        if let ExportData::Bytes { dtype, bytes } = tensor.data {
            let expected = (elements * dtype.size_bytes()) as u64;
            if bytes.len() as u64 != expected {
                let found = bytes.len() as u64;
                return Err(CheckpointError::ByteCount { tensor: tensor.name.clone(), expected, found });
            }
            if dtype == stored {
                return writer.write(&tensor.name, bytes);
            }
        }
        let mut values = vec![0.0; elements.min(CONVERTED_ELEMENTS)];
        let mut narrowed = vec![0; values.len() * stored.size_bytes()];
        for start in (0..elements).step_by(CONVERTED_ELEMENTS) {
            let count = (elements - start).min(CONVERTED_ELEMENTS);
            let values = &mut values[..count];
            match &tensor.data {
                ExportData::Bytes { dtype, bytes } => {
                    let size = dtype.size_bytes();
                    convert::widen(*dtype, &bytes[start * size..(start + count) * size], values);
                }
                ExportData::Values(read) => read(start, values)?,
                ExportData::Encoded { .. } => unreachable!("written above"),
            }
            let narrowed = &mut narrowed[..count * stored.size_bytes()];
            convert::narrow(stored, values, narrowed);
            writer.write(&tensor.name, narrowed)?;
        }
        Ok(())
    }

    fn spec(&self, tensor: &ExportTensor<'_>) -> TensorSpec {
        TensorSpec {
            name: tensor.name.clone(),
            dtype: match tensor.data {
                ExportData::Encoded { dtype, .. } => dtype,
                _ => stored_dtype(self.stored(tensor)),
            },
            shape: tensor.shape.clone(),
        }
    }

    fn stored(&self, tensor: &ExportTensor<'_>) -> DType {
        let own = match tensor.data {
            ExportData::Bytes { dtype, .. } => dtype,
            ExportData::Values(_) | ExportData::Encoded { .. } => DType::F32,
        };
        if convert::is_float(own) { self.dtype.unwrap_or(own) } else { own }
    }
}

/// Returns the temporary name of an export. A long name is replaced by its hash, so that the prefix cannot exceed the
/// file system's limit.
fn staging_name(name: &str) -> String {
    let digest = Digest::of(name.as_bytes()).to_string();
    match name.len() {
        0..=64 => format!(".lockstep-export-{name}"),
        _ => format!(".lockstep-export-{}", &digest[..16]),
    }
}

/// Checks that a directory to be written does not exist or is empty.
///
/// # Errors
/// If it is a file, has contents, or cannot be read.
pub fn check_vacant(path: &Path) -> Result<(), CheckpointError> {
    let is_vacant = match fs::read_dir(path) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => false,
        Err(error) => return Err(CheckpointError::io("open", path)(error)),
    };
    if is_vacant { Ok(()) } else { Err(CheckpointError::OutputExists { path: path.to_owned() }) }
}

/// Removes the leftovers of an export that was killed.
fn remove_if_there(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CheckpointError::io("delete", path)(error))
        }
        _ => Ok(()),
    }
}

fn write_file(dir: &Path, name: &str, content: &[u8]) -> Result<(), CheckpointError> {
    if !is_plain_name(name) {
        return Err(CheckpointError::UnsafeName { path: dir.to_path_buf(), name: name.to_owned() });
    }
    let path = dir.join(name);
    let mut file = create_file(&path, content.len() as u64)?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(CheckpointError::io("write", &path))
}

//! Weights that a model cannot use as its files store them (fused, transposed, merged or packed ones), written once as it uses them:
//! numbers of the model's type, or the blocks of quantized matrices, row by row.
//!
//! They are a directory of safetensors with an index, whose name is made from the type and a digest of where the weights come
//! from: paths, sizes and times of files. So another model, or a changed one, gets a directory of its own.
//!
//! ```text
//! OFFLOAD_DIR/weights-bf16-3f2a91c07d5e8b46/model.safetensors, origin.json
//! ```

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use lockstep_plan::{BlockFormat, DType, ParameterRecord};
use serde_json::{Value, json};

use crate::{
    BlockParameter, CheckpointError, Digest, ModelDirectory, StoredParameter, encode_blocks,
    gguf::StoredElements,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfCheckpoint, HfExport, SINGLE_FILE},
};

/// File that says where the weights come from.
const ORIGIN_FILE: &str = "origin.json";

/// Weights of a parameter in an offload directory.
#[derive(Debug, Clone, Copy)]
pub struct OffloadedWeight<'r> {
    /// Record of the parameter.
    pub record: &'r ParameterRecord,
    /// Its elements: numbers of the model's type, or blocks.
    pub elements: StoredElements,
}

/// Weights in an offload directory.
#[derive(Debug)]
pub struct OffloadedWeights {
    files: HfCheckpoint,
    /// Names of quantized matrices, with their formats and numbers of elements.
    quantized: BTreeMap<String, (BlockFormat, usize)>,
}

impl OffloadedWeights {
    /// Opens the weights of `model` in `offload_dir`; `None` if they were not written, or come from other files.
    ///
    /// # Errors
    /// If files of the model cannot be inspected, or the written ones are damaged.
    pub fn find(
        offload_dir: &Path,
        model: &ModelDirectory,
        dtype: DType,
        weights: &[OffloadedWeight<'_>],
    ) -> Result<Option<Self>, CheckpointError> {
        let (path, origin) = place(offload_dir, model, dtype, weights)?;
        let Ok(text) = fs::read_to_string(path.join(ORIGIN_FILE)) else { return Ok(None) };
        if serde_json::from_str::<Value>(&text).is_ok_and(|found| found == origin) {
            return Self::open(&path, weights).map(Some);
        }
        Ok(None)
    }

    /// Writes weights, numbers in type `dtype`. One parameter is in memory at a time.
    ///
    /// # Errors
    /// If a file of the model is damaged, or the disk is full.
    pub fn write(
        offload_dir: &Path,
        model: &ModelDirectory,
        dtype: DType,
        weights: &[OffloadedWeight<'_>],
    ) -> Result<Self, CheckpointError> {
        let (path, origin) = place(offload_dir, model, dtype, weights)?;
        model.check_base()?;
        HfExport {
            tensors: weights.iter().map(|&weight| tensor(model, weight)).collect(),
            dtype: Some(dtype),
            file: SINGLE_FILE,
            texts: BTreeMap::from([(ORIGIN_FILE.to_owned(), format!("{origin:#}\n"))]),
            copies: BTreeMap::new(),
            shard_bytes: DEFAULT_SHARD_BYTES,
        }
        .write(&path)?;
        Self::open(&path, weights)
    }

    fn open(path: &Path, weights: &[OffloadedWeight<'_>]) -> Result<Self, CheckpointError> {
        let blocks = |weight: &OffloadedWeight<'_>| match weight.elements {
            StoredElements::Blocks(format) => {
                Some((weight.record.name.clone(), (format, weight.record.elements())))
            }
            StoredElements::Dense(_) => None,
        };
        Ok(Self { files: HfCheckpoint::open(path)?, quantized: weights.iter().filter_map(blocks).collect() })
    }

    /// Returns the parameters and their places.
    pub fn stored_parameters(&self) -> Vec<StoredParameter<'_>> {
        let stored = |name| match self.quantized.get(name) {
            Some(&(format, elements)) => self.files.stored_blocks(name, format, elements),
            None => self.files.stored(name),
        };
        self.files.names().filter_map(stored).collect()
    }
}

/// Returns the directory of the weights, and the content of its [`ORIGIN_FILE`].
fn place(
    offload_dir: &Path,
    model: &ModelDirectory,
    dtype: DType,
    weights: &[OffloadedWeight<'_>],
) -> Result<(PathBuf, Value), CheckpointError> {
    let mut files = BTreeMap::new();
    for source in model.sources() {
        for path in files_of(source)? {
            // Names in a cache of Hugging Face are links.
            let Ok(found) = fs::metadata(&path) else { continue };
            let is_of_model =
                |end: &std::ffi::OsStr| ["safetensors", "json", "gguf"].iter().any(|of| end == *of);
            if !found.is_file() || !path.extension().is_some_and(is_of_model) {
                continue;
            }
            let path = fs::canonicalize(&path).map_err(CheckpointError::io("find", &path))?;
            let time = found.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let nanoseconds = time.map(|time| time.as_nanos().to_string());
            files.insert(path.display().to_string(), json!([found.len(), nanoseconds]));
        }
    }
    let described = |OffloadedWeight { record, elements }: &OffloadedWeight<'_>| match elements {
        StoredElements::Dense(_) => json!([record.name, record.shape]),
        StoredElements::Blocks(format) => json!([record.name, record.shape, format.to_string()]),
    };
    let weights: Vec<_> = weights.iter().map(described).collect();
    let origin = json!({ "dtype": dtype.to_string(), "files": files, "weights": weights });
    let digest = Digest::of(origin.to_string().as_bytes()).to_string();
    Ok((offload_dir.join(format!("weights-{dtype}-{}", &digest[..16])), origin))
}

/// Returns the paths in a directory, or that of a file.
fn files_of(source: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    if source.is_file() {
        return Ok(vec![source.to_owned()]);
    }
    let failed = || CheckpointError::io("list", source);
    let entries = fs::read_dir(source).map_err(failed())?;
    entries.map(|entry| Ok(entry.map_err(failed())?.path())).collect()
}

fn tensor<'a>(model: &'a ModelDirectory, weight: OffloadedWeight<'a>) -> ExportTensor<'a> {
    let record = weight.record;
    let (name, elements) = (record.name.clone(), record.elements());
    if let StoredElements::Blocks(format) = weight.elements {
        let shape = vec![format.bytes(elements).unwrap_or(0)];
        let bytes = Box::new(move || blocks(model, record, format));
        return ExportTensor {
            name,
            shape,
            data: ExportData::Encoded { dtype: ::safetensors::Dtype::U8, bytes },
        };
    }
    // The writer asks for a tensor piece by piece, in order; it is read at the first piece.
    let read = RefCell::new(Vec::new());
    let values = move |start: usize, out: &mut [f32]| -> Result<(), CheckpointError> {
        let mut values = read.borrow_mut();
        if start == 0 {
            model.read(&name, &mut values)?;
        }
        out.copy_from_slice(&values[start..start + out.len()]);
        if start + out.len() == elements {
            *values = Vec::new();
        }
        Ok(())
    };
    ExportTensor {
        name: record.name.clone(),
        shape: record.shape.clone(),
        data: ExportData::Values(Box::new(values)),
    }
}

/// Returns the blocks of a matrix: those of the model's files, or its numbers, quantized.
fn blocks(
    model: &ModelDirectory,
    record: &ParameterRecord,
    format: BlockFormat,
) -> Result<Vec<u8>, CheckpointError> {
    let is_same = |block: &BlockParameter<'_>| {
        block.name == record.name && block.format == format && block.elements == record.elements()
    };
    let columns = record.shape.last().copied().unwrap_or(1);
    if let Some(stored) = model.block_parameters().into_iter().find(is_same) {
        return stored.blocks(columns);
    }
    let mut values = Vec::new();
    model.read(&record.name, &mut values)?;
    Ok(encode_blocks(format, &values))
}

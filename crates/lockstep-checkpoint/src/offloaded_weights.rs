//! Weights that a model cannot use as its files store them (fused, transposed or merged ones), written once as it uses them.
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

use lockstep_plan::{DType, ParameterRecord};
use serde_json::{Value, json};

use crate::{
    CheckpointError, Digest, ModelDirectory, StoredParameter,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfCheckpoint, HfExport, SINGLE_FILE},
};

/// File that says where the weights come from.
const ORIGIN_FILE: &str = "origin.json";

/// Weights in an offload directory.
#[derive(Debug)]
pub struct OffloadedWeights {
    files: HfCheckpoint,
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
        records: &[&ParameterRecord],
    ) -> Result<Option<Self>, CheckpointError> {
        let (path, origin) = place(offload_dir, model, dtype, records)?;
        let Ok(text) = fs::read_to_string(path.join(ORIGIN_FILE)) else { return Ok(None) };
        if serde_json::from_str::<Value>(&text).is_ok_and(|found| found == origin) {
            return Ok(Some(Self { files: HfCheckpoint::open(&path)? }));
        }
        Ok(None)
    }

    /// Writes the weights of `records` in type `dtype`. One parameter is in memory at a time.
    ///
    /// # Errors
    /// If a file of the model is damaged, or the disk is full.
    pub fn write(
        offload_dir: &Path,
        model: &ModelDirectory,
        dtype: DType,
        records: &[&ParameterRecord],
    ) -> Result<Self, CheckpointError> {
        let (path, origin) = place(offload_dir, model, dtype, records)?;
        model.check_base()?;
        HfExport {
            tensors: records.iter().map(|record| tensor(model, record)).collect(),
            dtype: Some(dtype),
            file: SINGLE_FILE,
            texts: BTreeMap::from([(ORIGIN_FILE.to_owned(), format!("{origin:#}\n"))]),
            copies: BTreeMap::new(),
            shard_bytes: DEFAULT_SHARD_BYTES,
        }
        .write(&path)?;
        Ok(Self { files: HfCheckpoint::open(&path)? })
    }

    /// Returns the parameters and their places.
    pub fn stored_parameters(&self) -> Vec<StoredParameter<'_>> {
        self.files.names().filter_map(|name| self.files.stored(name)).collect()
    }
}

/// Returns the directory of the weights, and the content of its [`ORIGIN_FILE`].
fn place(
    offload_dir: &Path,
    model: &ModelDirectory,
    dtype: DType,
    records: &[&ParameterRecord],
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
    let weights: Vec<_> = records.iter().map(|record| json!([record.name, record.shape])).collect();
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

fn tensor<'a>(model: &'a ModelDirectory, record: &ParameterRecord) -> ExportTensor<'a> {
    let (name, elements) = (record.name.clone(), record.elements());
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

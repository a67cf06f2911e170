//! The weights of a model, wherever they lie: a Hugging Face directory or a checkpoint of ours; and the way from the
//! second to the first.
//!
//! A checkpoint of a training run carries the model's `config.json` under `config.model` and the name of its
//! tokenizer under `config.tokenizer`, so a step directory is a model directory too.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use lockstep_model::{HfContent, HfImport, HfMapping, HfTensor, ModelConfig};
use lockstep_plan::DType;

use crate::{
    Checkpoint, CheckpointError, MANIFEST_FILE, TensorKind,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfCheckpoint, HfExport},
};

const CONFIG_FILE: &str = "config.json";
const TOKENIZER_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];

/// A directory that holds a model.
#[derive(Debug)]
pub struct ModelDirectory {
    path: PathBuf,
    config: ModelConfig,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    HuggingFace { files: HfCheckpoint, import: HfImport },
    Checkpoint(Box<Checkpoint>),
}

impl ModelDirectory {
    /// Opens a Hugging Face directory (`config.json` and safetensors) or a `step-...` directory of a run, and checks
    /// that its tensors are those of its configuration.
    ///
    /// # Errors
    /// Files that are missing or damaged, tensors that do not fit the configuration.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.to_owned();
        if dir.join(MANIFEST_FILE).is_file() {
            let checkpoint = Checkpoint::open(dir)?;
            let config = checkpoint_model(&checkpoint)?;
            return Ok(Self { path, config, weights: Weights::Checkpoint(Box::new(checkpoint)) });
        }
        let config = ModelConfig::from_file(&dir.join(CONFIG_FILE))?;
        let files = HfCheckpoint::open(dir)?;
        let found: Vec<(String, Vec<usize>)> = files
            .names()
            .map(|name| Ok((name.to_owned(), files.tensor(name)?.shape.to_vec())))
            .collect::<Result<_, CheckpointError>>()?;
        let import = HfMapping::new(&config)
            .match_checkpoint(found.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())))
            .map_err(|source| CheckpointError::DoesNotFit { dir: path.clone(), source })?;
        Ok(Self { path, config, weights: Weights::HuggingFace { files, import } })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What the run that wrote this called its tokenizer, or the `tokenizer.json` beside the weights.
    pub fn tokenizer(&self) -> Option<String> {
        match &self.weights {
            Weights::Checkpoint(checkpoint) => {
                checkpoint.manifest().config.get("tokenizer")?.as_str().map(str::to_owned)
            }
            Weights::HuggingFace { .. } => {
                let file = self.path.join(TOKENIZER_FILES[0]);
                file.is_file().then(|| file.display().to_string())
            }
        }
    }

    /// Hands every parameter that owns its weights to `sink`, by canonical name, in full precision.
    ///
    /// # Errors
    /// Damaged files; whatever `sink` returns.
    pub fn for_each_parameter<E: From<CheckpointError>>(
        &self,
        mut sink: impl FnMut(&str, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        match &self.weights {
            Weights::Checkpoint(checkpoint) => {
                let mut values = Vec::new();
                let parameters =
                    checkpoint.manifest().tensors.iter().filter(|entry| entry.kind == TensorKind::Parameter);
                for entry in parameters {
                    values.resize(entry.shape.iter().product(), 0.0);
                    checkpoint.read(&entry.name, &TensorKind::Parameter, 0, &mut values)?;
                    sink(&entry.name, &values)?;
                }
                Ok(())
            }
            Weights::HuggingFace { files, import } => read_imported(files, import, sink),
        }
    }
}

fn read_imported<E: From<CheckpointError>>(
    files: &HfCheckpoint,
    import: &HfImport,
    mut sink: impl FnMut(&str, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let mut stored = Vec::new();
    let mut values = Vec::new();
    // Parameters that share a tensor (GPT-2's q, k and v) follow each other: it is read once.
    let mut loaded = "";
    for place in &import.places {
        if loaded != place.tensor {
            stored.resize(place.tensor_shape.iter().product(), 0.0);
            files.read_f32(&place.tensor, &mut stored)?;
            loaded = &place.tensor;
        }
        values.resize(place.parameter_elements(), 0.0);
        place.read(&stored, &mut values).map_err(CheckpointError::from)?;
        sink(&place.parameter, &values)?;
    }
    for (tensor, place) in &import.tied_copies {
        if files.tensor(tensor)?.bytes != files.tensor(&place.tensor)?.bytes {
            let problem =
                CheckpointError::TiedTensorsDiffer { tensor: tensor.clone(), tied_to: place.tensor.clone() };
            return Err(problem.into());
        }
    }
    for tensor in &import.zeros {
        let found = files.tensor(tensor)?;
        HfImport::require_zeros(tensor, found.bytes.len() / found.elements().max(1), found.bytes)
            .map_err(CheckpointError::from)?;
    }
    Ok(())
}

/// The model that a checkpoint of a training run belongs to.
///
/// # Errors
/// [`CheckpointError::Model`] if the manifest holds no model or one that is not supported.
pub fn checkpoint_model(checkpoint: &Checkpoint) -> Result<ModelConfig, CheckpointError> {
    let origin = checkpoint.path().join(MANIFEST_FILE).display().to_string();
    let empty = serde_json::Map::new();
    let table = checkpoint.manifest().config.get("model").and_then(|model| model.as_object());
    Ok(ModelConfig::from_table(table.unwrap_or(&empty), &origin)?)
}

/// Writes the weights of a checkpoint as a directory that `transformers` loads: `config.json`,
/// `model.safetensors` (sharded above 5 GB), and the tokenizer's files if the run had one.
///
/// # Errors
/// A damaged checkpoint, an output directory that is not empty, a full disk.
pub fn export_hf(checkpoint: &Checkpoint, dtype: DType, out: &Path) -> Result<(), CheckpointError> {
    let config = checkpoint_model(checkpoint)?;
    let mapping = HfMapping::new(&config);
    let tensors = mapping.tensors().iter().map(|tensor| export_tensor(checkpoint, tensor)).collect();
    let config_text = serde_json::to_string_pretty(&config.to_json(dtype)).unwrap_or_default() + "\n";
    let tokenizer = checkpoint.manifest().config.get("tokenizer").and_then(|name| name.as_str());
    let copies = tokenizer
        .filter(|&name| name != "bytes")
        .and_then(|name| Path::new(name).parent())
        .map(|dir| TOKENIZER_FILES.iter().map(|file| dir.join(file)).filter(|file| file.is_file()).collect());
    HfExport {
        tensors,
        dtype: Some(dtype),
        texts: BTreeMap::from([(CONFIG_FILE.to_owned(), config_text)]),
        copies: copies.unwrap_or_default(),
        shard_bytes: DEFAULT_SHARD_BYTES,
    }
    .write(out)
}

fn export_tensor<'a>(checkpoint: &'a Checkpoint, tensor: &'a HfTensor) -> ExportTensor<'a> {
    let elements: usize = tensor.shape.iter().product();
    // The writer asks for a tensor piece by piece, from the first to the last: it is put together once.
    let assembled = RefCell::new(Vec::new());
    let values = move |start: usize, out: &mut [f32]| -> Result<(), CheckpointError> {
        let mut assembled = assembled.borrow_mut();
        if start == 0 {
            *assembled = assemble(checkpoint, tensor, elements)?;
        }
        out.copy_from_slice(&assembled[start..start + out.len()]);
        if start + out.len() == elements {
            *assembled = Vec::new();
        }
        Ok(())
    };
    ExportTensor {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        data: ExportData::Values(Box::new(values)),
    }
}

fn assemble(
    checkpoint: &Checkpoint,
    tensor: &HfTensor,
    elements: usize,
) -> Result<Vec<f32>, CheckpointError> {
    let mut stored = vec![0.0; elements];
    if let HfContent::Parameters(places) = &tensor.content {
        let mut values = Vec::new();
        for place in places {
            values.resize(place.parameter_elements(), 0.0);
            checkpoint.read(&place.parameter, &TensorKind::Parameter, 0, &mut values)?;
            place.write(&values, &mut stored)?;
        }
    }
    Ok(stored)
}

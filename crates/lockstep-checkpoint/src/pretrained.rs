//! Weights of a model from a Hugging Face directory, a GGUF file or a training checkpoint.
//!
//! A checkpoint of a training run stores the model's `config.json` under `config.model` and the path of its tokenizer
//! under `config.tokenizer`, so a step directory is a model directory too. The checkpoint of a fine-tuning run may hold
//! only the trained part. The rest is then read from the base model, whose digest is checked.

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use lockstep_model::{HfImport, HfMapping, HfPlace, HfTransform, ModelConfig};
use lockstep_plan::DType;
use serde_json::Value;

use crate::{
    BaseModel, Checkpoint, CheckpointError, Digest, MANIFEST_FILE, PackedParameter, PeftAdapter,
    QuantizationSummary, StoredParameter, TensorKind,
    absent::AbsentFile,
    digest::Hasher,
    gguf::{EmbeddedTokenizer, model::GgufModel},
    hf::HfCheckpoint,
    listing::list,
    quantized::{QuantizedFiles, quantization_in},
    tensor_files::{TensorFiles, gguf_file},
    trained::{Trained, adapter_of, quantized_by, read_whole},
};

pub(crate) const CONFIG_FILE: &str = "config.json";
pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
/// Default generation settings of a model.
pub(crate) const GENERATION_FILE: &str = "generation_config.json";
/// Directory that holds a model.
#[derive(Debug)]
pub struct ModelDirectory {
    pub(crate) path: PathBuf,
    pub(crate) config: ModelConfig,
    pub(crate) weights: Weights,
}

/// Selection of parameters by canonical name.
type Selection<'s> = &'s dyn Fn(&str) -> bool;
/// Callback that receives parameters by canonical name.
type Sink<'s, E> = &'s mut dyn FnMut(&str, &[f32]) -> Result<(), E>;

#[derive(Debug)]
pub(crate) enum Weights {
    Files {
        files: TensorFiles,
        import: HfImport,
    },
    Checkpoint(Box<Checkpoint>),
    /// Base model in another directory, with its trained changes.
    Tuned {
        base: Box<ModelDirectory>,
        trained: Trained,
    },
}

impl ModelDirectory {
    /// Opens a Hugging Face directory (`config.json` and safetensors), a `step-...` directory of a run, a GGUF file, or a directory
    /// with one. Checks that its tensors are those of its configuration.
    ///
    /// # Errors
    /// If a file is missing or damaged, or the tensors do not fit the configuration.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.to_owned();
        if dir.join(MANIFEST_FILE).is_file() {
            return Self::of_checkpoint(Checkpoint::open(dir)?);
        }
        if let Some(file) = gguf_file(dir)? {
            let (model, config) = GgufModel::open(&file)?;
            return Self::of_files(file, config, TensorFiles::Gguf(Box::new(model)));
        }
        let config_file = dir.join(CONFIG_FILE);
        if !config_file.is_file()
            && let Some(newest) = list(dir).ok().and_then(|mut found| found.pop())
        {
            return Err(CheckpointError::ParentDirectory { path, newest: newest.path });
        }
        let config = ModelConfig::from_file(&config_file)?;
        let files = HfCheckpoint::open(dir)?;
        let files = match quantization_in(dir)? {
            None => TensorFiles::HuggingFace(files),
            Some(quantization) => {
                TensorFiles::Quantized(Box::new(QuantizedFiles::new(dir, files, quantization, &config)?))
            }
        };
        Self::of_files(path, config, files)
    }

    /// Opens a directory for questions about sizes and places alone: of one with a `config.json` and without weights, they are those of
    /// the safetensors file that the configuration describes. Its elements have the configuration's `dtype`; f32 if it has none, as in
    /// transformers.
    ///
    /// # Errors
    /// As for [`ModelDirectory::open`]; if there are no weights, and those of the configuration are quantized.
    pub fn described(dir: &Path) -> Result<Self, CheckpointError> {
        match Self::open(dir) {
            Err(CheckpointError::NoWeights { .. }) if quantization_in(dir)?.is_none() => {
                let file = dir.join(CONFIG_FILE);
                Self::of_configuration(dir, ModelConfig::from_file(&file)?, stored_dtype(&file)?)
            }
            opened => opened,
        }
    }

    /// Returns a model without weights, in a safetensors file that would hold them in type `dtype`. `dir` names it in messages.
    ///
    /// # Errors
    /// If the tensors of the configuration are not those of its model.
    pub fn of_configuration(dir: &Path, config: ModelConfig, dtype: DType) -> Result<Self, CheckpointError> {
        let file = AbsentFile::new(dir, &config, dtype);
        Self::of_files(dir.to_owned(), config, TensorFiles::Absent(file))
    }

    /// Returns false if only the configuration is there.
    pub fn has_weights(&self) -> bool {
        !matches!(&self.weights, Weights::Files { files: TensorFiles::Absent(_), .. })
    }

    fn of_files(path: PathBuf, config: ModelConfig, files: TensorFiles) -> Result<Self, CheckpointError> {
        let found = files.shapes()?;
        let mapping = match &files {
            TensorFiles::Gguf(model) if !model.has_single_experts() => HfMapping::with_stacks(&config),
            _ => HfMapping::new(&config),
        };
        let import = mapping
            .match_checkpoint(found.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())))
            .map_err(|error| CheckpointError::DoesNotFit { dir: path.clone(), source: files.named(error) })?;
        Ok(Self { path, config, weights: Weights::Files { files, import } })
    }

    /// Opens the model of a checkpoint. If the checkpoint holds only what a fine-tuning run trained, also opens the
    /// base model from its recorded path.
    ///
    /// # Errors
    /// As for [`ModelDirectory::open`].
    pub fn of_checkpoint(checkpoint: Checkpoint) -> Result<Self, CheckpointError> {
        let path = checkpoint.path().to_owned();
        let config = checkpoint_model(&checkpoint)?;
        let weights = match BaseModel::of(&checkpoint)? {
            None => Weights::Checkpoint(Box::new(checkpoint)),
            Some(BaseModel { path: base_path, digest }) => {
                let missing = |source| CheckpointError::BaseModel {
                    path: path.clone(),
                    base: base_path.clone(),
                    source: Box::new(source),
                };
                let base = Box::new(Self::open(&base_path).map_err(missing)?);
                let adapter = adapter_of(&checkpoint, &config)?;
                let quantized = quantized_by(&checkpoint)?;
                let checkpoint = Box::new(checkpoint);
                let trained = Trained::Checkpoint { checkpoint, adapter, quantized, digest };
                Weights::Tuned { base, trained }
            }
        };
        Ok(Self { path, config, weights })
    }

    /// Returns the model with the PEFT adapter in `dir`.
    ///
    /// # Errors
    /// If the adapter is damaged, of an unsupported kind, or does not fit the model.
    pub fn with_adapter(self, dir: &Path) -> Result<Self, CheckpointError> {
        let trained = Trained::Peft(Box::new(PeftAdapter::open(dir, &self.config)?));
        let (path, config) = (self.path.clone(), self.config.clone());
        Ok(Self { path, config, weights: Weights::Tuned { base: Box::new(self), trained } })
    }

    /// Returns the configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if the weights are those of a run that quantized matrices of its base model: their values are those of its blocks,
    /// and an adapter is merged into these, as peft merges into a quantized model.
    pub fn has_values_of_blocks(&self) -> bool {
        matches!(
            &self.weights,
            Weights::Tuned { trained: Trained::Checkpoint { quantized, .. }, .. } if !quantized.is_empty()
        )
    }

    /// Returns the tokenizer: the name that the training run recorded, or the path of a `tokenizer.json` beside the
    /// weights.
    pub fn tokenizer(&self) -> Option<String> {
        match &self.weights {
            Weights::Checkpoint(checkpoint)
            | Weights::Tuned { trained: Trained::Checkpoint { checkpoint, .. }, .. } => {
                checkpoint.manifest().config.get("tokenizer")?.as_str().map(str::to_owned)
            }
            Weights::Tuned { base, .. } => base.tokenizer(),
            Weights::Files { files, .. } => {
                let file = if files.has_companions() {
                    self.path.join(TOKENIZER_FILE)
                } else {
                    self.path.with_file_name(TOKENIZER_FILE)
                };
                file.is_file().then(|| file.display().to_string())
            }
        }
    }

    /// Returns the tokenizer inside the model's file; `None` if there is none, and if a `tokenizer.json` lies beside it.
    ///
    /// # Errors
    /// If the tokenizer is damaged or of an unsupported kind.
    pub fn embedded_tokenizer(&self) -> Result<Option<EmbeddedTokenizer>, CheckpointError> {
        match &self.weights {
            Weights::Files { files: TensorFiles::Gguf(model), .. } if self.tokenizer().is_none() => {
                model.tokenizer()
            }
            Weights::Tuned { base, trained: Trained::Peft(_) | Trained::Scales(_) } => {
                base.embedded_tokenizer()
            }
            _ => Ok(None),
        }
    }

    /// Returns true if these weights come from a run here that was trained on chats.
    pub fn has_chats(&self) -> bool {
        match &self.weights {
            Weights::Checkpoint(checkpoint)
            | Weights::Tuned { trained: Trained::Checkpoint { checkpoint, .. }, .. } => {
                checkpoint.manifest().config.get("has_chats").is_some_and(|said| said == true)
            }
            Weights::Tuned { base, trained: Trained::Scales(_) } => base.has_chats(),
            Weights::Tuned { .. } | Weights::Files { .. } => false,
        }
    }

    /// Returns the path of the `generation_config.json` beside the weights, or else beside the tokenizer.
    pub fn generation_config(&self) -> Option<PathBuf> {
        let beside_weights = match &self.weights {
            Weights::Files { files, .. } if files.has_companions() => Some(self.path.join(GENERATION_FILE)),
            Weights::Files { .. } => None,
            Weights::Tuned { base, .. } => base.generation_config(),
            Weights::Checkpoint(_) => None,
        };
        let beside_tokenizer = || Some(self.tokenizer_directory()?.join(GENERATION_FILE));
        beside_weights.into_iter().chain(beside_tokenizer()).find(|file| file.is_file())
    }

    /// Returns the directory of the tokenizer's files; `None` for the byte tokenizer.
    pub(crate) fn tokenizer_directory(&self) -> Option<PathBuf> {
        let beside = |name: String| Some(Path::new(&name).parent()?.to_owned());
        match (self.tokenizer(), &self.weights) {
            (Some(name), _) if name == "bytes" => None,
            (Some(name), _) => beside(name),
            // The directory may hold tokenizer files that are not read here but that transformers needs.
            (None, Weights::Files { files, .. }) if files.has_companions() => Some(self.path.clone()),
            (None, Weights::Tuned { base, trained: Trained::Scales(_) }) => base.tokenizer_directory(),
            (None, _) => None,
        }
    }

    /// Passes every parameter that owns its weights to `sink`, by canonical name, in f32.
    ///
    /// # Errors
    /// If a file is damaged, the base model has changed, or `sink` fails.
    pub fn for_each_parameter<E: From<CheckpointError>>(
        &self,
        mut sink: impl FnMut(&str, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit(&|_| true, &mut sink)
    }

    /// As [`ModelDirectory::for_each_parameter`], with those parameters only that `selection` selects; the others are not
    /// read if nothing depends on them.
    ///
    /// # Errors
    /// As for [`ModelDirectory::for_each_parameter`].
    pub fn for_each_selected<E: From<CheckpointError>>(
        &self,
        selection: impl Fn(&str) -> bool,
        mut sink: impl FnMut(&str, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit(&selection, &mut sink)
    }

    /// Returns the type of most elements of a model's files, if it is a float type; bf16 if most are quantized; f32 for the checkpoints
    /// of runs and fine-tuned models.
    pub fn stored_dtype(&self) -> DType {
        match &self.weights {
            Weights::Files { files, .. } => files.compute_dtype(),
            Weights::Tuned { base, trained: Trained::Scales(_) } => base.stored_dtype(),
            Weights::Checkpoint(_) | Weights::Tuned { .. } => DType::F32,
        }
    }

    /// Returns the parameters that can be used where they are stored: those of a model's files that are a whole tensor in the model's
    /// layout, or rows of one.
    pub fn stored_parameters(&self) -> Vec<StoredParameter<'_>> {
        match &self.weights {
            Weights::Files { files, import } => files.stored_parameters(import),
            Weights::Checkpoint(_) | Weights::Tuned { .. } => Vec::new(),
        }
    }

    /// Returns the pieces of parameters that are stored in the parameter's order: those of [`ModelDirectory::stored_parameters`], and
    /// the tensors of a parameter that consists of several. Pieces of a parameter need not cover all of it.
    pub fn stored_pieces(&self) -> Vec<StoredParameter<'_>> {
        match &self.weights {
            Weights::Files { files, import } => files.stored_pieces(import),
            Weights::Checkpoint(_) | Weights::Tuned { .. } => Vec::new(),
        }
    }

    /// Returns the parameters of a quantized model that can be repacked into blocks with the same values.
    pub fn packed_parameters(&self) -> Vec<PackedParameter<'_>> {
        match &self.weights {
            Weights::Files { files, import } => files.packed_parameters(import),
            Weights::Checkpoint(_) | Weights::Tuned { .. } => Vec::new(),
        }
    }

    /// Returns a summary of the packed tensors of a Hugging Face directory, or of the blocks of a GGUF file that are repacked or decoded;
    /// `None` if there are none.
    pub fn quantization(&self) -> Option<QuantizationSummary> {
        match &self.weights {
            Weights::Files { files: TensorFiles::Quantized(files), .. } => Some(files.summary()),
            Weights::Files { files: TensorFiles::Gguf(model), .. } => model.summary(),
            _ => None,
        }
    }

    /// As [`ModelDirectory::for_each_parameter`], and returns the digest of all names and values. A fine-tuning run
    /// records it to recognize its base model.
    ///
    /// # Errors
    /// As for [`ModelDirectory::for_each_parameter`].
    pub fn for_each_parameter_hashed<E: From<CheckpointError>>(
        &self,
        mut sink: impl FnMut(&str, &[f32]) -> Result<(), E>,
    ) -> Result<Digest, E> {
        let mut hasher = Hasher::new();
        self.visit(&|_| true, &mut |name: &str, values: &[f32]| {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            hasher.update(&(values.len() as u64).to_le_bytes());
            hasher.update(bytemuck::cast_slice(values));
            sink(name, values)
        })?;
        Ok(hasher.finish())
    }

    // Takes a trait object: a fine-tuned model visits its base model, and a generic sink would give a new type at each
    // level.
    fn visit<E: From<CheckpointError>>(
        &self,
        is_selected: Selection<'_>,
        sink: Sink<'_, E>,
    ) -> Result<(), E> {
        let mut values = Vec::new();
        match &self.weights {
            Weights::Checkpoint(checkpoint) => {
                let parameters =
                    checkpoint.manifest().tensors.iter().filter(|entry| entry.kind == TensorKind::Parameter);
                for entry in parameters.filter(|entry| is_selected(&entry.name)) {
                    read_whole(checkpoint, &entry.name, &mut values)?;
                    sink(&entry.name, &values)?;
                }
                Ok(())
            }
            Weights::Files { files, import } => read_imported(files, import, is_selected, sink),
            Weights::Tuned { base, trained } => {
                let found = base.for_each_parameter_hashed(|name, before| -> Result<(), E> {
                    if !is_selected(name) {
                        return Ok(());
                    }
                    values.clear();
                    values.extend_from_slice(before);
                    trained.tune(name, &mut values)?;
                    sink(name, &values)
                })?;
                match trained {
                    Trained::Checkpoint { digest, .. } if found != *digest => {
                        let (path, base) = (self.path.clone(), base.path.clone());
                        Err(CheckpointError::BaseModelChanged { path, base }.into())
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// Returns the directories, or the GGUF file, that the weights come from.
    pub(crate) fn sources(&self) -> Vec<&Path> {
        match &self.weights {
            Weights::Files { .. } | Weights::Checkpoint(_) => vec![&self.path],
            Weights::Tuned { base, trained } => {
                let own = match trained {
                    Trained::Checkpoint { checkpoint, .. } => checkpoint.path(),
                    Trained::Peft(peft) => peft.path(),
                    Trained::Scales(_) => return base.sources(),
                };
                [&base.sources()[..], &[own]].concat()
            }
        }
    }

    /// Checks the digest of the base model, which covers all parameters, before they are read one by one.
    pub(crate) fn check_base(&self) -> Result<(), CheckpointError> {
        match &self.weights {
            Weights::Tuned { base, trained: Trained::Scales(_) } => base.check_base(),
            Weights::Tuned { .. } => self.for_each_parameter(|_, _| Ok(())),
            Weights::Files { .. } | Weights::Checkpoint(_) => Ok(()),
        }
    }

    /// Fills `values` with one parameter, in f32.
    ///
    /// # Errors
    /// If a file is damaged, or there is no such parameter.
    pub fn read(&self, name: &str, values: &mut Vec<f32>) -> Result<(), CheckpointError> {
        match &self.weights {
            Weights::Checkpoint(checkpoint) => read_whole(checkpoint, name, values),
            Weights::Tuned { base, trained } => {
                base.read(name, values)?;
                trained.tune(name, values)
            }
            Weights::Files { files, import } => {
                values.clear();
                for place in import.places.iter().filter(|place| place.parameter == name) {
                    let mut stored = vec![0.0; place.tensor_shape.iter().product()];
                    files.read_f32(&place.tensor, &mut stored)?;
                    values.resize(place.part().end, 0.0);
                    place.read(&stored, &mut values[place.part()])?;
                }
                if values.is_empty() {
                    let (path, tensor) = (self.path.clone(), name.to_owned());
                    return Err(CheckpointError::NoSuchTensor { path, tensor });
                }
                Ok(())
            }
        }
    }

    /// Fills `values` with a range of one parameter's elements.
    pub(crate) fn read_part(
        &self,
        name: &str,
        part: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), CheckpointError> {
        match &self.weights {
            Weights::Checkpoint(checkpoint) => {
                values.resize(part.len(), 0.0);
                return checkpoint.read(name, &TensorKind::Parameter, part.start, values);
            }
            // An expert of a stack, which has a tensor of its own.
            Weights::Files { files, import } => {
                let is_part = |place: &&HfPlace| place.parameter == name && place.part() == part;
                if let Some(place) = import.places.iter().find(is_part) {
                    let mut stored = vec![0.0; place.tensor_shape.iter().product()];
                    files.read_f32(&place.tensor, &mut stored)?;
                    values.resize(part.len(), 0.0);
                    return Ok(place.read(&stored, values)?);
                }
                // An expert of a stack that is one tensor.
                let holds = |place: &&HfPlace| {
                    let held = place.part();
                    let is_within = held.start <= part.start && part.end <= held.end;
                    place.parameter == name && place.transform == HfTransform::Same && is_within
                };
                if let Some(place) = import.places.iter().find(holds) {
                    values.resize(part.len(), 0.0);
                    if files.read_part(&place.tensor, part.start - place.first_element, values)? {
                        return Ok(());
                    }
                }
            }
            Weights::Tuned { .. } => {}
        }
        self.read(name, values)?;
        values.truncate(part.end);
        values.drain(..part.start);
        Ok(())
    }
}

fn read_imported<E: From<CheckpointError>>(
    files: &TensorFiles,
    import: &HfImport,
    is_selected: Selection<'_>,
    sink: Sink<'_, E>,
) -> Result<(), E> {
    let mut stored = Vec::new();
    let mut values = Vec::new();
    // Parameters that share a tensor (GPT-2's q, k and v) are adjacent, so the tensor is read once.
    let mut loaded = "";
    let mut places = import.places.iter().filter(|place| is_selected(&place.parameter)).peekable();
    while let Some(place) = places.next() {
        if loaded != place.tensor {
            stored.resize(place.tensor_shape.iter().product(), 0.0);
            files.read_f32(&place.tensor, &mut stored)?;
            loaded = &place.tensor;
        }
        // Places of the stacked experts of one parameter are adjacent.
        values.resize(place.part().end, 0.0);
        place.read(&stored, &mut values[place.part()]).map_err(CheckpointError::from)?;
        let is_last = places.peek().is_none_or(|next| next.parameter != place.parameter);
        if is_last {
            sink(&place.parameter, &values)?;
        }
    }
    for (tensor, place) in &import.tied_copies {
        if !files.are_same(tensor, &place.tensor)? {
            let problem =
                CheckpointError::TiedTensorsDiffer { tensor: tensor.clone(), tied_to: place.tensor.clone() };
            return Err(problem.into());
        }
    }
    for tensor in &import.zeros {
        files.require_zeros(tensor)?;
    }
    Ok(())
}

/// Returns the type of the weights that a `config.json` names; f32 if it names none.
fn stored_dtype(config_file: &Path) -> Result<DType, CheckpointError> {
    let text = fs::read_to_string(config_file).map_err(CheckpointError::io("read", config_file))?;
    let config: Value = serde_json::from_str(&text).unwrap_or_default();
    let named = ["dtype", "torch_dtype"].iter().find_map(|key| config[key].as_str());
    Ok(match named {
        Some("bfloat16") => DType::BF16,
        Some("float16") => DType::F16,
        _ => DType::F32,
    })
}

/// Returns the model configuration in a checkpoint of a training run.
///
/// # Errors
/// If the manifest holds no model, or an unsupported one.
pub fn checkpoint_model(checkpoint: &Checkpoint) -> Result<ModelConfig, CheckpointError> {
    let origin = checkpoint.path().join(MANIFEST_FILE).display().to_string();
    let empty = serde_json::Map::new();
    let table = checkpoint.manifest().config.get("model").and_then(|model| model.as_object());
    Ok(ModelConfig::from_table(table.unwrap_or(&empty), &origin)?)
}

//! Export of a model to the formats of Hugging Face: a directory that `transformers` loads, or an adapter that `peft` loads.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use lockstep_model::{AdapterTensor, HfContent, HfMapping, HfTensor};
use lockstep_plan::DType;

use crate::{
    CheckpointError,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfExport, SINGLE_FILE},
    peft,
    pretrained::{CONFIG_FILE, GENERATION_FILE, ModelDirectory, TOKENIZER_FILE, Weights},
    trained::{Trained, read_whole},
};

/// Files that published tokenizers have besides `tokenizer.json`; nothing else in their directory is copied.
const TOKENIZER_FILES: [&str; 14] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "tokenizer.model.v3",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "qwen.tiktoken",
];

impl ModelDirectory {
    /// Returns the files that belong to the model besides weights and configuration, by name.
    pub(crate) fn companions(&self) -> BTreeMap<String, PathBuf> {
        let mut files = BTreeMap::new();
        if let Some(dir) = self.tokenizer_directory() {
            files.extend(TOKENIZER_FILES.map(|name| (name.to_owned(), dir.join(name))));
        }
        let tokenizer = self.tokenizer().filter(|name| name != "bytes");
        files.extend(tokenizer.map(|path| (TOKENIZER_FILE.to_owned(), path.into())));
        files.extend(self.generation_config().map(|path| (GENERATION_FILE.to_owned(), path)));
        files.retain(|_, path| path.is_file());
        files
    }

    /// Writes the model as a directory that `transformers` loads: `config.json`, `model.safetensors` (sharded above 5
    /// GB), all tokenizer files including the chat template, and `generation_config.json`.
    ///
    /// # Errors
    /// If a file is damaged, the base model has changed, the output directory is not empty, or the disk is full.
    pub fn export_hf(&self, dtype: DType, out: &Path) -> Result<(), CheckpointError> {
        self.check_base()?;
        let mapping = HfMapping::new(&self.config);
        let tensors = mapping.tensors().iter().map(|tensor| self.export_tensor(tensor)).collect();
        let config = serde_json::to_string_pretty(&self.config.to_json(dtype)).unwrap_or_default() + "\n";
        HfExport {
            tensors,
            dtype: Some(dtype),
            file: SINGLE_FILE,
            texts: BTreeMap::from([(CONFIG_FILE.to_owned(), config)]),
            copies: self.companions(),
            shard_bytes: DEFAULT_SHARD_BYTES,
        }
        .write(out)
    }

    /// Writes the adapter that a run has trained as a directory that `peft` loads.
    ///
    /// # Errors
    /// If the model has no trained adapter, and as for [`ModelDirectory::export_hf`].
    pub fn export_adapter(&self, dtype: DType, out: &Path) -> Result<(), CheckpointError> {
        let Weights::Tuned { base, trained: Trained::Checkpoint { checkpoint, adapter: Some(adapter), .. } } =
            &self.weights
        else {
            return Err(CheckpointError::NoAdapter { path: self.path.clone() });
        };
        let tensor = |tensor: &AdapterTensor| {
            let parameters = tensor.parameters.clone();
            let values = move |start: usize, out: &mut [f32]| -> Result<(), CheckpointError> {
                let (mut all, mut values) = (Vec::new(), Vec::new());
                for (name, _) in &parameters {
                    read_whole(checkpoint, name, &mut values)?;
                    all.extend_from_slice(&values);
                }
                out.copy_from_slice(&all[start..start + out.len()]);
                Ok(())
            };
            ExportTensor {
                name: format!("{}{}", peft::PREFIX, tensor.name),
                shape: tensor.shape.clone(),
                data: ExportData::Values(Box::new(values)),
            }
        };
        let config = peft::config_text(adapter, &self.config, &base.path);
        HfExport {
            tensors: adapter.tensors().iter().map(tensor).collect(),
            dtype: Some(dtype),
            file: peft::WEIGHTS_FILE,
            texts: BTreeMap::from([(peft::CONFIG_FILE.to_owned(), config)]),
            copies: BTreeMap::new(),
            shard_bytes: u64::MAX,
        }
        .write(out)
    }

    pub(crate) fn export_tensor<'a>(&'a self, tensor: &'a HfTensor) -> ExportTensor<'a> {
        let elements: usize = tensor.shape.iter().product();
        // The writer requests a tensor piece by piece, in order; it is assembled at the first piece.
        let assembled = RefCell::new(Vec::new());
        let values = move |start: usize, out: &mut [f32]| -> Result<(), CheckpointError> {
            let mut assembled = assembled.borrow_mut();
            if start == 0 {
                *assembled = self.assemble(tensor, elements)?;
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

    /// Returns all values of a tensor of the exported model.
    pub(crate) fn assemble(&self, tensor: &HfTensor, elements: usize) -> Result<Vec<f32>, CheckpointError> {
        let mut stored = vec![0.0; elements];
        if let HfContent::Parameters(places) = &tensor.content {
            let mut values = Vec::new();
            for place in places {
                self.read_part(&place.parameter, place.part(), &mut values)?;
                place.write(&values, &mut stored)?;
            }
        }
        Ok(stored)
    }
}

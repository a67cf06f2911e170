//! A model in memory, ready to run the forward.

use std::path::{Path, PathBuf};

use lockstep_checkpoint::{CheckpointError, ModelDirectory};
use lockstep_data::Tokenizer;
use lockstep_engine::StateStore;
use lockstep_graph::{BlockShape, Mode, Recompute};
use lockstep_model::{HeadOutput, ModelConfig, RecordedModel};
use lockstep_plan::{DType, MemoryCategory, ParameterId};
use lockstep_tensor::{Arena, Queue, Summation};

use crate::{GenerationConfig, InferError};

/// A model with f32 weights, and a queue to run it on.
pub struct LoadedModel {
    pub(crate) config: ModelConfig,
    pub(crate) weights: StateStore,
    pub(crate) arena: Arena,
    pub(crate) queue: Box<dyn Queue>,
    tokenizer: Option<String>,
    generation: Option<PathBuf>,
    has_chats: bool,
    name: String,
}

impl LoadedModel {
    /// Loads a Hugging Face directory or a checkpoint of a run, to run on `threads` threads.
    ///
    /// # Errors
    /// If a file is missing, damaged or does not fit the model, or if memory runs out.
    pub fn open(dir: &Path, threads: usize) -> Result<Self, InferError> {
        Self::load(&ModelDirectory::open(dir)?, threads)
    }

    /// Loads as [`LoadedModel::open`] does, with the PEFT adapter in `adapter` merged into the weights.
    ///
    /// # Errors
    /// As for [`LoadedModel::open`], or if the adapter belongs to another model.
    pub fn open_adapted(dir: &Path, adapter: &Path, threads: usize) -> Result<Self, InferError> {
        Self::load(&ModelDirectory::open(dir)?.with_adapter(adapter)?, threads)
    }

    fn load(directory: &ModelDirectory, threads: usize) -> Result<Self, InferError> {
        let config = directory.config().without_dropout();
        let arena = Arena::new();
        let records = record(&config, 1, 1, HeadOutput::Logits).records().to_vec();
        let weights = StateStore::zeros(&arena, &records, DType::F32, MemoryCategory::Parameters)?;
        directory.for_each_parameter(|name, values| -> Result<(), CheckpointError> {
            if let Some(index) = records.iter().position(|record| record.name == name) {
                weights.view(ParameterId(index)).write(values);
            }
            Ok(())
        })?;
        let mut queue = arena.queue(threads)?;
        // A token's logits must not depend on the tokens that are computed with it.
        queue.set_summation(Summation::ByDepth);
        let name = directory.path().display().to_string();
        let (tokenizer, generation) = (directory.tokenizer(), directory.generation_config());
        let has_chats = directory.has_chats();
        Ok(Self { config, weights, arena, queue, tokenizer, generation, has_chats, name })
    }

    /// Returns the model's configuration, without dropout.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns true if a Lockstep run trained this model on chats.
    pub fn has_chats(&self) -> bool {
        self.has_chats
    }

    /// Returns the model's generation settings; all absent without a `generation_config.json`.
    ///
    /// # Errors
    /// If the file cannot be read or is invalid.
    pub fn generation_config(&self) -> Result<GenerationConfig, InferError> {
        self.generation.as_deref().map_or_else(|| Ok(GenerationConfig::default()), GenerationConfig::read)
    }

    /// Returns the model's tokenizer. Without one, a vocabulary of 256 to 259 tokens means bytes.
    ///
    /// # Errors
    /// If there is no tokenizer, or it cannot be loaded or does not fit the vocabulary.
    pub fn tokenizer(&self) -> Result<Tokenizer, InferError> {
        let vocab_size = self.config.vocab_size();
        let name = match &self.tokenizer {
            Some(name) => name.as_str(),
            None if (256..=259).contains(&vocab_size) => "bytes",
            None => return Err(InferError::NoTokenizer { model: self.name.clone(), vocab_size }),
        };
        let tokenizer = Tokenizer::load(name)?;
        tokenizer.fits(vocab_size)?;
        Ok(tokenizer)
    }

    /// Records the programs for `sequences` of `seq_len` tokens.
    pub(crate) fn record(&self, sequences: usize, seq_len: usize, output: HeadOutput) -> RecordedModel {
        record(&self.config, sequences, seq_len, output)
    }
}

fn record(config: &ModelConfig, sequences: usize, seq_len: usize, output: HeadOutput) -> RecordedModel {
    let shape = BlockShape { sequences, seq_len, dtype: DType::F32 };
    RecordedModel::new(config, Mode::Inference, shape, Recompute::None, output)
}

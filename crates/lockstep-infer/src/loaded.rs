//! A model in memory, ready to run the forward.

use std::path::{Path, PathBuf};

use lockstep_checkpoint::{ModelDirectory, gguf::EmbeddedTokenizer};
use lockstep_data::Tokenizer;
use lockstep_graph::{BlockShape, Mode, Recompute};
use lockstep_model::{HeadOutput, ModelConfig, RecordedModel};
use lockstep_plan::DType;
use lockstep_tensor::{Arena, Queue, Summation};

use crate::{GenerationConfig, InferError, weights::ModelWeights};

/// Settings of [`LoadedModel::load`].
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Number of compute threads.
    pub threads: usize,
    /// Type of weights and activations: f32, bf16 or f16; `None` takes that of most weights in the files.
    pub dtype: Option<DType>,
}

/// A model, and a queue to run it on.
pub struct LoadedModel {
    pub(crate) config: ModelConfig,
    pub(crate) weights: ModelWeights,
    /// Type of weights, activations and cached keys and values.
    pub(crate) dtype: DType,
    pub(crate) arena: Arena,
    pub(crate) queue: Box<dyn Queue>,
    tokenizer: TokenizerSource,
    generation: Option<PathBuf>,
    has_chats: bool,
    name: String,
}

/// Source of a model's tokenizer. It is read on request, since a model can be run without one.
enum TokenizerSource {
    /// A file, or `bytes`.
    Named(String),
    /// The model's own file.
    Embedded(EmbeddedTokenizer),
    /// The tokenizer in the model's file is not supported.
    Refused(String),
    None,
}

impl TokenizerSource {
    fn of(directory: &ModelDirectory) -> Self {
        match (directory.tokenizer(), directory.embedded_tokenizer()) {
            (Some(name), _) => Self::Named(name),
            (None, Ok(Some(tokenizer))) => Self::Embedded(tokenizer),
            (None, Ok(None)) => Self::None,
            (None, Err(error)) => Self::Refused(error.to_string()),
        }
    }
}

impl LoadedModel {
    /// Loads a Hugging Face directory, a GGUF file or a checkpoint of a run, in the type of its files, to run on `threads` threads.
    ///
    /// # Errors
    /// If a file is missing, damaged or does not fit the model, or if memory runs out.
    pub fn open(dir: &Path, threads: usize) -> Result<Self, InferError> {
        Self::load(&ModelDirectory::open(dir)?, LoadOptions { threads, dtype: None })
    }

    /// Loads a model. Weights that are stored in the type that is asked for are used where they lie in their files; all others
    /// are converted into memory.
    ///
    /// # Errors
    /// As for [`LoadedModel::open`].
    pub fn load(directory: &ModelDirectory, options: LoadOptions) -> Result<Self, InferError> {
        let LoadOptions { threads, dtype } = options;
        let dtype = dtype.unwrap_or_else(|| directory.stored_dtype());
        let config = directory.config().without_dropout();
        let arena = Arena::new();
        let recorded = record(&config, dtype, [1, 1], HeadOutput::Logits);
        let weights = ModelWeights::load(directory, recorded.records(), dtype, &arena)?;
        let mut queue = arena.queue(threads)?;
        // A token's logits must not depend on the tokens that are computed with it.
        queue.set_summation(Summation::ByDepth);
        let name = directory.path().display().to_string();
        let (tokenizer, generation) = (TokenizerSource::of(directory), directory.generation_config());
        let has_chats = directory.has_chats();
        Ok(Self { config, weights, dtype, arena, queue, tokenizer, generation, has_chats, name })
    }

    /// Returns the type of the weights and activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of compute threads.
    pub fn threads(&self) -> usize {
        self.queue.threads()
    }

    /// Returns the bytes of weights that stay in their files, and of those that were converted into memory.
    pub fn weight_bytes(&self) -> [usize; 2] {
        [self.weights.in_place_bytes, self.weights.converted_bytes()]
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
        let tokenizer = match &self.tokenizer {
            TokenizerSource::Named(name) => Tokenizer::load(name)?,
            TokenizerSource::Embedded(EmbeddedTokenizer { tokenizer_json, config_json }) => {
                let path = Path::new(&self.name);
                Tokenizer::from_json(tokenizer_json.as_bytes(), path)?
                    .with_config(config_json.as_bytes(), path)?
            }
            TokenizerSource::Refused(problem) => {
                let (model, problem) = (self.name.clone(), problem.clone());
                return Err(InferError::EmbeddedTokenizer { model, problem });
            }
            TokenizerSource::None if (256..=259).contains(&vocab_size) => Tokenizer::Bytes,
            TokenizerSource::None => {
                return Err(InferError::NoTokenizer { model: self.name.clone(), vocab_size });
            }
        };
        tokenizer.fits(vocab_size)?;
        Ok(tokenizer)
    }

    /// Records the programs for `sequences` of `seq_len` tokens.
    pub(crate) fn record(&self, sequences: usize, seq_len: usize, output: HeadOutput) -> RecordedModel {
        record(&self.config, self.dtype, [sequences, seq_len], output)
    }
}

fn record(
    config: &ModelConfig,
    dtype: DType,
    [sequences, seq_len]: [usize; 2],
    output: HeadOutput,
) -> RecordedModel {
    let shape = BlockShape { sequences, seq_len, dtype };
    RecordedModel::new(config, Mode::Inference, shape, Recompute::None, output)
}

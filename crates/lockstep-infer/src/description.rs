//! Description of a model besides its weights: configuration, tokenizer and settings of generation.

use std::path::{Path, PathBuf};

use lockstep_checkpoint::{ModelDirectory, gguf::EmbeddedTokenizer};
use lockstep_data::Tokenizer;
use lockstep_model::ModelConfig;

use crate::{GenerationConfig, InferError};

/// A model without its weights.
#[derive(Debug, Clone)]
pub struct ModelDescription {
    config: ModelConfig,
    tokenizer: TokenizerSource,
    generation: Option<PathBuf>,
    has_chats: bool,
    name: String,
}

/// Source of a model's tokenizer. It is read on request, since a model can be run without one.
#[derive(Debug, Clone)]
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

/// Returns a model's configuration without dropout.
///
/// # Errors
/// If the model is no causal language model.
pub(crate) fn causal_config(directory: &ModelDirectory) -> Result<ModelConfig, InferError> {
    let config = directory.config().without_dropout();
    // Encoders and classifiers have inputs besides tokens: an attention mask, images, the place of the last token.
    if config.vocab_size() == 0 || !config.model().inputs().is_empty() {
        return Err(InferError::NotCausal { model_type: config.model_type().to_owned() });
    }
    Ok(config)
}

impl ModelDescription {
    /// Reads the description of a model.
    ///
    /// # Errors
    /// If the model is no causal language model.
    pub fn of(directory: &ModelDirectory) -> Result<Self, InferError> {
        Ok(Self {
            config: causal_config(directory)?,
            tokenizer: TokenizerSource::of(directory),
            generation: directory.generation_config(),
            has_chats: directory.has_chats(),
            name: directory.path().display().to_string(),
        })
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
}

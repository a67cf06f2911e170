//! Description of a model besides its weights: configuration, tokenizer and settings of generation.

use std::path::PathBuf;

use lockstep_checkpoint::ModelDirectory;
use lockstep_data::Tokenizer;
use lockstep_model::ModelConfig;

use crate::{GenerationConfig, InferError};

/// A model without its weights.
#[derive(Debug, Clone)]
pub struct ModelDescription {
    config: ModelConfig,
    tokenizer: Option<String>,
    generation: Option<PathBuf>,
    has_chats: bool,
    name: String,
}

impl ModelDescription {
    /// Reads the description of a model.
    pub fn of(directory: &ModelDirectory) -> Self {
        Self {
            config: directory.config().without_dropout(),
            tokenizer: directory.tokenizer(),
            generation: directory.generation_config(),
            has_chats: directory.has_chats(),
            name: directory.path().display().to_string(),
        }
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
}

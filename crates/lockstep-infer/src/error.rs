//! What can go wrong while a model is loaded or run.

use std::path::PathBuf;

use lockstep_checkpoint::CheckpointError;
use lockstep_comm::CommError;
use lockstep_data::DataError;
use lockstep_engine::EngineError;
use lockstep_tensor::TensorError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InferError {
    /// The model's directory.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The text or the tokenizer.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Memory or threads.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The run of a model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The directory names no tokenizer and the vocabulary is not that of bytes.
    #[error(
        "{model}: no tokenizer.json beside the weights, and a vocabulary of {vocab_size} is not that of bytes"
    )]
    NoTokenizer {
        /// The directory.
        model: String,
        /// Its vocabulary.
        vocab_size: usize,
    },
    /// The prompt has no token.
    #[error("the prompt is empty and the tokenizer has no token to begin with")]
    EmptyPrompt,
    /// More tokens than positions.
    #[error(
        "{tokens} tokens (the prompt and the new ones) do not fit: the model has {allowed} positions; give fewer \
         --max-new-tokens or a shorter prompt, or let the beginning be forgotten with --sliding-window {}",
        allowed / 2
    )]
    TooLong {
        /// Prompt and new tokens.
        tokens: usize,
        /// The model's maximum.
        allowed: usize,
    },
    /// What a model says of generation cannot be used.
    #[error("{}: {problem}", path.display())]
    GenerationConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A number that has no meaning.
    #[error("{name} = {value}: allowed is {allowed}")]
    OutOfRange {
        /// The option.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: &'static str,
    },
}

//! Errors of loading and running a model.

use std::{io, path::PathBuf};

use lockstep_checkpoint::CheckpointError;
use lockstep_comm::CommError;
use lockstep_config::human;
use lockstep_data::DataError;
use lockstep_engine::EngineError;
use lockstep_plan::DType;
use lockstep_tensor::TensorError;

/// An error in loading or running a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InferError {
    /// The model's directory cannot be opened, or its files do not fit.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The text cannot be read, or the tokenizer does not fit.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A file of weights cannot be mapped.
    #[error("cannot map {}: {source}", path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Memory is exhausted, or threads cannot be started.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A collective with other ranks failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The engine failed to run the model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The directory names no tokenizer, and the vocabulary is not one of bytes.
    #[error(
        "{model}: no tokenizer.json beside the weights, and a vocabulary of {vocab_size} is not that of bytes"
    )]
    NoTokenizer {
        /// The model's directory.
        model: String,
        /// Size of the model's vocabulary.
        vocab_size: usize,
    },
    /// The tokenizer in the model's file is damaged or not supported.
    #[error("{problem}")]
    EmbeddedTokenizer {
        /// The model's file.
        model: String,
        /// Description of the problem, with the file.
        problem: String,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty and the tokenizer has no token to begin with")]
    EmptyPrompt,
    /// The text needs more positions than the model or the cache has.
    #[error(
        "{tokens} tokens (the prompt and the new ones) do not fit: the model has {allowed} positions; give fewer \
         --max-new-tokens or a shorter prompt, or let the beginning be forgotten with --sliding-window {}",
        allowed / 2
    )]
    TooLong {
        /// Number of prompt and new tokens.
        tokens: usize,
        /// Largest allowed number of tokens.
        allowed: usize,
    },
    /// A calibration text is shorter than a window.
    #[error("the calibration text has {tokens} tokens; at least {window} are needed: give a longer text")]
    CalibrationText {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens of a window.
        window: usize,
    },
    /// The model does not predict next tokens.
    #[error(
        "a model of type {model_type} generates no text and has no perplexity: it is an encoder or a classifier"
    )]
    NotCausal {
        /// Type of the model.
        model_type: String,
    },
    /// The key-value cache has no room for more tokens.
    #[error("the key-value cache has room for {tokens} tokens, and the sequences need more")]
    CacheFull {
        /// Tokens that the cache holds.
        tokens: usize,
    },
    /// A cache of the type that is asked for does not hold the keys and values of the model.
    #[error(
        "--kv-cache {asked}: the model computes in {dtype}, whose keys and values a cache of that type does not hold without waste \
         or loss of range; allowed are auto, {}",
        allowed.join(", ")
    )]
    KvCache {
        /// Type of the cache.
        asked: String,
        /// Type of the computation.
        dtype: DType,
        /// Types that are allowed for it.
        allowed: Vec<&'static str>,
    },
    /// The model's `generation_config.json` is invalid.
    #[error("{}: {problem}", path.display())]
    GenerationConfig {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A device map does not fit the model or the machine.
    #[error("{origin}: {}", problems.join("; "))]
    DeviceMap {
        /// File or option that the map comes from.
        origin: String,
        /// Everything that is wrong.
        problems: Vec<String>,
    },
    /// The memory limit is below what the model needs.
    #[error(
        "cpu={} is too small: the least that would do is cpu={least_mib}MiB, of which caches, activations and workspace take {}{hint}",
        human::bytes(*limit_bytes), human::bytes(*run)
    )]
    LimitTooSmall {
        /// The limit, in bytes.
        limit_bytes: u64,
        /// The least limit, in MiB.
        least_mib: u64,
        /// Bytes of caches, activations and workspace.
        run: u64,
        /// Another remedy; may be empty.
        hint: String,
    },
    /// The limit on weights on disk is below what is left for the disk.
    #[error(
        "disk={} is too small: {} of weights do not fit in memory; give --max-memory a larger cpu or disk",
        human::bytes(*limit_bytes), human::bytes(*needed_bytes)
    )]
    DiskLimit {
        /// The limit, in bytes.
        limit_bytes: u64,
        /// Bytes of the weights whose device is the disk.
        needed_bytes: u64,
    },
    /// A plan does not fit the model, or inference does not support it.
    #[error("{}", problems.join("; "))]
    Plan {
        /// Everything that is wrong.
        problems: Vec<String>,
    },
    /// An option is out of range.
    #[error("{name} = {value}: allowed is {allowed}")]
    OutOfRange {
        /// Name of the option.
        name: &'static str,
        /// The given value.
        value: String,
        /// The allowed values.
        allowed: &'static str,
    },
}

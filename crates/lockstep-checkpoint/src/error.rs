//! Errors of the checkpoint crate, each with the file and the tensor that it concerns.
//!
//! [`CheckpointError::is_corrupt`] separates damaged or hostile input from failures of the machine or the caller. The
//! command line maps the former to exit code 4.

use std::{io, path::Path, path::PathBuf, time::Duration};

use crate::{
    observer::{Abandoned, CommitPoint},
    safetensors::HeaderError,
};

/// Error when a checkpoint or a safetensors file is written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The model configuration is invalid, or tensors do not fit it.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// The tensors in a directory are not those of the model in its `config.json`.
    #[error("{dir}: {source}")]
    DoesNotFit {
        /// Directory of the model.
        dir: PathBuf,
        /// Description of every tensor that does not fit.
        source: lockstep_model::ModelError,
    },
    /// Two tensors that the model ties have different values.
    #[error("{tensor} and {tied_to} differ, but the configuration ties them (tie_word_embeddings)")]
    TiedTensorsDiffer {
        /// Tensor that is a copy.
        tensor: String,
        /// Tensor that it must be equal to.
        tied_to: String,
    },
    /// The base model of a fine-tuning run cannot be read.
    #[error("{path} holds what was trained of the model in {base}: {source}")]
    BaseModel {
        /// Checkpoint of the fine-tuning run.
        path: PathBuf,
        /// Recorded path of the base model.
        base: PathBuf,
        /// Error of reading the base model.
        source: Box<CheckpointError>,
    },
    /// The base model of a fine-tuning run has changed.
    #[error("{path} was trained on the model that lay in {base}; the weights there are others now")]
    BaseModelChanged {
        /// Checkpoint of the fine-tuning run.
        path: PathBuf,
        /// Recorded path of the base model.
        base: PathBuf,
    },
    /// An adapter cannot be used with the model.
    #[error("the adapter in {dir} cannot be used: {reason}")]
    Adapter {
        /// Directory of the adapter.
        dir: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// The description of a model's quantization is damaged, or its method is not supported.
    #[error(
        "{path}: {source}; transformers decodes other models: load with dequantize=True, then save_pretrained"
    )]
    Quantization {
        /// File with the description.
        path: PathBuf,
        /// Description of the problem.
        source: crate::quantized::QuantizationError,
    },
    /// The parts of a packed tensor are not those that its description implies.
    #[error("{path}: packed tensor `{tensor}`: {reason}")]
    PackedTensor {
        /// Directory of the model.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Description of the problem.
        reason: String,
    },
    /// A model has no weights that can be quantized.
    #[error(
        "{path}: a {model_type} has no linear layers in blocks whose rows are whole groups; nothing was written"
    )]
    NothingToQuantize {
        /// Path of the model.
        path: PathBuf,
        /// Type of the model.
        model_type: String,
    },
    /// A directory holds checkpoints but is not one itself.
    #[error("{path} has neither manifest.json nor config.json, it holds checkpoints; did you mean {newest}?")]
    ParentDirectory {
        /// Directory that was given.
        path: PathBuf,
        /// Newest checkpoint in the directory.
        newest: PathBuf,
    },
    /// A checkpoint holds no adapter that could be exported.
    #[error("{path} holds no adapter: its run had no fine_tune.lora_rank")]
    NoAdapter {
        /// Checkpoint without an adapter.
        path: PathBuf,
    },
    /// An operating-system call failed.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// Attempted action, as a verb.
        action: &'static str,
        /// The file or directory of the call.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The device or the quota is full. Earlier checkpoints are untouched.
    #[error("no space left for {path}; earlier checkpoints are untouched")]
    DiskFull {
        /// File that did not fit.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file system does not answer, and the save has given up waiting.
    #[error("{doing} {path} has made no progress for {} s", idle.as_secs())]
    Stalled {
        /// The kind of call: "writing", "syncing", ...
        doing: &'static str,
        /// The file or directory of the call.
        path: PathBuf,
        /// Time since the last progress.
        idle: Duration,
        /// Thread that is still in the call.
        abandoned: Abandoned,
    },
    /// Another save or prune is using the directory.
    #[error("another process is at work in {dir}")]
    Busy {
        /// Directory of checkpoints.
        dir: PathBuf,
    },
    /// The background thread for saves cannot be started.
    #[error("cannot start the thread that saves in the background: {0}")]
    Thread(#[source] rayon::ThreadPoolBuildError),
    /// A [`CommitObserver`](crate::CommitObserver) stopped the save.
    #[error("save stopped by its observer at {point:?}: {source}")]
    Stopped {
        /// Point at which the save was stopped.
        point: CommitPoint,
        /// Error of the observer.
        source: io::Error,
    },
    /// Another rank failed to write its part of a checkpoint.
    #[error("rank {rank}: {reason}")]
    OfRank {
        /// Rank that failed.
        rank: usize,
        /// Error message of that rank.
        reason: String,
        /// True if that rank had no space left.
        is_full: bool,
    },
    /// A path with the name of a checkpoint does not exist, but other checkpoints lie beside it.
    #[error(
        "there is no checkpoint {path}, or no longer (a run keeps its newest checkpoint.keep); the newest there is {newest}"
    )]
    NoSuchCheckpoint {
        /// Path that was given.
        path: PathBuf,
        /// Newest checkpoint beside it.
        newest: PathBuf,
    },
    /// A checkpoint was removed while it was read.
    #[error(
        "{path} was removed or moved while it was read (a run keeps its newest checkpoint.keep); take {}",
        newest.as_ref().map_or("another one".to_owned(), |newest| newest.display().to_string())
    )]
    Removed {
        /// Path of the removed checkpoint.
        path: PathBuf,
        /// Newest checkpoint beside it.
        newest: Option<PathBuf>,
    },
    /// A file named by an index or a manifest is missing.
    #[error("{path} is missing, but {named_in} names it")]
    MissingFile {
        /// File that is missing.
        path: PathBuf,
        /// Index or manifest that names it.
        named_in: PathBuf,
    },
    /// A path where a checkpoint's file should be is not a regular file.
    #[error("{path} is not a regular file")]
    NotAFile {
        /// Path that is not a regular file.
        path: PathBuf,
    },

    /// A safetensors file breaks a rule of its format.
    #[error("{path} is not a valid safetensors file: {source}")]
    Header {
        /// Safetensors file that is invalid.
        path: PathBuf,
        /// Rule that is broken, and the tensor that breaks it.
        source: HeaderError,
    },
    /// A GGUF file breaks a rule of its format, or holds a model that is not supported.
    #[error("{path} cannot be read: {reason}")]
    Gguf {
        /// GGUF file.
        path: PathBuf,
        /// Rule that is broken, or what is not supported.
        reason: String,
    },
    /// A model cannot be written as a GGUF file.
    #[error("{path} cannot be written as a GGUF file: {reason}")]
    GgufExport {
        /// The model.
        path: PathBuf,
        /// Property of the model that the format cannot express.
        reason: String,
    },
    /// A tensor does not consist of whole blocks of a type.
    #[error("tensor `{tensor}` with rows of {columns} elements cannot be stored as {kind}")]
    GgufType {
        /// Name of the tensor.
        tensor: String,
        /// Elements of a row.
        columns: usize,
        /// Type of the elements.
        kind: String,
    },
    /// The output file exists already.
    #[error("{path} exists; choose another name or remove it")]
    FileExists {
        /// The file.
        path: PathBuf,
    },
    /// The requested tensor does not exist.
    #[error("{path} holds no tensor `{tensor}`")]
    NoSuchTensor {
        /// File or directory that was searched.
        path: PathBuf,
        /// Name of the requested tensor.
        tensor: String,
    },
    /// A tensor has a type that cannot be converted.
    #[error("tensor `{tensor}` in {path} is {dtype}; f32, bf16 or f16 can be read here")]
    UnsupportedDtype {
        /// File or directory that holds the tensor.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Type of the tensor.
        dtype: String,
    },
    /// A range exceeds a tensor, or a buffer has another size than the tensor.
    #[error("elements {start}..{} of tensor `{tensor}` were asked for; it has {elements}", start.saturating_add(*count))]
    Range {
        /// Name of the tensor.
        tensor: String,
        /// First requested element.
        start: usize,
        /// Number of requested elements.
        count: usize,
        /// Number of elements in the tensor.
        elements: usize,
    },

    /// Two tensors of one file or checkpoint have the same name.
    #[error("tensor `{tensor}` is given twice")]
    DuplicateTensor {
        /// Name that occurs twice.
        tensor: String,
    },
    /// A tensor has the reserved name of safetensors' metadata.
    #[error("no tensor can be called `{tensor}`: safetensors keeps its metadata there")]
    ReservedName {
        /// Name that is reserved.
        tensor: String,
    },
    /// A buffer has another size than its shape and type require.
    #[error("tensor `{tensor}` needs {expected} bytes, but {found} were given")]
    ByteCount {
        /// Name of the tensor.
        tensor: String,
        /// Bytes required by shape and type.
        expected: u64,
        /// Bytes in the buffer.
        found: u64,
    },
    /// A streaming writer was given another tensor than the next one in file order.
    #[error("the next tensor in the file is {expected:?}, not `{found}`")]
    OutOfOrder {
        /// Next tensor in file order; `None` if all are written.
        expected: Option<String>,
        /// Tensor that was given.
        found: String,
    },

    /// The directory holds no safetensors weights.
    #[error(
        "{dir} holds neither model.safetensors nor model.safetensors.index.json (pickled weights are never read)"
    )]
    NoWeights {
        /// Directory that was searched.
        dir: PathBuf,
    },
    /// A file name is not a plain name, so that it could leave its directory.
    #[error("{path} names the file `{name}`, which is not a plain file name")]
    UnsafeName {
        /// Index, manifest or request that holds the name.
        path: PathBuf,
        /// File name that is rejected.
        name: String,
    },
    /// A `model.safetensors.index.json` is malformed.
    #[error("{path} is not a valid index: {reason}")]
    Index {
        /// Index that is malformed.
        path: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// An index names a tensor that its shard does not hold.
    #[error("{path} says that `{tensor}` is in {shard}, which does not hold it")]
    MissingWeight {
        /// Index that names the tensor.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// File name of the shard.
        shard: String,
    },
    /// The output directory exists already and is not empty.
    #[error("{path} is not empty; choose another directory or remove it")]
    OutputExists {
        /// Output directory that is not empty.
        path: PathBuf,
    },

    /// `manifest.json` does not match the hash at its end.
    #[error("{path} is damaged: {reason}")]
    ManifestDamaged {
        /// Manifest that is damaged.
        path: PathBuf,
        /// Description of the mismatch.
        reason: &'static str,
    },
    /// `manifest.json` is undamaged but its contents are inconsistent.
    #[error("{path} is not a valid manifest: {reason}")]
    Manifest {
        /// Manifest that is inconsistent.
        path: PathBuf,
        /// Description of the inconsistency.
        reason: String,
    },
    /// The format version of a checkpoint is not supported.
    #[error("{path} has format version {found}; this build reads version {supported}")]
    UnsupportedVersion {
        /// Manifest with the unsupported version.
        path: PathBuf,
        /// Version in the manifest.
        found: u64,
        /// Version that this build reads.
        supported: u64,
    },
    /// A file of a checkpoint has another size than when it was saved.
    #[error("{path} has {found} bytes, but {expected} were saved")]
    FileSize {
        /// File with the wrong size.
        path: PathBuf,
        /// Size when saved, in bytes.
        expected: u64,
        /// Current size in bytes.
        found: u64,
    },
    /// The hash of a checkpoint's file differs from the saved one.
    #[error("{path} is damaged in {}", damaged_parts(tensors))]
    Corrupt {
        /// File that is damaged.
        path: PathBuf,
        /// Tensors whose bytes changed; empty if only the file's header changed.
        tensors: Vec<String>,
    },
    /// The slices of a tensor do not cover it exactly once.
    #[error("{kind} of `{tensor}`: {source}")]
    Coverage {
        /// Name of the tensor's parameter.
        tensor: String,
        /// Role of the tensor: `parameter`, `exp_avg`, ...
        kind: String,
        /// Reason why the cover fails.
        source: CoverageError,
    },
    /// Two ranks give a tensor different types or shapes.
    #[error("{kind} of `{tensor}` is {first} in one shard and {second} in another")]
    Disagreement {
        /// Name of the tensor's parameter.
        tensor: String,
        /// Role of the tensor.
        kind: String,
        /// Type and shape in the first shard.
        first: String,
        /// Type and shape in the other shard.
        second: String,
    },
}

/// Reason why a set of slices does not cover a tensor exactly once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CoverageError(pub(crate) String);

impl CoverageError {
    /// Returns the error of a shape whose number of elements or bytes overflows 64 bits.
    pub(crate) fn too_large(shape: &[usize]) -> Self {
        Self(format!("shape {shape:?} has more elements than can be counted"))
    }
}

impl CheckpointError {
    /// Returns true if the input is damaged, hostile or of another format. Returns false for a full disk, a missing
    /// permission or a mistake of the caller.
    pub fn is_corrupt(&self) -> bool {
        matches!(
            self,
            Self::NotAFile { .. }
                | Self::DoesNotFit { .. }
                | Self::MissingFile { .. }
                | Self::TiedTensorsDiffer { .. }
                | Self::BaseModelChanged { .. }
                | Self::Adapter { .. }
                | Self::Header { .. }
                | Self::Gguf { .. }
                | Self::PackedTensor { .. }
                | Self::UnsafeName { .. }
                | Self::Index { .. }
                | Self::MissingWeight { .. }
                | Self::ManifestDamaged { .. }
                | Self::Manifest { .. }
                | Self::UnsupportedVersion { .. }
                | Self::FileSize { .. }
                | Self::Corrupt { .. }
                | Self::Coverage { .. }
                | Self::NoSuchTensor { .. }
                | Self::UnsupportedDtype { .. }
        )
    }

    /// Returns true if the disk was full, on this rank or on the rank that reported the error.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::DiskFull { .. } | Self::OfRank { is_full: true, .. })
    }

    /// Turns "no such file" into [`MissingFile`](Self::MissingFile), because `named_in` names the file.
    pub(crate) fn named_in(self, named_in: PathBuf) -> Self {
        match self {
            Self::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Self::MissingFile { path, named_in }
            }
            other => other,
        }
    }

    /// Returns a function for `map_err` that attaches an action and a path. Distinguishes a full disk from other
    /// errors.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path, source },
            _ => Self::Io { action, path, source },
        }
    }
}

fn damaged_parts(tensors: &[String]) -> String {
    const SHOWN: usize = 3;
    match tensors {
        [] => "its header".to_owned(),
        [only] => format!("tensor `{only}`"),
        [several @ .., last] if tensors.len() <= SHOWN => {
            format!("tensors `{}` and `{last}`", several.join("`, `"))
        }
        many => format!("tensors `{}` and {} more", many[..SHOWN].join("`, `"), many.len() - SHOWN),
    }
}

//! Everything that can go wrong with a checkpoint, each with the file and the tensor it is about.
//!
//! [`CheckpointError::is_corrupt`] separates damaged or hostile input from a machine or a caller that
//! failed; the command line turns the first into exit code 4.

use std::{io, path::Path, path::PathBuf, time::Duration};

use crate::{
    Abandoned,
    directory::{is_named_like_a_checkpoint, list},
    files::parent_of,
    safetensors::HeaderError,
    save::CommitPoint,
};

/// Why a checkpoint or a safetensors file could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The model's configuration, or tensors that do not fit it.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// A directory's tensors are not those of the model that its `config.json` describes.
    #[error("{}: {source}", dir.display())]
    DoesNotFit {
        /// The directory.
        dir: PathBuf,
        /// Every tensor that does not fit.
        source: lockstep_model::ModelError,
    },
    /// Two tensors that the model shares hold different values.
    #[error("{tensor} and {tied_to} differ, but the configuration ties them (tie_word_embeddings)")]
    TiedTensorsDiffer {
        /// The copy.
        tensor: String,
        /// What it must equal.
        tied_to: String,
    },
    /// The model that a fine-tuning run started from cannot be read.
    #[error("{} holds what was trained of the model in {}: {source}", path.display(), base.display())]
    BaseModel {
        /// The checkpoint.
        path: PathBuf,
        /// Where its base model lay.
        base: PathBuf,
        /// What is wrong there.
        source: Box<CheckpointError>,
    },
    /// The model that a fine-tuning run started from is not the one that it was.
    #[error(
        "{} was trained on the model that lay in {}; the weights there are others now",
        path.display(),
        base.display()
    )]
    BaseModelChanged {
        /// The checkpoint.
        path: PathBuf,
        /// Where its base model lay.
        base: PathBuf,
    },
    /// An adapter that cannot be used with the model.
    #[error("the adapter in {} cannot be used: {reason}", dir.display())]
    Adapter {
        /// Its directory.
        dir: PathBuf,
        /// Why.
        reason: String,
    },
    /// A directory that holds checkpoints and is none itself.
    #[error("{} has neither manifest.json nor config.json, it holds checkpoints; did you mean {}?", path.display(), newest.display())]
    ParentDirectory {
        /// The directory.
        path: PathBuf,
        /// The newest checkpoint in it.
        newest: PathBuf,
    },
    /// A checkpoint from which no adapter can be written.
    #[error("{} holds no adapter: its run had no fine_tune.lora_rank", path.display())]
    NoAdapter {
        /// The checkpoint.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or directory of the call.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The device or the quota is full. Nothing that was saved before is touched.
    #[error("no space left for {}; earlier checkpoints are untouched", path.display())]
    DiskFull {
        /// The file that did not fit.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file system has stopped answering, and the save no longer waits for it.
    #[error("{doing} {} has made no progress for {} s", path.display(), idle.as_secs())]
    Stalled {
        /// The kind of call: "writing", "syncing", ...
        doing: &'static str,
        /// The file or directory of the call.
        path: PathBuf,
        /// Time since the last progress.
        idle: Duration,
        /// The thread that is still in the call.
        abandoned: Abandoned,
    },
    /// Another save or prune is at work in this directory.
    #[error("another process is at work in {}", dir.display())]
    Busy {
        /// The directory of checkpoints.
        dir: PathBuf,
    },
    /// The thread that saves in the background cannot be started.
    #[error("cannot start the thread that saves in the background: {0}")]
    Thread(#[source] rayon::ThreadPoolBuildError),
    /// A [`CommitObserver`](crate::CommitObserver) stopped the save.
    #[error("save stopped by its observer at {point:?}: {source}")]
    Stopped {
        /// Where.
        point: CommitPoint,
        /// The observer's reason.
        source: io::Error,
    },
    /// Another rank could not write its part of a checkpoint.
    #[error("rank {rank}: {reason}")]
    OfRank {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
        /// True if the rank has found no space left.
        is_full: bool,
    },
    /// A path that looks like a checkpoint, is not there, and has others beside it.
    #[error(
        "there is no checkpoint {}, or no longer (a run keeps its newest checkpoint.keep); the newest there is {}",
        path.display(),
        newest.display()
    )]
    NoSuchCheckpoint {
        /// The path.
        path: PathBuf,
        /// The newest one beside it.
        newest: PathBuf,
    },
    /// A checkpoint that was removed while it was read.
    #[error(
        "{} was removed or moved while it was read (a run keeps its newest checkpoint.keep); take {}",
        path.display(),
        newest.as_ref().map_or("another one".to_owned(), |newest| newest.display().to_string())
    )]
    Removed {
        /// The checkpoint.
        path: PathBuf,
        /// The newest one beside it.
        newest: Option<PathBuf>,
    },
    /// A file that an index or a manifest names is not there.
    #[error("{} is missing, but {} names it", path.display(), named_in.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
        /// The index or the manifest.
        named_in: PathBuf,
    },
    /// Something that is not a regular file stands where a checkpoint's file should be.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },

    /// A safetensors file breaks a rule of its format.
    #[error("{} is not a valid safetensors file: {source}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The rule, and the tensor that breaks it.
        source: HeaderError,
    },
    /// The tensor asked for is not there.
    #[error("{} holds no tensor `{tensor}`", path.display())]
    NoSuchTensor {
        /// File or directory that was searched.
        path: PathBuf,
        /// The name asked for.
        tensor: String,
    },
    /// A tensor is of a type that cannot be converted.
    #[error("tensor `{tensor}` in {} is {dtype}; {allowed} can be read here", path.display())]
    UnsupportedDtype {
        /// File or directory.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
        /// What would have been accepted.
        allowed: &'static str,
    },
    /// A range reaches past the end of a tensor, or a buffer does not have the tensor's size.
    #[error("elements {start}..{} of tensor `{tensor}` were asked for; it has {elements}", start.saturating_add(*count))]
    Range {
        /// The tensor.
        tensor: String,
        /// First element asked for.
        start: usize,
        /// How many.
        count: usize,
        /// How many there are.
        elements: usize,
    },

    /// Two tensors of one file or checkpoint have the same name.
    #[error("tensor `{tensor}` is given twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// A tensor has the name under which safetensors keeps its metadata.
    #[error("no tensor can be called `{tensor}`: safetensors keeps its metadata there")]
    ReservedName {
        /// The name.
        tensor: String,
    },
    /// A buffer does not have the size its shape and type demand.
    #[error("tensor `{tensor}` needs {expected} bytes, but {found} were given")]
    ByteCount {
        /// The tensor.
        tensor: String,
        /// Bytes by shape and type.
        expected: u64,
        /// Bytes given.
        found: u64,
    },
    /// A streaming writer was given another tensor than the next one in file order.
    #[error("the next tensor in the file is {expected:?}, not `{found}`")]
    OutOfOrder {
        /// The next tensor, or `None` when all are written.
        expected: Option<String>,
        /// The tensor given.
        found: String,
    },

    /// The directory holds no safetensors weights.
    #[error(
        "{} holds neither model.safetensors nor model.safetensors.index.json (pickled weights are never read)",
        dir.display()
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// A file name would leave its directory, or is no plain name.
    #[error("{} names the file `{name}`, which is not a plain file name", path.display())]
    UnsafeName {
        /// The index, manifest or request that names it.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// An index is not what `model.safetensors.index.json` should be.
    #[error("{} is not a valid index: {reason}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// An index names a tensor that its shard does not hold.
    #[error("{} says that `{tensor}` is in {shard}, which does not hold it", path.display())]
    MissingWeight {
        /// The index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
    /// The directory to export to is there already, and not empty.
    #[error("{} is not empty; choose another directory or remove it", path.display())]
    OutputExists {
        /// The directory.
        path: PathBuf,
    },

    /// `manifest.json` does not match the hash at its end.
    #[error("{} is damaged: {reason}", path.display())]
    ManifestDamaged {
        /// The manifest.
        path: PathBuf,
        /// How that was seen.
        reason: &'static str,
    },
    /// `manifest.json` is whole, but what it says cannot be.
    #[error("{} is not a valid manifest: {reason}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What cannot be.
        reason: String,
    },
    /// A checkpoint of a format this build does not read.
    #[error("{} has format version {found}; this build reads version {supported}", path.display())]
    UnsupportedVersion {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The version this build reads.
        supported: u64,
    },
    /// A file of a checkpoint is longer or shorter than it was when saved.
    #[error("{} has {found} bytes, but {expected} were saved", path.display())]
    FileSize {
        /// The file.
        path: PathBuf,
        /// Bytes saved.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// A file of a checkpoint does not hash to what was saved.
    #[error("{} is damaged in {}", path.display(), damaged_parts(tensors))]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The tensors whose bytes changed; empty when the damage is in the file's header.
        tensors: Vec<String>,
    },
    /// The slices of a tensor do not cover it exactly once.
    #[error("{kind} of `{tensor}`: {source}")]
    Coverage {
        /// The tensor.
        tensor: String,
        /// What of it: `parameter`, `exp_avg`, ...
        kind: String,
        /// How the cover fails.
        source: CoverageError,
    },
    /// Two ranks describe one tensor differently.
    #[error("{kind} of `{tensor}` is {first} in one shard and {second} in another")]
    Disagreement {
        /// The tensor.
        tensor: String,
        /// What of it.
        kind: String,
        /// Type and shape first seen.
        first: String,
        /// Type and shape that differ.
        second: String,
    },
}

/// How a set of slices fails to cover a tensor exactly once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CoverageError {
    /// No slice at all for a tensor that the model has.
    #[error("nobody saves it")]
    Absent,
    /// The saved shape is not the model's.
    #[error("saved with shape {saved:?}, but the model has {model:?}")]
    WrongShape {
        /// Shape of the saved tensor.
        saved: Vec<usize>,
        /// Shape in the model.
        model: Vec<usize>,
    },
    /// Shapes whose number of elements or bytes does not fit 64 bits.
    #[error("shape {shape:?} has more elements than can be counted")]
    TooLarge {
        /// The shape.
        shape: Vec<usize>,
    },
    /// A slice reaches outside the tensor, or has another number of dimensions.
    #[error("slice at {start:?} of shape {shape:?} does not lie in a tensor of shape {global:?}")]
    Outside {
        /// Start of the slice.
        start: Vec<usize>,
        /// Shape of the slice.
        shape: Vec<usize>,
        /// Shape of the tensor.
        global: Vec<usize>,
    },
    /// Two slices hold the same element.
    #[error("slices at {first:?} and {second:?} overlap")]
    Overlap {
        /// Start of one slice.
        first: Vec<usize>,
        /// Start of the other.
        second: Vec<usize>,
    },
    /// Some elements are in no slice.
    #[error("{covered} of {elements} elements are saved")]
    Missing {
        /// Elements in some slice.
        covered: usize,
        /// Elements of the tensor.
        elements: usize,
    },
    /// Element ranges and boxes of one tensor cannot be compared.
    #[error("element ranges and boxes that are not contiguous are mixed in one tensor")]
    Mixed,
    /// More boxes than a manifest may hold for one tensor.
    #[error("{found} slices, but at most {limit} are allowed")]
    TooManySlices {
        /// Slices of the tensor.
        found: usize,
        /// The limit.
        limit: usize,
    },
}

impl CheckpointError {
    /// Whether the input is damaged, hostile or of another format, as opposed to a full disk, a missing
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

    /// Returns true if there was no space left, here or on the rank that says so.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::DiskFull { .. } | Self::OfRank { is_full: true, .. })
    }

    /// Turns "no such file" into [`MissingFile`](Self::MissingFile): somebody promised that `path` is there.
    pub(crate) fn named_in(self, named_in: PathBuf) -> Self {
        match self {
            Self::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Self::MissingFile { path, named_in }
            }
            other => other,
        }
    }

    /// Replaces the error of a missing file by one that names the checkpoint below or beside `dir` that may have been meant.
    pub(crate) fn or_near_checkpoints(self, dir: &Path) -> Self {
        let is_missing = matches!(&self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound);
        if !is_missing {
            return self;
        }
        let newest = |dir: &Path| Some(list(dir).ok()?.pop()?.path);
        let path = dir.to_owned();
        if let Some(newest) = newest(dir) {
            return Self::ParentDirectory { path, newest };
        }
        match newest(&parent_of(dir)).filter(|_| is_named_like_a_checkpoint(dir) && !dir.exists()) {
            Some(newest) => Self::NoSuchCheckpoint { path, newest },
            None => self,
        }
    }

    /// An adapter for `map_err`: says what was tried on which path, and tells a full disk apart.
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

//! Errors in a configuration, in a checkpoint's tensors, or in an adapter.
//!
//! Problems are collected instead of stopping at the first: a [`ModelError::Config`] or a [`ModelError::Checkpoint`]
//! lists all of them.

use std::fmt::Display;
use std::path::PathBuf;

use thiserror::Error;

/// An error in configuring a model, or in matching a checkpoint or an adapter with it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No preset has this name.
    #[error("no preset is called `{name}`{}; `lockstep models` lists them", nearest_hint(.nearest.as_deref()))]
    UnknownPreset {
        /// The requested name.
        name: String,
        /// Name of the most similar preset, if one is similar enough.
        nearest: Option<String>,
    },
    /// A configuration file could not be read.
    #[error("cannot read {}: {source}", .path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A configuration is not JSON.
    #[error("{origin} is not valid JSON: {source}")]
    Json {
        /// Path of the file, or another name for the source of the text.
        origin: String,
        /// Error of the parser, with line and column.
        source: serde_json::Error,
    },
    /// A configuration has unknown, unsupported or inconsistent values.
    #[error("{origin}: {}", list(.problems))]
    Config {
        /// Path of the file, or another name for the source of the configuration.
        origin: String,
        /// All problems, in the order of the keys.
        problems: Vec<ConfigProblem>,
    },
    /// The tensors of a checkpoint do not match those of the model.
    #[error("the checkpoint does not fit the model: {}", list(.problems))]
    Checkpoint {
        /// All problems, in the order of the model's parameters, then of the file.
        problems: Vec<CheckpointProblem>,
    },
    /// The rank of an adapter is out of range.
    #[error("an adapter of rank {rank}; allowed is 1 to {largest}")]
    LoraRank {
        /// The given rank.
        rank: usize,
        /// The largest allowed rank.
        largest: usize,
    },
    /// A target of an adapter matches no linear layer that can be adapted.
    #[error(
        "`{target}` is no linear layer of the model that can be adapted; there are {}, and `all-linear` for all of \
         them",
        .allowed.join(", ")
    )]
    LoraTarget {
        /// The given target.
        target: String,
        /// Names that are valid targets.
        allowed: Vec<String>,
    },
    /// The size of a tensor's data differs from that of its shape.
    #[error("{tensor}: {what} has {found} elements, its shape demands {expected}")]
    Length {
        /// Name of the tensor.
        tensor: String,
        /// The buffer at fault: the stored tensor or the parameter.
        what: &'static str,
        /// Number of elements by the shape.
        expected: usize,
        /// Number of elements given.
        found: usize,
    },
    /// A tensor that must be zero for this model is not.
    #[error(
        "{tensor} is not zero at element {element}: the model is configured with `bias: false` and has no such \
         parameter"
    )]
    NotZero {
        /// Name of the tensor.
        tensor: String,
        /// Index of the first element that is not zero.
        element: usize,
    },
}

/// A single problem of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigProblem {
    /// The key is neither supported nor known to be harmless.
    #[error("unknown key `{key}`{}", nearest_hint(.nearest.as_deref()))]
    UnknownKey {
        /// The key, with its table (`rope_scaling.factr`).
        key: String,
        /// The most similar known key, if one is similar enough.
        nearest: Option<String>,
    },
    /// The value would change the numbers in a way that is not supported.
    #[error("`{key}` = {value} is not supported; supported: {supported}")]
    Unsupported {
        /// The key at fault.
        key: String,
        /// The given value, as JSON.
        value: String,
        /// The supported values.
        supported: String,
    },
    /// The value has the wrong type.
    #[error("`{key}` = {value} has the wrong type; expected {expected}")]
    WrongType {
        /// The key at fault.
        key: String,
        /// The given value, as JSON.
        value: String,
        /// The expected type.
        expected: &'static str,
    },
    /// The value is a number outside its limits.
    #[error("`{key}` = {value} is out of range; allowed: {allowed}")]
    OutOfRange {
        /// The key at fault.
        key: String,
        /// The given value.
        value: String,
        /// The allowed values.
        allowed: String,
    },
    /// A key that has no default is missing.
    #[error("`{key}` is missing; expected {expected}")]
    Missing {
        /// The missing key.
        key: String,
        /// The expected value.
        expected: String,
    },
    /// Two values contradict each other.
    #[error("{message}")]
    Conflict {
        /// Both keys, both values, and the rule they break.
        message: String,
    },
}

/// A single tensor of a checkpoint that does not match the model.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CheckpointProblem {
    /// The model needs this tensor and the checkpoint lacks it.
    #[error("`{tensor}` is missing")]
    Missing {
        /// Name in the checkpoint.
        tensor: String,
    },
    /// The checkpoint has a tensor that is not part of the model.
    #[error("`{tensor}` is not a tensor of this model")]
    Unexpected {
        /// Name in the checkpoint.
        tensor: String,
    },
    /// The checkpoint has the tensor twice, with and without the family's prefix.
    #[error("`{}` and `{}` are the same tensor", .tensors[0], .tensors[1])]
    Duplicate {
        /// Both names in the checkpoint.
        tensors: [String; 2],
    },
    /// The tensor's shape differs from that of the configuration.
    #[error("`{tensor}` has shape {found:?}, the configuration demands {expected:?}")]
    Shape {
        /// Name in the checkpoint.
        tensor: String,
        /// Shape by the configuration.
        expected: Vec<usize>,
        /// Shape in the checkpoint.
        found: Vec<usize>,
    },
}

impl CheckpointProblem {
    /// Returns the problem with the names of tensors that `rename` returns; those without a new name keep theirs.
    pub fn renamed(self, rename: impl Fn(&str) -> Option<String>) -> Self {
        let rename = |name: String| rename(&name).unwrap_or(name);
        match self {
            Self::Missing { tensor } => Self::Missing { tensor: rename(tensor) },
            Self::Unexpected { tensor } => Self::Unexpected { tensor: rename(tensor) },
            Self::Duplicate { tensors } => Self::Duplicate { tensors: tensors.map(rename) },
            Self::Shape { tensor, expected, found } => {
                Self::Shape { tensor: rename(tensor), expected, found }
            }
        }
    }
}

/// Returns the candidate most similar to `name`, if it is similar enough to be what the user meant.
pub(crate) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
        .filter(|(similarity, _)| *similarity > 0.8)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate.to_owned())
}

fn nearest_hint(nearest: Option<&str>) -> String {
    nearest.map(|name| format!(" (did you mean `{name}`?)")).unwrap_or_default()
}

/// Largest number of problems in a message; a wrong checkpoint easily has thousands.
const SHOWN_PROBLEMS: usize = 20;

/// Formats a single problem in line, several as a list below the origin.
fn list(problems: &[impl Display]) -> String {
    if let [single] = problems {
        return single.to_string();
    }
    let mut text = format!("{} problems", problems.len());
    for problem in problems.iter().take(SHOWN_PROBLEMS) {
        text.push_str(&format!("\n  - {problem}"));
    }
    if problems.len() > SHOWN_PROBLEMS {
        text.push_str(&format!("\n  - and {} more", problems.len() - SHOWN_PROBLEMS));
    }
    text
}

//! What can be wrong with a configuration or with a checkpoint's tensors.
//!
//! Problems are collected, not thrown at the first: a [`ModelError::Config`] or a
//! [`ModelError::Checkpoint`] lists everything that was found.

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;

/// Why a model could not be configured, or a checkpoint not be matched with it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No preset has this name.
    #[error("no preset is called `{name}`{}; `lockstep models` lists them", nearest_hint(.nearest.as_deref()))]
    UnknownPreset {
        /// The name asked for.
        name: String,
        /// The preset whose name comes nearest, if one is near.
        nearest: Option<String>,
    },
    /// A configuration file could not be read.
    #[error("cannot read {}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A configuration is not JSON.
    #[error("{origin} is not valid JSON: {source}")]
    Json {
        /// The file, or another name for where the text came from.
        origin: String,
        /// The parser's message, with line and column.
        source: serde_json::Error,
    },
    /// A configuration says something that is unknown, unsupported or inconsistent.
    #[error("{origin}: {}", list(.problems))]
    Config {
        /// The file, or another name for where the configuration came from.
        origin: String,
        /// Everything found, in the order of the keys.
        problems: Vec<ConfigProblem>,
    },
    /// The tensors of a checkpoint are not those of the model.
    #[error("the checkpoint does not fit the model: {}", list(.problems))]
    Checkpoint {
        /// Everything found, in the order of the model's parameters, then of the file.
        problems: Vec<CheckpointProblem>,
    },
    /// A rank that no adapter has.
    #[error("an adapter of rank {rank}; allowed is 1 to {largest}")]
    LoraRank {
        /// The rank.
        rank: usize,
        /// The largest that is allowed.
        largest: usize,
    },
    /// A target of an adapter that means no linear layer.
    #[error(
        "`{target}` is no linear layer of the model that can be adapted; there are {}, and `all-linear` for all of \
         them",
        .allowed.join(", ")
    )]
    LoraTarget {
        /// The target.
        target: String,
        /// Names that are targets.
        allowed: Vec<String>,
    },
    /// A tensor's data has another size than its shape demands.
    #[error("{tensor}: {what} has {found} elements, its shape demands {expected}")]
    Length {
        /// The tensor.
        tensor: String,
        /// Which of the buffers is meant.
        what: &'static str,
        /// Elements the shape demands.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A tensor that must be zero for this model is not.
    #[error(
        "{tensor} is not zero at element {element}: the model is configured with `bias: false` and has no such \
         parameter"
    )]
    NotZero {
        /// The tensor.
        tensor: String,
        /// Index of the first element that is not zero.
        element: usize,
    },
}

/// One thing that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigProblem {
    /// The key is neither supported nor known to be harmless.
    UnknownKey {
        /// The key, with the table it stands in (`rope_scaling.factr`).
        key: String,
        /// The known key that comes nearest, if one is near.
        nearest: Option<String>,
    },
    /// The value would change the numbers in a way that is not supported.
    Unsupported {
        /// The key.
        key: String,
        /// Its value, as JSON.
        value: String,
        /// What is supported.
        supported: String,
    },
    /// The value has the wrong type.
    WrongType {
        /// The key.
        key: String,
        /// Its value, as JSON.
        value: String,
        /// The type expected.
        expected: &'static str,
    },
    /// The value is a number outside its limits.
    OutOfRange {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The values allowed.
        allowed: String,
    },
    /// A key that has no default is missing.
    Missing {
        /// The key.
        key: String,
        /// What to write.
        expected: String,
    },
    /// Two values contradict each other.
    Conflict {
        /// Both keys, both values, and the rule they break.
        message: String,
    },
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey { key, nearest } => {
                write!(f, "unknown key `{key}`{}", nearest_hint(nearest.as_deref()))
            }
            Self::Unsupported { key, value, supported } => {
                write!(f, "`{key}` = {value} is not supported; supported: {supported}")
            }
            Self::WrongType { key, value, expected } => {
                write!(f, "`{key}` = {value} has the wrong type; expected {expected}")
            }
            Self::OutOfRange { key, value, allowed } => {
                write!(f, "`{key}` = {value} is out of range; allowed: {allowed}")
            }
            Self::Missing { key, expected } => write!(f, "`{key}` is missing; expected {expected}"),
            Self::Conflict { message } => f.write_str(message),
        }
    }
}

/// One tensor of a checkpoint that does not fit the model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointProblem {
    /// The model needs this tensor and the checkpoint lacks it.
    Missing {
        /// Name in the checkpoint.
        tensor: String,
    },
    /// The checkpoint has a tensor that the model has no place for.
    Unexpected {
        /// Name in the checkpoint.
        tensor: String,
    },
    /// The checkpoint has the tensor twice, with and without the family's prefix.
    Duplicate {
        /// Both names.
        tensors: [String; 2],
    },
    /// The tensor has another shape than the configuration demands.
    Shape {
        /// Name in the checkpoint.
        tensor: String,
        /// Shape that the configuration demands.
        expected: Vec<usize>,
        /// Shape in the checkpoint.
        found: Vec<usize>,
    },
}

impl fmt::Display for CheckpointProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { tensor } => write!(f, "`{tensor}` is missing"),
            Self::Unexpected { tensor } => write!(f, "`{tensor}` is not a tensor of this model"),
            Self::Duplicate { tensors: [first, second] } => {
                write!(f, "`{first}` and `{second}` are the same tensor")
            }
            Self::Shape { tensor, expected, found } => {
                write!(f, "`{tensor}` has shape {found:?}, the configuration demands {expected:?}")
            }
        }
    }
}

/// The candidate nearest to `name`, if it is near enough to be what was meant.
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

/// How many problems a message spells out; a wrong checkpoint easily has thousands.
const SHOWN_PROBLEMS: usize = 20;

/// A single problem behind the origin, several as a list below it.
fn list(problems: &[impl fmt::Display]) -> String {
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

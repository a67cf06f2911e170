//! `manifest.json`: what a checkpoint is, and the proof that it is unchanged.
//!
//! The last line of the file is the BLAKE3 of all bytes before it, so the manifest vouches for itself
//! and, through the hashes it holds, for every other file. The check is on bytes, not on parsed values:
//! no spelling of JSON can make two files pass for the same. It is still one JSON document.

use std::{collections::BTreeMap, collections::HashSet, fmt, path::Path};

use lockstep_plan::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    coverage,
    digest::Digest,
    error::CheckpointError,
    files::is_plain_name,
    region::{Runs, element_count},
};

/// Name of the manifest in its directory.
pub const MANIFEST_FILE: &str = "manifest.json";

/// The version this build writes and reads.
pub const FORMAT_VERSION: u64 = 1;

/// Largest manifest that is read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 512 << 20;

const FORMAT: &str = "lockstep-checkpoint";
const SEAL_HEAD: &str = ",\n\"manifest_blake3\":\"";
const SEAL_TAIL: &str = "\"\n}\n";
const DIGEST_DIGITS: usize = 64;

/// Everything `manifest.json` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always `lockstep-checkpoint`.
    pub format: String,
    /// [`FORMAT_VERSION`].
    pub version: u64,
    /// Optimizer steps taken.
    pub step: u64,
    /// Samples consumed: the whole state of the data loader.
    pub samples_consumed: u64,
    /// The seed of the run's random numbers.
    pub seed: u64,
    /// The run's configuration.
    pub config: Value,
    /// Hash of `config`, keys sorted: equal for equal configurations.
    pub config_blake3: Digest,
    /// The plan, or null.
    pub plan: Value,
    /// Counters and scalars that are not tensors (loss scale, skipped steps, ...).
    pub state: Value,
    /// Every tensor, whole, and where its slices lie.
    pub tensors: Vec<TensorEntry>,
    /// Every file but this one.
    pub files: BTreeMap<String, FileEntry>,
}

/// One logical tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Name of the parameter that it is or belongs to.
    pub name: String,
    /// What of the parameter.
    pub kind: TensorKind,
    /// Element type as stored.
    pub dtype: DType,
    /// Global shape.
    pub shape: Vec<usize>,
    /// The parts; together they are the whole, each element once.
    pub slices: Vec<SliceEntry>,
}

/// A part of a tensor that lies in one file, row-major.
///
/// `start` and `shape` have one number per dimension of the tensor (a box), or one number each (a range
/// of the tensor's elements in row-major order).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceEntry {
    /// The file.
    pub file: String,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// First index.
    pub start: Vec<usize>,
    /// Extent.
    pub shape: Vec<usize>,
    /// Hash of the slice's bytes.
    pub blake3: Digest,
}

/// Size and hash of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Size.
    pub bytes: u64,
    /// Hash of the whole file, as `b3sum` prints it.
    pub blake3: Digest,
}

/// What of a parameter a tensor is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum TensorKind {
    /// The parameter itself.
    Parameter,
    /// Adam's running mean of gradients.
    ExpAvg,
    /// Adam's running mean of squared gradients.
    ExpAvgSq,
    /// Momentum of SGD, Lion, Muon.
    Momentum,
    /// Anything else an optimizer keeps.
    Other(String),
}

impl TensorKind {
    /// The name in the manifest.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Parameter => "parameter",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
            Self::Momentum => "momentum",
            Self::Other(name) => name,
        }
    }
}

impl From<String> for TensorKind {
    fn from(name: String) -> Self {
        match name.as_str() {
            "parameter" => Self::Parameter,
            "exp_avg" => Self::ExpAvg,
            "exp_avg_sq" => Self::ExpAvgSq,
            "momentum" => Self::Momentum,
            _ => Self::Other(name),
        }
    }
}

impl From<TensorKind> for String {
    fn from(kind: TensorKind) -> Self {
        kind.as_str().to_owned()
    }
}

impl fmt::Display for TensorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl SliceEntry {
    /// Number of elements; bounds have been checked.
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Manifest {
    pub(crate) fn format_name() -> String {
        FORMAT.to_owned()
    }

    /// The entry of one tensor.
    pub fn tensor(&self, name: &str, kind: &TensorKind) -> Option<&TensorEntry> {
        self.tensors.iter().find(|entry| entry.name == name && entry.kind == *kind)
    }

    /// The file's bytes: one key a line, one tensor a line, sealed with their hash.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let value = serde_json::to_value(self).expect("a manifest has string keys and finite numbers only");
        let Value::Object(fields) = value else { unreachable!("a struct is an object") };
        let mut text = String::from("{");
        for (index, key) in FIELD_ORDER.iter().enumerate() {
            text.push_str(if index == 0 { "\n" } else { ",\n" });
            text.push_str(&format!("\"{key}\":{}", lines_of(key, &fields[*key])));
        }
        let digest = Digest::of(text.as_bytes());
        text.push_str(&format!("{SEAL_HEAD}{digest}{SEAL_TAIL}"));
        text.into_bytes()
    }

    /// Reads and checks the bytes of a manifest: seal, version, and that what it says can be. A pure
    /// function; `path` is for messages.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        let body = unsealed(bytes)
            .map_err(|reason| CheckpointError::ManifestDamaged { path: path.to_path_buf(), reason })?;
        let invalid = |reason: String| CheckpointError::Manifest { path: path.to_path_buf(), reason };

        #[derive(Deserialize)]
        struct Version {
            format: String,
            version: u64,
        }
        let document = [body, b"}"].concat();
        let version: Version =
            serde_json::from_slice(&document).map_err(|error| invalid(error.to_string()))?;
        if version.format != FORMAT {
            return Err(invalid(format!("its format is `{}`, not `{FORMAT}`", version.format)));
        }
        if version.version != FORMAT_VERSION {
            return Err(CheckpointError::UnsupportedVersion {
                path: path.to_path_buf(),
                found: version.version,
                supported: FORMAT_VERSION,
            });
        }
        let manifest: Self = serde_json::from_slice(&document).map_err(|error| invalid(error.to_string()))?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Names stay in the directory, tensors are covered once, slices lie in their files.
    fn check(&self, path: &Path) -> Result<(), CheckpointError> {
        let invalid = |reason: String| CheckpointError::Manifest { path: path.to_path_buf(), reason };
        if let Some(name) = self.files.keys().find(|name| !is_plain_name(name) || *name == MANIFEST_FILE) {
            return Err(CheckpointError::UnsafeName { path: path.to_path_buf(), name: name.clone() });
        }
        let mut seen = HashSet::new();
        for tensor in &self.tensors {
            if !seen.insert((&tensor.name, &tensor.kind)) {
                return Err(invalid(format!("{} of `{}` stands twice", tensor.kind, tensor.name)));
            }
            tensor.check_coverage()?;
            for slice in &tensor.slices {
                let file = self.files.get(&slice.file).ok_or_else(|| {
                    invalid(format!("tensor `{}` lies in `{}`, which is not listed", tensor.name, slice.file))
                })?;
                let bytes = (slice.elements() * tensor.dtype.size_bytes()) as u64;
                if slice.offset.checked_add(bytes).is_none_or(|end| end > file.bytes) {
                    return Err(invalid(format!(
                        "tensor `{}` reaches past the end of `{}`",
                        tensor.name, slice.file
                    )));
                }
            }
        }
        Ok(())
    }
}

impl TensorEntry {
    /// Elements of the whole tensor; its coverage has been checked.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The runs of one slice; its coverage has been checked.
    pub(crate) fn runs<'a>(&'a self, slice: &'a SliceEntry) -> Runs<'a> {
        Runs::new(&slice.start, &slice.shape, &self.shape).expect("checked when the manifest was")
    }

    /// Whether the slices hold every element exactly once.
    pub(crate) fn check_coverage(&self) -> Result<(), CheckpointError> {
        let slices: Vec<(&[usize], &[usize])> =
            self.slices.iter().map(|slice| (&slice.start[..], &slice.shape[..])).collect();
        element_count(&self.shape).and_then(|_| coverage::check(&self.shape, &slices)).map_err(|source| {
            CheckpointError::Coverage { tensor: self.name.clone(), kind: self.kind.to_string(), source }
        })
    }
}

/// Hash of a configuration: of its JSON with sorted keys and no spaces.
pub(crate) fn config_digest(config: &Value) -> Digest {
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(fields) => {
                let mut entries: Vec<_> = fields.iter().collect();
                entries.sort_by_key(|(key, _)| *key);
                Value::Object(
                    entries
                        .into_iter()
                        .map(|(key, value)| (key.clone(), sorted(value)))
                        .collect::<Map<_, _>>(),
                )
            }
            Value::Array(values) => Value::Array(values.iter().map(sorted).collect()),
            scalar => scalar.clone(),
        }
    }
    Digest::of(sorted(config).to_string().as_bytes())
}

/// The order in which a reader wants the fields; the long lists come last.
const FIELD_ORDER: [&str; 11] = [
    "format",
    "version",
    "step",
    "samples_consumed",
    "seed",
    "config_blake3",
    "config",
    "plan",
    "state",
    "files",
    "tensors",
];

/// JSON of one field; the long lists with one element a line.
fn lines_of(key: &str, value: &Value) -> String {
    let one_a_line = |open: char, lines: Vec<String>, close: char| {
        if lines.is_empty() {
            format!("{open}{close}")
        } else {
            format!("{open}\n{}\n{close}", lines.join(",\n"))
        }
    };
    match (key, value) {
        ("tensors", Value::Array(entries)) => {
            one_a_line('[', entries.iter().map(Value::to_string).collect(), ']')
        }
        ("files", Value::Object(entries)) => {
            let lines = entries.iter().map(|(name, entry)| format!("{}:{entry}", Value::from(name.as_str())));
            one_a_line('{', lines.collect(), '}')
        }
        _ => value.to_string(),
    }
}

/// The bytes before the seal, if the seal is theirs.
fn unsealed(bytes: &[u8]) -> Result<&[u8], &'static str> {
    const SEAL_BYTES: usize = SEAL_HEAD.len() + DIGEST_DIGITS + SEAL_TAIL.len();
    let cut = bytes.len().checked_sub(SEAL_BYTES).ok_or("it is too short to end with its hash")?;
    let (body, seal) = bytes.split_at(cut);
    let digest = seal
        .strip_prefix(SEAL_HEAD.as_bytes())
        .and_then(|seal| seal.strip_suffix(SEAL_TAIL.as_bytes()))
        .and_then(|digits| str::from_utf8(digits).ok())
        .and_then(Digest::from_hex)
        .ok_or("it does not end with its hash")?;
    if Digest::of(body) == digest { Ok(body) } else { Err("its bytes do not match the hash at its end") }
}

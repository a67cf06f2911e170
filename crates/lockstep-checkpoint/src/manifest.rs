//! `manifest.json`: the description of a checkpoint, sealed with a hash.
//!
//! The last line of the file is the BLAKE3 hash of all bytes before it. So the manifest protects itself and, through
//! the hashes it holds, every other file. The check covers bytes, not parsed values, so two different files never pass
//! as equal. The file is still one valid JSON document.

use std::{collections::BTreeMap, collections::HashSet, fmt, path::Path};

use lockstep_plan::DType;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    coverage,
    digest::Digest,
    error::CheckpointError,
    files::is_plain_name,
    region::{Runs, element_count},
};

/// Name of the manifest in the checkpoint directory.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Format version that this build writes and reads.
pub const FORMAT_VERSION: u64 = 1;

/// Maximum size of a manifest, in bytes.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 512 << 20;

const FORMAT: &str = "lockstep-checkpoint";
const SEAL_HEAD: &str = ",\n\"manifest_blake3\":\"";
const SEAL_TAIL: &str = "\"\n}\n";
const DIGEST_DIGITS: usize = 64;

/// Contents of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Name of the format, always `lockstep-checkpoint`.
    pub format: String,
    /// Format version; [`FORMAT_VERSION`] in this build.
    pub version: u64,
    /// Optimizer steps taken.
    pub step: u64,
    /// Samples consumed: the whole state of the data loader.
    pub samples_consumed: u64,
    /// Random seed of the run.
    pub seed: u64,
    /// Level of the CPU kernels that computed the state, in the words of `LOCKSTEP_CPU_LEVEL`; bits depend on it. `None` in
    /// manifests of earlier versions and if the level was not the same on all ranks.
    #[serde(default)]
    pub kernels: Option<String>,
    /// Configuration of the run.
    pub config: Value,
    /// Hash of `config` with sorted keys; equal for equal configurations.
    pub config_blake3: Digest,
    /// Plan of the run, or null.
    pub plan: Value,
    /// Counters and scalars that are not tensors, such as the loss scale and skipped steps.
    pub state: Value,
    /// All global tensors, with the locations of their slices.
    pub tensors: Vec<TensorEntry>,
    /// All files except the manifest, by name.
    pub files: BTreeMap<String, FileEntry>,
}

/// One global tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Name of the parameter that the tensor is or belongs to.
    pub name: String,
    /// Role of the tensor: the parameter itself, or one of its optimizer states.
    pub kind: TensorKind,
    /// Element type in the files.
    pub dtype: DType,
    /// Global shape of the tensor.
    pub shape: Vec<usize>,
    /// Slices that cover the tensor exactly once.
    pub slices: Vec<SliceEntry>,
}

/// Slice of a tensor that is stored in one file, row-major.
///
/// `start` and `shape` have one number per dimension of the tensor (a box), or a single number each (a range of the
/// tensor's elements in row-major order).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceEntry {
    /// Name of the file.
    pub file: String,
    /// Byte offset in the file.
    pub offset: u64,
    /// First index of the slice.
    pub start: Vec<usize>,
    /// Extent of the slice.
    pub shape: Vec<usize>,
    /// Hash of the slice's bytes.
    pub blake3: Digest,
}

/// Size and hash of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Size in bytes.
    pub bytes: u64,
    /// Hash of the whole file, as `b3sum` prints it.
    pub blake3: Digest,
}

/// Role of a tensor: a parameter, or an optimizer state of a parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum TensorKind {
    /// The parameter itself.
    Parameter,
    /// Adam's running mean of gradients.
    ExpAvg,
    /// Adam's running mean of squared gradients.
    ExpAvgSq,
    /// Momentum buffer of SGD, Lion or Muon.
    Momentum,
    /// Any other optimizer state.
    Other(String),
}

impl TensorKind {
    /// Returns the name in the manifest.
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
    /// Returns the number of elements; the shape must have been checked.
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Manifest {
    pub(crate) fn format_name() -> String {
        FORMAT.to_owned()
    }

    /// Returns the entry of a tensor.
    pub fn tensor(&self, name: &str, kind: &TensorKind) -> Option<&TensorEntry> {
        self.tensors.iter().find(|entry| entry.name == name && entry.kind == *kind)
    }

    /// Encodes the manifest: one line per key, file and tensor, sealed with the hash.
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

    /// Parses the bytes of a manifest and checks the seal, the version and the consistency of the contents. A pure
    /// function; `path` is used only in messages.
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

    /// Checks that file names stay in the directory, every tensor is covered exactly once, and slices lie within their
    /// files.
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
    /// Returns the number of elements of the whole tensor; the coverage must have been checked.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the contiguous runs of one slice; the coverage must have been checked.
    pub(crate) fn runs<'a>(&'a self, slice: &'a SliceEntry) -> Runs<'a> {
        Runs::new(&slice.start, &slice.shape, &self.shape).expect("checked when the manifest was")
    }

    /// Checks that the slices cover every element exactly once.
    pub(crate) fn check_coverage(&self) -> Result<(), CheckpointError> {
        let slices: Vec<(&[usize], &[usize])> =
            self.slices.iter().map(|slice| (&slice.start[..], &slice.shape[..])).collect();
        element_count(&self.shape).and_then(|_| coverage::check(&self.shape, &slices)).map_err(|source| {
            CheckpointError::Coverage { tensor: self.name.clone(), kind: self.kind.to_string(), source }
        })
    }
}

/// Returns the hash of a configuration's JSON with sorted keys and no spaces.
pub(crate) fn config_digest(config: &Value) -> Digest {
    let mut sorted = config.clone();
    sorted.sort_all_objects();
    Digest::of(sorted.to_string().as_bytes())
}

/// Order of the fields in the file; the long lists come last.
const FIELD_ORDER: [&str; 12] = [
    "format",
    "version",
    "step",
    "samples_consumed",
    "seed",
    "kernels",
    "config_blake3",
    "config",
    "plan",
    "state",
    "files",
    "tensors",
];

/// Formats the JSON of one field; the long lists get one line per element.
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

/// Returns the bytes before the seal, if the seal matches them.
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

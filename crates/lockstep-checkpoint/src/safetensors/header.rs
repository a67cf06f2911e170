//! Rules of the safetensors header, as one pure function over the bytes of a file.
//!
//! The main rule: sorted by offset, the tensors tile the data section from its first byte to its last, without holes or
//! overlaps. Each has exactly the bytes that its shape and type require. So every byte of a valid file is accounted
//! for.

use std::collections::{BTreeMap, HashMap};

use ::safetensors::Dtype;

use super::json::{Entry, parse_entries};

/// Maximum length of a header: 100 MB, the limit of the format.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Size in bytes of the header's length field.
pub(super) const LENGTH_BYTES: usize = 8;

/// Rule that a file breaks, and the tensor that breaks it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is too short for the length of a header.
    #[error("it has {bytes} bytes, fewer than the 8 of the header's length")]
    TooShort {
        /// Size of the file in bytes.
        bytes: usize,
    },
    /// The header claims to be longer than the format allows.
    #[error("its header claims {declared} bytes; the limit is {MAX_HEADER_BYTES}")]
    HeaderTooLong {
        /// Declared length of the header in bytes.
        declared: u64,
    },
    /// The header claims to be longer than the file.
    #[error("its header claims {declared} bytes, but only {available} follow")]
    HeaderTruncated {
        /// Declared length of the header in bytes.
        declared: u64,
        /// Bytes after the length field.
        available: u64,
    },
    /// The header is not UTF-8.
    #[error("its header is not UTF-8 at byte {at}")]
    NotUtf8 {
        /// Offset in the header.
        at: usize,
    },
    /// The header does not start with `{`.
    #[error("its header does not start with `{{`")]
    NotAnObject,
    /// The header is not valid JSON.
    #[error("its header is not valid JSON: {reason}")]
    Json {
        /// Message of the parser, with the position.
        reason: String,
    },
    /// A name occurs twice in the header.
    #[error("`{key}` stands twice in its header")]
    DuplicateKey {
        /// Name that occurs twice.
        key: String,
    },
    /// `__metadata__` is not an object of strings with unique keys.
    #[error("its `__metadata__` must map strings to strings: {reason}")]
    Metadata {
        /// Message of the parser.
        reason: String,
    },
    /// An entry has a missing, unknown or wrongly typed field.
    #[error("tensor `{tensor}`: {reason}")]
    Entry {
        /// Name of the tensor.
        tensor: String,
        /// Message of the parser.
        reason: String,
    },
    /// A tensor has a type that the format does not define.
    #[error("tensor `{tensor}` has the unknown type `{dtype}`")]
    UnknownDtype {
        /// Name of the tensor.
        tensor: String,
        /// Type in the header.
        dtype: String,
    },
    /// A byte range ends before it begins.
    #[error("tensor `{tensor}` begins at {begin} and ends before, at {end}")]
    Reversed {
        /// Name of the tensor.
        tensor: String,
        /// First byte of the range.
        begin: u64,
        /// End of the range, exclusive.
        end: u64,
    },
    /// A byte range exceeds the file.
    #[error("tensor `{tensor}` ends at byte {end} of the data, which has {data_bytes}")]
    OutOfRange {
        /// Name of the tensor.
        tensor: String,
        /// End of the range, exclusive.
        end: u64,
        /// Bytes after the header.
        data_bytes: u64,
    },
    /// Bytes between two tensors belong to neither.
    #[error("tensor `{tensor}` begins at {begin}, leaving a hole from {expected}")]
    Hole {
        /// Name of the tensor after the hole.
        tensor: String,
        /// Required first byte.
        expected: u64,
        /// Actual first byte.
        begin: u64,
    },
    /// Bytes belong to two tensors.
    #[error("tensor `{tensor}` begins at {begin}, inside another that ends at {expected}")]
    Overlap {
        /// Name of the second tensor.
        tensor: String,
        /// Required first byte.
        expected: u64,
        /// Actual first byte.
        begin: u64,
    },
    /// The number of elements or bits of a shape overflows 64 bits.
    #[error("tensor `{tensor}` has shape {shape:?}, whose size overflows")]
    SizeOverflow {
        /// Name of the tensor.
        tensor: String,
        /// Shape in the header.
        shape: Vec<u64>,
    },
    /// A tensor of a sub-byte type does not fill whole bytes.
    #[error("tensor `{tensor}` of shape {shape:?} and type {dtype} does not fill whole bytes")]
    PartialByte {
        /// Name of the tensor.
        tensor: String,
        /// Shape in the header.
        shape: Vec<u64>,
        /// Type in the header.
        dtype: String,
    },
    /// A byte range has another size than shape and type require.
    #[error(
        "tensor `{tensor}` of shape {shape:?} and type {dtype} needs {expected} bytes, its range has {found}"
    )]
    SizeMismatch {
        /// Name of the tensor.
        tensor: String,
        /// Shape in the header.
        shape: Vec<u64>,
        /// Type in the header.
        dtype: String,
        /// Bytes required by shape and type.
        expected: u64,
        /// Bytes in the range.
        found: u64,
    },
    /// Bytes follow the last tensor.
    #[error("{trailing} bytes follow its last tensor")]
    TrailingBytes {
        /// Number of trailing bytes.
        trailing: u64,
    },
}

/// Entry of a tensor in a valid header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name of the tensor.
    pub name: String,
    /// Stored type; Lockstep's own [`DType`](crate::DType) is a subset of these.
    pub dtype: Dtype,
    /// Shape of the tensor, row-major.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Header that satisfies every rule of the format.
#[derive(Debug, Clone)]
pub struct Header {
    /// Tensors in the order of their bytes.
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    metadata: BTreeMap<String, String>,
}

impl Header {
    /// Returns the tensors in the order of their bytes.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the tensor with that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// Returns the strings of `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// Checks the bytes of a whole safetensors file and returns its header. Does not read the data.
///
/// Memory use is bounded by the length of the header, which is checked against the size of the file first.
pub fn parse_header(file: &[u8]) -> Result<Header, HeaderError> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(HeaderError::TooShort { bytes: file.len() });
    };
    let declared = u64::from_le_bytes(*length);
    if declared > MAX_HEADER_BYTES {
        return Err(HeaderError::HeaderTooLong { declared });
    }
    let truncated = HeaderError::HeaderTruncated { declared, available: rest.len() as u64 };
    let header_bytes = usize::try_from(declared).map_err(|_| truncated.clone())?;
    let (header, data) = rest.split_at_checked(header_bytes).ok_or(truncated)?;
    if header.first() != Some(&b'{') {
        return Err(HeaderError::NotAnObject);
    }
    let text = str::from_utf8(header).map_err(|error| HeaderError::NotUtf8 { at: error.valid_up_to() })?;

    let (mut entries, metadata) = parse_entries(text)?;
    entries.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    let data_start = LENGTH_BYTES + header_bytes;
    let mut expected = 0;
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        check_entry(&entry, expected, data.len() as u64)?;
        expected = entry.end;
        tensors.push(TensorInfo {
            dtype: entry.dtype,
            // In range of the data, and so of usize. A tensor without elements may have other dimensions of any size.
            shape: entry.shape.iter().map(|&dim| usize::try_from(dim).unwrap_or(usize::MAX)).collect(),
            offset: data_start + as_length(entry.begin),
            bytes: as_length(entry.end - entry.begin),
            name: entry.name,
        });
    }
    if expected != data.len() as u64 {
        return Err(HeaderError::TrailingBytes { trailing: data.len() as u64 - expected });
    }
    let by_name = tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), index)).collect();
    Ok(Header { tensors, by_name, metadata })
}

/// Checks one tensor against all rules; `expected` is the end of the previous tensor.
fn check_entry(entry: &Entry, expected: u64, data_bytes: u64) -> Result<(), HeaderError> {
    let Entry { begin, end, .. } = *entry;
    let tensor = || entry.name.clone();
    if begin > end {
        return Err(HeaderError::Reversed { tensor: tensor(), begin, end });
    }
    if end > data_bytes {
        return Err(HeaderError::OutOfRange { tensor: tensor(), end, data_bytes });
    }
    if begin > expected {
        return Err(HeaderError::Hole { tensor: tensor(), expected, begin });
    }
    if begin < expected {
        return Err(HeaderError::Overlap { tensor: tensor(), expected, begin });
    }
    let needed = stored_bytes(entry)?;
    if needed != end - begin {
        return Err(HeaderError::SizeMismatch {
            tensor: tensor(),
            shape: entry.shape.clone(),
            dtype: entry.dtype.to_string(),
            expected: needed,
            found: end - begin,
        });
    }
    Ok(())
}

/// Returns the bytes that shape and type require.
fn stored_bytes(entry: &Entry) -> Result<u64, HeaderError> {
    let bits = entry
        .shape
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .and_then(|elements| elements.checked_mul(entry.dtype.bitsize() as u64))
        .ok_or_else(|| HeaderError::SizeOverflow {
            tensor: entry.name.clone(),
            shape: entry.shape.clone(),
        })?;
    if !bits.is_multiple_of(8) {
        return Err(HeaderError::PartialByte {
            tensor: entry.name.clone(),
            shape: entry.shape.clone(),
            dtype: entry.dtype.to_string(),
        });
    }
    Ok(bits / 8)
}

fn as_length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("no longer than the slice that was given")
}

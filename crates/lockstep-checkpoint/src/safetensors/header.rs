//! The rules of the safetensors header, as one pure function over the bytes of a file.
//!
//! The rule that carries the others: sorted by offset, the tensors tile the data section, from its first
//! byte to its last, with no hole and no overlap, and each has exactly the bytes its shape and type
//! demand. No byte of a valid file is unaccounted for.

use std::collections::{BTreeMap, HashMap};

use ::safetensors::Dtype;

use super::json::{Entry, parse_entries};

/// Longest header that is parsed: 100 MB, the format's own limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the length in front of the header.
pub(super) const LENGTH_BYTES: usize = 8;

/// The rule that a file breaks, and the tensor that breaks it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Too short to hold the length of a header.
    #[error("it has {bytes} bytes, fewer than the 8 of the header's length")]
    TooShort {
        /// Bytes of the file.
        bytes: usize,
    },
    /// The header claims to be longer than the format allows.
    #[error("its header claims {declared} bytes; the limit is {MAX_HEADER_BYTES}")]
    HeaderTooLong {
        /// Length claimed.
        declared: u64,
    },
    /// The header claims to be longer than the file.
    #[error("its header claims {declared} bytes, but only {available} follow")]
    HeaderTruncated {
        /// Length claimed.
        declared: u64,
        /// Bytes after the length.
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
    /// The header is not the JSON it should be.
    #[error("its header is not valid JSON: {reason}")]
    Json {
        /// What the parser found, and where.
        reason: String,
    },
    /// A name stands twice in the header.
    #[error("`{key}` stands twice in its header")]
    DuplicateKey {
        /// The name.
        key: String,
    },
    /// `__metadata__` is not an object of strings with unique keys.
    #[error("its `__metadata__` must map strings to strings: {reason}")]
    Metadata {
        /// What the parser found.
        reason: String,
    },
    /// An entry lacks a field, has one too many, or one of the wrong JSON type.
    #[error("tensor `{tensor}`: {reason}")]
    Entry {
        /// The tensor.
        tensor: String,
        /// What the parser found.
        reason: String,
    },
    /// A type that the format does not have.
    #[error("tensor `{tensor}` has the unknown type `{dtype}`")]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
    },
    /// A range that ends before it begins.
    #[error("tensor `{tensor}` begins at {begin} and ends before, at {end}")]
    Reversed {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A range that reaches past the end of the file.
    #[error("tensor `{tensor}` ends at byte {end} of the data, which has {data_bytes}")]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// One past its last byte.
        end: u64,
        /// Bytes after the header.
        data_bytes: u64,
    },
    /// Bytes between two tensors that belong to neither.
    #[error("tensor `{tensor}` begins at {begin}, leaving a hole from {expected}")]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// Where it had to begin.
        expected: u64,
        /// Where it begins.
        begin: u64,
    },
    /// Bytes that belong to two tensors.
    #[error("tensor `{tensor}` begins at {begin}, inside another that ends at {expected}")]
    Overlap {
        /// The second of the two.
        tensor: String,
        /// Where it had to begin.
        expected: u64,
        /// Where it begins.
        begin: u64,
    },
    /// A shape with more elements or bytes than 64 bits count.
    #[error("tensor `{tensor}` has shape {shape:?}, whose size overflows")]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A shape of a sub-byte type that does not fill whole bytes.
    #[error("tensor `{tensor}` of shape {shape:?} and type {dtype} does not fill whole bytes")]
    PartialByte {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its type.
        dtype: String,
    },
    /// A range of another size than shape and type demand.
    #[error(
        "tensor `{tensor}` of shape {shape:?} and type {dtype} needs {expected} bytes, its range has {found}"
    )]
    SizeMismatch {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its type.
        dtype: String,
        /// Bytes by shape and type.
        expected: u64,
        /// Bytes of its range.
        found: u64,
    },
    /// Bytes after the last tensor.
    #[error("{trailing} bytes follow its last tensor")]
    TrailingBytes {
        /// How many.
        trailing: u64,
    },
}

/// What a valid header says of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Its stored type; Lockstep's own [`DType`](crate::DType) is a subset of these.
    pub dtype: Dtype,
    /// Its shape, row-major.
    pub shape: Vec<usize>,
    /// Its first byte, counted from the start of the file.
    pub offset: usize,
    /// Its size in bytes.
    pub bytes: usize,
}

/// A header that satisfies every rule of the format.
#[derive(Debug, Clone)]
pub struct Header {
    /// In the order of their bytes.
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    metadata: BTreeMap<String, String>,
}

impl Header {
    /// The tensors in the order of their bytes.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// The strings of `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// Checks the bytes of a whole safetensors file and returns its header; the data itself is not read.
///
/// Memory is bounded by the header's length, which is checked against the file first.
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
            // In range of the data, so of usize; an empty tensor may have any other dimension.
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

/// One tensor against all rules; `expected` is where the one before it ended.
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

/// Bytes that shape and type demand.
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

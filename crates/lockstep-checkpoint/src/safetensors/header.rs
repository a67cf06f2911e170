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
#[error("{0}")]
pub struct HeaderError(String);

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
    parse(file).map_err(HeaderError)
}

fn parse(file: &[u8]) -> Result<Header, String> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("it has {} bytes, fewer than the 8 of the header's length", file.len()));
    };
    let declared = u64::from_le_bytes(*length);
    if declared > MAX_HEADER_BYTES {
        return Err(format!("its header claims {declared} bytes; the limit is {MAX_HEADER_BYTES}"));
    }
    let header_bytes = usize::try_from(declared).unwrap_or(usize::MAX);
    let Some((header, data)) = rest.split_at_checked(header_bytes) else {
        return Err(format!("its header claims {declared} bytes, but only {} follow", rest.len()));
    };
    if header.first() != Some(&b'{') {
        return Err("its header does not start with `{`".to_owned());
    }
    let text = str::from_utf8(header)
        .map_err(|error| format!("its header is not UTF-8 at byte {}", error.valid_up_to()))?;

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
        return Err(format!("{} bytes follow its last tensor", data.len() as u64 - expected));
    }
    let by_name = tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), index)).collect();
    Ok(Header { tensors, by_name, metadata })
}

/// Checks one tensor against all rules; `expected` is the end of the previous tensor.
fn check_entry(entry: &Entry, expected: u64, data_bytes: u64) -> Result<(), String> {
    let Entry { begin, end, ref name, ref shape, dtype } = *entry;
    if begin > end {
        return Err(format!("tensor `{name}` begins at {begin} and ends before, at {end}"));
    }
    if end > data_bytes {
        return Err(format!("tensor `{name}` ends at byte {end} of the data, which has {data_bytes}"));
    }
    if begin > expected {
        return Err(format!("tensor `{name}` begins at {begin}, leaving a hole from {expected}"));
    }
    if begin < expected {
        return Err(format!("tensor `{name}` begins at {begin}, inside another that ends at {expected}"));
    }
    let (needed, found) = (stored_bytes(entry)?, end - begin);
    if needed != found {
        return Err(format!(
            "tensor `{name}` of shape {shape:?} and type {dtype} needs {needed} bytes, its range has {found}"
        ));
    }
    Ok(())
}

/// Returns the bytes that shape and type require.
fn stored_bytes(Entry { name, shape, dtype, .. }: &Entry) -> Result<u64, String> {
    let bits = shape
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .and_then(|elements| elements.checked_mul(dtype.bitsize() as u64))
        .ok_or_else(|| format!("tensor `{name}` has shape {shape:?}, whose size overflows"))?;
    if !bits.is_multiple_of(8) {
        return Err(format!("tensor `{name}` of shape {shape:?} and type {dtype} does not fill whole bytes"));
    }
    Ok(bits / 8)
}

fn as_length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("no longer than the slice that was given")
}

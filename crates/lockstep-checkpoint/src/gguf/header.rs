//! Layout of a GGUF file, as one pure function over its bytes.

use std::collections::HashMap;

use lockstep_plan::{BlockFormat, DType};

use super::{cursor::Cursor, foreign::ForeignFormat, metadata::GgufMetadata};

/// First bytes of a file.
const MAGIC: &[u8; 4] = b"GGUF";
/// Versions that have this layout.
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
/// Alignment of tensors if the metadata names none.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment.
const MAX_ALIGNMENT: u64 = 1 << 16;
/// Largest number of dimensions of a tensor.
const MAX_RANK: u32 = 4;
/// Fewest bytes of the entry of a tensor: lengths, type and offset.
const TENSOR_ENTRY_BYTES: u64 = 24;
/// Fewest bytes of a pair of key and value.
const PAIR_BYTES: u64 = 13;

/// Rule that a file breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GgufError(pub(super) String);

/// Storage of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoredElements {
    /// Numbers of a type.
    Dense(DType),
    /// Quantized blocks along the last dimension.
    Blocks(BlockFormat),
}

impl StoredElements {
    /// Numbers of the types in files.
    const IN_FILES: [(u32, Self); 10] = [
        (0, Self::Dense(DType::F32)),
        (1, Self::Dense(DType::F16)),
        (2, Self::Blocks(BlockFormat::Q4_0)),
        (3, Self::Blocks(BlockFormat::Q4_1)),
        (8, Self::Blocks(BlockFormat::Q8_0)),
        (12, Self::Blocks(BlockFormat::Q4K)),
        (13, Self::Blocks(BlockFormat::Q5K)),
        (14, Self::Blocks(BlockFormat::Q6K)),
        (30, Self::Dense(DType::BF16)),
        (39, Self::Blocks(BlockFormat::Mxfp4)),
    ];

    /// Returns the number of this type in files; `None` for integers, which no weight is.
    pub(super) fn number(self) -> Option<u32> {
        Self::IN_FILES.iter().find(|(_, stored)| *stored == self).map(|(number, _)| *number)
    }

    /// Returns the bytes of a row of `columns` elements; `None` if they are not whole blocks or are too many.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        match self {
            Self::Dense(dtype) => columns.checked_mul(dtype.size_bytes()),
            Self::Blocks(format) => format.bytes(columns),
        }
    }
}

impl std::fmt::Display for StoredElements {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dense(dtype) => dtype.fmt(f),
            Self::Blocks(format) => format.fmt(f),
        }
    }
}

/// Type of a tensor in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorType {
    /// Elements that kernels read as they are stored.
    Read(StoredElements),
    /// Blocks that are repacked or decoded.
    Foreign(ForeignFormat),
}

impl TensorType {
    fn all() -> impl Iterator<Item = (u32, Self)> {
        let read = StoredElements::IN_FILES.map(|(number, stored)| (number, Self::Read(stored)));
        let foreign = ForeignFormat::IN_FILES.map(|(number, format)| (number, Self::Foreign(format)));
        read.into_iter().chain(foreign)
    }

    fn of_number(number: u32) -> Option<Self> {
        Self::all().find(|(of, _)| *of == number).map(|(_, found)| found)
    }

    /// Returns the elements and the bytes of a block; one number is a block.
    fn block(self) -> (usize, usize) {
        match self {
            Self::Read(StoredElements::Dense(dtype)) => (1, dtype.size_bytes()),
            Self::Read(StoredElements::Blocks(format)) => (format.block_elements(), format.block_bytes()),
            Self::Foreign(format) => (format.block_elements(), format.block_bytes()),
        }
    }

    /// Returns the bytes of a row of `columns` elements; `None` if they are not whole blocks or are too many.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        if columns.is_multiple_of(elements) { (columns / elements).checked_mul(bytes) } else { None }
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Read(stored) => stored.fmt(f),
            Self::Foreign(format) => format.fmt(f),
        }
    }
}

/// Tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Name.
    pub name: String,
    /// Shape, row-major: the last dimension is contiguous.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub stored: TensorType,
    /// First byte, counted from the start of the file.
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Layout of a file that satisfies every rule of the format.
#[derive(Debug, Clone)]
pub struct GgufHeader {
    /// Metadata by key.
    pub metadata: GgufMetadata,
    tensors: Vec<GgufTensor>,
    by_name: HashMap<String, usize>,
}

impl GgufHeader {
    /// Returns the tensors in the order of the file.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// Returns the tensor with that name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }
}

/// Checks the bytes of a whole GGUF file and returns its layout. Does not read the data of tensors.
///
/// Memory use is bounded by the length of the metadata and the entries of tensors that are really there.
///
/// # Errors
/// If the file breaks a rule of the format or has a tensor of an unsupported type.
pub fn parse_gguf(file: &[u8]) -> Result<GgufHeader, GgufError> {
    parse(file).map_err(GgufError)
}

fn parse(file: &[u8]) -> Result<GgufHeader, String> {
    let mut cursor = Cursor::new(file, 0);
    if cursor.take(4, "the magic number")? != MAGIC {
        return Err("it does not begin with `GGUF`".to_owned());
    }
    let version = cursor.u32("the version")?;
    if VERSIONS.contains(&version.swap_bytes()) {
        return Err("it is big-endian; only little-endian files are read".to_owned());
    }
    if !VERSIONS.contains(&version) {
        return Err(format!("it has version {version}; versions 2 and 3 are read"));
    }
    let count = |cursor: &mut Cursor<'_>, what: &str, least: u64| {
        let count = cursor.u64(what)?;
        if count > cursor.left() as u64 / least {
            return Err(format!("it claims {count} {what}, but only {} bytes follow", cursor.left()));
        }
        Ok(count)
    };
    let tensor_count = count(&mut cursor, "tensors", TENSOR_ENTRY_BYTES)?;
    let pair_count = count(&mut cursor, "metadata values", PAIR_BYTES)?;
    let metadata = GgufMetadata::read(&mut cursor, pair_count)?;
    let alignment = alignment(&metadata)?;
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        tensors.push(read_tensor(&mut cursor, alignment)?);
    }
    let data_start = cursor.position().next_multiple_of(alignment as usize);
    let mut by_name = HashMap::with_capacity(tensors.len());
    for (index, tensor) in tensors.iter_mut().enumerate() {
        let end = data_start.checked_add(tensor.offset).and_then(|start| start.checked_add(tensor.bytes));
        if end.is_none_or(|end| end > file.len()) {
            return Err(format!(
                "tensor `{}` of {} bytes at byte {} of the data ends beyond the file, which has {}",
                tensor.name,
                tensor.bytes,
                tensor.offset,
                file.len()
            ));
        }
        tensor.offset += data_start;
        if by_name.insert(tensor.name.clone(), index).is_some() {
            return Err(format!("tensor `{}` occurs twice", tensor.name));
        }
    }
    check_overlaps(&tensors)?;
    Ok(GgufHeader { metadata, tensors, by_name })
}

fn alignment(metadata: &GgufMetadata) -> Result<u64, String> {
    const KEY: &str = "general.alignment";
    if metadata.get(KEY).is_none() {
        return Ok(DEFAULT_ALIGNMENT);
    }
    let is_valid = |alignment: &u64| alignment.is_power_of_two() && *alignment <= MAX_ALIGNMENT;
    metadata
        .integer(KEY)
        .filter(is_valid)
        .ok_or_else(|| format!("`{KEY}` must be a power of two up to {MAX_ALIGNMENT}"))
}

/// Reads the entry of a tensor; its offset is relative to the data.
fn read_tensor(cursor: &mut Cursor<'_>, alignment: u64) -> Result<GgufTensor, String> {
    let name = cursor.string("the name of a tensor")?.to_owned();
    let rank = cursor.u32("the rank of a tensor")?;
    if rank > MAX_RANK {
        return Err(format!("tensor `{name}` has {rank} dimensions; allowed are up to {MAX_RANK}"));
    }
    let dims = (0..rank).map(|_| cursor.u64("a dimension")).collect::<Result<Vec<_>, _>>()?;
    let number = cursor.u32("the type of a tensor")?;
    let offset = cursor.u64("the offset of a tensor")?;
    let stored = TensorType::of_number(number).ok_or_else(|| {
        let known: Vec<String> =
            TensorType::all().map(|(number, stored)| format!("{stored} ({number})")).collect();
        format!("tensor `{name}` has type {number}; read here are {}", known.join(", "))
    })?;
    if !offset.is_multiple_of(alignment) {
        return Err(format!("tensor `{name}` is at byte {offset} of the data, no multiple of {alignment}"));
    }
    let too_large = || format!("tensor `{name}` has dimensions {dims:?}, more than a file can hold");
    // Files have the contiguous dimension first.
    let shape: Vec<usize> = dims
        .iter()
        .rev()
        .map(|&dim| usize::try_from(dim).map_err(|_| too_large()))
        .collect::<Result<_, _>>()?;
    let columns = shape.last().copied().unwrap_or(1);
    let rows = shape.iter().rev().skip(1).try_fold(1_usize, |rows, &dim| rows.checked_mul(dim));
    let (block, _) = stored.block();
    if !columns.is_multiple_of(block) {
        return Err(format!(
            "tensor `{name}` has rows of {columns} elements, no whole {stored} blocks of {block}"
        ));
    }
    let bytes = stored.row_bytes(columns).zip(rows).and_then(|(row, rows)| row.checked_mul(rows));
    let (bytes, offset) = bytes.zip(usize::try_from(offset).ok()).ok_or_else(too_large)?;
    Ok(GgufTensor { name, shape, stored, offset, bytes })
}

/// Checks that no two tensors share a byte.
fn check_overlaps(tensors: &[GgufTensor]) -> Result<(), String> {
    let mut sorted: Vec<&GgufTensor> = tensors.iter().filter(|tensor| tensor.bytes > 0).collect();
    sorted.sort_by_key(|tensor| tensor.offset);
    match sorted.windows(2).find(|pair| pair[0].offset + pair[0].bytes > pair[1].offset) {
        Some(pair) => Err(format!("tensors `{}` and `{}` share bytes", pair[0].name, pair[1].name)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::writer::{TensorSpec, Value, write};

    /// Returns the bytes of a file with two tensors.
    fn file(metadata: &[(String, Value)]) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gguf");
        let tensor = |name: &str, shape: &[usize], stored| TensorSpec {
            name: name.to_owned(),
            shape: shape.to_vec(),
            stored,
        };
        let tensors = [
            tensor("blk.0.attn_q.weight", &[3, 64], StoredElements::Blocks(BlockFormat::Q8_0)),
            tensor("output_norm.weight", &[5], StoredElements::Dense(DType::F32)),
        ];
        let sizes = [3 * 68, 20];
        write(&path, metadata, &tensors, |index| Ok(vec![index as u8 + 1; sizes[index]])).unwrap();
        std::fs::read(path).unwrap()
    }

    fn plain() -> Vec<u8> {
        file(&[
            ("general.architecture".to_owned(), Value::Text("llama".to_owned())),
            ("tokenizer.ggml.tokens".to_owned(), Value::Texts(vec!["a".to_owned(), "bc".to_owned()])),
        ])
    }

    /// Returns the place of some bytes.
    fn find(file: &[u8], bytes: &[u8]) -> usize {
        file.windows(bytes.len()).position(|window| window == bytes).unwrap()
    }

    #[test]
    fn a_written_file_is_read_back() {
        let file = plain();
        let header = parse_gguf(&file).unwrap();
        assert_eq!(header.metadata.text("general.architecture"), Some("llama"));
        let tokens = header.metadata.strings("tokenizer.ggml.tokens", &file).unwrap().unwrap();
        assert_eq!(tokens, ["a", "bc"]);
        let [matrix, vector] = header.tensors() else { panic!("{:?}", header.tensors()) };
        assert_eq!((matrix.shape.as_slice(), matrix.bytes), (&[3, 64][..], 204));
        assert_eq!(file[matrix.offset..matrix.offset + 204], [1; 204]);
        assert_eq!(file[vector.offset..vector.offset + 20], [2; 20]);
    }

    #[test]
    fn every_shortened_file_is_refused() {
        let file = plain();
        let last = parse_gguf(&file).unwrap().tensors()[1].clone();
        for len in 0..last.offset + last.bytes {
            assert!(parse_gguf(&file[..len]).is_err(), "the first {len} bytes of {}", file.len());
        }
    }

    #[test]
    fn each_broken_rule_is_named() {
        let file = plain();
        let changed = |at: usize, bytes: &[u8]| {
            let mut file = file.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            parse_gguf(&file).map(drop).unwrap_err().to_string()
        };
        let (tokens, name) = (find(&file, b"tokenizer.ggml.tokens"), find(&file, b"blk.0.attn_q.weight"));
        // Type and length of the array follow its key; rank, dimensions, type and offset follow the tensor's name.
        let (array, rank) = (tokens + 21, name + 19);
        let huge = u64::MAX.to_le_bytes();
        let cases = [
            (0, b"GGML".to_vec(), "does not begin with `GGUF`"),
            (4, vec![1], "it has version 1"),
            (4, vec![0, 0, 0, 3], "it is big-endian"),
            (8, huge.to_vec(), "it claims 18446744073709551615 tensors"),
            (16, huge.to_vec(), "it claims 18446744073709551615 metadata values"),
            (24, huge.to_vec(), "a key at byte 32 claims 18446744073709551615 bytes"),
            (32, vec![0xff], "a key at byte 24 is not UTF-8"),
            (array, vec![13], "has a value of type 13"),
            (array + 4, vec![14], "has a value of type 14"),
            (array + 8, huge.to_vec(), "claims 18446744073709551615 values"),
            (rank, vec![5], "has 5 dimensions"),
            (rank + 4, vec![65], "has rows of 65 elements, no whole q8_0 blocks of 32"),
            (rank + 12, huge.to_vec(), "more than a file can hold"),
            (rank + 12, vec![200], "ends beyond the file"),
            (rank + 20, vec![29], "has type 29; read here are f32 (0)"),
            (rank + 24, vec![1], "is at byte 1 of the data, no multiple of 32"),
            (rank + 24, vec![32], "share bytes"),
            (rank + 24, huge.map(|_| 0xe0).to_vec(), "ends beyond the file"),
        ];
        for (at, bytes, expected) in cases {
            let message = changed(at, &bytes);
            assert!(message.contains(expected), "{bytes:?} at {at}: {message}, expected {expected}");
        }
        for alignment in [0, 3, 1 << 20] {
            let mut file = file.clone();
            let key = find(&file, b"general.architecture");
            // The same length as another key with a number.
            file.splice(key - 8..key + 20 + 4 + 8 + 5, {
                let mut pair = 17_u64.to_le_bytes().to_vec();
                pair.extend(b"general.alignment");
                pair.extend(4_u32.to_le_bytes());
                pair.extend((alignment as u32).to_le_bytes());
                pair
            });
            let message = parse_gguf(&file).map(drop).unwrap_err().to_string();
            assert!(message.contains("must be a power of two"), "{alignment}: {message}");
        }
    }

    #[test]
    fn arrays_that_nest_without_end_are_refused() {
        let mut file = Vec::from(*b"GGUF");
        file.extend(3_u32.to_le_bytes());
        file.extend(0_u64.to_le_bytes());
        file.extend(1_u64.to_le_bytes());
        file.extend(1_u64.to_le_bytes());
        file.push(b'k');
        file.extend(9_u32.to_le_bytes());
        for _ in 0..1000 {
            file.extend(9_u32.to_le_bytes());
            file.extend(1_u64.to_le_bytes());
        }
        let message = parse_gguf(&file).map(drop).unwrap_err().to_string();
        assert!(message.contains("nested more than 4 deep"), "{message}");
    }
}

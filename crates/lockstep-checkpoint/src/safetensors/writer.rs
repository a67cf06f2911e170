//! Streaming writer of safetensors files. The layout is fixed before the first byte, so that no file is held in memory.
//!
//! The order depends only on the set of tensors: wider types first, then by name. So every tensor is aligned to its
//! element size, and the same tensors give the same file in whatever order they are listed.

use std::{
    collections::{BTreeMap, HashSet},
    io::Write,
    path::{Path, PathBuf},
};

use ::safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::header::LENGTH_BYTES;
use crate::error::{CheckpointError, CoverageError};

/// Alignment of the data in bytes: a cache line. The format requires 8.
const DATA_ALIGNMENT: usize = 64;

/// Description of a tensor that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name of the tensor; `__metadata__` is reserved.
    pub name: String,
    /// Stored type of the elements.
    pub dtype: Dtype,
    /// Shape of the tensor, row-major.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Returns the size in bytes, or `None` if it overflows 64 bits or is not a whole number of bytes.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim as u64))?;
        let bits = elements.checked_mul(self.dtype.bitsize() as u64)?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// Layout of a file: the positions of all tensors.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Bytes before the first tensor: length, JSON header and padding.
    pub(crate) prefix: Vec<u8>,
    /// Placed tensors in file order.
    pub(crate) placed: Vec<Placed>,
    /// Size of the whole file in bytes.
    pub(crate) file_bytes: u64,
}

/// Position of one tensor: index in the specs, offset from the start of the file, and size in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placed {
    pub(crate) index: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Layout {
    pub(crate) fn new(
        specs: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, CheckpointError> {
        let mut names = HashSet::new();
        for spec in specs {
            if spec.name == "__metadata__" {
                return Err(CheckpointError::ReservedName { tensor: spec.name.clone() });
            }
            if !names.insert(&spec.name) {
                return Err(CheckpointError::DuplicateTensor { tensor: spec.name.clone() });
            }
        }
        let mut order: Vec<usize> = (0..specs.len()).collect();
        order.sort_by(|&a, &b| {
            let width = |spec: &TensorSpec| spec.dtype.bitsize();
            width(&specs[b]).cmp(&width(&specs[a])).then_with(|| specs[a].name.cmp(&specs[b].name))
        });

        let mut header = Map::new();
        if !metadata.is_empty() {
            header.insert("__metadata__".to_owned(), json!(metadata));
        }
        let mut placed = Vec::with_capacity(specs.len());
        let mut end = 0u64;
        for index in order {
            let spec = &specs[index];
            let too_large = || CheckpointError::Coverage {
                tensor: spec.name.clone(),
                kind: "shape".to_owned(),
                source: CoverageError::too_large(&spec.shape),
            };
            let bytes = spec.bytes().ok_or_else(too_large)?;
            let offset = end;
            end = end.checked_add(bytes).ok_or_else(too_large)?;
            header.insert(
                spec.name.clone(),
                json!({"dtype": spec.dtype.to_string(), "shape": spec.shape, "data_offsets": [offset, end]}),
            );
            placed.push(Placed { index, offset, bytes });
        }

        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize((LENGTH_BYTES + text.len()).next_multiple_of(DATA_ALIGNMENT) - LENGTH_BYTES, b' ');
        let mut prefix = (text.len() as u64).to_le_bytes().to_vec();
        prefix.append(&mut text);
        let data_start = prefix.len() as u64;
        placed.iter_mut().for_each(|place| place.offset += data_start);
        Ok(Self { prefix, placed, file_bytes: data_start + end })
    }
}

/// Writer of one file, tensor by tensor in the order of [`SafetensorsWriter::next_tensor`], each in any number of
/// pieces.
#[derive(Debug)]
pub struct SafetensorsWriter<W> {
    sink: W,
    path: PathBuf,
    specs: Vec<TensorSpec>,
    layout: Layout,
    /// Number of complete tensors.
    done: usize,
    /// Bytes written of the current tensor.
    written: u64,
}

impl<W: Write> SafetensorsWriter<W> {
    /// Fixes the layout and writes the header to `sink`. `path` is the file behind the sink, for messages.
    pub fn new(
        mut sink: W,
        path: &Path,
        specs: Vec<TensorSpec>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, CheckpointError> {
        let layout = Layout::new(&specs, metadata)?;
        sink.write_all(&layout.prefix).map_err(CheckpointError::io("write", path))?;
        let mut writer = Self { sink, path: path.to_path_buf(), specs, layout, done: 0, written: 0 };
        writer.skip_complete();
        Ok(writer)
    }

    /// Returns the size of the finished file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.layout.file_bytes
    }

    /// Returns the tensor whose bytes must come next, or `None` if all are complete. Skips tensors without elements.
    pub fn next_tensor(&self) -> Option<&TensorSpec> {
        self.layout.placed.get(self.done).map(|place| &self.specs[place.index])
    }

    /// Appends bytes to the tensor `name`, which must be the one of [`SafetensorsWriter::next_tensor`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let expected = self.next_tensor().map(|spec| spec.name.as_str());
        if expected != Some(name) {
            let expected = expected.map(str::to_owned);
            return Err(CheckpointError::OutOfOrder { expected, found: name.to_owned() });
        }
        let total = self.layout.placed[self.done].bytes;
        let found = self.written.saturating_add(bytes.len() as u64);
        if found > total {
            return Err(CheckpointError::ByteCount { tensor: name.to_owned(), expected: total, found });
        }
        self.sink.write_all(bytes).map_err(CheckpointError::io("write", &self.path))?;
        self.written = found;
        self.skip_complete();
        Ok(())
    }

    /// Returns the sink, unflushed. Fails if a tensor is incomplete.
    pub fn finish(self) -> Result<W, CheckpointError> {
        match self.next_tensor() {
            None => Ok(self.sink),
            Some(spec) => Err(CheckpointError::ByteCount {
                tensor: spec.name.clone(),
                expected: self.layout.placed[self.done].bytes,
                found: self.written,
            }),
        }
    }

    fn skip_complete(&mut self) {
        while self.layout.placed.get(self.done).is_some_and(|place| place.bytes == self.written) {
            self.done += 1;
            self.written = 0;
        }
    }
}

//! Writing of a GGUF file, one tensor at a time.

use std::{
    fs,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use super::header::StoredElements;
use crate::{
    error::CheckpointError,
    files::{create_file, parent_of, sync_directory},
};

/// Version of the files.
const VERSION: u32 = 3;
/// Multiple of bytes at which tensors begin.
const ALIGNMENT: usize = 32;

/// Metadata value to write.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

impl Value {
    /// Appends type and value.
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::U32(x) => put_number(out, 4, &x.to_le_bytes()),
            Self::F32(x) => put_number(out, 6, &x.to_le_bytes()),
            Self::Bool(x) => put_number(out, 7, &[u8::from(*x)]),
            Self::Text(text) => {
                put_number(out, 8, &[]);
                put_text(out, text);
            }
            Self::Texts(texts) => {
                put_array(out, 8, texts.len());
                texts.iter().for_each(|text| put_text(out, text));
            }
            Self::I32s(numbers) => {
                put_array(out, 5, numbers.len());
                out.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
            }
            Self::F32s(numbers) => {
                put_array(out, 6, numbers.len());
                out.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
            }
        }
    }
}

fn put_number(out: &mut Vec<u8>, kind: u32, bytes: &[u8]) {
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}

fn put_array(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend(9_u32.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Tensor to write.
#[derive(Debug, Clone)]
pub(crate) struct TensorSpec {
    /// Name in llama.cpp's form.
    pub(crate) name: String,
    /// Shape, row-major.
    pub(crate) shape: Vec<usize>,
    /// Storage of the elements.
    pub(crate) stored: StoredElements,
}

impl TensorSpec {
    /// Returns the size in bytes; `None` if the rows are not whole blocks.
    fn bytes(&self) -> Option<usize> {
        let columns = self.shape.last().copied().unwrap_or(1);
        let rows: usize = self.shape.iter().rev().skip(1).product();
        self.stored.row_bytes(columns)?.checked_mul(rows)
    }
}

/// Writes a file, which appears under its name only when it is complete. `bytes` returns the bytes of each tensor, in their order.
///
/// # Errors
/// If the file exists, the disk is full, or `bytes` fails or returns another size than the tensor has.
pub(crate) fn write(
    path: &Path,
    metadata: &[(String, Value)],
    tensors: &[TensorSpec],
    bytes: impl FnMut(usize) -> Result<Vec<u8>, CheckpointError>,
) -> Result<(), CheckpointError> {
    if path.exists() {
        return Err(CheckpointError::FileExists { path: path.to_path_buf() });
    }
    let staging = staging(path);
    if staging.exists() {
        // What an export that was killed left.
        fs::remove_file(&staging).map_err(CheckpointError::io("delete", &staging))?;
    }
    let written = write_into(&staging, metadata, tensors, bytes).and_then(|()| {
        fs::rename(&staging, path).map_err(CheckpointError::io("rename to", path))?;
        sync_directory(&parent_of(path))
    });
    if written.is_err() {
        // The first error is the one to report.
        drop(fs::remove_file(&staging));
    }
    written
}

/// Returns the path under which a file is written.
fn staging(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.part"))
}

fn write_into(
    path: &Path,
    metadata: &[(String, Value)],
    tensors: &[TensorSpec],
    mut bytes: impl FnMut(usize) -> Result<Vec<u8>, CheckpointError>,
) -> Result<(), CheckpointError> {
    let (header, sizes) = header(metadata, tensors)?;
    let data: usize = sizes.iter().map(|size| size.next_multiple_of(ALIGNMENT)).sum();
    let file = create_file(path, (header.len() + data) as u64)?;
    let mut writer = BufWriter::new(file);
    let failed = |error| CheckpointError::io("write", path)(error);
    writer.write_all(&header).map_err(failed)?;
    for (index, (tensor, size)) in tensors.iter().zip(sizes).enumerate() {
        let data = bytes(index)?;
        if data.len() != size {
            let (expected, found) = (size as u64, data.len() as u64);
            return Err(CheckpointError::ByteCount { tensor: tensor.name.clone(), expected, found });
        }
        writer.write_all(&data).map_err(failed)?;
        writer.write_all(&vec![0; size.next_multiple_of(ALIGNMENT) - size]).map_err(failed)?;
    }
    let file = writer.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)
}

/// Returns all bytes before the data, and the size of each tensor.
fn header(
    metadata: &[(String, Value)],
    tensors: &[TensorSpec],
) -> Result<(Vec<u8>, Vec<usize>), CheckpointError> {
    let mut out = Vec::from(*b"GGUF");
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_text(&mut out, key);
        value.put(&mut out);
    }
    let (mut offset, mut sizes) = (0, Vec::with_capacity(tensors.len()));
    for tensor in tensors {
        let unsupported = || CheckpointError::GgufType {
            tensor: tensor.name.clone(),
            columns: tensor.shape.last().copied().unwrap_or(1),
            kind: tensor.stored.to_string(),
        };
        let (size, number) = tensor.bytes().zip(tensor.stored.number()).ok_or_else(unsupported)?;
        put_text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        // The contiguous dimension comes first.
        out.extend(tensor.shape.iter().rev().flat_map(|&dim| (dim as u64).to_le_bytes()));
        out.extend(number.to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += size.next_multiple_of(ALIGNMENT);
        sizes.push(size);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    Ok((out, sizes))
}

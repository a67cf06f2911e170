//! Memory-mapped safetensors file with a checked header.

use std::{
    fs,
    path::{Path, PathBuf},
};

use ::safetensors::Dtype;
use lockstep_plan::DType;
use lockstep_tensor::MappedFile;

use super::header::{Header, TensorInfo, parse_header};
use crate::{convert, error::CheckpointError};

/// Valid safetensors file, mapped read-only. Opening it reads only the header.
///
/// As with every mapping, the file must not be truncated while it is open.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    map: MappedFile,
    header: Header,
}

/// Tensor of a file: type, shape, and bytes in the mapping.
#[derive(Debug, Clone, Copy)]
pub struct TensorRef<'a> {
    /// Stored type of the elements.
    pub dtype: Dtype,
    /// Shape of the tensor, row-major.
    pub shape: &'a [usize],
    /// Little-endian elements, not necessarily aligned.
    pub bytes: &'a [u8],
}

impl TensorRef<'_> {
    /// Returns the type as Lockstep's own [`DType`]; `None` if it has no such type.
    pub fn known_dtype(&self) -> Option<DType> {
        DType::from_safetensors_name(&self.dtype.to_string())
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl SafetensorsFile {
    /// Maps the file and checks its header against every rule of the format.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let metadata = fs::metadata(path).map_err(CheckpointError::io("open", path))?;
        if !metadata.is_file() {
            return Err(CheckpointError::NotAFile { path: path.to_path_buf() });
        }
        let map = MappedFile::open(path).map_err(CheckpointError::io("map", path))?;
        let header = parse_header(&map)
            .map_err(|source| CheckpointError::Header { path: path.to_path_buf(), source })?;
        Ok(Self { path: path.to_path_buf(), map, header })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the checked header: tensors in the order of their bytes, and the metadata strings.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the tensor names in the order of their bytes.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors().iter().map(|info| info.name.as_str())
    }

    /// Returns the tensor with that name.
    pub fn tensor(&self, name: &str) -> Result<TensorRef<'_>, CheckpointError> {
        let info = self.header.tensor(name).ok_or_else(|| CheckpointError::NoSuchTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
        })?;
        Ok(self.view(info))
    }

    /// Fills `out` with the elements `start..start + out.len()` of a float tensor.
    pub fn read_f32_at(&self, name: &str, start: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let tensor = self.tensor(name)?;
        let dtype = tensor.known_dtype().filter(|&dtype| convert::is_float(dtype)).ok_or_else(|| {
            CheckpointError::UnsupportedDtype {
                path: self.path.clone(),
                tensor: name.to_owned(),
                dtype: tensor.dtype.to_string(),
            }
        })?;
        let elements = tensor.elements();
        let size = dtype.size_bytes();
        if start > elements || out.len() > elements - start {
            let tensor = name.to_owned();
            return Err(CheckpointError::Range { tensor, start, count: out.len(), elements });
        }
        convert::widen(dtype, &tensor.bytes[start * size..(start + out.len()) * size], out);
        Ok(())
    }

    fn view<'a>(&'a self, info: &'a TensorInfo) -> TensorRef<'a> {
        TensorRef {
            dtype: info.dtype,
            shape: &info.shape,
            bytes: &self.map[info.offset..info.offset + info.bytes],
        }
    }
}

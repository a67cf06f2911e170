//! Weights that are not on this machine: names, shapes and places as one safetensors file would have them, computed from a
//! configuration. A plan of an inference needs no more.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use lockstep_model::{HfMapping, ModelConfig};
use lockstep_plan::DType;

use crate::{
    RowOrder, StoredParameter, error::CheckpointError, files::parent_of, gguf::StoredElements,
    hf::SINGLE_FILE,
};

/// A weights file that does not exist.
#[derive(Debug)]
pub(crate) struct AbsentFile {
    path: PathBuf,
    dtype: DType,
    tensors: BTreeMap<String, AbsentTensor>,
}

#[derive(Debug)]
struct AbsentTensor {
    shape: Vec<usize>,
    /// Byte of the file at which the tensor would lie.
    offset: usize,
}

impl AbsentFile {
    /// Returns the file of a model in `dir`, with elements of type `dtype`.
    pub(crate) fn new(dir: &Path, config: &ModelConfig, dtype: DType) -> Self {
        let mapping = HfMapping::new(config);
        let shapes: BTreeMap<String, Vec<usize>> =
            mapping.tensors().iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect();
        let mut end = 0;
        let place = |(name, shape): (String, Vec<usize>)| {
            let offset = end;
            end += shape.iter().product::<usize>() * dtype.size_bytes();
            (name, AbsentTensor { shape, offset })
        };
        Self { path: dir.join(SINGLE_FILE), dtype, tensors: shapes.into_iter().map(place).collect() }
    }

    /// Returns the tensors' names and shapes.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.shape.as_slice()))
    }

    /// Returns the type of all elements.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the location that a tensor would have; `None` if there is none of that name.
    pub(crate) fn stored(&self, name: &str) -> Option<StoredParameter<'_>> {
        let (name, tensor) = self.tensors.get_key_value(name)?;
        Some(StoredParameter {
            name,
            file: &self.path,
            offset: tensor.offset,
            stored: StoredElements::Dense(self.dtype),
            order: RowOrder::Same,
            elements: tensor.shape.iter().product(),
            first_element: 0,
        })
    }

    /// Returns the error of an access to the weights.
    pub(crate) fn missing(&self) -> CheckpointError {
        CheckpointError::NoWeights { dir: parent_of(&self.path) }
    }
}

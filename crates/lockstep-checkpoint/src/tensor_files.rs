//! Files of a model's weights in either form, with tensors by Hugging Face's names.

use std::{collections::BTreeMap, ops::Range, path::Path};

use lockstep_model::{HfImport, HfPlace, HfTransform, ModelError};
use lockstep_plan::DType;

use crate::{
    PackedParameter, StoredParameter,
    absent::AbsentFile,
    convert::is_float,
    error::CheckpointError,
    gguf::model::GgufModel,
    hf::HfCheckpoint,
    quantized::{PackedTensors, QuantizedFiles},
};

/// Files of a model's weights.
#[derive(Debug)]
pub(crate) enum TensorFiles {
    HuggingFace(HfCheckpoint),
    Gguf(Box<GgufModel>),
    Quantized(Box<QuantizedFiles>),
    Absent(AbsentFile),
}

impl TensorFiles {
    /// Returns the tensors' names and shapes.
    pub(crate) fn shapes(&self) -> Result<Vec<(String, Vec<usize>)>, CheckpointError> {
        match self {
            Self::HuggingFace(files) => {
                files.names().map(|name| Ok((name.to_owned(), files.tensor(name)?.shape.to_vec()))).collect()
            }
            Self::Gguf(model) => Ok(model.shapes()),
            Self::Quantized(files) => files.shapes(),
            Self::Absent(file) => {
                Ok(file.shapes().map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect())
            }
        }
    }

    /// Returns an error about tensors with their names in the files.
    pub(crate) fn named(&self, error: ModelError) -> ModelError {
        match (self, error) {
            (Self::Gguf(model), ModelError::Checkpoint { problems }) => {
                let named =
                    problems.into_iter().map(|problem| problem.renamed(|name| model.stored_name(name)));
                ModelError::Checkpoint { problems: named.collect() }
            }
            (_, error) => error,
        }
    }

    /// Returns the float type to compute in: that of most elements, or bf16 if most are quantized.
    pub(crate) fn compute_dtype(&self) -> DType {
        let files = match self {
            Self::HuggingFace(files) => files,
            Self::Gguf(model) => return model.compute_dtype(),
            Self::Quantized(files) => return files.compute_dtype(),
            Self::Absent(file) => return file.dtype(),
        };
        let mut elements = BTreeMap::<_, usize>::new();
        for tensor in files.names().filter_map(|name| files.tensor(name).ok()) {
            if let Some(dtype) = tensor.known_dtype().filter(|&dtype| is_float(dtype)) {
                *elements.entry(dtype).or_default() += tensor.elements();
            }
        }
        elements.into_iter().max_by_key(|&(_, elements)| elements).map_or(DType::F32, |(dtype, _)| dtype)
    }

    /// Returns the parameters that can be used where they are stored: a whole tensor, or some of its rows.
    pub(crate) fn stored_parameters<'a>(&'a self, import: &'a HfImport) -> Vec<StoredParameter<'a>> {
        let parameters = import.places.chunk_by(|a, b| a.parameter == b.parameter);
        let stored = parameters.filter_map(|places| {
            let [place] = places else { return None };
            self.piece(place).filter(|piece| piece.first_element == 0)
        });
        stored.collect()
    }

    /// Returns the pieces of parameters that are stored in the parameter's order: whole tensors, or some of their rows. A parameter may
    /// have several, such as a stack of experts, and others that are not among them.
    pub(crate) fn stored_pieces<'a>(&'a self, import: &'a HfImport) -> Vec<StoredParameter<'a>> {
        import.places.iter().filter_map(|place| self.piece(place)).collect()
    }

    fn piece<'a>(&'a self, place: &'a HfPlace) -> Option<StoredParameter<'a>> {
        let stored = match self {
            Self::HuggingFace(files) => files.stored(&place.tensor)?,
            Self::Gguf(model) => model.stored(&place.tensor)?,
            Self::Quantized(files) => files.stored(&place.tensor)?,
            Self::Absent(file) => file.stored(&place.tensor)?,
        };
        let first_element = place.first_element;
        let stored = StoredParameter { name: &place.parameter, first_element, ..stored };
        match &place.transform {
            HfTransform::Same => Some(stored),
            HfTransform::Rows { rows, blocks: 1, .. } => {
                let row_bytes = stored.stored.row_bytes(*place.tensor_shape.last()?)?;
                let offset = stored.offset + rows.start * row_bytes;
                Some(StoredParameter { offset, elements: place.parameter_elements(), ..stored })
            }
            _ => None,
        }
    }

    /// Returns the parameters that can be repacked into blocks: a whole tensor, some of its rows, a tensor for each expert, or a stack of
    /// transposed experts.
    pub(crate) fn packed_parameters<'a>(&'a self, import: &'a HfImport) -> Vec<PackedParameter<'a>> {
        let parameters = import.places.chunk_by(|a, b| a.parameter == b.parameter);
        let packed = parameters.filter_map(|places| {
            let name = &places[0].parameter;
            match self {
                Self::Quantized(files) => {
                    Some(PackedParameter::of_tensors(name, packed_tensors(files, places)?))
                }
                Self::Gguf(model) => {
                    let [place] = places else { return None };
                    let rows = model.foreign_rows(&place.tensor, rows_of(place)?)?;
                    Some(PackedParameter::of_foreign(name, rows))
                }
                Self::HuggingFace(_) | Self::Absent(_) => None,
            }
        });
        packed.collect()
    }

    /// Fills `out` with all values of a tensor.
    pub(crate) fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), CheckpointError> {
        match self {
            Self::HuggingFace(files) => files.read_f32(name, out),
            Self::Gguf(model) => model.read_f32(name, out),
            Self::Quantized(files) => files.read_f32(name, out),
            Self::Absent(file) => Err(file.missing()),
        }
    }

    /// Fills `out` with the values of a tensor from element `first` on, and returns true; false if all of the tensor must be read for them.
    pub(crate) fn read_part(
        &self,
        name: &str,
        first: usize,
        out: &mut [f32],
    ) -> Result<bool, CheckpointError> {
        match self {
            Self::Gguf(model) => model.read_part(name, first, out),
            Self::HuggingFace(_) | Self::Quantized(_) | Self::Absent(_) => Ok(false),
        }
    }

    /// Returns true if two tensors have the same bytes.
    pub(crate) fn are_same(&self, a: &str, b: &str) -> Result<bool, CheckpointError> {
        match self {
            Self::HuggingFace(files) => Ok(files.tensor(a)?.bytes == files.tensor(b)?.bytes),
            Self::Gguf(model) => Ok(model.bytes(a)? == model.bytes(b)?),
            Self::Quantized(files) => files.are_same(a, b),
            Self::Absent(file) => Err(file.missing()),
        }
    }

    /// Checks that a tensor consists of zeros.
    pub(crate) fn require_zeros(&self, name: &str) -> Result<(), CheckpointError> {
        let files = match self {
            Self::HuggingFace(files) => files,
            Self::Quantized(files) => files.files(),
            Self::Absent(file) => return Err(file.missing()),
            Self::Gguf(model) => return Ok(HfImport::require_zeros(name, 1, model.bytes(name)?)?),
        };
        let found = files.tensor(name)?;
        let element_bytes = found.bytes.len() / found.elements().max(1);
        Ok(HfImport::require_zeros(name, element_bytes, found.bytes)?)
    }

    /// Returns true if the weights lie in a directory of Hugging Face, with other files of the model beside them.
    pub(crate) fn has_companions(&self) -> bool {
        matches!(self, Self::HuggingFace(_) | Self::Quantized(_) | Self::Absent(_))
    }
}

/// Returns the GGUF file that a path names: itself, or the one in a directory without another model.
///
/// # Errors
/// If a directory has several such files.
pub(crate) fn gguf_file(path: &Path) -> Result<Option<std::path::PathBuf>, CheckpointError> {
    use crate::gguf::model::{EXTENSION, file_in};
    if path.is_file() && path.extension().is_some_and(|extension| extension == EXTENSION) {
        return Ok(Some(path.to_path_buf()));
    }
    if path.join("config.json").exists() { Ok(None) } else { file_in(path) }
}

/// Returns the packed tensors of a parameter; `None` if no blocks have its values, or it is not stored row by row.
fn packed_tensors<'a>(files: &'a QuantizedFiles, places: &'a [HfPlace]) -> Option<PackedTensors<'a>> {
    let [place] = places else {
        let mut end = 0;
        let follows = |place: &HfPlace| {
            let part = place.part();
            let is_next = place.transform == HfTransform::Same && part.start == end;
            end = part.end;
            is_next
        };
        let is_stack = places.iter().all(follows);
        let tensors = places.iter().map(|place| place.tensor.as_str());
        return is_stack.then(|| files.packed_stack(tensors)).flatten();
    };
    if let &HfTransform::StackedColumns { first, step, .. } = &place.transform {
        return files.packed_columns(&place.tensor, (first, step));
    }
    files.packed(&place.tensor, Some(rows_of(place)?))
}

/// Returns the rows of a tensor that a parameter consists of; `None` if it does not consist of rows.
fn rows_of(place: &HfPlace) -> Option<Range<usize>> {
    match &place.transform {
        _ if place.is_whole() => {
            let (_, matrix) = place.tensor_shape.split_last()?;
            Some(0..matrix.iter().product())
        }
        HfTransform::Rows { rows, blocks: 1, .. } if place.first_element == 0 => Some(rows.clone()),
        _ => None,
    }
}

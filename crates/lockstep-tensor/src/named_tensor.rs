//! Named, typed tensors in host memory: the inputs of a micro-batch before they are copied to a device.

use std::{ops::Range, sync::Arc};

use lockstep_plan::DType;

use crate::view::View;

/// Name of the input that a loss counts: elements other than -100 of an i32 tensor are valid.
pub const LABELS: &str = "labels";
/// Name under which samples hold the ids of their tokens, u32 `[seq_len]`.
pub const INPUT_IDS: &str = "input_ids";

/// Names that data sets have for the inputs of models.
const ALIASES: [(&str, &str); 2] = [("pixel_values", "image"), (LABELS, "label")];

/// Returns the tensor of a name, also under the name that data sets usually have for it: `image` for `pixel_values`, `label`
/// for `labels`.
pub fn find_tensor<'a>(tensors: &'a [NamedTensor], name: &str) -> Option<&'a NamedTensor> {
    let exact = tensors.iter().find(|tensor| &*tensor.name == name);
    exact.or_else(|| tensors.iter().find(|tensor| is_name_of(&tensor.name, name)))
}

/// Returns true if a data set may call the input `input` of a model `name`.
pub fn is_name_of(name: &str, input: &str) -> bool {
    name == input || ALIASES.contains(&(input, name))
}

/// Elements of a tensor, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum TensorData {
    /// Bytes: decoded pixels, text.
    U8(Vec<u8>),
    /// Signed 32-bit integers: labels.
    I32(Vec<i32>),
    /// Unsigned 32-bit integers: token ids.
    U32(Vec<u32>),
    /// 32-bit floats: features, transformed pixels.
    F32(Vec<f32>),
}

/// Evaluates `$body` with `$values` bound to the vector of any variant.
macro_rules! with_values {
    ($data:expr, $values:ident => $body:expr) => {
        match $data {
            TensorData::U8($values) => $body,
            TensorData::I32($values) => $body,
            TensorData::U32($values) => $body,
            TensorData::F32($values) => $body,
        }
    };
}

impl TensorData {
    /// Returns an empty vector of `dtype`; `None` for a dtype that samples do not hold (bf16, f16).
    pub fn empty(dtype: DType) -> Option<Self> {
        match dtype {
            DType::U8 => Some(Self::U8(Vec::new())),
            DType::I32 => Some(Self::I32(Vec::new())),
            DType::U32 => Some(Self::U32(Vec::new())),
            DType::F32 => Some(Self::F32(Vec::new())),
            DType::BF16 | DType::F16 => None,
        }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::U8(_) => DType::U8,
            Self::I32(_) => DType::I32,
            Self::U32(_) => DType::U32,
            Self::F32(_) => DType::F32,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        with_values!(self, values => values.len())
    }

    /// Returns true if there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the elements to `view`.
    ///
    /// # Panics
    /// If the view has another dtype or number of elements.
    pub fn write_to(&self, view: View<'_>) {
        with_values!(self, values => view.write(values));
    }

    /// Removes all elements and keeps the memory.
    pub fn clear(&mut self) {
        with_values!(self, values => values.clear());
    }

    /// Returns the elements of a `U8` tensor.
    pub fn as_u8(&self) -> Option<&[u8]> {
        if let Self::U8(values) = self { Some(values) } else { None }
    }

    /// Returns the elements of an `I32` tensor.
    pub fn as_i32(&self) -> Option<&[i32]> {
        if let Self::I32(values) = self { Some(values) } else { None }
    }

    /// Returns the elements of an `F32` tensor.
    pub fn as_f32(&self) -> Option<&[f32]> {
        if let Self::F32(values) = self { Some(values) } else { None }
    }

    /// Appends the elements of `other`. Returns false, and appends nothing, if its dtype differs.
    #[must_use]
    pub fn append(&mut self, other: &Self) -> bool {
        self.append_range(other, 0..other.len())
    }

    /// Appends the elements `range` of `other`. Returns false, and appends nothing, if its dtype differs.
    ///
    /// # Panics
    /// If `other` has no such elements.
    #[must_use]
    pub fn append_range(&mut self, other: &Self, range: Range<usize>) -> bool {
        match (self, other) {
            (Self::U8(all), Self::U8(more)) => all.extend_from_slice(&more[range]),
            (Self::I32(all), Self::I32(more)) => all.extend_from_slice(&more[range]),
            (Self::U32(all), Self::U32(more)) => all.extend_from_slice(&more[range]),
            (Self::F32(all), Self::F32(more)) => all.extend_from_slice(&more[range]),
            _ => return false,
        }
        true
    }
}

/// Tensor of a sample or of a batch: `image` of shape `[height, width, channels]`, `label` of shape `[]`.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor {
    /// Name, unique in its sample.
    pub name: Arc<str>,
    /// Extent of each dimension; empty for a scalar.
    pub shape: Vec<usize>,
    /// Elements, as many as the product of `shape`.
    pub data: TensorData,
}

impl NamedTensor {
    /// Creates a tensor.
    ///
    /// # Panics
    /// If `shape` and `data` differ in their number of elements.
    pub fn new(name: impl Into<Arc<str>>, shape: &[usize], data: TensorData) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "elements of shape {shape:?}");
        Self { name: name.into(), shape: shape.to_vec(), data }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Replaces shape and elements, and returns the old elements.
    ///
    /// # Panics
    /// If `shape` and `data` differ in their number of elements.
    pub fn replace(&mut self, shape: &[usize], data: TensorData) -> TensorData {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "elements of shape {shape:?}");
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        std::mem::replace(&mut self.data, data)
    }
}

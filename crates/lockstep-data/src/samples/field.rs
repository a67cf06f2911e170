//! Selection of the tensors of a sample from the named parts of a record: members of a tar shard, or features of a
//! `tf.Example`.

use std::sync::Arc;

use lockstep_plan::DType;
use lockstep_tensor::{NamedTensor, TensorData};

use super::{
    dataset::{is_class, label_problem},
    image_file::{Channels, decode_image},
    npy::read_npy,
    tensor::TensorSpec,
};
use crate::error::{DataError, Result};

/// Tensor of a sample, and the part of a record that it is decoded from.
#[derive(Debug, Clone)]
pub struct Field {
    /// Name of the tensor.
    pub name: Arc<str>,
    /// Names of the part: the first of them that a record has. For a tar shard, suffixes without a dot.
    pub keys: Vec<String>,
    /// Encoding of the part.
    pub kind: FieldKind,
}

/// Encoding of a part of a record, and the tensor that it becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FieldKind {
    /// Image file; becomes u8 `[height, width, channels]`.
    Image(Channels),
    /// Class index as decimal text (tar) or as one int64 (`tf.Example`); becomes an i32 scalar.
    Class {
        /// Number of classes, against which the index is checked.
        num_classes: Option<u32>,
    },
    /// Bytes as they are, such as text or JSON; become u8 `[bytes]`.
    Bytes,
    /// Array: a `.npy` member (tar), or a list of int64 or floats (`tf.Example`).
    Array {
        /// Element type of the tensor.
        dtype: DType,
        /// Extent of each dimension; `None` where it varies. At most one varies in a `tf.Example`.
        shape: Vec<Option<usize>>,
    },
}

impl Field {
    /// Selects an image; `keys` are alternatives separated by `;`, such as `"jpg;jpeg;png"`.
    pub fn image(name: &str, keys: &str, channels: Channels) -> Self {
        Self::new(name, keys, FieldKind::Image(channels))
    }

    /// Selects a class index below `num_classes`.
    pub fn class(name: &str, keys: &str, num_classes: Option<u32>) -> Self {
        Self::new(name, keys, FieldKind::Class { num_classes })
    }

    /// Selects the field as bytes, undecoded.
    pub fn bytes(name: &str, keys: &str) -> Self {
        Self::new(name, keys, FieldKind::Bytes)
    }

    /// Selects an array.
    pub fn array(name: &str, keys: &str, dtype: DType, shape: &[Option<usize>]) -> Self {
        Self::new(name, keys, FieldKind::Array { dtype, shape: shape.to_vec() })
    }

    fn new(name: &str, keys: &str, kind: FieldKind) -> Self {
        let keys = keys.split(';').map(|key| key.trim().to_owned()).filter(|key| !key.is_empty()).collect();
        Self { name: name.into(), keys, kind }
    }

    /// Returns the tensor that the field becomes.
    pub(crate) fn spec(&self) -> TensorSpec {
        let name = Arc::clone(&self.name);
        match &self.kind {
            FieldKind::Image(channels) => {
                TensorSpec::new(name, DType::U8, &[None, None, Some(channels.count())])
            }
            FieldKind::Class { .. } => TensorSpec::new(name, DType::I32, &[]),
            FieldKind::Bytes => TensorSpec::new(name, DType::U8, &[None]),
            FieldKind::Array { dtype, shape } => TensorSpec::new(name, *dtype, shape),
        }
    }

    /// Returns the names of the part for a message: `"jpg" or "png"`.
    pub(crate) fn described(&self) -> String {
        self.keys.iter().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(" or ")
    }

    /// Decodes the bytes of a part into `tensor`, which is empty and has the dtype of [`spec`](Self::spec).
    pub(crate) fn decode(&self, bytes: &[u8], tensor: &mut NamedTensor) -> Result<(), String> {
        match (&self.kind, &mut tensor.data) {
            (FieldKind::Image(channels), TensorData::U8(pixels)) => {
                tensor.shape.extend(decode_image(bytes, *channels, pixels)?);
            }
            (FieldKind::Class { .. }, TensorData::I32(_)) => {
                let text = str::from_utf8(bytes).ok().map(str::trim);
                let label = text.and_then(|text| text.parse().ok());
                self.push_class(label.ok_or("it is not a class index in decimal digits")?, tensor)?;
            }
            (FieldKind::Bytes, TensorData::U8(values)) => {
                values.extend_from_slice(bytes);
                tensor.shape.push(bytes.len());
            }
            (FieldKind::Array { .. }, data) => {
                tensor.shape.extend(read_npy(bytes, data)?);
                self.check_shape(&tensor.shape)?;
            }
            (_, data) => return Err(format!("it does not become {}", data.dtype())),
        }
        Ok(())
    }

    /// Appends a class index to `tensor` after a check.
    pub(crate) fn push_class(&self, label: i64, tensor: &mut NamedTensor) -> Result<(), String> {
        let FieldKind::Class { num_classes } = self.kind else { return Ok(()) };
        if num_classes.is_some_and(|num_classes| !is_class(label, num_classes)) {
            return Err(label_problem(&label, num_classes.unwrap_or(0)));
        }
        let label = i32::try_from(label).map_err(|_| format!("its label is {label}, beyond i32"))?;
        if let TensorData::I32(values) = &mut tensor.data {
            values.push(label);
        }
        Ok(())
    }

    /// Checks the shape of an array against the one that was asked for.
    fn check_shape(&self, found: &[usize]) -> Result<(), String> {
        let FieldKind::Array { shape, .. } = &self.kind else { return Ok(()) };
        let fits = shape.len() == found.len()
            && shape
                .iter()
                .zip(found)
                .all(|(expected, extent)| expected.is_none_or(|expected| expected == *extent));
        if fits { Ok(()) } else { Err(format!("its shape is {found:?}; allowed: {}", shape_text(shape))) }
    }
}

/// Returns a shape as text, with `_` for an extent that varies.
pub(crate) fn shape_text(shape: &[Option<usize>]) -> String {
    let extents: Vec<String> =
        shape.iter().map(|extent| extent.map_or("_".to_owned(), |extent| extent.to_string())).collect();
    format!("[{}]", extents.join(", "))
}

/// Checks that there are fields, that each has keys, and that no two tensors have the same name.
pub(crate) fn check_fields(fields: &[Field]) -> Result<()> {
    if fields.is_empty() {
        return Err(DataError::out_of_range("the number of fields", 0, "1 or more"));
    }
    for (at, field) in fields.iter().enumerate() {
        let name = field.name.to_string();
        if field.keys.is_empty() {
            return Err(DataError::out_of_range(
                "a field without keys",
                name,
                "names of a part, such as \"jpg;png\"",
            ));
        }
        if fields[..at].iter().any(|other| other.name == field.name) {
            return Err(DataError::out_of_range("the name of two fields", name, "distinct names"));
        }
        if let FieldKind::Array { dtype, .. } = field.kind
            && TensorData::empty(dtype).is_none()
        {
            return Err(DataError::out_of_range("the dtype of a field", dtype, "u8, i32, u32, f32"));
        }
    }
    Ok(())
}

//! Typed tensors on the host, and the sample that names them.
//!
//! A tensor is one vector of its element type and a shape. A sample keeps the vectors that its tensors no longer use
//! as spares, so that filling it again allocates nothing.

use std::sync::Arc;

use lockstep_plan::DType;

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

    /// Returns the elements of a `U32` tensor.
    pub fn as_u32(&self) -> Option<&[u32]> {
        if let Self::U32(values) = self { Some(values) } else { None }
    }

    /// Returns the elements of an `F32` tensor.
    pub fn as_f32(&self) -> Option<&[f32]> {
        if let Self::F32(values) = self { Some(values) } else { None }
    }

    /// Appends the elements of `other`. Returns false, and appends nothing, if its dtype differs.
    pub(crate) fn append(&mut self, other: &Self) -> bool {
        match (self, other) {
            (Self::U8(all), Self::U8(more)) => all.extend_from_slice(more),
            (Self::I32(all), Self::I32(more)) => all.extend_from_slice(more),
            (Self::U32(all), Self::U32(more)) => all.extend_from_slice(more),
            (Self::F32(all), Self::F32(more)) => all.extend_from_slice(more),
            _ => return false,
        }
        true
    }

    /// Appends the elements `range` of `other`, which has the same dtype.
    pub(crate) fn append_range(&mut self, other: &Self, range: std::ops::Range<usize>) {
        match (self, other) {
            (Self::U8(all), Self::U8(more)) => all.extend_from_slice(&more[range]),
            (Self::I32(all), Self::I32(more)) => all.extend_from_slice(&more[range]),
            (Self::U32(all), Self::U32(more)) => all.extend_from_slice(&more[range]),
            (Self::F32(all), Self::F32(more)) => all.extend_from_slice(&more[range]),
            (this, other) => debug_assert_eq!(this.dtype(), other.dtype()),
        }
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

    /// Replaces shape and elements; the old elements become a spare.
    pub(crate) fn replace(&mut self, shape: &[usize], data: TensorData, spares: &mut Spares) {
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        spares.give(std::mem::replace(&mut self.data, data));
    }
}

/// Name, dtype and shape that every sample of a data set has for one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name of the tensor.
    pub name: Arc<str>,
    /// Element type.
    pub dtype: DType,
    /// Extent of each dimension; `None` where it varies from sample to sample.
    pub shape: Vec<Option<usize>>,
}

impl TensorSpec {
    /// Creates the specification of a tensor whose extents are all fixed.
    pub fn fixed(name: impl Into<Arc<str>>, dtype: DType, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: shape.iter().copied().map(Some).collect() }
    }

    /// Creates the specification of a tensor with the given extents.
    pub fn new(name: impl Into<Arc<str>>, dtype: DType, shape: &[Option<usize>]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }
}

/// Vectors whose contents are no longer needed, at most a few of each dtype.
#[derive(Debug, Clone, Default)]
pub struct Spares(Vec<TensorData>);

/// Maximum number of spare vectors; a list of transforms has at most two in use at a time.
const MOST_SPARES: usize = 8;

impl Spares {
    /// Returns an empty vector of floats, with the memory of an earlier tensor if there is one.
    pub fn f32(&mut self) -> Vec<f32> {
        match self.take(DType::F32) {
            Some(TensorData::F32(values)) => values,
            _ => Vec::new(),
        }
    }

    /// Returns an empty vector of bytes, with the memory of an earlier tensor if there is one.
    pub fn u8(&mut self) -> Vec<u8> {
        match self.take(DType::U8) {
            Some(TensorData::U8(values)) => values,
            _ => Vec::new(),
        }
    }

    /// Keeps the memory of `data` for a later tensor.
    pub fn give(&mut self, mut data: TensorData) {
        if self.0.len() < MOST_SPARES {
            data.clear();
            self.0.push(data);
        }
    }

    fn take(&mut self, dtype: DType) -> Option<TensorData> {
        let at = self.0.iter().position(|data| data.dtype() == dtype)?;
        Some(self.0.swap_remove(at))
    }
}

/// One sample: tensors with distinct names, always in the same order.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// Tensors in the order of [`Dataset::tensors`](super::Dataset::tensors).
    pub tensors: Vec<NamedTensor>,
    spares: Spares,
    /// Memory for an encoded record, which a reader takes and gives back.
    pub(crate) record: Vec<u8>,
}

impl PartialEq for Sample {
    fn eq(&self, other: &Self) -> bool {
        self.tensors == other.tensors
    }
}

impl Sample {
    /// Creates a sample of these tensors.
    pub fn new(tensors: Vec<NamedTensor>) -> Self {
        Self { tensors, ..Self::default() }
    }

    /// Returns the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&NamedTensor> {
        self.tensors.iter().find(|tensor| &*tensor.name == name)
    }

    /// Returns the tensor with this name, and the spare vectors that a transform of it may use.
    pub fn tensor_mut(&mut self, name: &str) -> Option<(&mut NamedTensor, &mut Spares)> {
        let tensor = self.tensors.iter_mut().find(|tensor| &*tensor.name == name)?;
        Some((tensor, &mut self.spares))
    }

    /// Gives the sample the tensors that `specs` name, all empty, and reuses the memory of earlier ones.
    pub fn prepare(&mut self, specs: &[TensorSpec]) -> &mut [NamedTensor] {
        let Self { tensors, spares, .. } = self;
        tensors.truncate(specs.len());
        for (at, spec) in specs.iter().enumerate() {
            let empty = |spares: &mut Spares| {
                spares
                    .take(spec.dtype)
                    .or_else(|| TensorData::empty(spec.dtype))
                    .unwrap_or(TensorData::U8(vec![]))
            };
            match tensors.get_mut(at) {
                Some(tensor) => {
                    if !Arc::ptr_eq(&tensor.name, &spec.name) {
                        tensor.name = Arc::clone(&spec.name);
                    }
                    tensor.shape.clear();
                    if tensor.dtype() == spec.dtype {
                        tensor.data.clear();
                    } else {
                        let data = empty(spares);
                        spares.give(std::mem::replace(&mut tensor.data, data));
                    }
                }
                None => {
                    let data = empty(spares);
                    tensors.push(NamedTensor { name: Arc::clone(&spec.name), shape: Vec::new(), data });
                }
            }
        }
        tensors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_that_is_filled_again_keeps_its_memory() {
        let specs =
            [TensorSpec::new("image", DType::U8, &[None]), TensorSpec::fixed("label", DType::I32, &[])];
        let mut sample = Sample::default();
        let mut addresses = Vec::new();
        for _ in 0..3 {
            let [image, label] = sample.prepare(&specs) else { panic!() };
            let TensorData::U8(bytes) = &mut image.data else { panic!() };
            bytes.resize(1000, 7);
            addresses.push(bytes.as_ptr());
            image.shape.push(1000);
            label.data = TensorData::I32(vec![1]);
            // A transform turns the bytes into floats.
            let (image, spares) = sample.tensor_mut("image").unwrap();
            let mut floats = spares.f32();
            floats.resize(1000, 0.5);
            image.replace(&[10, 100], TensorData::F32(floats), spares);
            assert_eq!(sample.tensor("image").unwrap().dtype(), DType::F32);
        }
        assert!(addresses.windows(2).all(|pair| pair[0] == pair[1]), "{addresses:?}");
    }

    #[test]
    fn a_sample_of_other_tensors_forgets_the_earlier_ones() {
        let mut sample = Sample::new(vec![
            NamedTensor::new("a", &[2], TensorData::F32(vec![1.0, 2.0])),
            NamedTensor::new("b", &[], TensorData::I32(vec![3])),
        ]);
        let [only] = sample.prepare(&[TensorSpec::fixed("c", DType::U32, &[1])]) else { panic!() };
        assert_eq!((&*only.name, only.dtype(), only.data.len()), ("c", DType::U32, 0));
        assert!(sample.tensor("a").is_none());
    }
}

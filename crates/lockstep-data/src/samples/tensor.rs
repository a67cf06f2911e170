//! A sample of named tensors, and the specification of its tensors. A sample keeps the vectors that its tensors no longer use
//! as spares, so that filling it again allocates nothing.

pub(super) use lockstep_tensor::{NamedTensor, TensorData};
use std::sync::Arc;

use lockstep_plan::DType;

/// Name, dtype and shape that every sample of a data set has for one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name of the tensor.
    pub name: Arc<str>,
    /// Dtype of the elements.
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
    /// Memory for an encoded record.
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

    /// Calls [`prepare`](Self::prepare); returns the memory for an encoded record as well.
    pub(crate) fn prepare_with_record(&mut self, specs: &[TensorSpec]) -> (&mut [NamedTensor], &mut Vec<u8>) {
        self.prepare(specs);
        (&mut self.tensors, &mut self.record)
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
            spares.give(image.replace(&[10, 100], TensorData::F32(floats)));
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

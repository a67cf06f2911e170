//! A batch of samples: their tensors stacked along a new first dimension.

use lockstep_tensor::{NamedTensor, TensorData};

use super::tensor::Sample;

/// Stacked samples. Images `[height, width, channels]` become `[samples, height, width, channels]`, scalar labels
/// `[samples]`.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Batch {
    /// Tensors in the order of the samples' tensors.
    pub tensors: Vec<NamedTensor>,
    /// Global sample number of each sample. Dropout is keyed by it.
    pub sample_numbers: Vec<u64>,
    /// Number of damaged samples that were skipped while this batch was filled.
    pub skipped: u64,
}

impl Batch {
    /// Returns the number of samples.
    pub fn samples(&self) -> usize {
        self.sample_numbers.len()
    }

    /// Returns the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&NamedTensor> {
        self.tensors.iter().find(|tensor| &*tensor.name == name)
    }

    /// Removes all samples and keeps the memory.
    pub(crate) fn clear(&mut self) {
        for tensor in &mut self.tensors {
            tensor.data.clear();
            if let Some(samples) = tensor.shape.first_mut() {
                *samples = 0;
            }
        }
        self.sample_numbers.clear();
        self.skipped = 0;
    }

    /// Appends a sample.
    ///
    /// # Errors
    /// If a tensor differs from that of the first sample in name, dtype or shape.
    pub(crate) fn push(&mut self, sample: &Sample, number: u64) -> Result<(), String> {
        if self.sample_numbers.is_empty() {
            self.start(sample);
        }
        if self.tensors.len() != sample.tensors.len() {
            return Err(format!(
                "it has {} tensors, the first of its batch {}",
                sample.tensors.len(),
                self.tensors.len()
            ));
        }
        for (stacked, tensor) in self.tensors.iter_mut().zip(&sample.tensors) {
            let is_alike = stacked.name == tensor.name && stacked.shape[1..] == tensor.shape;
            if !is_alike || !stacked.data.append(&tensor.data) {
                return Err(format!(
                    "its tensor \"{}\" is {} {:?}, that of the first sample of its batch is \"{}\", {} {:?}; transforms \
                     such as Resize and RandomCrop give all images one shape",
                    tensor.name,
                    tensor.dtype(),
                    tensor.shape,
                    stacked.name,
                    stacked.dtype(),
                    &stacked.shape[1..]
                ));
            }
            stacked.shape[0] += 1;
        }
        self.sample_numbers.push(number);
        Ok(())
    }

    /// Gives the batch the tensors of its first sample, without elements.
    fn start(&mut self, sample: &Sample) {
        self.tensors.truncate(sample.tensors.len());
        for (at, tensor) in sample.tensors.iter().enumerate() {
            if self.tensors.get(at).is_none_or(|stacked| stacked.dtype() != tensor.dtype()) {
                let data = TensorData::empty(tensor.dtype()).unwrap_or(TensorData::U8(Vec::new()));
                let fresh = NamedTensor { name: tensor.name.clone(), shape: Vec::new(), data };
                self.tensors.truncate(at);
                self.tensors.push(fresh);
            }
            let stacked = &mut self.tensors[at];
            stacked.name = tensor.name.clone();
            stacked.data.clear();
            stacked.shape.clear();
            stacked.shape.push(0);
            stacked.shape.extend_from_slice(&tensor.shape);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(values: &[f32], label: i32) -> Sample {
        Sample::new(vec![
            NamedTensor::new("x", &[values.len()], TensorData::F32(values.to_vec())),
            NamedTensor::new("label", &[], TensorData::I32(vec![label])),
        ])
    }

    #[test]
    fn samples_are_stacked_and_memory_is_kept() {
        let mut batch = Batch::default();
        let mut address = None;
        for _ in 0..3 {
            batch.clear();
            batch.push(&sample(&[1.0, 2.0], 7), 40).unwrap();
            batch.push(&sample(&[3.0, 4.0], 8), 41).unwrap();
            let expected = NamedTensor::new("x", &[2, 2], TensorData::F32(vec![1.0, 2.0, 3.0, 4.0]));
            assert_eq!(batch.tensor("x"), Some(&expected));
            assert_eq!(
                batch.tensor("label"),
                Some(&NamedTensor::new("label", &[2], TensorData::I32(vec![7, 8])))
            );
            assert_eq!(batch.sample_numbers, [40, 41]);
            let now = batch.tensors[0].data.as_f32().unwrap().as_ptr();
            assert_eq!(*address.get_or_insert(now), now);
        }
    }

    #[test]
    fn samples_of_other_shapes_are_refused() {
        let mut batch = Batch::default();
        batch.push(&sample(&[1.0, 2.0], 7), 0).unwrap();
        let problem = batch.push(&sample(&[1.0], 7), 1).unwrap_err();
        assert!(problem.contains("\"x\" is f32 [1]") && problem.contains("f32 [2]"), "{problem}");
    }
}

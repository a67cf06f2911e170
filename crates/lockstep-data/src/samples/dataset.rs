//! The interface of a data set of samples, and one whose samples are arrays in memory.

use std::{fmt::Debug, sync::Arc};

use super::tensor::{NamedTensor, Sample, TensorSpec};
use crate::error::{DataError, Result};

/// Data set whose samples are read by index, in any order and from any thread.
///
/// `get` is a function of the index alone: two calls give the same sample, on any rank and in any run. Randomness
/// belongs into [`Transforms`](super::Transforms), which know the seed, the sample number and the epoch.
pub trait Dataset: Debug + Send + Sync {
    /// Returns the number of samples.
    fn len(&self) -> u64;

    /// Returns true if there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the tensors that every sample has, in order.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Reads sample `index`, below [`len`](Self::len).
    ///
    /// # Errors
    /// If the sample cannot be read or is damaged. A data set of a user's reports [`DataError::BadSample`].
    fn get(&self, index: u64) -> Result<Sample>;

    /// Reads sample `index` into `sample`, whose memory it may reuse: see [`Sample::prepare`].
    ///
    /// # Errors
    /// As [`get`](Self::get). The contents of `sample` are unspecified then.
    fn get_into(&self, index: u64, sample: &mut Sample) -> Result<()> {
        *sample = self.get(index)?;
        Ok(())
    }
}

/// Returns sample `index` of a data set that implements [`Dataset::get_into`].
pub(crate) fn get_new(dataset: &dyn Dataset, index: u64) -> Result<Sample> {
    let mut sample = Sample::default();
    dataset.get_into(index, &mut sample)?;
    Ok(sample)
}

/// Checks the index of a sample.
pub(crate) fn check_index(index: u64, samples: u64) -> Result<()> {
    if index < samples {
        return Ok(());
    }
    let allowed =
        if samples == 0 { "none, there is no sample".to_owned() } else { format!("0 to {}", samples - 1) };
    Err(DataError::out_of_range("sample index", index, allowed))
}

/// Samples cut from arrays in memory along their first dimension, like PyTorch's `TensorDataset`. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TensorDataset {
    arrays: Arc<[NamedTensor]>,
    specs: Vec<TensorSpec>,
    samples: u64,
}

impl TensorDataset {
    /// Creates a data set of arrays `[samples, ...]`.
    ///
    /// # Errors
    /// If there is no array, one has no dimension, two have the same name, or the numbers of samples differ.
    pub fn new(arrays: Vec<NamedTensor>) -> Result<Self> {
        let mut samples = None;
        for (at, array) in arrays.iter().enumerate() {
            let Some(&count) = array.shape.first() else {
                return Err(DataError::BadArrays {
                    problem: format!("\"{}\" has no dimension of samples", array.name),
                });
            };
            let (first, expected) = *samples.get_or_insert((&array.name, count));
            if count != expected {
                let problem = format!(
                    "\"{}\" has {count} samples and \"{first}\" has {expected}; the first dimension of all arrays is the \
                     number of samples",
                    array.name
                );
                return Err(DataError::BadArrays { problem });
            }
            if arrays[..at].iter().any(|other| other.name == array.name) {
                return Err(DataError::BadArrays { problem: format!("two are named \"{}\"", array.name) });
            }
        }
        let Some((_, samples)) = samples else {
            return Err(DataError::BadArrays { problem: "there is none".to_owned() });
        };
        let spec =
            |array: &NamedTensor| TensorSpec::fixed(array.name.as_ref(), array.dtype(), &array.shape[1..]);
        let specs = arrays.iter().map(spec).collect();
        Ok(Self { arrays: arrays.into(), specs, samples: samples as u64 })
    }

    /// Returns the arrays, each `[samples, ...]`.
    pub fn arrays(&self) -> &[NamedTensor] {
        &self.arrays
    }
}

impl Dataset for TensorDataset {
    fn len(&self) -> u64 {
        self.samples
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.specs.clone()
    }

    fn get(&self, index: u64) -> Result<Sample> {
        get_new(self, index)
    }

    fn get_into(&self, index: u64, sample: &mut Sample) -> Result<()> {
        check_index(index, self.samples)?;
        for (array, tensor) in self.arrays.iter().zip(sample.prepare(&self.specs)) {
            let elements = array.shape[1..].iter().product::<usize>();
            let start = index as usize * elements;
            tensor.shape.extend_from_slice(&array.shape[1..]);
            let is_appended = tensor.data.append_range(&array.data, start..start + elements);
            assert!(is_appended, "a prepared tensor has the dtype of its array");
        }
        Ok(())
    }
}

/// Returns true if `label` is one of `num_classes` classes.
pub(crate) fn is_class(label: i64, num_classes: u32) -> bool {
    (0..i64::from(num_classes)).contains(&label)
}

/// Returns the description of a label beyond the classes.
pub(crate) fn label_problem(value: &dyn std::fmt::Display, num_classes: u32) -> String {
    format!("its label is {value}, but there are {num_classes} classes: 0 to {}", i64::from(num_classes) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::tensor::TensorData;

    #[test]
    fn a_sample_is_a_row_of_every_array() {
        let data = TensorDataset::new(vec![
            NamedTensor::new("x", &[3, 2], TensorData::F32(vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0])),
            NamedTensor::new("y", &[3], TensorData::I32(vec![7, 8, 9])),
        ])
        .unwrap();
        assert_eq!(data.len(), 3);
        assert_eq!(data.tensors()[0].shape, [Some(2)]);
        let sample = data.get(1).unwrap();
        assert_eq!(
            sample.tensor("x").unwrap(),
            &NamedTensor::new("x", &[2], TensorData::F32(vec![2.0, 3.0]))
        );
        assert_eq!(sample.tensor("y").unwrap(), &NamedTensor::new("y", &[], TensorData::I32(vec![8])));
        let error = data.get(3).unwrap_err().to_string();
        assert!(error.contains("sample index is 3; allowed: 0 to 2"), "{error}");
    }

    #[test]
    fn arrays_that_do_not_belong_together_are_refused() {
        let array = |name: &str, shape: &[usize]| {
            NamedTensor::new(name, shape, TensorData::U8(vec![0; shape.iter().product()]))
        };
        for (arrays, expected) in [
            (vec![], "there is none"),
            (vec![array("x", &[])], "\"x\" has no dimension"),
            (vec![array("x", &[2]), array("y", &[3])], "\"y\" has 3 samples and \"x\" has 2"),
            (vec![array("x", &[2]), array("x", &[2])], "two are named \"x\""),
        ] {
            let error = TensorDataset::new(arrays).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}

//! A data set whose tensors have other names: those of a model's inputs.

use std::sync::Arc;

use super::{
    dataset::Dataset,
    tensor::{Sample, TensorSpec},
};
use crate::error::{DataError, Result};

/// A data set with some of its tensors renamed.
#[derive(Debug)]
pub struct RenamedTensors {
    dataset: Arc<dyn Dataset>,
    specs: Vec<TensorSpec>,
}

impl RenamedTensors {
    /// Gives each tensor `from` of `dataset` the name `to`, for each pair `(to, from)` of `names`.
    ///
    /// # Errors
    /// If the data set has no tensor `from`, or two tensors would have one name.
    pub fn new<'n>(
        dataset: Arc<dyn Dataset>,
        names: impl IntoIterator<Item = (&'n str, &'n str)>,
    ) -> Result<Self> {
        let found = dataset.tensors();
        let mut specs = found.clone();
        for (to, from) in names {
            let Some(at) = found.iter().position(|spec| &*spec.name == from) else {
                let names: Vec<&str> = found.iter().map(|spec| &*spec.name).collect();
                let problem = format!("there is no tensor \"{from}\"; allowed: {}", names.join(", "));
                return Err(DataError::BadArrays { problem });
            };
            specs[at].name = to.into();
        }
        for (at, spec) in specs.iter().enumerate() {
            if specs[..at].iter().any(|other| other.name == spec.name) {
                return Err(DataError::BadArrays { problem: format!("two are named \"{}\"", spec.name) });
            }
        }
        Ok(Self { dataset, specs })
    }

    fn rename(&self, sample: &mut Sample) {
        for (tensor, spec) in sample.tensors.iter_mut().zip(&self.specs) {
            tensor.name = Arc::clone(&spec.name);
        }
    }
}

impl Dataset for RenamedTensors {
    fn len(&self) -> u64 {
        self.dataset.len()
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.specs.clone()
    }

    fn get(&self, index: u64) -> Result<Sample> {
        let mut sample = self.dataset.get(index)?;
        self.rename(&mut sample);
        Ok(sample)
    }

    fn get_into(&self, index: u64, sample: &mut Sample) -> Result<()> {
        self.dataset.get_into(index, sample)?;
        self.rename(sample);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{NamedTensor, TensorData, TensorDataset};

    fn data() -> Arc<dyn Dataset> {
        let labels = |name: &str| NamedTensor::new(name, &[2], TensorData::I32(vec![7, 8]));
        Arc::new(TensorDataset::new(vec![labels("fine"), labels("coarse")]).unwrap())
    }

    #[test]
    fn a_tensor_has_its_new_name_and_the_others_keep_theirs() {
        let renamed = RenamedTensors::new(data(), [("labels", "coarse")]).unwrap();
        let names: Vec<String> = renamed.tensors().iter().map(|spec| spec.name.to_string()).collect();
        assert_eq!(names, ["fine", "labels"]);
        let mut sample = Sample::default();
        for index in 0..2 {
            renamed.get_into(index, &mut sample).unwrap();
            assert_eq!(sample, renamed.get(index).unwrap());
            assert_eq!(sample.tensor("labels").unwrap().data, TensorData::I32(vec![7 + index as i32]));
        }
    }

    #[test]
    fn unknown_and_double_names_are_refused() {
        for (names, part) in [
            ([("labels", "label")], "no tensor \"label\"; allowed: fine, coarse"),
            ([("fine", "coarse")], "two are named \"fine\""),
        ] {
            let error = RenamedTensors::new(data(), names).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}

//! The tensors of a Hugging Face checkpoint, and the locations of parameters in them.

use std::ops::Range;

use lockstep_plan::ParameterRecord;

use crate::error::ModelError;
use crate::hf_transform::HfTransform;

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HfTensor {
    /// Name, with the family's prefix.
    pub name: String,
    /// Shape as stored.
    pub shape: Vec<usize>,
    /// Source of the tensor's elements.
    pub content: HfContent,
}

/// Source of a checkpoint tensor's elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HfContent {
    /// Parameters, which together cover it exactly.
    Parameters(Vec<HfPlace>),
    /// Zeros: a bias that transformers expects and the model does not have.
    Zeros,
}

/// Location of a parameter, or of a part of one, in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HfPlace {
    /// Canonical name of the parameter.
    pub parameter: String,
    /// Name of the tensor; in an [`HfImport`](crate::HfImport), the name in the file.
    pub tensor: String,
    /// Shape of the tensor as stored.
    pub tensor_shape: Vec<usize>,
    /// First element of the parameter that is in this tensor. In a checkpoint each expert of a stack has a tensor of its own.
    pub first_element: usize,
    /// Layout of these elements in the tensor.
    pub transform: HfTransform,
}

impl HfTensor {
    /// Returns the tensor that consists of one place.
    pub fn single(place: HfPlace) -> Self {
        let (name, shape) = (place.tensor.clone(), place.tensor_shape.clone());
        Self { name, shape, content: HfContent::Parameters(vec![place]) }
    }

    /// Returns the tensor of a parameter with the same name and layout.
    pub fn same(record: &ParameterRecord) -> Self {
        Self::single(HfPlace::new(record, record.name.clone(), record.shape.clone(), HfTransform::Same))
    }
}

impl HfTensor {
    /// Returns true if the tensor holds the whole of one parameter, called `parameter`, in canonical order.
    pub fn is_whole(&self, parameter: &str) -> bool {
        match &self.content {
            HfContent::Parameters(places) => {
                matches!(places.as_slice(), [place] if place.parameter == parameter && place.is_whole())
            }
            HfContent::Zeros => false,
        }
    }

    /// Adds a place to the tensor that it names, which it creates if there is none.
    pub(crate) fn add_place(tensors: &mut Vec<Self>, place: HfPlace) {
        match tensors.iter_mut().rev().find(|tensor| tensor.name == place.tensor) {
            Some(Self { content: HfContent::Parameters(places), .. }) => places.push(place),
            _ => tensors.push(Self::single(place)),
        }
    }
}

impl HfPlace {
    /// Returns the place of a parameter from its first element on.
    pub fn new(
        record: &ParameterRecord,
        tensor: String,
        tensor_shape: Vec<usize>,
        transform: HfTransform,
    ) -> Self {
        Self { parameter: record.name.clone(), tensor, tensor_shape, first_element: 0, transform }
    }

    /// Returns the range of the parameter's elements that this place holds.
    pub fn part(&self) -> Range<usize> {
        self.first_element..self.first_element + self.parameter_elements()
    }

    /// Returns true if the tensor holds the whole parameter in canonical order.
    pub fn is_whole(&self) -> bool {
        self.first_element == 0 && self.transform == HfTransform::Same
    }

    /// Copies these elements of the parameter, in canonical order, out of the stored tensor.
    ///
    /// # Errors
    /// If the length of a slice does not match its shape.
    pub fn read<T: Copy>(&self, stored: &[T], parameter: &mut [T]) -> Result<(), ModelError> {
        self.check(stored.len(), parameter.len())?;
        self.transform.read(stored, parameter);
        Ok(())
    }

    /// Copies these elements of the parameter into the stored tensor, and leaves its other elements alone.
    ///
    /// # Errors
    /// If the length of a slice does not match its shape.
    pub fn write<T: Copy>(&self, parameter: &[T], stored: &mut [T]) -> Result<(), ModelError> {
        self.check(stored.len(), parameter.len())?;
        self.transform.write(parameter, stored);
        Ok(())
    }

    /// Runs [`HfPlace::read`] on bytes, for elements of `ELEMENT_BYTES` each; no alignment is needed.
    ///
    /// # Errors
    /// If the length of a slice does not match its shape.
    pub fn read_bytes<const ELEMENT_BYTES: usize>(
        &self,
        stored: &[u8],
        parameter: &mut [u8],
    ) -> Result<(), ModelError> {
        let (stored, stored_rest) = stored.as_chunks::<ELEMENT_BYTES>();
        let (parameter, parameter_rest) = parameter.as_chunks_mut::<ELEMENT_BYTES>();
        self.check(stored.len() + stored_rest.len(), parameter.len() + parameter_rest.len())?;
        self.read(stored, parameter)
    }

    /// Runs [`HfPlace::write`] on bytes, for elements of `ELEMENT_BYTES` each; no alignment is needed.
    ///
    /// # Errors
    /// If the length of a slice does not match its shape.
    pub fn write_bytes<const ELEMENT_BYTES: usize>(
        &self,
        parameter: &[u8],
        stored: &mut [u8],
    ) -> Result<(), ModelError> {
        let (parameter, parameter_rest) = parameter.as_chunks::<ELEMENT_BYTES>();
        let (stored, stored_rest) = stored.as_chunks_mut::<ELEMENT_BYTES>();
        self.check(stored.len() + stored_rest.len(), parameter.len() + parameter_rest.len())?;
        self.write(parameter, stored)
    }

    /// Number of elements of the stored tensor.
    fn stored_elements(&self) -> usize {
        self.tensor_shape.iter().product()
    }

    /// Number of the parameter's elements that this place holds.
    pub fn parameter_elements(&self) -> usize {
        self.transform.parameter_elements(self.stored_elements())
    }

    fn check(&self, stored: usize, parameter: usize) -> Result<(), ModelError> {
        let checks = [
            (&self.tensor, "the stored tensor", self.stored_elements(), stored),
            (&self.parameter, "the parameter", self.parameter_elements(), parameter),
        ];
        for (tensor, what, expected, found) in checks {
            if expected != found {
                return Err(ModelError::Length { tensor: tensor.clone(), what, expected, found });
            }
        }
        Ok(())
    }
}

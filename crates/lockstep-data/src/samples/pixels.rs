//! Transforms of pixel values: bytes to floats, and normalization.

use lockstep_plan::DType;

use super::{
    tensor::{NamedTensor, Spares, TensorData, TensorSpec},
    transform::{SampleRandom, Transform},
};
use crate::error::DataError;

/// Conversion of u8 to f32 in `[0, 1]`: `x / 255`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ToFloat;

impl Transform for ToFloat {
    fn output(&self, input: &TensorSpec) -> Result<TensorSpec, String> {
        if input.dtype != DType::U8 {
            return Err(format!("its dtype is {}; allowed: u8", input.dtype));
        }
        Ok(TensorSpec { dtype: DType::F32, ..input.clone() })
    }

    fn apply(&self, tensor: &mut NamedTensor, _: SampleRandom, spares: &mut Spares) -> Result<(), String> {
        let TensorData::U8(bytes) = &tensor.data else {
            return Err(format!("its dtype is {}; allowed: u8", tensor.dtype()));
        };
        let mut floats = spares.f32();
        floats.extend(bytes.iter().map(|&byte| f32::from(byte) / 255.0));
        spares.give(std::mem::replace(&mut tensor.data, TensorData::F32(floats)));
        Ok(())
    }
}

/// Normalization of the last dimension: `(x - mean[c]) / std[c]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Normalize {
    mean: Vec<f32>,
    std: Vec<f32>,
}

impl Normalize {
    /// Mean of each channel of CIFAR-10's training images, as floats in `[0, 1]`, and their standard deviation.
    pub const CIFAR10: ([f32; 3], [f32; 3]) = ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]);

    /// Mean and standard deviation of each channel of ImageNet's training images, as floats in `[0, 1]`.
    pub const IMAGENET: ([f32; 3], [f32; 3]) = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);

    /// Creates a normalization with one mean and standard deviation per channel.
    ///
    /// # Errors
    /// If the counts differ or are zero, or a number is not finite, or a standard deviation not positive.
    pub fn new(mean: &[f32], std: &[f32]) -> Result<Self, DataError> {
        if mean.is_empty() || mean.len() != std.len() {
            let found = format!("{} means and {} standard deviations", mean.len(), std.len());
            return Err(DataError::out_of_range("a normalization", found, "one of each per channel"));
        }
        let is_sound =
            mean.iter().all(|mean| mean.is_finite()) && std.iter().all(|std| std.is_finite() && *std > 0.0);
        if !is_sound {
            let found = format!("mean {mean:?}, std {std:?}");
            return Err(DataError::out_of_range("a normalization", found, "finite numbers, std above 0"));
        }
        Ok(Self { mean: mean.to_vec(), std: std.to_vec() })
    }

    fn check(&self, dtype: DType, channels: Option<usize>) -> Result<(), String> {
        if dtype != DType::F32 {
            return Err(format!("its dtype is {dtype}; allowed: f32, which ToFloat makes"));
        }
        if channels.is_some_and(|channels| channels != self.mean.len()) {
            return Err(format!(
                "it has other channels than the normalization; allowed: {}",
                self.mean.len()
            ));
        }
        Ok(())
    }
}

impl Transform for Normalize {
    fn output(&self, input: &TensorSpec) -> Result<TensorSpec, String> {
        let Some(&channels) = input.shape.last() else {
            return Err("it has no dimension of channels".to_owned());
        };
        self.check(input.dtype, channels)?;
        Ok(input.clone())
    }

    fn apply(&self, tensor: &mut NamedTensor, _: SampleRandom, _: &mut Spares) -> Result<(), String> {
        self.check(tensor.dtype(), Some(tensor.shape.last().copied().unwrap_or(1)))?;
        if let TensorData::F32(values) = &mut tensor.data {
            for pixel in values.chunks_exact_mut(self.mean.len()) {
                for ((value, mean), std) in pixel.iter_mut().zip(&self.mean).zip(&self.std) {
                    *value = (*value - mean) / std;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::sequence::SamplePlace;

    #[test]
    fn bytes_become_normalized_floats() {
        let random = SampleRandom::new(0, SamplePlace { sample: 0, epoch: 0, index: 0 }, 0);
        let mut tensor = NamedTensor::new("image", &[1, 2, 2], TensorData::U8(vec![0, 255, 51, 102]));
        let mut spares = Spares::default();
        ToFloat.apply(&mut tensor, random, &mut spares).unwrap();
        assert_eq!(tensor.data.as_f32().unwrap(), [0.0, 1.0, 0.2, 0.4]);
        Normalize::new(&[0.0, 0.5], &[1.0, 0.5]).unwrap().apply(&mut tensor, random, &mut spares).unwrap();
        assert_eq!(tensor.data.as_f32().unwrap(), [0.0, 1.0, 0.2, (0.4 - 0.5) / 0.5]);
    }

    #[test]
    fn what_does_not_suit_is_refused_before_the_first_sample() {
        let spec = |dtype, channels| TensorSpec::fixed("image", dtype, &[2, 2, channels]);
        let normalize = Normalize::new(&[0.0; 3], &[1.0; 3]).unwrap();
        assert!(normalize.output(&spec(DType::U8, 3)).unwrap_err().contains("ToFloat"));
        assert!(normalize.output(&spec(DType::F32, 1)).unwrap_err().contains("allowed: 3"));
        assert!(ToFloat.output(&spec(DType::F32, 3)).unwrap_err().contains("allowed: u8"));
        assert!(Normalize::new(&[0.0], &[0.0]).unwrap_err().to_string().contains("std above 0"));
        assert!(Normalize::new(&[0.0], &[1.0, 1.0]).unwrap_err().to_string().contains("per channel"));
    }
}

//! Tensors of a quantized module, whose types and shapes are checked before a byte is used.

use ::safetensors::Dtype;
use lockstep_plan::DType;

use super::integers::{ScaleOrder, Scales};
use crate::{convert::is_float, hf::HfCheckpoint, safetensors::TensorRef};

/// Tensor of a module.
pub(super) struct Part<'a> {
    pub(super) name: String,
    pub(super) tensor: TensorRef<'a>,
}

impl<'a> Part<'a> {
    /// Returns a tensor of a module; `None` if there is none.
    pub(super) fn find(files: &'a HfCheckpoint, module: &str, suffix: &str) -> Option<Self> {
        let name = format!("{module}.{suffix}");
        let tensor = files.tensor(&name).ok()?;
        Some(Self { name, tensor })
    }

    pub(super) fn require(files: &'a HfCheckpoint, module: &str, suffix: &str) -> Result<Self, String> {
        Self::find(files, module, suffix).ok_or_else(|| format!("`{module}.{suffix}` is missing"))
    }

    /// Checks the type.
    pub(super) fn of_type(self, dtype: Dtype) -> Result<Self, String> {
        if self.tensor.dtype == dtype {
            return Ok(self);
        }
        Err(format!("`{}` is {}; expected is {dtype}", self.name, self.tensor.dtype))
    }

    /// Checks the shape.
    pub(super) fn of_shape(self, shape: &[usize]) -> Result<Self, String> {
        if self.tensor.shape == shape {
            return Ok(self);
        }
        Err(format!("`{}` has the shape {:?}; expected is {shape:?}", self.name, self.tensor.shape))
    }

    /// Returns the shape of a matrix.
    pub(super) fn matrix(&self) -> Result<[usize; 2], String> {
        let matrix = self.tensor.shape.try_into();
        matrix.map_err(|_| {
            format!("`{}` has the shape {:?}; it must be a matrix", self.name, self.tensor.shape)
        })
    }

    /// Returns the float type.
    pub(super) fn float_dtype(&self) -> Result<DType, String> {
        let dtype = self.tensor.known_dtype().filter(|&dtype| is_float(dtype));
        dtype.ok_or_else(|| format!("`{}` is {}; expected is f32, bf16 or f16", self.name, self.tensor.dtype))
    }

    /// Returns the scales in it.
    pub(super) fn scales(self, order: ScaleOrder) -> Result<Scales<'a>, String> {
        Ok(Scales { bytes: self.tensor.bytes, dtype: self.float_dtype()?, order, factor: None })
    }
}

//! A packed tensor of any method, and the names of its parts.

use std::ops::Range;

use ::safetensors::Dtype;
use lockstep_plan::{BlockFormat, DType};

use super::{
    codebook::CodebookMatrix, config::Quantization, fp8::Fp8Matrix, integer_tensors, integers::IntegerMatrix,
    mxfp4::Mxfp4Matrices,
};
use crate::hf::HfCheckpoint;

/// A packed tensor.
#[derive(Debug, Clone)]
pub(super) enum PackedReader<'a> {
    Integers(IntegerMatrix<'a>),
    Fp8(Fp8Matrix<'a>),
    Codebook(CodebookMatrix<'a>),
    Mxfp4(Mxfp4Matrices<'a>),
}

/// Suffix of the tensor that stands for a module's packed ones.
const WEIGHT: &str = ".weight";

/// Returns the names of the tensors that stand for packed ones.
pub(super) fn tensors(files: &HfCheckpoint, quantization: &Quantization) -> Vec<String> {
    let is = |name: &str, dtype: Dtype| files.tensor(name).is_ok_and(|tensor| tensor.dtype == dtype);
    let tensor = |name: &str| match quantization {
        Quantization::Gptq { .. } | Quantization::Awq { .. } => {
            Some(format!("{}{WEIGHT}", name.strip_suffix(".qweight")?))
        }
        Quantization::CompressedTensors { .. } => match name.strip_suffix(".weight_packed") {
            Some(module) => Some(format!("{module}{WEIGHT}")),
            None => {
                let module = name.strip_suffix(WEIGHT)?;
                files.contains(&format!("{module}.weight_scale")).then(|| name.to_owned())
            }
        },
        Quantization::Fp8 { .. } => {
            (name.ends_with(WEIGHT) && is(name, Dtype::F8_E4M3)).then(|| name.to_owned())
        }
        Quantization::BitsAndBytes => {
            let module = name.strip_suffix(WEIGHT)?;
            let has = |suffix: &str| files.contains(&format!("{module}.{suffix}"));
            (has("SCB") || has("weight.absmax")).then(|| name.to_owned())
        }
        Quantization::Mxfp4 => name.strip_suffix("_blocks").map(str::to_owned),
    };
    files.names().filter_map(tensor).collect()
}

/// Returns true if a tensor is a part of a packed one.
pub(super) fn is_part(quantization: &Quantization, name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    match quantization {
        Quantization::Gptq { .. } | Quantization::Awq { .. } => {
            ["qweight", "qzeros", "scales", "g_idx"].contains(&last)
        }
        // Scales of activations and of cached keys and values are not applied.
        Quantization::CompressedTensors { .. } => {
            let suffixes = [
                "weight_packed",
                "weight_scale",
                "weight_zero_point",
                "weight_shape",
                "weight_g_idx",
                "input_scale",
                "input_zero_point",
                "output_scale",
                "output_zero_point",
                "k_scale",
                "v_scale",
            ];
            suffixes.contains(&last)
        }
        Quantization::Fp8 { .. } => {
            ["weight_scale_inv", "weight_scale", "activation_scale", "input_scale"].contains(&last)
        }
        Quantization::BitsAndBytes => {
            let suffixes = [
                "SCB",
                "weight_format",
                "absmax",
                "quant_map",
                "nested_absmax",
                "nested_quant_map",
                "bitsandbytes__nf4",
                "bitsandbytes__fp4",
            ];
            suffixes.contains(&last)
        }
        Quantization::Mxfp4 => last.ends_with("_blocks") || last.ends_with("_scales"),
    }
}

impl<'a> PackedReader<'a> {
    /// Returns the reader of a tensor.
    ///
    /// # Errors
    /// If a part is missing or has another type or shape than the others imply.
    pub(super) fn new(
        files: &'a HfCheckpoint,
        quantization: &Quantization,
        tensor: &str,
    ) -> Result<Self, String> {
        let module = tensor.strip_suffix(WEIGHT).unwrap_or(tensor);
        let has = |suffix: &str| files.contains(&format!("{module}.{suffix}"));
        let is = |name: &str, dtype: Dtype| files.tensor(name).is_ok_and(|found| found.dtype == dtype);
        match quantization {
            Quantization::Gptq { bits, group, zero_shift } => {
                integer_tensors::gptq(files, module, (*bits, *group, *zero_shift)).map(Self::Integers)
            }
            Quantization::Awq { group } => integer_tensors::awq(files, module, *group).map(Self::Integers),
            Quantization::CompressedTensors { block, .. } if is(tensor, Dtype::F8_E4M3) => {
                Fp8Matrix::new(files, module, "weight_scale", *block).map(Self::Fp8)
            }
            Quantization::CompressedTensors { .. } if is(&format!("{module}.weight_packed"), Dtype::U8) => {
                Mxfp4Matrices::of_module(files, module).map(Self::Mxfp4)
            }
            Quantization::CompressedTensors { bits, .. } => {
                integer_tensors::compressed_tensors(files, module, bits).map(Self::Integers)
            }
            Quantization::Fp8 { block } => {
                let suffix = if has("weight_scale_inv") { "weight_scale_inv" } else { "weight_scale" };
                Fp8Matrix::new(files, module, suffix, *block).map(Self::Fp8)
            }
            Quantization::BitsAndBytes if has("SCB") => {
                integer_tensors::llm_int8(files, module).map(Self::Integers)
            }
            Quantization::BitsAndBytes => CodebookMatrix::new(files, module).map(Self::Codebook),
            Quantization::Mxfp4 => Mxfp4Matrices::of_experts(files, tensor).map(Self::Mxfp4),
        }
    }

    /// Returns the shape of the decoded tensor.
    pub(super) fn shape(&self) -> Vec<usize> {
        match self {
            Self::Integers(matrix) => vec![matrix.outputs, matrix.inputs],
            Self::Fp8(matrix) => matrix.shape.to_vec(),
            Self::Codebook(matrix) => matrix.shape.to_vec(),
            Self::Mxfp4(matrices) => matrices.shape(),
        }
    }

    /// Returns the float type of the decoded tensor, if the parts have one.
    pub(super) fn dtype(&self) -> Option<DType> {
        match self {
            Self::Integers(matrix) if matrix.scales.factor.is_some() => None,
            Self::Integers(matrix) => Some(matrix.scales.dtype),
            Self::Fp8(matrix) => matrix.short_dtype(),
            Self::Codebook(matrix) => matrix.dtype,
            Self::Mxfp4(_) => Some(DType::BF16),
        }
    }

    /// Returns the format of blocks with the same values, or the reason why there is none.
    pub(super) fn format(&self) -> Result<BlockFormat, &'static str> {
        match self {
            Self::Integers(matrix) => matrix.format(),
            Self::Fp8(matrix) => matrix.format(),
            Self::Codebook(matrix) => matrix.format(),
            Self::Mxfp4(_) => Ok(BlockFormat::Mxfp4),
        }
    }

    /// Decodes some rows of the last dimension to `values`, in f32.
    ///
    /// # Errors
    /// If a number is NaN.
    pub(super) fn decode(&self, rows: Range<usize>, values: &mut [f32]) -> Result<(), String> {
        match self {
            Self::Integers(matrix) => matrix.decode(rows, values),
            Self::Fp8(matrix) => {
                require_numbers(matrix, rows.clone())?;
                matrix.decode(rows, values);
            }
            Self::Codebook(matrix) => matrix.decode(rows, values),
            Self::Mxfp4(matrices) => matrices.decode(rows, values)?,
        }
        Ok(())
    }

    /// Writes some rows of the stored matrices as blocks of [`PackedReader::format`].
    ///
    /// # Errors
    /// If a number is NaN.
    pub(super) fn pack(
        &self,
        format: BlockFormat,
        rows: Range<usize>,
        blocks: &mut [u8],
    ) -> Result<(), String> {
        match self {
            Self::Integers(matrix) => matrix.pack(format, rows, blocks),
            Self::Fp8(matrix) => {
                require_numbers(matrix, rows.clone())?;
                matrix.pack(rows, blocks);
            }
            Self::Codebook(matrix) => matrix.pack(rows, blocks),
            Self::Mxfp4(matrices) => matrices.pack(rows, blocks)?,
        }
        Ok(())
    }
}

/// Checks that no number in some rows is NaN.
fn require_numbers(matrix: &Fp8Matrix<'_>, rows: Range<usize>) -> Result<(), String> {
    match matrix.row_of_nan(rows) {
        Some(row) => Err(format!("row {row} of `weight` has a NaN")),
        None => Ok(()),
    }
}

//! Weights in MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats (E2M1) with a power of two for each 32 of them.
//!
//! ```text
//! weight[o][i] = 2^(scale[o][i / 32] - 127) · number[o][i]        the even input is in the low half of a byte
//! ```
//!
//! gpt-oss stores stacks of experts in this form; the tensors that they stand for have the transposed matrices.

use std::ops::Range;

use ::safetensors::Dtype;
use lockstep_plan::block_format::{BlockCodec, Mxfp4Codec};

use super::{fp8::power_of_two, parts::Part};
use crate::hf::HfCheckpoint;

/// Values of the codes.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// Elements that share a scale.
const BLOCK: usize = Mxfp4Codec::ELEMENTS;
/// Bytes of the codes of a block.
const CODE_BYTES: usize = BLOCK / 2;
/// Scale that is no number.
const NAN: u8 = 0xff;

/// A stack of matrices `[outputs, inputs]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mxfp4Matrices<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    outputs: usize,
    inputs: usize,
    /// Number of stacked matrices, which are read transposed; `None` of a single one.
    experts: Option<usize>,
}

impl<'a> Mxfp4Matrices<'a> {
    /// Returns the stack of experts in the tensors `NAME_blocks` and `NAME_scales`.
    ///
    /// # Errors
    /// If a tensor is missing or has another type or shape.
    pub(super) fn of_experts(files: &'a HfCheckpoint, name: &str) -> Result<Self, String> {
        let (module, last) = name.rsplit_once('.').ok_or_else(|| format!("`{name}` is in no module"))?;
        let codes = Part::require(files, module, &format!("{last}_blocks"))?.of_type(Dtype::U8)?;
        let [experts, outputs, blocks, bytes] = codes.tensor.shape[..] else {
            return Err(format!(
                "`{}` has the shape {:?}; it must have four dimensions",
                codes.name, codes.tensor.shape
            ));
        };
        if bytes != CODE_BYTES || experts * outputs * blocks == 0 {
            return Err(format!(
                "`{}` has the shape {:?}; blocks have 16 bytes",
                codes.name, codes.tensor.shape
            ));
        }
        let scales = Part::require(files, module, &format!("{last}_scales"))?.of_type(Dtype::U8)?;
        let scales = scales.of_shape(&[experts, outputs, blocks])?;
        let (codes, scales) = (codes.tensor.bytes, scales.tensor.bytes);
        Ok(Self { codes, scales, outputs, inputs: blocks * BLOCK, experts: Some(experts) })
    }

    /// Returns the matrix in the tensors `weight_packed` and `weight_scale` of a module.
    ///
    /// # Errors
    /// If a tensor is missing or has another type or shape.
    pub(super) fn of_module(files: &'a HfCheckpoint, module: &str) -> Result<Self, String> {
        let codes = Part::require(files, module, "weight_packed")?.of_type(Dtype::U8)?;
        let [outputs, bytes] = codes.matrix()?;
        let inputs = bytes * 2;
        if outputs * inputs == 0 || !inputs.is_multiple_of(BLOCK) {
            return Err(format!("`{}` has {bytes} bytes a row, which are no whole blocks", codes.name));
        }
        let scales = Part::require(files, module, "weight_scale")?.of_shape(&[outputs, inputs / BLOCK])?;
        if !matches!(scales.tensor.dtype, Dtype::U8 | Dtype::F8_E8M0) {
            return Err(format!("`{}` is {}; expected is U8", scales.name, scales.tensor.dtype));
        }
        let (codes, scales) = (codes.tensor.bytes, scales.tensor.bytes);
        Ok(Self { codes, scales, outputs, inputs, experts: None })
    }

    /// Returns the shape of the decoded tensor.
    pub(super) fn shape(&self) -> Vec<usize> {
        match self.experts {
            Some(experts) => vec![experts, self.inputs, self.outputs],
            None => vec![self.outputs, self.inputs],
        }
    }

    fn value(&self, output: usize, input: usize) -> f32 {
        let code = self.codes[(output * self.inputs + input) / 2] >> (4 * (input % 2)) & 15;
        E2M1[usize::from(code)] * power_of_two(self.scales[(output * self.inputs + input) / BLOCK])
    }

    /// Decodes some rows of the decoded tensor to `values`, in f32.
    ///
    /// # Errors
    /// If a scale is NaN.
    pub(super) fn decode(&self, rows: Range<usize>, values: &mut [f32]) -> Result<(), String> {
        match self.experts {
            None => {
                for (output, values) in rows.zip(values.chunks_exact_mut(self.inputs)) {
                    for (input, value) in values.iter_mut().enumerate() {
                        *value = self.value(output, input);
                    }
                }
            }
            // Neighbouring rows share bytes, so the outputs are the outer loop.
            Some(_) => {
                for output in 0..self.outputs {
                    for (index, row) in rows.clone().enumerate() {
                        let (expert, input) = (row / self.inputs, row % self.inputs);
                        values[index * self.outputs + output] =
                            self.value(expert * self.outputs + output, input);
                    }
                }
            }
        }
        if values.iter().any(|value| value.is_nan()) { Err(no_number()) } else { Ok(()) }
    }

    /// Writes some rows of the stored matrices, those of all experts in order, as blocks of
    /// [`BlockFormat::Mxfp4`](lockstep_plan::BlockFormat::Mxfp4).
    ///
    /// # Errors
    /// If a scale is NaN.
    pub(super) fn pack(&self, rows: Range<usize>, blocks: &mut [u8]) -> Result<(), String> {
        let per_row = self.inputs / BLOCK;
        let of_rows = rows.start * per_row..rows.end * per_row;
        let scales = &self.scales[of_rows.clone()];
        if scales.contains(&NAN) {
            return Err(no_number());
        }
        let codes = self.codes[of_rows.start * CODE_BYTES..of_rows.end * CODE_BYTES].chunks_exact(CODE_BYTES);
        let blocks = blocks.chunks_exact_mut(Mxfp4Codec::BYTES);
        for ((&scale, pairs), block) in scales.iter().zip(codes).zip(blocks) {
            Mxfp4Codec::pack(scale, pairs, block);
        }
        Ok(())
    }
}

fn no_number() -> String {
    format!("a scale is {NAN}, which is no number")
}

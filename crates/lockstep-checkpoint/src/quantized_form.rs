//! Form of quantized matrices in files: the type of their codes, the size of a group, and the type of the scales.

use half::{bf16, f16};
use lockstep_plan::{BlockFormat, DType, block_format::int8_group};
use rayon::prelude::*;

use crate::weight_quantization::WeightType;

/// Form of the quantized matrices of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizedForm {
    /// Type of the codes.
    pub to: WeightType,
    /// Neighbours that share a scale.
    pub group_size: usize,
    /// Type of the scales of integers, and of the other weights.
    pub dtype: DType,
}

impl QuantizedForm {
    /// Replaces a matrix, whose rows are whole groups, by the values of its codes and scales.
    pub fn round_trip(&self, matrix: &mut [f32]) {
        matrix.par_chunks_mut(self.group_size).for_each(|group| self.round_trip_group(group));
    }

    fn round_trip_group(&self, group: &mut [f32]) {
        match self.to {
            WeightType::Int8 => {
                let mut codes = vec![0; group.len()];
                let scale = int8_group(group, |scale| self.rounded(scale), &mut codes);
                group.iter_mut().zip(codes).for_each(|(x, code)| *x = f32::from(code) * scale);
            }
            WeightType::Int4 => {
                let (scale, codes) = symmetric_int4(group, |scale| self.rounded(scale));
                group.iter_mut().zip(codes).for_each(|(x, code)| *x = (f32::from(code) - INT4_ZERO) * scale);
            }
            WeightType::Nf4 => {
                let mut block = vec![0; BlockFormat::Nf4G64.block_bytes()];
                BlockFormat::Nf4G64.quantize(group, &mut block);
                BlockFormat::Nf4G64.dequantize(&block, group);
            }
        }
    }

    /// Returns a number in the type of the scales.
    pub fn rounded(&self, value: f32) -> f32 {
        match self.dtype {
            DType::BF16 => bf16::from_f32(value).to_f32(),
            DType::F16 => f16::from_f32(value).to_f32(),
            _ => value,
        }
    }
}

/// Returns the scale and the packed codes of a group in NF4: of two codes in a byte, the first is in the high half.
pub(crate) fn nf4(group: &[f32]) -> (f32, Vec<u8>) {
    const HEAD: usize = 4;
    let mut block = vec![0; BlockFormat::Nf4G64.block_bytes()];
    BlockFormat::Nf4G64.quantize(group, &mut block);
    let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    // In a block, 16 bytes have the codes of 32 elements: the low halves are the first 16.
    let code = |element: usize| {
        let byte = block[HEAD + element / 32 * 16 + element % 16];
        byte >> (element % 32 / 16 * 4) & 15
    };
    (scale, (0..group.len() / 2).map(|pair| code(2 * pair) << 4 | code(2 * pair + 1)).collect())
}

/// Parts of the range of a group that are tried.
const RANGES: [f32; 8] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72];
/// Code of zero in 4 bits.
const INT4_ZERO: f32 = 8.0;

/// Quantizes a group to codes of 4 bits around 8, and returns the scale with them. The scale may be negative: the element of the largest
/// magnitude has the code 0, which has one step more than 15, or 15. The scale of least squared error is kept.
pub(crate) fn symmetric_int4(group: &[f32], round: impl Fn(f32) -> f32) -> (f32, Vec<u8>) {
    let extreme = group.iter().fold(0.0_f32, |most, &x| if x.abs() > most.abs() { x } else { most });
    let code = |x: f32, scale: f32| {
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        (x * inverse + INT4_ZERO).round().clamp(0.0, 15.0)
    };
    let (mut best, mut least) = (0.0, f64::INFINITY);
    for range in RANGES {
        for steps in [-INT4_ZERO, INT4_ZERO - 1.0] {
            let scale = round(extreme * range / steps);
            let error = |&x: &f32| f64::from((code(x, scale) - INT4_ZERO) * scale - x).powi(2);
            let error: f64 = group.iter().map(error).sum();
            if error < least {
                (best, least) = (scale, error);
            }
        }
    }
    (best, group.iter().map(|&x| code(x, best) as u8).collect())
}

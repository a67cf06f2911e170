//! Weights of 8-bit floats (E4M3) with a scale for each block of rows and columns: DeepSeek-V3's, and those of compressed-tensors.
//!
//! ```text
//! weight[o][i] = scale[o / rows][i / columns] · number[o][i]
//! ```

use std::ops::Range;

use ::safetensors::Dtype;
use lockstep_plan::{
    BlockFormat, DType,
    block_format::{BlockCodec, Fp8Codec, fp8_value},
};

use super::parts::Part;
use crate::{convert, hf::HfCheckpoint};

/// Magnitude of the two numbers that are none.
const NAN: u8 = 0x7f;
/// Elements of a block of [`BlockFormat::Fp8G128`].
const BLOCK: usize = Fp8Codec::ELEMENTS;

/// A matrix of 8-bit floats.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fp8Matrix<'a> {
    numbers: &'a [u8],
    scales: &'a [u8],
    /// Type of the scales; `None` for powers of two (E8M0).
    scale_dtype: Option<DType>,
    /// Rows and columns that share a scale.
    block: [usize; 2],
    /// Scales of a row of blocks.
    scale_columns: usize,
    pub(super) shape: [usize; 2],
}

impl<'a> Fp8Matrix<'a> {
    /// Returns the matrix of a module, with scales under `suffix` for blocks of `block` rows and columns; `None` infers whole matrices or
    /// rows from the number of scales.
    ///
    /// # Errors
    /// If a tensor is missing or has another type or shape.
    pub(super) fn new(
        files: &'a HfCheckpoint,
        module: &str,
        suffix: &str,
        block: Option<[usize; 2]>,
    ) -> Result<Self, String> {
        let numbers = Part::require(files, module, "weight")?.of_type(Dtype::F8_E4M3)?;
        let shape @ [rows, columns] = numbers.matrix()?;
        if rows == 0 || columns == 0 {
            return Err(format!("`{}` has no elements", numbers.name));
        }
        let scales = Part::require(files, module, suffix)?;
        let scale_dtype = match scales.tensor.dtype {
            Dtype::F8_E8M0 => None,
            _ => Some(scales.float_dtype()?),
        };
        let count = scales.tensor.elements();
        let block = match block {
            Some(block @ [block_rows, block_columns]) => {
                let expected = [rows.div_ceil(block_rows), columns.div_ceil(block_columns)];
                if count == 1 && expected != [1, 1] {
                    [rows, columns]
                } else {
                    return Self::with(numbers, scales.of_shape(&expected)?, scale_dtype, block, shape);
                }
            }
            None if count == 1 => [rows, columns],
            None if count == rows => [1, columns],
            None => {
                return Err(format!(
                    "`{}` has the shape {:?}; expected is one scale, or one for each of {rows} rows",
                    scales.name, scales.tensor.shape
                ));
            }
        };
        Self::with(numbers, scales, scale_dtype, block, shape)
    }

    fn with(
        numbers: Part<'a>,
        scales: Part<'a>,
        scale_dtype: Option<DType>,
        block: [usize; 2],
        shape: [usize; 2],
    ) -> Result<Self, String> {
        let (numbers, scales) = (numbers.tensor.bytes, scales.tensor.bytes);
        Ok(Self { numbers, scales, scale_dtype, block, scale_columns: shape[1].div_ceil(block[1]), shape })
    }

    /// Returns the type of the scales, if it is one of 16 bits.
    pub(super) fn short_dtype(&self) -> Option<DType> {
        self.scale_dtype.filter(|&dtype| dtype != DType::F32)
    }

    /// Returns the format of blocks that represents the matrix exactly, or the reason why there is none.
    pub(super) fn format(&self) -> Result<BlockFormat, &'static str> {
        let [_, columns] = self.shape;
        let fits =
            columns.is_multiple_of(BLOCK) && (self.scale_columns == 1 || self.block[1].is_multiple_of(BLOCK));
        if fits { Ok(BlockFormat::Fp8G128) } else { Err("its columns are no multiple of 128") }
    }

    /// Returns the row of the first element that is no number, if there is one.
    pub(super) fn row_of_nan(&self, rows: Range<usize>) -> Option<usize> {
        let columns = self.shape[1];
        let numbers = &self.numbers[rows.start * columns..rows.end * columns];
        let at = numbers.iter().position(|number| number & NAN == NAN)?;
        Some(rows.start + at / columns)
    }

    fn scale(&self, row: usize, column: usize) -> f32 {
        let index = row / self.block[0] * self.scale_columns + column / self.block[1];
        match self.scale_dtype {
            Some(dtype) => {
                let size = dtype.size_bytes();
                convert::scalar(dtype, &self.scales[index * size..(index + 1) * size])
            }
            None => power_of_two(self.scales[index]),
        }
    }

    /// Decodes some rows to `values`, in f32.
    pub(super) fn decode(&self, rows: Range<usize>, values: &mut [f32]) {
        let columns = self.shape[1];
        for (row, values) in rows.zip(values.chunks_exact_mut(columns)) {
            let numbers = self.numbers[row * columns..][..columns].chunks(self.block[1]);
            for (index, (values, numbers)) in values.chunks_mut(self.block[1]).zip(numbers).enumerate() {
                let scale = self.scale(row, index * self.block[1]);
                for (value, &number) in values.iter_mut().zip(numbers) {
                    *value = scale * fp8_value(number);
                }
            }
        }
    }

    /// Writes some rows as blocks of [`BlockFormat::Fp8G128`].
    pub(super) fn pack(&self, rows: Range<usize>, blocks: &mut [u8]) {
        let columns = self.shape[1];
        let numbers = self.numbers[rows.start * columns..rows.end * columns].chunks_exact(BLOCK);
        for (index, (numbers, block)) in numbers.zip(blocks.chunks_exact_mut(Fp8Codec::BYTES)).enumerate() {
            let element = index * BLOCK;
            let scale = self.scale(rows.start + element / columns, element % columns);
            Fp8Codec::pack(scale, numbers, block);
        }
    }
}

/// Returns the value of an E8M0 number, 2^(code - 127).
pub(super) fn power_of_two(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        0xff => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

//! Weights of bitsandbytes in 4 bits: codes that name one of 16 values, and the largest magnitude of each block of elements.
//!
//! ```text
//! weight[e] = table[code[e]] · absmax[e / block],  e the index in the matrix, row by row
//! absmax[b] = nested table[absmax code[b]] · nested absmax[b / nested block] + offset     (double quantization)
//! ```

use std::ops::Range;

use ::safetensors::Dtype;
use lockstep_plan::{
    BlockFormat, DType,
    block_format::{BlockCodec, NF4, Nf4Codec},
};
use serde::Deserialize;

use super::parts::Part;
use crate::hf::HfCheckpoint;

/// Elements of a block of [`BlockFormat::Nf4G64`].
const BLOCK: usize = Nf4Codec::ELEMENTS;
/// Largest size of a description in bytes.
const MAX_STATE_BYTES: usize = 1 << 16;

/// Description of a module's codes.
#[derive(Debug, Deserialize)]
struct State {
    blocksize: usize,
    shape: Vec<usize>,
    dtype: Option<String>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

/// Largest magnitudes of blocks.
#[derive(Debug, Clone)]
enum Largest<'a> {
    Plain(&'a [u8]),
    Nested { codes: &'a [u8], table: &'a [u8], largest: &'a [u8], block: usize, offset: f32 },
}

/// A matrix of codes.
#[derive(Debug, Clone)]
pub(super) struct CodebookMatrix<'a> {
    codes: &'a [u8],
    table: [f32; 16],
    largest: Largest<'a>,
    /// Elements of a block.
    block: usize,
    pub(super) dtype: Option<DType>,
    pub(super) shape: [usize; 2],
}

fn f32_at(bytes: &[u8], index: usize) -> f32 {
    let bytes = &bytes[4 * index..4 * index + 4];
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

impl<'a> CodebookMatrix<'a> {
    /// Returns the matrix of a module.
    ///
    /// # Errors
    /// If a tensor is missing or has another type or shape than the description implies.
    pub(super) fn new(files: &'a HfCheckpoint, module: &str) -> Result<Self, String> {
        let weight = format!("{module}.weight");
        let part = |suffix: &str| Part::require(files, &weight, suffix);
        let found = ["nf4", "fp4"]
            .iter()
            .find_map(|kind| Part::find(files, &weight, &format!("quant_state.bitsandbytes__{kind}")));
        let described =
            found.ok_or_else(|| format!("`{weight}.quant_state.bitsandbytes__nf4` or `__fp4` is missing"))?;
        let bytes = described.tensor.bytes;
        if bytes.len() > MAX_STATE_BYTES {
            return Err(format!("`{}` has {} bytes", described.name, bytes.len()));
        }
        let state: State =
            serde_json::from_slice(bytes).map_err(|error| format!("`{}`: {error}", described.name))?;
        let bad = |reason: String| format!("`{}`: {reason}", described.name);
        let [rows, columns] = state.shape[..] else {
            return Err(bad(format!("shape is {:?}; it must be that of a matrix", state.shape)));
        };
        let elements = rows.checked_mul(columns).filter(|&elements| elements > 0);
        let elements = elements.ok_or_else(|| bad(format!("shape is [{rows}, {columns}]")))?;
        if !(1..=1 << 20).contains(&state.blocksize) {
            return Err(bad(format!("blocksize is {}", state.blocksize)));
        }
        let codes = Part::require(files, module, "weight")?;
        if codes.tensor.bytes.len() != elements.div_ceil(2) {
            let found = codes.tensor.bytes.len();
            return Err(format!("`{}` has {found} bytes for {elements} codes of 4 bits", codes.name));
        }
        let table = part("quant_map")?.of_type(Dtype::F32)?.of_shape(&[16])?.tensor.bytes;
        let blocks = elements.div_ceil(state.blocksize);
        let largest = part("absmax")?.of_shape(&[blocks])?;
        let largest = match state.nested_blocksize {
            None => Largest::Plain(largest.of_type(Dtype::F32)?.tensor.bytes),
            Some(block @ 1..) => Largest::Nested {
                codes: largest.of_type(Dtype::U8)?.tensor.bytes,
                table: part("nested_quant_map")?.of_type(Dtype::F32)?.of_shape(&[256])?.tensor.bytes,
                largest: part("nested_absmax")?
                    .of_type(Dtype::F32)?
                    .of_shape(&[blocks.div_ceil(block)])?
                    .tensor
                    .bytes,
                block,
                offset: state.nested_offset.ok_or_else(|| bad("nested_offset is missing".to_owned()))? as f32,
            },
            Some(0) => return Err(bad("nested_blocksize is 0".to_owned())),
        };
        Ok(Self {
            codes: codes.tensor.bytes,
            table: std::array::from_fn(|code| f32_at(table, code)),
            largest,
            block: state.blocksize,
            dtype: match state.dtype.as_deref() {
                Some("bfloat16") => Some(DType::BF16),
                Some("float16") => Some(DType::F16),
                _ => None,
            },
            shape: [rows, columns],
        })
    }

    /// Returns the format of blocks that represents the matrix exactly, or the reason why there is none.
    pub(super) fn format(&self) -> Result<BlockFormat, &'static str> {
        if self.table != NF4 {
            Err("its codes are not those of NF4")
        } else if !self.shape[1].is_multiple_of(BLOCK) || !self.block.is_multiple_of(BLOCK) {
            Err("its columns or blocks are no multiple of 64")
        } else {
            Ok(BlockFormat::Nf4G64)
        }
    }

    /// Returns the largest magnitude of a block.
    fn largest(&self, index: usize) -> f32 {
        match self.largest {
            Largest::Plain(bytes) => f32_at(bytes, index),
            Largest::Nested { codes, table, largest, block, offset } => {
                f32_at(table, codes[index].into()) * f32_at(largest, index / block) + offset
            }
        }
    }

    /// Returns the code of an element. Of two codes in a byte, the first is in the high half.
    fn code(&self, element: usize) -> u8 {
        self.codes[element / 2] >> (4 * (1 - element % 2)) & 15
    }

    /// Decodes some rows to `values`, in f32.
    pub(super) fn decode(&self, rows: Range<usize>, values: &mut [f32]) {
        let mut element = rows.start * self.shape[1];
        let mut values = values.iter_mut();
        while !values.as_slice().is_empty() {
            let largest = self.largest(element / self.block);
            let count = self.block - element % self.block;
            for value in values.by_ref().take(count) {
                *value = self.table[usize::from(self.code(element))] * largest;
                element += 1;
            }
        }
    }

    /// Writes some rows as blocks of [`BlockFormat::Nf4G64`].
    pub(super) fn pack(&self, rows: Range<usize>, blocks: &mut [u8]) {
        let mut codes = [0; BLOCK];
        let first = rows.start * self.shape[1];
        for (index, block) in blocks.chunks_exact_mut(Nf4Codec::BYTES).enumerate() {
            let element = first + index * BLOCK;
            for (code, element) in codes.iter_mut().zip(element..) {
                *code = self.code(element);
            }
            Nf4Codec::pack(self.largest(element / self.block), &codes, block);
        }
    }
}

//! Quantization of a model's weights in memory: the type, the matrices that have it, and their blocks.

use lockstep_plan::BlockFormat;
use rayon::prelude::*;

/// Type of quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// Integers of 8 bits.
    Int8,
    /// Integers of 4 bits: with zero points in memory, symmetric in files.
    Int4,
    /// Quantiles of the normal distribution, 4 bits.
    Nf4,
}

/// Type of quantized weights, and the number of neighbours that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightQuantization {
    /// Type of the weights.
    pub to: WeightType,
    /// Size of a group: 32, 64 or 128; `None` takes 128 for int8 and 64 for others.
    pub group_size: Option<usize>,
}

/// Elements that a thread encodes at a time: whole blocks of every format.
const TASK_ELEMENTS: usize = 1 << 14;
/// Sizes of groups.
const GROUP_SIZES: [usize; 3] = [128, 64, 32];
/// Size of NF4's groups.
pub(crate) const NF4_GROUP: usize = 64;

impl WeightQuantization {
    /// Returns the groups that may be used, the largest first.
    pub(crate) fn groups(self) -> impl Iterator<Item = usize> {
        let largest = self.group_size.unwrap_or(match self.to {
            WeightType::Int8 => 128,
            WeightType::Int4 | WeightType::Nf4 => NF4_GROUP,
        });
        let is_nf4 = self.to == WeightType::Nf4;
        GROUP_SIZES.into_iter().filter(move |&group| group <= largest && (!is_nf4 || group == NF4_GROUP))
    }

    /// Returns the format of blocks for rows of `columns` elements; `None` if they are no whole groups.
    pub fn format(self, columns: usize) -> Option<BlockFormat> {
        let group = self.groups().find(|&group| columns.is_multiple_of(group))?;
        Some(match (self.to, group) {
            (WeightType::Int8, 128) => BlockFormat::Int8G128,
            (WeightType::Int8, _) => BlockFormat::Int8G32,
            (WeightType::Int4, 128) => BlockFormat::Int4G128,
            (WeightType::Int4, 64) => BlockFormat::Int4G64,
            (WeightType::Int4, _) => BlockFormat::Int4G32,
            (WeightType::Nf4, _) => BlockFormat::Nf4G64,
        })
    }
}

/// Returns the blocks of a matrix whose rows are whole blocks.
pub fn encode_blocks(format: BlockFormat, values: &[f32]) -> Vec<u8> {
    let size = |elements: usize| elements / format.block_elements() * format.block_bytes();
    let mut bytes = vec![0; size(values.len())];
    bytes
        .par_chunks_mut(size(TASK_ELEMENTS))
        .zip(values.par_chunks(TASK_ELEMENTS))
        .for_each(|(bytes, values)| format.quantize(values, bytes));
    bytes
}

/// Rounds a matrix, whose rows are whole blocks, to the values of its blocks.
pub fn round_to_blocks(format: BlockFormat, values: &mut [f32]) {
    let blocks = encode_blocks(format, values);
    format.dequantize(&blocks, values);
}

/// Returns true if a parameter is the matrix of a linear layer that is quantized: in a block, and no router.
pub fn is_quantizable(name: &str, shape: &[usize]) -> bool {
    let is_in_block = name.split('.').any(|part| part.parse::<usize>().is_ok());
    let module = name.strip_suffix(".weight").unwrap_or_default();
    let last = module.rsplit('.').next().unwrap_or_default();
    let is_router = ["gate", "router", "shared_expert_gate"].contains(&last);
    shape.len() == 2 && is_in_block && !module.is_empty() && !is_router
}

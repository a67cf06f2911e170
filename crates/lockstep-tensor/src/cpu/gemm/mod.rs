//! GEMM, by the method of BLIS (Van Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS
//! Functionality", 2015). Operands are packed into small panels in the order in which a micro-kernel reads them, and
//! the micro-kernel keeps a tile of C in registers.
//!
//! `problem` checks the operands and `dispatch` chooses the micro-kernel. `pack` converts the three layouts and all types to panels. `kernel`, `amx` and `aarch64` hold one micro-kernel for each CPU
//! level. `driver` splits the product into blocks and tasks. `store` finishes a tile (bias, accumulation, rounding).
//! `convolution` multiplies images, `winograd` with fewer multiplications where it can, `weight_gradient` without packing, and `few_channels` those of a first layer. `rows` computes products with few rows, as in generation, and reads the weights in place. `grouped` makes one
//! product for each expert of a mixture. `block_lines` decodes quantized weights while they are packed, and `integer` multiplies their codes with int8
//! `activations`, by vectors or tiles (`run_products`); `neon_integers` and `neon_words` are the vectors of AArch64 for both. `interleave` stores 16 rows of them word by word, and `interleaved_row` multiplies one row with those.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
mod block_lines;
mod blocks;
mod convolution;
#[cfg(target_arch = "x86_64")]
mod decode_pairs;
mod dispatch;
mod driver;
mod few_channels;
mod grouped;
mod image;
mod integer;
mod integer_lanes;
mod interleave;
mod interleaved_row;
mod kernel;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon_integers;
#[cfg(target_arch = "aarch64")]
mod neon_words;
mod operand;
mod pack;
mod packed_lines;
mod patches;
mod peak;
mod problem;
mod rows;
mod run_products;
mod scratch;
#[cfg(target_arch = "x86_64")]
mod split;
mod store;
mod task_rows;
mod thin;
mod transpose;
mod units;
mod weight_gradient;
mod winograd;
mod word_lanes;

pub(super) use block_lines::BlockLines;
pub(super) use dispatch::block_gemm;
pub(super) use interleave::interleave;
pub use peak::{Peak, measure_peak, measure_peak_within};
pub(super) use scratch::Scratch;

/// Building blocks for products of blocks in other modules.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) mod panels {
    #[cfg(target_arch = "aarch64")]
    pub(in crate::cpu) use super::aarch64::NeonBf16;
    #[cfg(target_arch = "x86_64")]
    pub(in crate::cpu) use super::{
        amx::Tiles,
        kernel::{Avx512DotBlock, Avx512DotFour, Avx512DotTwo},
    };
    pub(in crate::cpu) use super::{
        kernel::{ColumnPanels, Columns, MicroKernel, Place, RowPanels, Rows},
        operand::{Operand, Order},
        pack::pack,
        store::Tile,
        units::BfloatPair,
    };
}

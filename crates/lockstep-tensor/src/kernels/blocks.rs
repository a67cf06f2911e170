//! Kernels that read block-quantized matrices: products and rows.

use std::ops::Range;

use lockstep_plan::{BlockFormat, DType};

use crate::{GemmLayout, View, Write};

/// Block-quantized matrix, whose rows are whole blocks.
#[derive(Debug, Clone, Copy)]
pub struct BlockMatrix<'a> {
    format: BlockFormat,
    bytes: View<'a>,
    rows: usize,
    columns: usize,
}

impl<'a> BlockMatrix<'a> {
    /// Wraps the bytes of a matrix `[rows, columns]`, row by row.
    ///
    /// # Panics
    /// If `bytes` is not u8, or not as long as the blocks of the matrix.
    pub fn new(format: BlockFormat, bytes: View<'a>, [rows, columns]: [usize; 2]) -> Self {
        let expected = format.bytes(columns).and_then(|row| row.checked_mul(rows));
        assert!(
            bytes.dtype() == DType::U8 && expected == Some(bytes.elements()),
            "a {format} matrix [{rows}, {columns}] in {bytes:?}"
        );
        Self { format, bytes, rows, columns }
    }

    /// Format of the blocks.
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// The bytes of all blocks, u8.
    pub fn bytes(&self) -> View<'a> {
        self.bytes
    }

    /// Number of rows and of columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.columns / self.format.block_elements() * self.format.block_bytes()
    }

    /// Returns some of the rows.
    ///
    /// # Panics
    /// If the range exceeds the matrix.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let bytes = self.bytes.rows(rows.start * self.row_bytes()..rows.end * self.row_bytes());
        Self { bytes, rows: rows.len(), ..*self }
    }

    /// Returns the same memory with another view of it, as a device's queue does.
    #[cfg(feature = "delayed")]
    pub(crate) fn with_bytes(self, bytes: View<'_>) -> BlockMatrix<'_> {
        BlockMatrix { format: self.format, bytes, rows: self.rows, columns: self.columns }
    }
}

/// Matrix of weights: numbers, or quantized blocks.
#[derive(Debug, Clone, Copy)]
pub enum Matrix<'a> {
    /// Numbers of a float type.
    Dense(View<'a>),
    /// Quantized blocks.
    Blocks(BlockMatrix<'a>),
}

/// Type of the activations in products with quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BlockActivations {
    /// Their own. The product has the bits of the dense product with the weights decoded and rounded to the type of the activations.
    #[default]
    Float,
    /// Int8 with a scale for each 32 neighbours of a row, the largest magnitude divided by 127. Products of codes are summed as
    /// integers in a run of the weights, and in f32 along the depth. Several times faster.
    Int8,
}

/// A product with quantized weights: `C = A · B (+ bias)` or `C += A · B`.
///
/// It is summed [by depth](crate::Summation::ByDepth) whatever the queue's setting. Weights are decoded panel by panel; no product has
/// all of them decoded at once.
#[derive(Debug, Clone, Copy)]
pub struct BlockGemm<'a> {
    /// [`NT`](GemmLayout::NT) for a linear layer, with activations of the type of [`BlockActivations`], or [`NN`](GemmLayout::NN) for
    /// the gradient of its input, whose `A` keeps its type.
    pub layout: GemmLayout,
    /// Left operand `[m, k]`: f32, bf16 or f16.
    pub a: View<'a>,
    /// Weights: `[n, k]` of an `NT` product, `[k, n]` of an `NN` product.
    pub b: BlockMatrix<'a>,
    /// Output `[m, n]`, of the type of `A` or f32.
    pub c: View<'a>,
    /// Bias `[n]` of the type of `A`, added to every row of the product.
    pub bias: Option<View<'a>>,
    /// Overwrite or accumulate.
    pub write: Write,
}

impl<'a> BlockGemm<'a> {
    /// Returns a linear layer: the `NT` product that overwrites `c`.
    pub const fn linear(a: View<'a>, b: BlockMatrix<'a>, c: View<'a>, bias: Option<View<'a>>) -> Self {
        Self { layout: GemmLayout::NT, a, b, c, bias, write: Write::Overwrite }
    }
}

/// Products and rows of quantized matrices. Part of [`Kernels`](crate::Kernels).
pub trait BlockKernels {
    /// Computes a product with quantized weights; see [`BlockGemm`].
    ///
    /// # Panics
    /// If the layout is [`TN`](GemmLayout::TN): no gradient flows to quantized weights.
    fn block_gemm(&self, gemm: BlockGemm<'_>);

    /// Computes `out [T, width] = table[ids - first_id]`, decoded and rounded to the type of `out`, as
    /// [`embedding`](crate::EmbeddingKernels::embedding) does.
    fn block_embedding(&self, ids: View<'_>, table: BlockMatrix<'_>, first_id: u32, out: View<'_>);
}

//! Kernels that read block-quantized matrices: products and rows.

use lockstep_plan::{BlockFormat, CACHE_LINE_BYTES, DType};

use crate::{GemmLayout, View, Write};

/// Order of the blocks of a quantized matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockLayout {
    /// Row by row, as files store them.
    Rows,
    /// 16 rows at a time, word by word: word `w` of block `b` of all 16 rows, then their next word; behind all words of the 16 rows the
    /// 16-bit parts of formats whose blocks are not whole words, block by block; then padding up to a multiple of 64 bytes. A lane of
    /// a vector is a row, so that products need not transpose what they read.
    Interleaved,
}

/// Rows that are interleaved.
pub(crate) const INTERLEAVED_ROWS: usize = 16;

/// Block-quantized matrix, whose rows are whole blocks.
#[derive(Debug, Clone, Copy)]
pub struct BlockMatrix<'a> {
    format: BlockFormat,
    layout: BlockLayout,
    bytes: View<'a>,
    rows: usize,
    columns: usize,
}

impl<'a> BlockMatrix<'a> {
    /// Wraps the bytes of a matrix `[rows, columns]`, row by row.
    ///
    /// # Panics
    /// If `bytes` is not u8, or not as long as the blocks of the matrix.
    pub fn new(format: BlockFormat, bytes: View<'a>, shape: [usize; 2]) -> Self {
        Self::with_layout(format, BlockLayout::Rows, bytes, shape)
    }

    /// Wraps the bytes of a matrix `[rows, columns]` in a layout.
    ///
    /// # Panics
    /// If `bytes` is not u8, or not as long as [`BlockMatrix::bytes_of`] says.
    pub fn with_layout(
        format: BlockFormat,
        layout: BlockLayout,
        bytes: View<'a>,
        [rows, columns]: [usize; 2],
    ) -> Self {
        assert!(
            bytes.dtype() == DType::U8
                && Self::bytes_of(format, layout, [rows, columns]) == Some(bytes.elements()),
            "a {format} matrix [{rows}, {columns}] of {layout:?} in {bytes:?}"
        );
        Self { format, layout, bytes, rows, columns }
    }

    /// Returns the bytes of a matrix in a layout; `None` if its rows are not whole blocks, or if 16 does not divide their number and
    /// they are to be interleaved.
    pub fn bytes_of(format: BlockFormat, layout: BlockLayout, [rows, columns]: [usize; 2]) -> Option<usize> {
        let row = format.bytes(columns)?;
        match layout {
            BlockLayout::Rows => row.checked_mul(rows),
            BlockLayout::Interleaved => {
                let count = rows.is_multiple_of(INTERLEAVED_ROWS).then_some(rows / INTERLEAVED_ROWS)?;
                interleaved_bytes(format, columns).checked_mul(count)
            }
        }
    }

    /// Format of the blocks.
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// Order of the blocks.
    pub fn layout(&self) -> BlockLayout {
        self.layout
    }

    /// The bytes of all blocks, u8.
    pub fn bytes(&self) -> View<'a> {
        self.bytes
    }

    /// Number of rows and of columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Returns the same memory with another view of it, as a device's queue does.
    #[cfg(feature = "delayed")]
    pub(crate) fn with_bytes(self, bytes: View<'_>) -> BlockMatrix<'_> {
        BlockMatrix {
            format: self.format,
            layout: self.layout,
            bytes,
            rows: self.rows,
            columns: self.columns,
        }
    }
}

/// Returns the bytes of 16 interleaved rows.
pub(crate) fn interleaved_bytes(format: BlockFormat, columns: usize) -> usize {
    let blocks = columns / format.block_elements() * format.interleaved_block_bytes();
    (INTERLEAVED_ROWS * blocks).next_multiple_of(CACHE_LINE_BYTES)
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

    /// Writes the blocks of a matrix that is stored row by row to `to`, of the same format and shape, whose rows are interleaved.
    fn interleave_blocks(&self, from: BlockMatrix<'_>, to: BlockMatrix<'_>);

    /// Computes `out [T, width] = table[ids - first_id]` modulo 2^32, decoded and rounded to the type of `out`, as
    /// [`embedding`](crate::EmbeddingKernels::embedding) does.
    fn block_embedding(&self, ids: View<'_>, table: BlockMatrix<'_>, first_id: u32, out: View<'_>);
}

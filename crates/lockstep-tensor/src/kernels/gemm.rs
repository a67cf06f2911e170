//! Kernels of matrix products: whole, in part, grouped by expert.

use crate::View;

/// Storage order of the operands of a GEMM. `C` is always `[m, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmLayout {
    /// `A [m, k]`, `B [k, n]`: the gradient of a linear layer's input, `dX = dY · W`.
    NN,
    /// `A [m, k]`, `B [n, k]`: a linear layer, `Y = X · Wᵀ`.
    NT,
    /// `A [k, m]`, `B [k, n]`: the gradient of a linear layer's weight, `dW = dYᵀ · X`.
    TN,
}

/// Selects if a kernel overwrites its output or accumulates into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Write {
    /// `C = ...`
    Overwrite,
    /// `C += ...`
    Accumulate,
}

/// Order of additions in the forward of linear layers (`NT` products) and of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Summation {
    /// The fastest order for the shape: a row's bits may depend on the number of rows. For training, where shapes are fixed.
    #[default]
    ByShape,
    /// One order for a depth: a row has the same bits alone and among any other rows. For inference, where prompts are
    /// batched and cut into chunks.
    ByDepth,
}

/// A GEMM: `C = A · B (+ bias)` or `C += A · B`.
///
/// `A` and `B` share a type (f32, bf16 or f16). `C` has that type or is f32. Products are summed in f32 and rounded once.
/// `bias [n]` has the type of `A` and is added to every row.
#[derive(Debug, Clone, Copy)]
pub struct Gemm<'a> {
    /// Storage order of the operands.
    pub layout: GemmLayout,
    /// Left operand `A`.
    pub a: View<'a>,
    /// Right operand `B`.
    pub b: View<'a>,
    /// Output `[m, n]`.
    pub c: View<'a>,
    /// Bias `[n]`, added to every row of the product.
    pub bias: Option<View<'a>>,
    /// Overwrite or accumulate.
    pub write: Write,
}

/// Grouped GEMM: each group of rows has a matrix of its own, and these matrices are stacked. Group `g` has the rows
/// `offsets[g]..offsets[g + 1]`, which may be empty. Rows of no group are not read, and those of `C` stay unchanged.
///
/// The types are those of [`Gemm`].
#[derive(Debug, Clone, Copy)]
pub struct GroupedGemm<'a> {
    /// For `R` rows and `G` groups: `NT` multiplies `A [R, k]` by `B [G, n, k]`, `NN` by `B [G, k, n]`, both into
    /// `C [R, n]`; `TN` multiplies `A [R, m]` by `B [R, n]` into `C [G, m, n]`.
    pub layout: GemmLayout,
    /// Left operand `A`.
    pub a: View<'a>,
    /// Right operand `B`.
    pub b: View<'a>,
    /// Output matrix `C`.
    pub c: View<'a>,
    /// `[G, n]`: a vector for each group, added to each of its rows of `C` (`NT` and `NN` only).
    pub bias: Option<View<'a>>,
    /// u32 `[G + 1]`, nondecreasing: the first row of each group.
    pub offsets: View<'a>,
    /// Overwrite or accumulate. The product of an empty group (`TN`) is zero.
    pub write: Write,
}

/// Matrix products. Part of [`Kernels`](crate::Kernels).
pub trait GemmKernels {
    /// Computes a matrix product; see [`Gemm`].
    fn gemm(&self, gemm: Gemm<'_>) {
        self.gemm_rows(gemm, gemm.c.shape().as_matrix().0);
    }

    /// Computes some rows of a matrix product that has `rows` of them, bit-identical to those rows of the whole
    /// product. `a` (not transposed) and `c` hold only those rows.
    fn gemm_rows(&self, gemm: Gemm<'_>, rows: usize);

    /// Computes matrix products of groups of rows; see [`GroupedGemm`].
    fn grouped_gemm(&self, gemm: GroupedGemm<'_>);
}

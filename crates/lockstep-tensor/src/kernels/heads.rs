//! Kernels that work on the heads of queries, keys and values: rotary position embedding, concatenation and slicing.

use crate::{GemmLayout, Matrix, View};

/// Direction of a rotary embedding; the backward is the rotation by the opposite angle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rotation {
    /// By `+position · frequency`.
    Forward,
    /// By `-position · frequency`.
    Backward,
}

/// The angles and the amplitude of a rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// Position of each token, u32 `[T]`.
    pub positions: View<'a>,
    /// Radians per position of each pair, f32 `[n]`.
    pub inverse_frequencies: View<'a>,
    /// Factor on the rotated elements.
    pub amplitude: f32,
}

impl<'a> Rotary<'a> {
    /// Creates an embedding that keeps the lengths of pairs.
    pub fn new(positions: View<'a>, inverse_frequencies: View<'a>) -> Self {
        Self { positions, inverse_frequencies, amplitude: 1.0 }
    }
}

/// Rotary position embedding. Part of [`Kernels`](crate::Kernels).
pub trait RotaryKernels {
    /// Applies rotary position embedding in the half-split form: for `i < n`, the pair `(x[i], x[i + n])` of each head is
    /// rotated by `positions[t] · inverse_frequencies[i]` and multiplied by the amplitude. Elements from `2n` on are copied.
    ///
    /// `x`, `y`: `[T, heads, head_dim]`, `2n <= head_dim`. May be in place.
    fn rope(&self, x: View<'_>, rotary: Rotary<'_>, rotation: Rotation, y: View<'_>);

    /// Applies rotary position embedding as [`RotaryKernels::rope`] does, to interleaved pairs: `(x[2i], x[2i + 1])`.
    fn rope_interleaved(&self, x: View<'_>, rotary: Rotary<'_>, rotation: Rotation, y: View<'_>);
}

/// Products of heads, each with a matrix of its own: `y_h = x_h · W_hᵀ` or `y_h = x_h · W_h`, summed in f32 along the depth and
/// rounded once. A row's bits do not depend on the other rows.
#[derive(Debug, Clone, Copy)]
pub struct HeadProduct<'a> {
    /// [`NT`](GemmLayout::NT): `W [heads · b, a]`. [`NN`](GemmLayout::NN): `W [heads · a, b]`.
    pub layout: GemmLayout,
    /// `[T, heads, at least a]`: the first `a` elements of each head are multiplied.
    pub x: View<'a>,
    /// The matrices of all heads, one below the other, of the type of `x` or quantized.
    pub weight: Matrix<'a>,
    /// Output `[T, heads, b]`, of the type of `x`.
    pub y: View<'a>,
}

/// Concatenation, slicing and products of heads. Part of [`Kernels`](crate::Kernels).
pub trait HeadKernels {
    /// Concatenates two parts of each head: `y [T, heads, a + b]` of `own [T, heads, a]` and `tail [T, heads, b]`. A
    /// tail of `[T, 1, b]` is shared by all heads.
    fn join_heads(&self, own: View<'_>, tail: View<'_>, y: View<'_>);

    /// Computes the gradients of [`HeadKernels::join_heads`]; that of a shared tail is the sum over heads.
    fn join_heads_backward(&self, dy: View<'_>, down: View<'_>, dtail: View<'_>);

    /// Truncates or zero-pads each head: `y [T, heads, b]` has the first elements of each head of `x [T, heads, a]`,
    /// then zeros. With the shapes exchanged it is its own backward.
    fn resize_heads(&self, x: View<'_>, y: View<'_>);

    /// Multiplies each head by its own matrix; see [`HeadProduct`].
    ///
    /// # Panics
    /// If the shapes or types do not fit each other, or the layout is [`TN`](GemmLayout::TN).
    fn multiply_heads(&self, product: HeadProduct<'_>);
}

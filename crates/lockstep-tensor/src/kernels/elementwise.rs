//! Elementwise kernels, gates and dropout, and the sum over rows.

use crate::View;

/// The variants of the Gaussian error linear unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// `x Φ(x)` by the error function (`gelu`).
    Exact,
    /// The tanh approximation (`gelu_new`, `gelu_pytorch_tanh`).
    Tanh,
}

/// Gated activations `y = f(gate) · up` of feed-forward layers (Shazeer, "GLU Variants Improve Transformer", 2020).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GatedActivation {
    /// SwiGLU: `gate · σ(gate) · up`.
    Silu,
    /// GeGLU: `gelu(gate) · up`.
    Gelu(Gelu),
    /// SwiGLU with bounded operands: `g · σ(slope · g) · (clamp(up, -limit, limit) + 1)` for `g = min(gate, limit)`
    /// (gpt-oss).
    Clamped {
        /// Factor on the gate inside the sigmoid.
        slope: f32,
        /// Largest gate, and largest magnitude of `up`.
        limit: f32,
    },
}

impl GatedActivation {
    /// All gated activations, the clamped one with the numbers of gpt-oss.
    pub const ALL: [Self; 4] = [
        Self::Silu,
        Self::Gelu(Gelu::Exact),
        Self::Gelu(Gelu::Tanh),
        Self::Clamped { slope: 1.702, limit: 7.0 },
    ];
}

/// Activation functions without trained parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// Rectified linear unit, `max(x, 0)`.
    Relu,
    /// Sigmoid linear unit, `x / (1 + e^-x)`.
    Silu,
    /// Hyperbolic tangent of `x`.
    Tanh,
    /// Logistic function, `1 / (1 + e^-x)`.
    Sigmoid,
    /// Soft cap, `c · tanh(x / c)` for a positive bound `c` (Gemma 2: Gemma Team, 2024, section 2).
    SoftCap(f32),
}

impl Activation {
    /// All activation functions without a bound.
    pub const ALL: [Self; 4] = [Self::Relu, Self::Silu, Self::Tanh, Self::Sigmoid];

    /// Returns true if the gradient is a function of the output; otherwise it is one of the input.
    pub const fn saves_output(self) -> bool {
        !matches!(self, Self::Silu)
    }
}

/// A dropout mask: a function of (sequence key, position, head, feature, site), never of a rank or a batch.
///
/// An element is kept if its random word is at least `probability · 2^32`, and is then scaled by
/// `1 / (1 - probability)`. The word is number `feature % 4` of the Philox block with the sequence's key at counter
/// `[position, head, feature / 4, site]`.
#[derive(Debug, Clone, Copy)]
pub struct Dropout<'a> {
    /// Probability of dropping, in `[0, 1)`.
    pub probability: f32,
    /// Index of the dropout layer in the model; input to the random generator.
    pub site: u32,
    /// u32 `[sequences, 2]`: low and high word of the key of (seed, global sample number, epoch).
    pub keys: View<'a>,
}

/// Maps the rows of an activation tensor to sequences and positions of their micro-batch.
///
/// Row `r` of the tensor is row `first_row + r` of this rank's micro-batch `[sequences · seq_len]`. With context
/// parallelism a rank may hold two ranges of equal length of each sequence, one from each end, so that all ranks have
/// the same attention work. Token `i` of a sequence on this rank has position `halves[0] + i` for `i < seq_len / 2`,
/// else `halves[1] + i - seq_len / 2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenPositions {
    /// Index within the micro-batch of the tensor's first row.
    pub first_row: usize,
    /// Tokens of each sequence on this rank.
    pub seq_len: usize,
    /// Positions in the whole sequence of this rank's tokens 0 and `seq_len / 2`.
    pub halves: [usize; 2],
}

impl TokenPositions {
    /// Creates the mapping for all rows of whole sequences.
    pub fn whole(seq_len: usize) -> Self {
        Self { first_row: 0, seq_len, halves: [0, seq_len / 2] }
    }

    /// Returns the sequence of a row and its position within that sequence.
    #[inline(always)]
    pub fn of(&self, row: usize) -> (usize, usize) {
        let row = self.first_row + row;
        let (sequence, index) = (row / self.seq_len, row % self.seq_len);
        let half = self.seq_len / 2;
        let position = if index < half { self.halves[0] + index } else { self.halves[1] + (index - half) };
        (sequence, position)
    }
}

/// Elementwise kernels, gates and dropout, and the sum over rows. Part of [`Kernels`](crate::Kernels).
pub trait ElementwiseKernels {
    /// Computes `y`, the gated activation of `gate` and `up`.
    fn gated(&self, kind: GatedActivation, gate: View<'_>, up: View<'_>, y: View<'_>);

    /// Computes the gradients of [`ElementwiseKernels::gated`].
    fn gated_backward(
        &self,
        kind: GatedActivation,
        dy: View<'_>,
        gate: View<'_>,
        up: View<'_>,
        dgate: View<'_>,
        dup: View<'_>,
    );

    /// Computes `y = gelu(x)`.
    fn gelu(&self, kind: Gelu, x: View<'_>, y: View<'_>);

    /// Computes the gradient of [`ElementwiseKernels::gelu`]. `dx` may be `dy` in place.
    fn gelu_backward(&self, kind: Gelu, dy: View<'_>, x: View<'_>, dx: View<'_>);

    /// Computes `y = f(x)` for an activation function. May be in place.
    fn activation(&self, kind: Activation, x: View<'_>, y: View<'_>);

    /// Computes the gradient of [`ElementwiseKernels::activation`] from the saved tensor: the output, or the input if
    /// [`Activation::saves_output`] says so. `dx` may be `dy` in place.
    fn activation_backward(&self, kind: Activation, dy: View<'_>, saved: View<'_>, dx: View<'_>);

    /// Computes `y = a + b`. May be in place.
    fn add(&self, a: View<'_>, b: View<'_>, y: View<'_>);

    /// Computes `y = factor · x`. It is its own backward. May be in place.
    fn scale(&self, factor: f32, x: View<'_>, y: View<'_>);

    /// Computes `y = x`, scaled, where the mask keeps the element, else 0. `x [rows, width]`; `places` maps a row to
    /// its sequence and position, the head is 0, and the feature is `first_feature + column`. So the mask of a shard
    /// is a shard of the mask. It is its own backward. May be in place.
    fn dropout(
        &self,
        dropout: Dropout<'_>,
        places: TokenPositions,
        first_feature: u32,
        x: View<'_>,
        y: View<'_>,
    );

    /// Computes `y [T, width] = sigmoid(gate [T]) · x [T, width]`, row by row.
    fn gate_rows(&self, gate: View<'_>, x: View<'_>, y: View<'_>);

    /// Computes the gradients of [`ElementwiseKernels::gate_rows`].
    fn gate_rows_backward(&self, dy: View<'_>, gate: View<'_>, x: View<'_>, dgate: View<'_>, dx: View<'_>);

    /// Computes `out [n] += sum over rows of x [rows, n]`, the gradient of a bias; `out` is f32.
    fn sum_rows(&self, x: View<'_>, out: View<'_>);
}

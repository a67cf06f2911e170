//! The kernels that every device must supply, with their shapes.
//!
//! Conventions for all of them: `T` is the number of tokens of a micro-batch (sequences × sequence length,
//! sequence-major). Activations and weights are f32, bf16 or f16; all float operands of a call share one type unless said
//! otherwise. Arithmetic is in f32. Weight gradients are f32 and always accumulate. Outputs must not overlap other
//! operands unless a kernel says "may be in place". Shapes that do not fit are a bug in the caller: the kernel panics
//! and names them. Work is split by shape only, so the number of threads changes no bit.

use lockstep_plan::{DType, QuantizedType, exact::ExactSum};

use crate::{GroupedGemm, Pending, Permutation, Router, RouterGradients, RouterOutputs, View};

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

/// The variants of the Gaussian error linear unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// `x Φ(x)` by the error function (`gelu`).
    Exact,
    /// The tanh approximation (`gelu_new`, `gelu_pytorch_tanh`).
    Tanh,
}

/// Direction of a rotary embedding; the backward is the rotation by the opposite angle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rotation {
    /// By `+position · frequency`.
    Forward,
    /// By `-position · frequency`.
    Backward,
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

/// The tokens of each sequence that take part in an attention call: `len` of the `stored` ones, from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenSpan {
    /// Tokens of each sequence that the tensor holds.
    pub stored: usize,
    /// Index of the first token that takes part.
    pub first: usize,
    /// Number of tokens that take part.
    pub len: usize,
    /// Position of the first of them in the whole sequence.
    pub position: usize,
}

impl TokenSpan {
    /// Creates the span of all tokens of a tensor that holds whole sequences, or their beginnings.
    pub fn whole(len: usize) -> Self {
        Self { stored: len, first: 0, len, position: 0 }
    }
}

/// The geometry of a causal attention. A query sees the keys with `position - window < key's position <= position`
/// that belong to its own document.
///
/// Queries and keys are spans of each sequence, so ranks may hold parts of sequences and receive the keys of other
/// ranks part by part (ring attention: Liu et al., 2023). The results of calls with one span of queries and several
/// spans of keys are merged, see [`Kernels::attention`].
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Sequences in the batch.
    pub sequences: usize,
    /// Queries of each sequence.
    pub queries: TokenSpan,
    /// Keys (and values) of each sequence.
    pub keys: TokenSpan,
    /// Number of query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads head `h / (heads / key_value_heads)`.
    pub key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the scores, usually `head_dim^-0.5`.
    pub scale: f32,
    /// Sliding window in tokens; `None` for full causal attention.
    pub window: Option<usize>,
    /// Position in the whole sequence at which each query's document starts; `None` if documents of a sequence attend
    /// to each other. u32 `[sequences·queries.stored]`, nondecreasing within a sequence. Blocks of keys outside the
    /// document are skipped.
    pub document_starts: Option<View<'a>>,
    /// Index of this rank's first query head in the whole model, if heads are sharded. Only dropout uses it.
    pub first_head: usize,
    /// Dropout of the probabilities: `position` is the query's, `feature` the key's position.
    pub dropout: Option<Dropout<'a>>,
}

/// Overwrite or accumulate, for each result of [`Kernels::attention_backward`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionWrite {
    /// Mode for the gradient of the queries.
    pub queries: Write,
    /// Mode for the gradients of keys and values.
    pub keys: Write,
}

impl AttentionWrite {
    /// Overwrites all results, for a call that has all queries and all keys.
    pub const OVERWRITE: Self = Self { queries: Write::Overwrite, keys: Write::Overwrite };
}

/// The operands of layer normalization, `y = (x - mean) · rstd · weight + bias` over the last dimension.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<'a> {
    /// Input `[rows, width]`.
    pub x: View<'a>,
    /// Scale `[width]`.
    pub weight: View<'a>,
    /// f32 `[rows]`: mean of each row.
    pub mean: View<'a>,
    /// f32 `[rows]`: 1 / sqrt(variance + eps) of each row.
    pub rstd: View<'a>,
}

/// Rounding of the weights and optimizer state that are stored in bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest number, ties to even.
    Nearest,
    /// Stochastic rounding: up or down at random, so that the expected value is exact and small changes add up. The
    /// random bits are a function of these numbers and the element.
    Stochastic {
        /// Key derived from the seed and the parameter's name; each operand derives a key of its own from it.
        key: u64,
        /// Number of the optimizer step.
        step: u64,
        /// Index of the first element within its parameter; a multiple of 8.
        first_element: u64,
    },
}

/// One AdamW step (Loshchilov and Hutter, 2019) on one flat range. The gradient is f32; weights and moments are f32
/// or bf16.
#[derive(Debug, Clone, Copy)]
pub struct AdamW<'a> {
    /// Weights, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient in f32.
    pub gradient: View<'a>,
    /// First moment (`exp_avg` in PyTorch).
    pub exp_avg: View<'a>,
    /// Second moment (`exp_avg_sq` in PyTorch).
    pub exp_avg_sq: View<'a>,
    /// Output for the rounded weights, if kernels read another precision (bf16 or f16).
    pub rounded: Option<View<'a>>,
    /// Rounding of bf16 operands.
    pub rounding: Rounding,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
    /// Number of this step, from 1, for the bias corrections.
    pub step: u64,
}

/// One step of gradient descent with momentum, as PyTorch's `SGD`: `g += decay·p; m = momentum·m + g; p -= lr·m`.
#[derive(Debug, Clone, Copy)]
pub struct Sgd<'a> {
    /// Weights, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient in f32.
    pub gradient: View<'a>,
    /// Momentum buffer; `None` if the momentum is zero.
    pub momentum_buffer: Option<View<'a>>,
    /// Output for the rounded weights, if kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// Rounding of bf16 operands.
    pub rounding: Rounding,
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Factor on the old momentum buffer.
    pub momentum: f32,
    /// L2 decay, added to the gradient.
    pub weight_decay: f32,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
    /// Number of this step, from 1: the first one sets the momentum buffer to the gradient.
    pub step: u64,
}

/// One step of Lion (Chen et al., 2023) on one flat range:
/// `p -= lr·(sign(β₁·m + (1-β₁)·g) + decay·p); m = β₂·m + (1-β₂)·g`. The gradient is f32; weights and average are f32
/// or bf16.
#[derive(Debug, Clone, Copy)]
pub struct Lion<'a> {
    /// Weights, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient in f32.
    pub gradient: View<'a>,
    /// Exponential moving average of the gradients.
    pub exp_avg: View<'a>,
    /// Output for the rounded weights, if kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// Rounding of bf16 operands.
    pub rounding: Rounding,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Factors `β₁`, `β₂` on the old average: in the update direction, and in the new average.
    pub betas: [f64; 2],
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
}

/// One step of Muon (Jordan et al., 2024) on a whole matrix. The gradient is f32; weights and momentum are f32 or
/// bf16.
#[derive(Debug, Clone, Copy)]
pub struct Muon<'a> {
    /// Weights `[rows, columns]`, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient in f32.
    pub gradient: View<'a>,
    /// Momentum buffer: moving average of the gradients.
    pub momentum_buffer: View<'a>,
    /// Output for the rounded weights, if kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// Rounding of bf16 operands.
    pub rounding: Rounding,
    /// Type of the GEMMs of the orthogonalization (Newton-Schulz): f32 or bf16.
    pub dtype: DType,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Factor on the old average; the Nesterov form is used.
    pub momentum: f32,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
    /// Factor on the learning rate that follows from the matrix's shape.
    pub scale: f32,
}

/// The kernels of a queue, which run in the order in which they are called.
pub trait Kernels {
    /// Computes a matrix product; see [`Gemm`].
    fn gemm(&self, gemm: Gemm<'_>) {
        self.gemm_rows(gemm, gemm.c.shape().as_matrix().0);
    }

    /// Computes some rows of a matrix product that has `rows` of them, bit-identical to those rows of the whole
    /// product. `a` (not transposed) and `c` hold only those rows.
    fn gemm_rows(&self, gemm: Gemm<'_>, rows: usize);

    /// Computes matrix products of groups of rows; see [`GroupedGemm`].
    fn grouped_gemm(&self, gemm: GroupedGemm<'_>);

    /// Computes `out [n] += sum over rows of x [rows, n]`, the gradient of a bias; `out` is f32.
    fn sum_rows(&self, x: View<'_>, out: View<'_>);

    /// Computes `out [T, width] = table[ids - first_id]`, ids u32 `[T]`. `table [rows, width]` is the vocabulary
    /// shard whose first row is `first_id`. An id outside the shard gives a row of zeros, so that the sum over all
    /// shards is the full lookup. The caller must ensure that ids lie in the vocabulary.
    fn embedding(&self, ids: View<'_>, table: View<'_>, first_id: u32, out: View<'_>);

    /// Computes `gradient [rows, width] (f32) += scatter of dy [T, width] by ids - first_id`, tokens added in
    /// ascending order. An id outside the shard contributes nothing.
    fn embedding_backward(&self, ids: View<'_>, dy: View<'_>, first_id: u32, gradient: View<'_>);

    /// Computes `y = x · rstd · weight` over the last dimension; `rstd (f32 [rows]) = 1/sqrt(mean(x²) + eps)` is an
    /// output.
    fn rms_norm(&self, x: View<'_>, weight: View<'_>, eps: f32, y: View<'_>, rstd: View<'_>);

    /// Computes the gradient with respect to [`Kernels::rms_norm`]'s input.
    fn rms_norm_backward_input(
        &self,
        dy: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        rstd: View<'_>,
        dx: View<'_>,
        write: Write,
    );

    /// Adds the gradient of [`Kernels::rms_norm`]'s weight to `dweight` (f32 `[width]`).
    fn rms_norm_backward_weight(&self, dy: View<'_>, x: View<'_>, rstd: View<'_>, dweight: View<'_>);

    /// Computes layer normalization; writes `y` and the statistics of `norm`.
    fn layer_norm(&self, norm: LayerNorm<'_>, bias: Option<View<'_>>, eps: f32, y: View<'_>);

    /// Computes the gradient with respect to [`Kernels::layer_norm`]'s input.
    fn layer_norm_backward_input(&self, norm: LayerNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write);

    /// Adds the gradients of [`Kernels::layer_norm`]'s weight and bias (f32 `[width]`).
    fn layer_norm_backward_weight(
        &self,
        norm: LayerNorm<'_>,
        dy: View<'_>,
        dweight: View<'_>,
        dbias: Option<View<'_>>,
    );

    /// Applies rotary position embedding in the half-split form: for `i < head_dim/2`, the pair
    /// `(x[i], x[i + head_dim/2])` of each head is rotated by `positions[t] · inverse_frequencies[i]`.
    ///
    /// `x`, `y`: `[T, heads, head_dim]`; positions u32 `[T]`; inverse frequencies f32 `[head_dim/2]`. May be in
    /// place.
    fn rope(
        &self,
        x: View<'_>,
        positions: View<'_>,
        inverse_frequencies: View<'_>,
        rotation: Rotation,
        y: View<'_>,
    );

    /// Applies rotary position embedding as [`Kernels::rope`] does, to interleaved pairs: `(x[2i], x[2i + 1])`.
    fn rope_interleaved(
        &self,
        x: View<'_>,
        positions: View<'_>,
        inverse_frequencies: View<'_>,
        rotation: Rotation,
        y: View<'_>,
    );

    /// Concatenates two parts of each head: `y [T, heads, a + b]` of `own [T, heads, a]` and `tail [T, heads, b]`. A
    /// tail of `[T, 1, b]` is shared by all heads.
    fn join_heads(&self, own: View<'_>, tail: View<'_>, y: View<'_>);

    /// Computes the gradients of [`Kernels::join_heads`]; that of a shared tail is the sum over heads.
    fn join_heads_backward(&self, dy: View<'_>, down: View<'_>, dtail: View<'_>);

    /// Truncates or zero-pads each head: `y [T, heads, b]` has the first elements of each head of `x [T, heads, a]`,
    /// then zeros. With the shapes exchanged it is its own backward.
    fn resize_heads(&self, x: View<'_>, y: View<'_>);

    /// Computes causal attention. `q`, `out`: `[sequences·queries.stored, heads, head_dim]`; `k`, `v`:
    /// `[sequences·keys.stored, key_value_heads, head_dim]`; `log_sum_exp`: f32 `[sequences, heads, queries.stored]`,
    /// of the scaled scores, before dropout. No queries-by-keys matrix is ever stored. Rows of `out` and
    /// `log_sum_exp` that are not among the queries stay unchanged.
    ///
    /// With [`Write::Accumulate`], `out` and `log_sum_exp` hold the attention to other, disjoint keys on entry, and
    /// the attention to both on return: `lse = log(e^a + e^b)`, `out = e^(a - lse) out_a + e^(b - lse) out_b`. `out`
    /// may be f32 whatever the type of `q`, and must be f32 when it accumulates: partial softmax results stay in f32
    /// and are rounded once, by [`Kernels::cast`], after the last part. Keys after all queries have no effect and
    /// need no call.
    #[expect(clippy::too_many_arguments, reason = "three inputs, two outputs, and how these are written")]
    fn attention(
        &self,
        attention: &Attention<'_>,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
        write: Write,
    );

    /// Computes the gradients of [`Kernels::attention`]: `dq` of the queries, `dk` and `dv` of the keys. `out` (in
    /// the type of `q`) and `log_sum_exp` are the final ones, over all keys. A call computes the contribution of its
    /// keys to `dq`, and of its queries to `dk` and `dv`. `write` selects overwrite or accumulate. Each of the three
    /// gradients may be f32 whatever the type of `q`, and must be f32 when it accumulates.
    #[expect(clippy::too_many_arguments, reason = "six inputs and three outputs, all of the mathematics")]
    fn attention_backward(
        &self,
        attention: &Attention<'_>,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
        dout: View<'_>,
        dq: View<'_>,
        dk: View<'_>,
        dv: View<'_>,
        write: AttentionWrite,
    );

    /// Computes `y = silu(gate) · up`.
    fn swiglu(&self, gate: View<'_>, up: View<'_>, y: View<'_>);

    /// Computes the gradients of [`Kernels::swiglu`].
    fn swiglu_backward(&self, dy: View<'_>, gate: View<'_>, up: View<'_>, dgate: View<'_>, dup: View<'_>);

    /// Computes `y = gelu(x)`.
    fn gelu(&self, kind: Gelu, x: View<'_>, y: View<'_>);

    /// Computes the gradient of [`Kernels::gelu`]. `dx` may be `dy` in place.
    fn gelu_backward(&self, kind: Gelu, dy: View<'_>, x: View<'_>, dx: View<'_>);

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

    /// Computes the cross-entropy of `logits [T, vocabulary]` against `labels` (i32 `[T]`, -100 = masked): writes
    /// `losses` (f32 `[T]`, 0 where masked).
    fn cross_entropy(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>);

    /// Computes [`Kernels::cross_entropy`], and overwrites the logits with its gradient:
    /// `seed · (softmax(logits) - onehot(labels))`, zero where masked. Each row is finished while it is in the cache.
    fn cross_entropy_with_gradient(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>, seed: f32);

    /// Computes the softmax statistics of one vocabulary shard, for vocabulary-parallel cross-entropy. Writes f32
    /// `[3, T]`: for each token the maximum of `logits [T, columns]`, the sum of `exp(logit - maximum)`, and the
    /// label's logit (0 if the label is in another shard). The shard's columns start at `first_column` of the
    /// vocabulary; there may be none. Labels are i32 `[T]`; a token with label -100 is masked, and its statistics are
    /// those of no columns. The caller must ensure that labels lie in the vocabulary.
    fn softmax_statistics(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        statistics: View<'_>,
    );

    /// Computes the cross-entropy of a vocabulary in `P` shards. Merges the shards' statistics `parts` (f32
    /// `[P, 3, T]`, of [`Kernels::softmax_statistics`]) in their order. Writes `log_sum_exp` (f32 `[T]`, negative
    /// infinity where masked) and `losses` (f32 `[T]`, 0 where masked).
    fn merge_softmax(&self, parts: View<'_>, labels: View<'_>, log_sum_exp: View<'_>, losses: View<'_>);

    /// Overwrites the logits of one vocabulary shard with the gradient of the cross-entropy:
    /// `seed · (exp(logit - log_sum_exp) - onehot)`, zero where masked. The operands are those of
    /// [`Kernels::softmax_statistics`] and [`Kernels::merge_softmax`].
    fn softmax_gradient(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        log_sum_exp: View<'_>,
        seed: f32,
    );

    /// Chooses experts by `logits [T, experts]`, and writes all of `routed`; see [`Router`].
    fn router_top_k(&self, router: &Router<'_>, logits: View<'_>, routed: RouterOutputs<'_>);

    /// Returns the router margin: the smallest distance of any token from another choice of experts. It is the
    /// difference between the score of a token's last chosen expert and the best one it did not choose, and likewise
    /// for its groups. Scores include the selection bias. The margin is infinite if there is no other choice.
    fn router_margin(&self, router: &Router<'_>, scores: View<'_>) -> Pending<'static, f32>;

    /// Computes the gradient with respect to [`Kernels::router_top_k`]'s logits; the choice itself has none. `places`
    /// maps tokens to sequences.
    fn router_top_k_backward(
        &self,
        router: &Router<'_>,
        logits: View<'_>,
        routed: RouterOutputs<'_>,
        gradients: RouterGradients<'_>,
        places: TokenPositions,
        dlogits: View<'_>,
    );

    /// Computes the terms of a load-balancing loss (Fedus et al., "Switch Transformers", 2021, section 2.2). Writes
    /// `counts` (f32 `[sequences, experts]`), the number of slots of a sequence's tokens that chose an expert. Writes
    /// `probabilities` (same shape), the sum of the expert's probabilities over these tokens.
    fn router_load(
        &self,
        routed: RouterOutputs<'_>,
        places: TokenPositions,
        counts: View<'_>,
        probabilities: View<'_>,
    );

    /// Sorts slots by expert, and in ascending order within an expert. `experts` (u32) holds the expert of each slot;
    /// `offsets` (u32 `[G + 1]`) becomes the first row of each of the experts `first_expert..first_expert + G`. Slots
    /// of other experts get no row. For slots that arrive one per row, `T` is their number and `top_k` is 1.
    fn sort_slots(
        &self,
        experts: View<'_>,
        first_expert: u32,
        permutation: Permutation<'_>,
        offsets: View<'_>,
    );

    /// Applies expert capacity: keeps the first `capacity` slots of each expert in every sequence, in the order of
    /// tokens and of their slots. `kept` (u32 `[T, top_k]`) is `experts` with [`Permutation::NONE`] for dropped
    /// slots. `before` (f32 `[sequences, experts]`) counts the slots that chose each expert among a sequence's
    /// earlier tokens on other ranks; without it there are none.
    fn limit_slots(
        &self,
        experts: View<'_>,
        places: TokenPositions,
        capacity: usize,
        before: Option<View<'_>>,
        kept: View<'_>,
    );

    /// Computes `y [T, width] = sigmoid(gate [T]) · x [T, width]`, row by row.
    fn gate_rows(&self, gate: View<'_>, x: View<'_>, y: View<'_>);

    /// Computes the gradients of [`Kernels::gate_rows`].
    fn gate_rows_backward(&self, dy: View<'_>, gate: View<'_>, x: View<'_>, dgate: View<'_>, dx: View<'_>);

    /// Expands slots for sharded experts: writes `of_parts` (u32), the parts of the expert of each slot of `experts`
    /// (u32), next to each other. A part counts as an expert. The parts of an expert are on as many neighbouring
    /// ranks, each with parts of `experts_of_rank` experts.
    fn part_slots(&self, experts: View<'_>, experts_of_rank: usize, of_parts: View<'_>);

    /// Writes `arrived` (u32), the expert of each row received in the all-to-all. `counts` (u32) has the number of
    /// rows from each rank, subdivided by the `experts` on this rank.
    fn arrived_experts(&self, counts: View<'_>, experts: usize, arrived: View<'_>);

    /// Gathers `rows [T·top_k, width]` from `x [T, width]` by their slots. Rows without a slot stay unchanged.
    fn permute(&self, permutation: Permutation<'_>, x: View<'_>, rows: View<'_>);

    /// Computes `y [T, width] = Σ weights [T, top_k] · rows [T·top_k, width]`, the slots of a token in ascending
    /// order, slots without a row excepted. Without weights (f32) each is 1, which makes it the backward of
    /// [`Kernels::permute`]. If there are fewer weights than slots, each weight applies to an equal number of
    /// neighbouring slots of its token.
    fn unpermute(&self, permutation: Permutation<'_>, rows: View<'_>, weights: Option<View<'_>>, y: View<'_>);

    /// Computes the gradients of [`Kernels::unpermute`]: `drows` (rows without a slot stay unchanged) and `dweights`
    /// (f32, 0 for slots without a row, the sum where slots share a weight).
    fn unpermute_backward(
        &self,
        permutation: Permutation<'_>,
        dy: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        drows: View<'_>,
        dweights: View<'_>,
    );

    /// Runs one AdamW step.
    fn adamw(&self, step: &AdamW<'_>);

    /// Runs one SGD step.
    fn sgd(&self, step: &Sgd<'_>);

    /// Runs one Lion step.
    fn lion(&self, step: &Lion<'_>);

    /// Runs one Muon step.
    fn muon(&self, step: &Muon<'_>);

    /// Returns the sum of squares of an f32 view: f64 sums of blocks of 1,024 elements, added exactly. NaN or
    /// infinite elements make it NaN.
    fn sum_of_squares(&self, x: View<'_>) -> Pending<'static, ExactSum>;

    /// Converts between f32, bf16 and f16 (round to nearest even), or copies.
    fn cast(&self, x: View<'_>, y: View<'_>);

    /// Quantizes the elements of `x` (f32, bf16 or f16; whole blocks of
    /// [`QUANTIZATION_BLOCK`](lockstep_plan::QUANTIZATION_BLOCK)) into `records` (u8 `[kind.bytes(elements)]`).
    /// Records hold a scale for each block and a code for each element, whose error is at most half of that scale.
    ///
    /// A `residual` (f32 or bf16, one for each element) is added first, and becomes the new quantization error (error
    /// feedback: Seide et al., 2014; Karimireddy et al., 2019).
    ///
    /// A block with a non-finite element becomes NaN as a whole, and leaves no residual. A block whose largest
    /// magnitude is below 1.5e-36 (int8; 8.2e-38 for int4) becomes zeros.
    fn quantize(&self, kind: QuantizedType, x: View<'_>, residual: Option<View<'_>>, records: View<'_>);

    /// Dequantizes the output of [`Kernels::quantize`], rounded to the type of `y` (f32, bf16 or f16).
    fn dequantize(&self, kind: QuantizedType, records: View<'_>, y: View<'_>);

    /// Dequantizes `parts` tensors that are concatenated in `records`, each as long as `y` (f32), and sums them. The
    /// sum is in f32, in the order in which a reduction over as many ranks adds.
    fn dequantize_sum(&self, kind: QuantizedType, parts: usize, records: View<'_>, y: View<'_>);

    /// Transposes the first two dimensions: `y [b, a, width]` becomes `x [a, b, width]` with them exchanged. Float
    /// types.
    fn transpose_blocks(&self, x: View<'_>, y: View<'_>);

    /// Sets every byte to zero.
    fn zero(&self, y: View<'_>);
}

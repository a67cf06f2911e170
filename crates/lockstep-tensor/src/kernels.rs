//! The kernels that every device must supply, with their shapes.
//!
//! Conventions for all of them. `T` is the number of tokens of a micro-batch (sequences × sequence length,
//! sequence-major). Activations and weights are f32 or bf16, one type for all float operands of a call
//! unless said otherwise; arithmetic is in f32; gradients of weights are f32 and are always *added* to.
//! Outputs must not overlap other operands unless a kernel says "may be in place". Shapes that do not fit
//! are a bug in the caller: the kernel panics and names them. Work is split by shape only, so the bits
//! do not depend on the number of threads.

use lockstep_plan::{DType, QuantizedType, exact::ExactSum};

use crate::{GroupedGemm, Pending, Permutation, Routed, Router, RouterGradients, View};

/// Which operands of a matrix product are stored transposed. `C` is always `[m, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmLayout {
    /// `A [m, k]`, `B [k, n]`: the gradient of a linear layer's input, `dX = dY · W`.
    NN,
    /// `A [m, k]`, `B [n, k]`: a linear layer, `Y = X · Wᵀ`.
    NT,
    /// `A [k, m]`, `B [k, n]`: the gradient of a linear layer's weight, `dW = dYᵀ · X`.
    TN,
}

/// Whether a kernel replaces its output or adds to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Write {
    /// `C = ...`
    Overwrite,
    /// `C += ...`
    Accumulate,
}

/// A matrix product `C = A · B (+ bias)` or `C += A · B`.
///
/// `A` and `B` share a type (f32 or bf16). `C` has that type or is f32; products are summed in f32 and rounded
/// once. `bias [n]` has the type of `A` and is added to every row.
#[derive(Debug, Clone, Copy)]
pub struct Gemm<'a> {
    /// Which operands are transposed.
    pub layout: GemmLayout,
    /// Left operand.
    pub a: View<'a>,
    /// Right operand.
    pub b: View<'a>,
    /// Output `[m, n]`.
    pub c: View<'a>,
    /// Added to every row of the product.
    pub bias: Option<View<'a>>,
    /// Replace or add.
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
/// An element is kept where its random word is at least `probability · 2^32`, and then scaled by
/// `1 / (1 - probability)`. The word is number `feature % 4` of the Philox block with the sequence's key at
/// counter `[position, head, feature / 4, site]`.
#[derive(Debug, Clone, Copy)]
pub struct Dropout<'a> {
    /// Probability of dropping, in `[0, 1)`.
    pub probability: f32,
    /// Which dropout of the model this is.
    pub site: u32,
    /// u32 `[sequences, 2]`: low and high word of the key of (seed, global sample number, epoch).
    pub keys: View<'a>,
}

/// Where the rows of a tensor of activations stand in their sequences, if they are part of a micro-batch.
///
/// Row `r` is row `first_row + r` of this rank's micro-batch `[sequences · seq_len]`. Of a sequence a rank may hold two
/// stretches of equal length (context parallelism gives one from each end of the sequence, so that all ranks have as
/// much attention to do): index `i` of it stands at `halves[0] + i` for `i < seq_len / 2`, else at
/// `halves[1] + i - seq_len / 2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenPlaces {
    /// Row of the micro-batch that is the first one here.
    pub first_row: usize,
    /// Tokens of each sequence on this rank.
    pub seq_len: usize,
    /// Positions of the first token and of token `seq_len / 2` within the whole sequence.
    pub halves: [usize; 2],
}

impl TokenPlaces {
    /// All rows of whole sequences.
    pub fn whole(seq_len: usize) -> Self {
        Self { first_row: 0, seq_len, halves: [0, seq_len / 2] }
    }

    /// The sequence of a row, and the row's position within that.
    #[inline(always)]
    pub fn of(&self, row: usize) -> (usize, usize) {
        let row = self.first_row + row;
        let (sequence, index) = (row / self.seq_len, row % self.seq_len);
        let half = self.seq_len / 2;
        let position = if index < half { self.halves[0] + index } else { self.halves[1] + (index - half) };
        (sequence, position)
    }
}

/// Which tokens of each sequence take part in an attention: of those that a tensor holds, `len` from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenSpan {
    /// Tokens of each sequence that the tensor holds.
    pub stored: usize,
    /// The first of them that takes part.
    pub first: usize,
    /// How many take part.
    pub len: usize,
    /// Where the first one stands in the whole sequence.
    pub position: usize,
}

impl TokenSpan {
    /// All tokens of a tensor that holds whole sequences, or their beginnings.
    pub fn whole(len: usize) -> Self {
        Self { stored: len, first: 0, len, position: 0 }
    }
}

/// The geometry of a causal attention. A query at a position sees the keys with
/// `position - window < key's position <= position`, and none before its document.
///
/// Queries and keys are spans of each sequence, so that ranks may hold parts of sequences and take the keys of others
/// part by part (ring attention: Liu et al., 2023): the results of calls on one span of queries and several of keys
/// are merged, see [`Kernels::attention`].
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Sequences in the batch.
    pub sequences: usize,
    /// Queries of each sequence.
    pub queries: TokenSpan,
    /// Keys (and values) of each sequence.
    pub keys: TokenSpan,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads head `h / (heads / key_value_heads)`.
    pub key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the scores, usually `head_dim^-0.5`.
    pub scale: f32,
    /// Sliding window in tokens, if any.
    pub window: Option<usize>,
    /// Where each query's document starts in the whole sequence, if documents that share a sequence are kept apart: u32
    /// `[sequences·queries.stored]`, never falling within a sequence. Blocks of keys outside are skipped.
    pub document_starts: Option<View<'a>>,
    /// Number of the first query head among those of the whole model, if heads are split over ranks; only the
    /// dropout asks.
    pub first_head: usize,
    /// Dropout of the probabilities: `position` is the query's, `feature` the key's position.
    pub dropout: Option<Dropout<'a>>,
}

/// How [`Kernels::attention_backward`] writes its results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionWrite {
    /// The gradient of the queries.
    pub queries: Write,
    /// The gradients of keys and values.
    pub keys: Write,
}

impl AttentionWrite {
    /// For a call that has all queries and all keys.
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

/// How a step rounds the weights and the state that it keeps in bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest number, ties to even.
    Nearest,
    /// Up or down at random, so that the mean is exact: small changes add up. The random bits are a function of
    /// these numbers and the element.
    Stochastic {
        /// Of (seed, name of the parameter); each operand makes a key of its own from it.
        key: u64,
        /// Number of this step.
        step: u64,
        /// Where in its parameter the first element stands; a multiple of 8.
        first_element: u64,
    },
}

/// One AdamW step (Loshchilov and Hutter, 2019) on one flat range. The gradient is f32; weights and moments are f32
/// or bf16.
#[derive(Debug, Clone, Copy)]
pub struct AdamW<'a> {
    /// Weights, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient.
    pub gradient: View<'a>,
    /// First moment.
    pub exp_avg: View<'a>,
    /// Second moment.
    pub exp_avg_sq: View<'a>,
    /// Where the rounded weights go when kernels read another precision (bf16 or f16).
    pub rounded: Option<View<'a>>,
    /// How bf16 operands are rounded.
    pub rounding: Rounding,
    /// Step size.
    pub learning_rate: f64,
    /// Decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
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
    /// Gradient.
    pub gradient: View<'a>,
    /// Momentum buffer; `None` if the momentum is zero.
    pub momentum_buffer: Option<View<'a>>,
    /// Where the rounded weights go when kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// How bf16 operands are rounded.
    pub rounding: Rounding,
    /// Step size.
    pub learning_rate: f32,
    /// Momentum.
    pub momentum: f32,
    /// L2 decay, added to the gradient.
    pub weight_decay: f32,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
    /// Number of this step, from 1: the first one sets the momentum buffer to the gradient.
    pub step: u64,
}

/// One step of Lion (Chen et al., 2023) on one flat range: `p -= lr·(sign(β₁·m + (1-β₁)·g) + decay·p);
/// m = β₂·m + (1-β₂)·g`. The gradient is f32; weights and average are f32 or bf16.
#[derive(Debug, Clone, Copy)]
pub struct Lion<'a> {
    /// Weights, or the f32 master weights.
    pub parameter: View<'a>,
    /// Gradient.
    pub gradient: View<'a>,
    /// Average of the gradients.
    pub exp_avg: View<'a>,
    /// Where the rounded weights go when kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// How bf16 operands are rounded.
    pub rounding: Rounding,
    /// Step size.
    pub learning_rate: f64,
    /// Weights of the old average: in the direction, and in the new average.
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
    /// Gradient.
    pub gradient: View<'a>,
    /// Average of the gradients.
    pub momentum_buffer: View<'a>,
    /// Where the rounded weights go when kernels read another precision.
    pub rounded: Option<View<'a>>,
    /// How bf16 operands are rounded.
    pub rounding: Rounding,
    /// Type of the products that make the singular values equal: f32 or bf16.
    pub dtype: DType,
    /// Step size.
    pub learning_rate: f64,
    /// Weight of the old average; Nesterov's form is used.
    pub momentum: f32,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping).
    pub gradient_scale: f32,
    /// Factor on the step size that follows from the matrix's shape.
    pub scale: f32,
}

/// The kernels of a queue, which run in the order in which they are called.
pub trait Kernels {
    /// Matrix product; see [`Gemm`].
    fn gemm(&self, gemm: Gemm<'_>) {
        self.gemm_part(gemm, gemm.c.shape().as_matrix().0);
    }

    /// Some rows of a matrix product that has `rows` of them, with the bits that they have in the whole: `a` (not
    /// transposed) and `c` are those rows.
    fn gemm_part(&self, gemm: Gemm<'_>, rows: usize);

    /// Matrix products of groups of rows; see [`GroupedGemm`].
    fn grouped_gemm(&self, gemm: GroupedGemm<'_>);

    /// `out [n] += sum over rows of x [rows, n]`; `out` is f32. The gradient of a bias.
    fn sum_rows(&self, x: View<'_>, out: View<'_>);

    /// `out [T, width] = table[ids - first_id]`, ids u32 `[T]`: the table `[rows, width]` holds rows `first_id..` of the
    /// whole. An id outside gives a row of zeros, so that the sum over all parts of a table is what the whole gives;
    /// whether ids lie in the vocabulary is for the caller to see to.
    fn embedding(&self, ids: View<'_>, table: View<'_>, first_id: u32, out: View<'_>);

    /// `gradient [rows, width] (f32) += scatter of dy [T, width] by ids - first_id`, tokens added in ascending order. An
    /// id outside contributes nothing.
    fn embedding_backward(&self, ids: View<'_>, dy: View<'_>, first_id: u32, gradient: View<'_>);

    /// `y = x · rstd · weight` over the last dimension, `rstd (f32 [rows]) = 1/sqrt(mean(x²) + eps)` is an output.
    fn rms_norm(&self, x: View<'_>, weight: View<'_>, eps: f32, y: View<'_>, rstd: View<'_>);

    /// Gradient of [`Kernels::rms_norm`]'s input.
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

    /// Layer normalization; writes `y` and the statistics of `norm`.
    fn layer_norm(&self, norm: LayerNorm<'_>, bias: Option<View<'_>>, eps: f32, y: View<'_>);

    /// Gradient of [`Kernels::layer_norm`]'s input.
    fn layer_norm_backward_input(&self, norm: LayerNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write);

    /// Adds the gradients of [`Kernels::layer_norm`]'s weight and bias (f32 `[width]`).
    fn layer_norm_backward_weight(
        &self,
        norm: LayerNorm<'_>,
        dy: View<'_>,
        dweight: View<'_>,
        dbias: Option<View<'_>>,
    );

    /// Rotary position embedding in the half-split form: for `i < head_dim/2`, the pair `(x[i], x[i + head_dim/2])`
    /// of each head is rotated by `positions[t] · inverse_frequencies[i]`.
    ///
    /// `x`, `y`: `[T, heads, head_dim]`; positions u32 `[T]`; inverse frequencies f32 `[head_dim/2]`. May be in place.
    fn rope(
        &self,
        x: View<'_>,
        positions: View<'_>,
        inverse_frequencies: View<'_>,
        rotation: Rotation,
        y: View<'_>,
    );

    /// As [`Kernels::rope`], for pairs of neighbours: `(x[2i], x[2i + 1])`.
    fn rope_neighbours(
        &self,
        x: View<'_>,
        positions: View<'_>,
        inverse_frequencies: View<'_>,
        rotation: Rotation,
        y: View<'_>,
    );

    /// Heads of two parts: `y [T, heads, a + b]` of `own [T, heads, a]` and `tail [T, heads, b]`, or of one tail for all heads,
    /// `[T, 1, b]`.
    fn join_heads(&self, own: View<'_>, tail: View<'_>, y: View<'_>);

    /// Gradients of [`Kernels::join_heads`]; that of a shared tail is the sum over heads.
    fn join_heads_backward(&self, dy: View<'_>, down: View<'_>, dtail: View<'_>);

    /// `y [T, heads, b]` has the first elements of each head of `x [T, heads, a]`, and zeros where those end. Its own backward, the
    /// other way.
    fn resize_heads(&self, x: View<'_>, y: View<'_>);

    /// Causal attention. `q`, `out`: `[sequences·queries.stored, heads, head_dim]`; `k`, `v`:
    /// `[sequences·keys.stored, key_value_heads, head_dim]`; `log_sum_exp`: f32 `[sequences, heads, queries.stored]`, of
    /// the scaled scores, before dropout. Never holds a matrix of queries by keys. Rows of `out` and `log_sum_exp` that
    /// are not among the queries stay as they are.
    ///
    /// With [`Write::Accumulate`] `out` and `log_sum_exp` hold the attention to other keys, disjoint from these, and
    /// become that to both: `lse = log(e^a + e^b)`, `out = e^(a - lse) out_a + e^(b - lse) out_b`. `out` may be f32
    /// whatever the type of `q`, and must be where it is added to: parts of a softmax are kept in f32 and rounded once,
    /// by [`Kernels::cast`], when all are in. Keys after all queries change nothing and need no call.
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

    /// Gradients of [`Kernels::attention`]: `dq` of the queries, `dk` and `dv` of the keys. `out` and `log_sum_exp` are
    /// those of all keys, `out` in the type of `q`; a call gives the share that its keys have in `dq` and its queries
    /// in `dk` and `dv`. `write` says which are replaced and which added to. Each of the
    /// three may be f32 whatever the type of `q`, and must be where it is added to.
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

    /// `y = silu(gate) · up`.
    fn swiglu(&self, gate: View<'_>, up: View<'_>, y: View<'_>);

    /// Gradients of [`Kernels::swiglu`].
    fn swiglu_backward(&self, dy: View<'_>, gate: View<'_>, up: View<'_>, dgate: View<'_>, dup: View<'_>);

    /// `y = gelu(x)`.
    fn gelu(&self, kind: Gelu, x: View<'_>, y: View<'_>);

    /// Gradient of [`Kernels::gelu`]. `dx` may be `dy` in place.
    fn gelu_backward(&self, kind: Gelu, dy: View<'_>, x: View<'_>, dx: View<'_>);

    /// `y = a + b`. May be in place.
    fn add(&self, a: View<'_>, b: View<'_>, y: View<'_>);

    /// `y = factor · x`. Its own backward. May be in place.
    fn scale(&self, factor: f32, x: View<'_>, y: View<'_>);

    /// `y = x` where the mask keeps it, scaled, else 0. `x [rows, width]`; `places` says which sequence and position a
    /// row has, head is 0, and feature `first_feature + column`: the mask of a part is that part of the whole one's.
    /// Its own backward. May be in place.
    fn dropout(
        &self,
        dropout: Dropout<'_>,
        places: TokenPlaces,
        first_feature: u32,
        x: View<'_>,
        y: View<'_>,
    );

    /// Cross-entropy of `logits [T, vocabulary]` against `labels` (i32 `[T]`, -100 = masked): writes
    /// `losses` (f32 `[T]`, 0 where masked).
    fn cross_entropy(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>);

    /// [`Kernels::cross_entropy`], and its gradient in place of the logits: `seed · (softmax(logits) - onehot(labels))`,
    /// zero where masked. Each row is finished while it is in the cache.
    fn cross_entropy_with_gradient(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>, seed: f32);

    /// What the other parts of a split vocabulary need of this one: writes f32 `[3, T]`, for each token the largest of
    /// `logits [T, columns]`, the sum of `exp(logit - largest)`, and the label's logit (0 if it is not in this part).
    /// The columns are those from `first_column` on of the whole; there may be none. Labels are i32 `[T]`; a token with
    /// label -100 is masked: its statistics are those of no columns. Labels outside the whole vocabulary are for the
    /// caller to see to.
    fn softmax_statistics(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        statistics: View<'_>,
    );

    /// The cross-entropy of a vocabulary in `P` parts: combines their statistics `parts` (f32 `[P, 3, T]`, of
    /// [`Kernels::softmax_statistics`]) in their order, and writes `log_sum_exp` (f32 `[T]`, negative infinity where
    /// masked) and `losses` (f32 `[T]`, 0 where masked).
    fn merge_softmax(&self, parts: View<'_>, labels: View<'_>, log_sum_exp: View<'_>, losses: View<'_>);

    /// The gradient of a cross-entropy in place of part of the logits: `seed · (exp(logit - log_sum_exp) - onehot)`, zero
    /// where masked. The operands are those of [`Kernels::softmax_statistics`] and [`Kernels::merge_softmax`].
    fn softmax_gradient(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        log_sum_exp: View<'_>,
        seed: f32,
    );

    /// Chooses experts by `logits [T, experts]`, writes all of `routed`; see [`Router`].
    fn router_top_k(&self, router: &Router<'_>, logits: View<'_>, routed: Routed<'_>);

    /// How near any token is to choosing other experts: the smallest difference between the score of its last expert and that of
    /// the best one that it has not chosen, and likewise of its groups. Scores are those that choices are made by, with the
    /// selection bias. Infinite where there is nothing else to choose.
    fn router_margin(&self, router: &Router<'_>, scores: View<'_>) -> Pending<'static, f32>;

    /// Gradient of [`Kernels::router_top_k`]'s logits; the choice itself has none. `places` says which sequence a token
    /// belongs to.
    fn router_top_k_backward(
        &self,
        router: &Router<'_>,
        logits: View<'_>,
        routed: Routed<'_>,
        gradients: RouterGradients<'_>,
        places: TokenPlaces,
        dlogits: View<'_>,
    );

    /// What a load-balancing loss (Fedus et al., "Switch Transformers", 2021, section 2.2) is made of: writes `counts`
    /// (f32 `[sequences, experts]`), how many slots of a sequence's tokens chose an expert, and `probabilities` (alike),
    /// the sum of its probabilities over these tokens.
    fn router_load(&self, routed: Routed<'_>, places: TokenPlaces, counts: View<'_>, probabilities: View<'_>);

    /// Sorts slots by expert, those of one expert in ascending order. `experts` (u32) are the slots', `offsets`
    /// (u32 `[G + 1]`) becomes the first row of each of the experts `first_expert..first_expert + G`. Slots of other
    /// experts get no row. For slots that arrive by rows of one each `T` is their number, and `top_k` is 1.
    fn sort_slots(
        &self,
        experts: View<'_>,
        first_expert: u32,
        permutation: Permutation<'_>,
        offsets: View<'_>,
    );

    /// Leaves each expert its first `capacity` slots of every sequence, in the order of tokens and of their slots: `kept`
    /// (u32 `[T, top_k]`) is `experts` with [`Permutation::NONE`] for the others. `before` (f32 `[sequences, experts]`) says
    /// how many slots of a sequence's earlier tokens, which are elsewhere, have chosen an expert; none have without it.
    fn limit_slots(
        &self,
        experts: View<'_>,
        places: TokenPlaces,
        capacity: usize,
        before: Option<View<'_>>,
        kept: View<'_>,
    );

    /// `y [T, width] = sigmoid(gate [T]) · x [T, width]`, row by row.
    fn gate_rows(&self, gate: View<'_>, x: View<'_>, y: View<'_>);

    /// Gradients of [`Kernels::gate_rows`].
    fn gate_rows_backward(&self, dy: View<'_>, gate: View<'_>, x: View<'_>, dgate: View<'_>, dx: View<'_>);

    /// Where experts are in parts: writes `of_parts` (u32), for each slot of `experts` (u32) the parts of its expert, as neighbours.
    /// A part counts as an expert; those of one are on as many neighbouring ranks, each with parts of `experts_of_rank` experts.
    fn part_slots(&self, experts: View<'_>, experts_of_rank: usize, of_parts: View<'_>);

    /// Writes `arrived` (u32), the expert of each row that has come: `counts` (u32) says how many from each rank and, of these,
    /// for each of the `experts` that are here.
    fn arrived_experts(&self, counts: View<'_>, experts: usize, arrived: View<'_>);

    /// `rows [T·top_k, width]` become those of `x [T, width]` that their slots say. Rows without a slot stay as they are.
    fn permute(&self, permutation: Permutation<'_>, x: View<'_>, rows: View<'_>);

    /// `y [T, width] = Σ weights [T, top_k] · rows [T·top_k, width]`, the slots of a token in ascending order, without
    /// those that have no row; without weights (f32) each is 1, which makes it the backward of [`Kernels::permute`]. Of fewer weights
    /// than slots each belongs to as many neighbouring slots of its token as any other.
    fn unpermute(&self, permutation: Permutation<'_>, rows: View<'_>, weights: Option<View<'_>>, y: View<'_>);

    /// Gradients of [`Kernels::unpermute`]: `drows` (rows without a slot stay as they are) and `dweights` (f32, 0 for
    /// slots without a row, the sum where slots share one).
    fn unpermute_backward(
        &self,
        permutation: Permutation<'_>,
        dy: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        drows: View<'_>,
        dweights: View<'_>,
    );

    /// One AdamW step.
    fn adamw(&self, step: &AdamW<'_>);

    /// One SGD step.
    fn sgd(&self, step: &Sgd<'_>);

    /// One Lion step.
    fn lion(&self, step: &Lion<'_>);

    /// One Muon step.
    fn muon(&self, step: &Muon<'_>);

    /// The sum of squares of an f32 view: f64 sums of blocks of 1,024 elements, added exactly. NaN or infinite
    /// elements make it NaN.
    fn sum_of_squares(&self, x: View<'_>) -> Pending<'static, ExactSum>;

    /// Converts between f32, bf16 and f16 (round to nearest even), or copies.
    fn cast(&self, x: View<'_>, y: View<'_>);

    /// Writes the elements of `x` (f32, bf16 or f16; whole blocks of
    /// [`QUANTIZATION_BLOCK`](lockstep_plan::QUANTIZATION_BLOCK)) as `records` (u8 `[kind.bytes(elements)]`): a scale for each block
    /// and a code for each element, off by no more than half of that scale.
    ///
    /// With a `residual` (f32 or bf16, as many elements) it is added first, and what the records then fail to say becomes the
    /// new one (error feedback: Seide et al., 2014; Karimireddy et al., 2019).
    ///
    /// A block with an element that is not finite becomes NaN as a whole, and leaves no residual. Of a block whose largest
    /// magnitude is below 1.5e-36 (int8; 8.2e-38 for int4) nothing is said: it becomes zeros.
    fn quantize(&self, kind: QuantizedType, x: View<'_>, residual: Option<View<'_>>, records: View<'_>);

    /// The elements that [`Kernels::quantize`] wrote, rounded to the type of `y` (f32, bf16 or f16).
    fn dequantize(&self, kind: QuantizedType, records: View<'_>, y: View<'_>);

    /// The sums of the elements of `parts` tensors that lie one after the other in `records`, each as long as `y` (f32): added in f32,
    /// in the order in which floats of as many ranks are reduced.
    fn dequantize_sum(&self, kind: QuantizedType, parts: usize, records: View<'_>, y: View<'_>);

    /// `y [b, a, width]` becomes `x [a, b, width]` with its first two dimensions exchanged. Float types.
    fn transpose_blocks(&self, x: View<'_>, y: View<'_>);

    /// Sets every byte to zero.
    fn zero(&self, y: View<'_>);
}

//! What the kernels of a mixture of experts are given: how a router chooses, who goes where, products by expert.
//!
//! A token is routed to `top_k` experts, its *slots*. For the experts' products the slots of all tokens are brought into
//! the order of their experts, as *rows*; afterwards each token adds up the rows of its slots.

use crate::{GemmLayout, View, Write};

/// How a router turns logits into scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterScores {
    /// Over all experts (Mixtral, Qwen-MoE).
    Softmax,
    /// Of each expert by itself (DeepSeek-V3).
    Sigmoid,
}

/// What the scores of a token's experts become as weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterWeights {
    /// As they are.
    Scores,
    /// Divided by the sum of the chosen ones.
    Normalized,
}

/// Experts in groups of equal size, of which a token may use some (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024,
/// section 2.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Groups that a token keeps: those with the largest sum of their two best experts.
    pub kept: usize,
}

/// How tokens choose experts: those with the largest scores, of equal ones that with the lower index.
#[derive(Debug, Clone, Copy)]
pub struct Router<'a> {
    /// Experts of each token.
    pub top_k: usize,
    /// How logits become scores.
    pub scores: RouterScores,
    /// f32 `[experts]`, added to the scores where experts and groups are chosen, and nowhere else: it balances their
    /// load without a loss (Wang et al., 2024).
    pub selection_bias: Option<View<'a>>,
    /// Groups that limit the choice.
    pub groups: Option<ExpertGroups>,
    /// What scores become as weights.
    pub weights: RouterWeights,
    /// Factor on the weights.
    pub scale: f32,
}

/// What a router gives, and its backward needs.
#[derive(Debug, Clone, Copy)]
pub struct Routed<'a> {
    /// f32 `[T, experts]`.
    pub scores: View<'a>,
    /// f32 `[T]`: that of the logits.
    pub log_sum_exp: View<'a>,
    /// u32 `[T, top_k]`: the chosen experts, best first.
    pub experts: View<'a>,
    /// f32 `[T, top_k]`: their weights.
    pub weights: View<'a>,
}

/// Gradients by what a router gives.
#[derive(Debug, Clone, Copy)]
pub struct RouterGradients<'a> {
    /// f32 `[T, top_k]`: by the weights.
    pub weights: View<'a>,
    /// f32 `[sequences, experts]`: by each token's probabilities, the same for all tokens of a sequence. Probabilities
    /// are scores divided by their sum. That of a load-balancing loss is a factor times the counts of
    /// [`Kernels::router_load`](crate::Kernels::router_load).
    pub probabilities: Option<View<'a>>,
    /// By `log_sum_exp²` of each token: the factor of a z-loss (Zoph et al., "ST-MoE", 2022).
    pub squared_log_sum_exp: f32,
}

/// Which row belongs to which slot, and the reverse: an output of [`Kernels::sort_slots`](crate::Kernels::sort_slots).
#[derive(Debug, Clone, Copy)]
pub struct Permutation<'a> {
    /// u32 `[T · top_k]`: the slot of each row, `token · top_k + k`. [`Permutation::NONE`] for rows beyond the last.
    pub slots: View<'a>,
    /// u32 `[T · top_k]`: the row of each slot. [`Permutation::NONE`] for slots of experts that are elsewhere.
    pub rows: View<'a>,
}

impl Permutation<'_> {
    /// No row, or no slot.
    pub const NONE: u32 = u32::MAX;
}

/// Products of groups of rows, each with a matrix of its own, stacked. Group `g` has the rows `offsets[g]..offsets[g + 1]`,
/// which may be none; other rows take no part, and those of `C` stay as they are.
///
/// Types are those of [`Gemm`](crate::Gemm).
#[derive(Debug, Clone, Copy)]
pub struct GroupedGemm<'a> {
    /// For `R` rows and `G` groups: `NT` multiplies `A [R, k]` by `B [G, n, k]`, `NN` by `B [G, k, n]`, both into
    /// `C [R, n]`; `TN` multiplies `A [R, m]` by `B [R, n]` into `C [G, m, n]`.
    pub layout: GemmLayout,
    /// Left operand.
    pub a: View<'a>,
    /// Right operand.
    pub b: View<'a>,
    /// Output.
    pub c: View<'a>,
    /// u32 `[G + 1]`, never falling.
    pub offsets: View<'a>,
    /// Replace or add. The products of no rows (`TN`) are zero.
    pub write: Write,
}

//! Operands of the mixture-of-experts kernels: routing, permutation of tokens, and grouped GEMM by expert.
//!
//! A token is routed to `top_k` experts, its *slots*. For the grouped GEMM, the slots of all tokens are sorted by
//! expert into *rows*. Afterwards each token adds up the rows of its slots.

use crate::{GemmLayout, View, Write};

/// The function that turns router logits into scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterScores {
    /// Softmax over all experts (Mixtral, Qwen-MoE).
    Softmax,
    /// Sigmoid of each expert's own logit (DeepSeek-V3).
    Sigmoid,
}

/// The function that turns the scores of a token's experts into combine weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterWeights {
    /// The scores unchanged.
    Scores,
    /// The scores divided by the sum over the chosen experts.
    Normalized,
}

/// Expert groups of equal size; a token may choose only from some of them (DeepSeek-AI, "DeepSeek-V3 Technical
/// Report", 2024, section 2.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups that a token may choose from: those with the largest sum of their two best scores.
    pub kept: usize,
}

/// The routing rule: a token chooses the experts with the largest scores; on a tie, the lower index wins.
#[derive(Debug, Clone, Copy)]
pub struct Router<'a> {
    /// Number of experts that each token chooses.
    pub top_k: usize,
    /// Turns logits into scores.
    pub scores: RouterScores,
    /// f32 `[experts]`, added to the scores for the choice of experts and groups only. It balances the load without a
    /// loss (Wang et al., 2024).
    pub selection_bias: Option<View<'a>>,
    /// Groups that limit the choice; `None` if there are none.
    pub groups: Option<ExpertGroups>,
    /// Turns the chosen scores into weights.
    pub weights: RouterWeights,
    /// Factor on the weights.
    pub scale: f32,
}

/// The outputs of a router, which its backward reads.
#[derive(Debug, Clone, Copy)]
pub struct RouterOutputs<'a> {
    /// f32 `[T, experts]`: the score of each expert.
    pub scores: View<'a>,
    /// f32 `[T]`: log-sum-exp of the logits.
    pub log_sum_exp: View<'a>,
    /// u32 `[T, top_k]`: the chosen experts, best first.
    pub experts: View<'a>,
    /// f32 `[T, top_k]`: combine weights of the chosen experts.
    pub weights: View<'a>,
}

/// Gradients with respect to the outputs of a router.
#[derive(Debug, Clone, Copy)]
pub struct RouterGradients<'a> {
    /// f32 `[T, top_k]`: gradient with respect to the weights.
    pub weights: View<'a>,
    /// f32 `[sequences, experts]`: gradient with respect to each token's probabilities, the same for all tokens of a
    /// sequence. Probabilities are scores divided by their sum. For a load-balancing loss, it is a factor times the
    /// counts of [`Kernels::router_load`](crate::Kernels::router_load).
    pub probabilities: Option<View<'a>>,
    /// Gradient with respect to `log_sum_exp²` of each token: the factor of a z-loss (Zoph et al., "ST-MoE", 2022).
    pub squared_log_sum_exp: f32,
}

/// The mapping between rows and slots, in both directions; an output of
/// [`Kernels::sort_slots`](crate::Kernels::sort_slots).
#[derive(Debug, Clone, Copy)]
pub struct Permutation<'a> {
    /// u32 `[T · top_k]`: the slot of each row, `token · top_k + k`; [`Permutation::NONE`] for rows beyond the last.
    pub slots: View<'a>,
    /// u32 `[T · top_k]`: the row of each slot; [`Permutation::NONE`] for slots whose expert is on another rank.
    pub rows: View<'a>,
}

impl Permutation<'_> {
    /// Marks a missing row or slot.
    pub const NONE: u32 = u32::MAX;
}

/// Grouped GEMM: each group of rows has a matrix of its own, and these matrices are stacked. Group `g` has the rows
/// `offsets[g]..offsets[g + 1]`, which may be empty. Rows of no group are not read, and those of `C` stay unchanged.
///
/// The types are those of [`Gemm`](crate::Gemm).
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
    /// u32 `[G + 1]`, nondecreasing: the first row of each group.
    pub offsets: View<'a>,
    /// Overwrite or accumulate. The product of an empty group (`TN`) is zero.
    pub write: Write,
}

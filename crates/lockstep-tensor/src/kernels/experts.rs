//! Kernels of a mixture of experts and their operands: routing, and permutation of tokens by expert.
//!
//! A token is routed to `top_k` experts, its *slots*. For the grouped GEMM, the slots of all tokens are sorted by
//! expert into *rows*. Afterwards each token adds up the rows of its slots.

use crate::{Pending, TokenPositions, View};

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
    /// counts of [`RouterKernels::router_load`].
    pub probabilities: Option<View<'a>>,
    /// Gradient with respect to `log_sum_exp²` of each token: the factor of a z-loss (Zoph et al., "ST-MoE", 2022).
    pub squared_log_sum_exp: f32,
}

/// The mapping between rows and slots, in both directions; an output of
/// [`PermutationKernels::sort_slots`].
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

/// The router of a mixture of experts. Part of [`Kernels`](crate::Kernels).
pub trait RouterKernels {
    /// Chooses experts by `logits [T, experts]`, and writes all of `routed`; see [`Router`].
    fn router_top_k(&self, router: &Router<'_>, logits: View<'_>, routed: RouterOutputs<'_>);

    /// Returns the router margin: the smallest distance of any token from another choice of experts. It is the
    /// difference between the score of a token's last chosen expert and the best one it did not choose, and likewise
    /// for its groups. Scores include the selection bias. The margin is infinite if there is no other choice.
    fn router_margin(&self, router: &Router<'_>, scores: View<'_>) -> Pending<'static, f32>;

    /// Computes the gradient with respect to [`RouterKernels::router_top_k`]'s logits; the choice itself has none. `places`
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
}

/// Permutation of tokens by expert, and expert capacity. Part of [`Kernels`](crate::Kernels).
pub trait PermutationKernels {
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
    /// [`PermutationKernels::permute`]. If there are fewer weights than slots, each weight applies to an equal number of
    /// neighbouring slots of its token.
    fn unpermute(&self, permutation: Permutation<'_>, rows: View<'_>, weights: Option<View<'_>>, y: View<'_>);

    /// Computes the gradients of [`PermutationKernels::unpermute`]: `drows` (rows without a slot stay unchanged) and `dweights`
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
}

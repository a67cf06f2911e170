//! The operations of a mixture of experts: the router with its configuration, and the tables by which rows go to the
//! experts and back.

use lockstep_plan::ExpertPlace;
use lockstep_tensor::{ExpertGroups, RouterScores, RouterWeights};

use super::facts::Facts;
use crate::block::{ParameterIndex, TokenRange, Value};

/// Configuration of a router: choice of experts, their weights, load-balancing losses and capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts chosen per token.
    pub top_k: usize,
    /// Function from logits to scores.
    pub scores: RouterScores,
    /// Function from the chosen scores to the weights of experts.
    pub weights: RouterWeights,
    /// Factor on the weights.
    pub scale: f32,
    /// Expert groups that restrict the choice.
    pub groups: Option<ExpertGroups>,
    /// Coefficient of the auxiliary loss.
    pub auxiliary_loss: f32,
    /// Coefficient of the z-loss.
    pub z_loss: f32,
    /// Capacity of an expert, as a multiple of its even share of a sequence's slots. `None` means no limit; inference has none.
    pub capacity_factor: Option<f32>,
}

/// A router with its operands, results and scratch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RouteOperation {
    pub(crate) logits: Value,
    /// Selection bias, added to the scores for the choice of experts only, and f32 scratch for it.
    pub(crate) bias: Option<(ParameterIndex, Value)>,
    pub(crate) routing: Routing,
    /// Slots per sequence that an expert takes; `None` means no limit.
    pub(crate) capacity: Option<usize>,
    pub(crate) scores: Value,
    pub(crate) log_sum_exp: Value,
    pub(crate) experts: Value,
    pub(crate) weights: Value,
    /// The tokens that this rank routes.
    pub(crate) tokens: TokenRange,
    /// Slots that chose each expert, per local range of a sequence: f32 `[ranges, experts]`.
    pub(crate) counts: Value,
    /// The counts of whole sequences, where other ranks hold parts of them.
    pub(crate) parts: Option<PartCounts>,
    /// Scratch: sums of probabilities in the forward, their gradients in the backward.
    pub(crate) probabilities: Value,
    /// The chosen experts, with slots beyond the capacity masked; `None` without a capacity.
    pub(crate) kept: Option<Value>,
}

impl RouteOperation {
    pub(super) fn facts(&self) -> Facts {
        let Self { logits, scores, log_sum_exp, experts, weights, counts, parts, kept, .. } = *self;
        let of_parts = parts.iter().flat_map(|parts| [parts.gathered, parts.ordered, parts.before]);
        let of_bias = self.bias.map(|(_, scratch)| scratch);
        let totals = parts.map(|parts| parts.totals);
        let always = [weights, scores, log_sum_exp, experts, counts];
        let written: Vec<_> = always.into_iter().chain(totals).chain(kept).collect();
        Facts {
            scratch: of_parts.chain(of_bias).chain([self.probabilities]).collect(),
            saved_for_inputs: vec![logits, scores, log_sum_exp, experts, weights, totals.unwrap_or(counts)],
            // Per score.
            vector_flops: [4, 6, 0],
            ..Facts::of("router", [logits], written)
        }
    }
}

/// Slot counts across the ranks that hold parts of the same sequences.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartCounts {
    /// Counts of whole sequences.
    pub(crate) totals: Value,
    /// Scratch: the counts of every rank's ranges, as gathered.
    pub(crate) gathered: Value,
    /// Scratch: these counts in token order, one sequence after another.
    pub(crate) ordered: Value,
    /// Scratch: counts of the tokens before each local range.
    pub(crate) before: Value,
}

/// Tables and buffers of the all-to-all that takes rows to the experts of other ranks and back. A shard of an expert
/// counts as an expert here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteRows {
    pub(crate) place: ExpertPlace,
    /// The expert of each slot, once per shard of the expert; `None` without expert tensor parallelism.
    pub(crate) experts: Option<Value>,
    /// Offset of the first row to send for each expert, in rank order.
    pub(crate) sent: Value,
    /// Number of rows received, per sending rank and local expert.
    pub(crate) received: Value,
    /// Scratch: the expert of each received row.
    pub(crate) arrived: Value,
    /// Permutation from received rows to rows sorted by expert, and its inverse.
    pub(crate) arrived_slots: Value,
    pub(crate) arrived_rows: Value,
    /// Scratch: the send and the receive buffer.
    pub(crate) sending: Value,
    pub(crate) receiving: Value,
}

/// Permutation between slots and rows sorted by expert, and the first row of each expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotTables {
    pub(crate) slots: Value,
    pub(crate) rows: Value,
    pub(crate) offsets: Value,
    /// Tables of the all-to-all, where experts are on several ranks.
    pub(crate) remote: Option<RemoteRows>,
}

impl SlotTables {
    /// Returns the permutations between rows and slots, without the offsets.
    pub(super) fn permutations(&self) -> impl Iterator<Item = Value> {
        let of_remote = self.remote.map(|remote| {
            let RemoteRows { sent, received, arrived_slots, arrived_rows, .. } = remote;
            [sent, received, arrived_slots, arrived_rows]
        });
        [self.slots, self.rows].into_iter().chain(of_remote.into_iter().flatten())
    }

    /// Returns the send and the receive buffer.
    pub(super) fn buffers(&self) -> impl Iterator<Item = Value> {
        self.remote.into_iter().flat_map(|remote| [remote.sending, remote.receiving])
    }
}

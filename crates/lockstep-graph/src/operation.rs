//! The operations of a recorded block: the values and parameters each reads and writes, and the saved activations
//! that its two backward functions need. The kernels are called in `replay`.

use lockstep_plan::ExpertPlace;
use lockstep_tensor::Gelu;

use crate::{
    Routing, Value,
    context::{ContextCollective, ContextCollectiveKind, KeySource},
    placement::Redistribute,
    summa::SummaLinear,
    training::Training,
};

/// Index of a parameter in its program's list of declarations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ParameterIndex(pub usize);

/// An integer input of a micro-batch that an embedding can look up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchInput {
    /// Ids of the tokens.
    Ids,
    /// Position of each token in its sequence.
    Positions,
}

/// A dropout site of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutSite {
    /// Index of the site within its block.
    pub site: u32,
    /// Probability of dropping an element.
    pub probability: f32,
}

/// The elements of a head that a rotary embedding rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotaryPairs {
    /// Elements `i` and `i + head_dim / 2`: the half-split form.
    Halves,
    /// Elements `2i` and `2i + 1`: the interleaved form.
    Neighbours,
}

/// The model's parameters of an attention; the batch supplies the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Sliding window in tokens; `None` means full causal attention.
    pub window: Option<usize>,
}

/// An attention with its operands and results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionOperation {
    pub(crate) q: Value,
    pub(crate) k: Value,
    pub(crate) v: Value,
    /// Shape of this rank's part, where ranks shard the heads.
    pub(crate) shape: AttentionShape,
    /// Index of this rank's first query head.
    pub(crate) first_head: usize,
    /// The sequences that this rank attends within.
    pub(crate) sequences: SequenceRange,
    pub(crate) dropout: Option<DropoutSite>,
    /// Source of the keys of whole sequences.
    pub(crate) reach: KeySource,
    pub(crate) y: Value,
    pub(crate) log_sum_exp: Value,
}

/// Consecutive tokens of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenRange {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

/// Consecutive sequences of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SequenceRange {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

/// Inputs and scratch of a vocabulary-parallel loss, for the tokens of one range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitLoss {
    pub(crate) first_column: usize,
    /// Softmax statistics, three numbers per token: see
    /// [`LossKernels::softmax_statistics`](lockstep_tensor::LossKernels::softmax_statistics).
    pub(crate) statistics: Value,
    /// The statistics of all ranks.
    pub(crate) gathered: Value,
    pub(crate) log_sum_exp: Value,
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
    fn values(&self) -> Vec<Value> {
        let mut values = vec![self.slots, self.rows];
        if let Some(remote) = self.remote {
            let RemoteRows { sent, received, arrived_slots, arrived_rows, .. } = remote;
            values.extend([sent, received, arrived_slots, arrived_rows]);
        }
        values
    }

    fn scratch(&self) -> Vec<Value> {
        self.remote.map_or_else(Vec::new, |remote| vec![remote.sending, remote.receiving])
    }
}

/// One recorded operation.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Embedding {
        input: BatchInput,
        table: ParameterIndex,
        /// Token id of this rank's first row of the table.
        first_id: u32,
        /// The tokens to look up.
        tokens: TokenRange,
        y: Value,
    },
    Linear {
        x: Value,
        weight: ParameterIndex,
        bias: Option<ParameterIndex>,
        /// True if this rank adds the bias. In a row-parallel layer only rank 0 does.
        adds_bias: bool,
        y: Value,
    },
    /// A linear layer under two-dimensional tensor parallelism.
    SummaLinear(SummaLinear),
    RmsNorm {
        x: Value,
        weight: ParameterIndex,
        eps: f32,
        y: Value,
        rstd: Value,
    },
    LayerNorm {
        x: Value,
        weight: ParameterIndex,
        bias: Option<ParameterIndex>,
        eps: f32,
        y: Value,
        mean: Value,
        rstd: Value,
    },
    Rope {
        x: Value,
        head_dim: usize,
        pairs: RotaryPairs,
        /// The tokens of the local rows.
        tokens: TokenRange,
        y: Value,
    },
    /// Concatenation of the elements of each head: those of `own`, then those of `tail`.
    JoinHeads {
        own: Value,
        tail: Value,
        heads: usize,
        /// Number of heads of `tail`: `heads`, or 1 that all heads share.
        tails: usize,
        y: Value,
    },
    /// Each head truncated or zero-padded to the width of `y`.
    ResizeHeads {
        x: Value,
        heads: usize,
        y: Value,
    },
    Attention(AttentionOperation),
    SwiGlu {
        gate: Value,
        up: Value,
        y: Value,
        /// Expert offsets: if given, only the rows before the last offset are computed.
        offsets: Option<Value>,
    },
    Gelu {
        kind: Gelu,
        x: Value,
        y: Value,
    },
    Scale {
        x: Value,
        factor: f32,
        y: Value,
    },
    Add {
        a: Value,
        b: Value,
        y: Value,
    },
    Dropout {
        x: Value,
        dropout: DropoutSite,
        /// The local tokens and the first local column, which key the mask.
        tokens: TokenRange,
        first_feature: u32,
        y: Value,
    },
    /// A tensor-parallel collective that changes the placement of a value.
    Redistribute {
        exchange: Redistribute,
        x: Value,
        y: Value,
        /// Scratch as large as `x`, for all-to-alls to and from blocks.
        scratch: Option<Value>,
    },
    /// A context-parallel collective that converts between local tokens and whole sequences.
    ContextCollective(ContextCollective),
    /// A router: the choice of experts and their weights.
    Route(RouteOperation),
    /// A copy of the row of each slot, sorted by expert.
    Dispatch {
        x: Value,
        chosen: Value,
        tables: SlotTables,
        rows: Value,
    },
    /// A linear layer per expert, as a grouped matrix product.
    GroupedLinear {
        x: Value,
        weight: ParameterIndex,
        offsets: Value,
        /// Total rows of the local experts under even load, for cost estimates.
        even_rows: usize,
        y: Value,
    },
    /// The weighted sum of the rows of each token's slots.
    Combine {
        rows: Value,
        weights: Value,
        tables: SlotTables,
        /// Rows of this rank's slots after they are sent back, where experts are on several ranks.
        returned: Option<Value>,
        y: Value,
    },
    /// Rows scaled by the sigmoid of one number each.
    GateRows {
        gate: Value,
        x: Value,
        y: Value,
    },
    /// The output layer and its cross-entropy, computed for one range of tokens at a time so that all logits never
    /// exist at once. In training the backward computes the logits, the losses and the gradients together.
    OutputLoss {
        x: Value,
        weight: ParameterIndex,
        /// Scratch for the logits of one range of tokens.
        logits: Value,
        split: Option<SplitLoss>,
        losses: Value,
    },
}

/// The way a second gradient is added to an input's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accumulation {
    /// The kernel accumulates into the existing gradient.
    InKernel,
    /// The kernel writes to a separate buffer, which is then added.
    Aside,
}

impl Operation {
    /// Returns the value that the rest of the block uses.
    pub(crate) fn output(&self) -> Value {
        match *self {
            Self::Embedding { y, .. }
            | Self::Linear { y, .. }
            | Self::SummaLinear(SummaLinear { y, .. })
            | Self::RmsNorm { y, .. }
            | Self::LayerNorm { y, .. }
            | Self::Rope { y, .. }
            | Self::Attention(AttentionOperation { y, .. })
            | Self::SwiGlu { y, .. }
            | Self::Gelu { y, .. }
            | Self::Scale { y, .. }
            | Self::Add { y, .. }
            | Self::Dropout { y, .. }
            | Self::GroupedLinear { y, .. }
            | Self::Combine { y, .. }
            | Self::GateRows { y, .. }
            | Self::JoinHeads { y, .. }
            | Self::ResizeHeads { y, .. }
            | Self::Redistribute { y, .. }
            | Self::ContextCollective(ContextCollective { y, .. }) => y,
            Self::Route(RouteOperation { weights, .. }) => weights,
            Self::Dispatch { rows, .. } => rows,
            Self::OutputLoss { losses, .. } => losses,
        }
    }

    /// Returns everything that the forward writes for others to read: the output, and statistics for the backward.
    pub(crate) fn outputs(&self) -> Vec<Value> {
        match *self {
            Self::RmsNorm { y, rstd, .. } => vec![y, rstd],
            Self::LayerNorm { y, mean, rstd, .. } => vec![y, mean, rstd],
            Self::Attention(AttentionOperation { y, log_sum_exp, .. }) => vec![y, log_sum_exp],
            Self::Route(route) => {
                let RouteOperation { weights, scores, log_sum_exp, experts, counts, parts, kept, .. } = route;
                let totals = parts.map(|parts| parts.totals);
                let always = [weights, scores, log_sum_exp, experts, counts];
                always.into_iter().chain(totals).chain(kept).collect()
            }
            Self::Dispatch { tables, rows, .. } => {
                let experts = tables.remote.and_then(|remote| remote.experts);
                let tables = tables.values().into_iter().chain([tables.offsets]);
                [rows].into_iter().chain(tables).chain(experts).collect()
            }
            Self::Combine { returned: Some(returned), y, .. } => vec![y, returned],
            _ => vec![self.output()],
        }
    }

    /// Returns the values that the forward reads.
    pub(crate) fn reads(&self) -> Vec<Value> {
        let mut values = self.inputs();
        match *self {
            Self::SwiGlu { offsets, .. } => values.extend(offsets),
            Self::GroupedLinear { offsets, .. } => values.push(offsets),
            Self::Dispatch { chosen, .. } => values.push(chosen),
            Self::Combine { tables, .. } => values.extend(tables.values()),
            _ => {}
        }
        values
    }

    /// Returns the parameter that biases the choice of experts, if this is a router with one.
    pub(crate) fn selection_bias(&self) -> Option<ParameterIndex> {
        match self {
            Self::Route(RouteOperation { bias, .. }) => bias.map(|(parameter, _)| parameter),
            _ => None,
        }
    }

    /// Returns the output that is saved even if it could be recomputed, because the engine reads it: a router's slot counts.
    pub(crate) fn always_saved(&self) -> Option<Value> {
        match *self {
            Self::Route(RouteOperation { counts, .. }) => Some(counts),
            _ => None,
        }
    }

    /// Returns the values it reads that can have gradients.
    pub(crate) fn inputs(&self) -> Vec<Value> {
        match *self {
            Self::Embedding { .. } => vec![],
            Self::Linear { x, .. }
            | Self::SummaLinear(SummaLinear { x, .. })
            | Self::RmsNorm { x, .. }
            | Self::LayerNorm { x, .. }
            | Self::Rope { x, .. }
            | Self::Gelu { x, .. }
            | Self::Scale { x, .. }
            | Self::Dropout { x, .. }
            | Self::ResizeHeads { x, .. }
            | Self::Redistribute { x, .. }
            | Self::ContextCollective(ContextCollective { x, .. })
            | Self::OutputLoss { x, .. } => vec![x],
            Self::JoinHeads { own, tail, .. } => vec![own, tail],
            Self::Attention(AttentionOperation { q, k, v, .. }) => vec![q, k, v],
            Self::SwiGlu { gate, up, .. } => vec![gate, up],
            Self::Add { a, b, .. } => vec![a, b],
            Self::Route(RouteOperation { logits, .. }) => vec![logits],
            Self::Dispatch { x, .. } | Self::GroupedLinear { x, .. } => vec![x],
            Self::Combine { rows, weights, .. } => vec![rows, weights],
            Self::GateRows { gate, x, .. } => vec![gate, x],
        }
    }

    /// Returns scratch values, used by the forward or the input gradients.
    pub(crate) fn scratch(&self) -> Vec<Value> {
        match *self {
            Self::Attention(ref attention) => attention.reach.scratch(),
            Self::SummaLinear(ref linear) => linear.scratch(),
            Self::Redistribute { scratch, .. } => scratch.into_iter().collect(),
            Self::ContextCollective(ref exchange) => exchange.scratch(),
            Self::OutputLoss { logits, split: None, .. } => vec![logits],
            Self::OutputLoss { logits, split: Some(split), .. } => {
                vec![logits, split.statistics, split.gathered, split.log_sum_exp]
            }
            Self::Route(RouteOperation { probabilities, parts, bias, .. }) => {
                let parts = parts.into_iter().flat_map(|parts| [parts.gathered, parts.ordered, parts.before]);
                parts.chain(bias.map(|(_, scratch)| scratch)).chain([probabilities]).collect()
            }
            Self::Dispatch { tables, .. } => {
                let arrived = tables.remote.map(|remote| remote.arrived);
                tables.scratch().into_iter().chain(arrived).collect()
            }
            Self::Combine { tables, .. } => tables.scratch(),
            _ => vec![],
        }
    }

    /// Returns scratch values, used by the weight gradients.
    pub(crate) fn scratch_for_weights(&self) -> Vec<Value> {
        match self {
            Self::SummaLinear(linear) => linear.scratch_for_weights(),
            _ => vec![],
        }
    }

    /// Returns the value that its output is an alias of; only their gradients differ.
    pub(crate) fn renamed(&self) -> Option<Value> {
        match *self {
            Self::Redistribute { exchange: Redistribute::AllReduceGradient, x, .. } => Some(x),
            _ => None,
        }
    }

    /// Returns true if its inputs have the gradient of its output.
    pub(crate) fn passes_gradient_on(&self) -> bool {
        matches!(self, Self::Add { .. } | Self::Redistribute { exchange: Redistribute::AllReduce, .. })
    }

    /// Returns true if it is a loss, which seeds the backward and does all of its work there.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::OutputLoss { .. })
    }

    /// Returns the saved activations that the input gradients need.
    pub(crate) fn needs_for_inputs(&self) -> Vec<Value> {
        match *self {
            Self::RmsNorm { x, rstd, .. } => vec![x, rstd],
            Self::LayerNorm { x, mean, rstd, .. } => vec![x, mean, rstd],
            Self::Attention(AttentionOperation { q, k, v, y, log_sum_exp, .. }) => {
                vec![q, k, v, y, log_sum_exp]
            }
            Self::SwiGlu { gate, up, offsets, .. } => [gate, up].into_iter().chain(offsets).collect(),
            Self::Gelu { x, .. } | Self::OutputLoss { x, .. } => vec![x],
            Self::Route(RouteOperation {
                logits,
                scores,
                log_sum_exp,
                experts,
                weights,
                counts,
                parts,
                ..
            }) => {
                let counts = parts.map_or(counts, |parts| parts.totals);
                vec![logits, scores, log_sum_exp, experts, weights, counts]
            }
            Self::Dispatch { tables, .. } => tables.values(),
            Self::GroupedLinear { offsets, .. } => vec![offsets],
            Self::Combine { rows, weights, tables, returned, .. } => {
                let rows = returned.unwrap_or(rows);
                [rows, weights].into_iter().chain(tables.values()).collect()
            }
            Self::GateRows { gate, x, .. } => vec![gate, x],
            Self::Embedding { .. }
            | Self::Linear { .. }
            | Self::SummaLinear(_)
            | Self::Rope { .. }
            | Self::Scale { .. }
            | Self::Add { .. }
            | Self::Dropout { .. }
            | Self::JoinHeads { .. }
            | Self::ResizeHeads { .. }
            | Self::Redistribute { .. }
            | Self::ContextCollective(_) => vec![],
        }
    }

    /// Returns the saved activations that the gradients of trained weights need. A bias gradient needs none.
    pub(crate) fn needs_for_weights(&self, training: &Training) -> Vec<Value> {
        match *self {
            Self::Linear { x, weight, .. } | Self::SummaLinear(SummaLinear { x, weight, .. })
                if training.trains(weight) =>
            {
                vec![x]
            }
            Self::GroupedLinear { x, weight, offsets, .. } if training.trains(weight) => vec![x, offsets],
            Self::RmsNorm { x, rstd, weight, .. } if training.trains(weight) => vec![x, rstd],
            Self::LayerNorm { x, mean, rstd, weight, .. } if training.trains(weight) => vec![x, mean, rstd],
            _ => vec![],
        }
    }

    /// Returns its parameters: the matrix or the scale first, then the bias.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = ParameterIndex> {
        let (weight, bias) = match *self {
            Self::Embedding { table, .. } => (Some(table), None),
            Self::RmsNorm { weight, .. }
            | Self::GroupedLinear { weight, .. }
            | Self::OutputLoss { weight, .. } => (Some(weight), None),
            Self::Linear { weight, bias, .. }
            | Self::SummaLinear(SummaLinear { weight, bias, .. })
            | Self::LayerNorm { weight, bias, .. } => (Some(weight), bias),
            _ => (None, None),
        };
        weight.into_iter().chain(bias)
    }

    /// Returns inputs whose storage the output may take over once nothing else needs them.
    pub(crate) fn in_place_inputs(&self) -> Vec<Value> {
        match *self {
            Self::Rope { x, .. }
            | Self::Scale { x, .. }
            | Self::Dropout { x, .. }
            | Self::Redistribute { exchange: Redistribute::AllReduce, x, .. } => vec![x],
            Self::Add { a, b, .. } => vec![b, a],
            _ => vec![],
        }
    }

    /// Returns true if the gradient of the input may overwrite the gradient of the output.
    pub(crate) fn backward_in_place(&self) -> bool {
        matches!(
            self,
            Self::Rope { .. }
                | Self::Scale { .. }
                | Self::Dropout { .. }
                | Self::Gelu { .. }
                | Self::Redistribute { exchange: Redistribute::AllReduceGradient, .. }
        )
    }

    /// Returns the way a second gradient is added to an input's.
    pub(crate) fn accumulation(&self) -> Accumulation {
        match self {
            Self::Linear { .. }
            | Self::SummaLinear(_)
            | Self::GroupedLinear { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. } => Accumulation::InKernel,
            _ => Accumulation::Aside,
        }
    }

    /// Returns true if its output is never saved but gathered again, because other ranks save their shards of it.
    pub(crate) fn is_gathered(&self) -> bool {
        matches!(
            self,
            Self::Redistribute {
                exchange: Redistribute::AllGatherTokens | Redistribute::AllGatherReplicated,
                ..
            }
        ) || self.gathers_sequences()
    }

    /// Returns true if its output is the keys or values of whole sequences; those of the local tokens are saved instead.
    pub(crate) fn gathers_sequences(&self) -> bool {
        matches!(
            self,
            Self::ContextCollective(ContextCollective { change: ContextCollectiveKind::Gather, .. })
        )
    }

    /// Returns true if selective recomputation drops its output: it is cheap to recompute, and as wide as an activation.
    pub(crate) fn is_cheap(&self) -> bool {
        matches!(
            self,
            Self::RmsNorm { .. }
                | Self::LayerNorm { .. }
                | Self::SwiGlu { .. }
                | Self::Gelu { .. }
                | Self::Dispatch { tables: SlotTables { remote: None, .. }, .. }
                | Self::Dropout { .. }
                // The output of a norm in blocks; the norm's output is not saved either.
                | Self::Redistribute { exchange: Redistribute::TokensToBlocks, .. }
        )
    }
}

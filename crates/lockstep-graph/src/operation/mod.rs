//! The operations of a recorded block: the values and parameters each reads and writes, and the saved activations
//! that its two backward functions need. The kernels are called in `replay`.

mod attention;
mod experts;
mod parallel;

use lockstep_tensor::Gelu;

pub(crate) use self::attention::{AttentionOperation, KeySource};
pub use self::attention::{AttentionShape, RotaryPairs};
pub use self::experts::Routing;
pub(crate) use self::experts::{PartCounts, RemoteRows, RouteOperation, SlotTables};
pub(crate) use self::parallel::{ContextCollective, ContextCollectiveKind, SplitLoss, SummaLinear};
use crate::{
    block::{BatchInput, DropoutSite, ParameterIndex, TokenRange, Value},
    placement::Redistribute,
};

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

    /// Returns the saved activations that the gradient of its weight needs. A bias gradient needs none.
    pub(crate) fn needs_for_weights(&self) -> Vec<Value> {
        match *self {
            Self::Linear { x, .. } | Self::SummaLinear(SummaLinear { x, .. }) => vec![x],
            Self::GroupedLinear { x, offsets, .. } => vec![x, offsets],
            Self::RmsNorm { x, rstd, .. } => vec![x, rstd],
            Self::LayerNorm { x, mean, rstd, .. } => vec![x, mean, rstd],
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
